"""Every strategy by name. A new one is one file and one line here; other packages register theirs by entry point:

[project.entry-points."smolcluster.strategies"]
mine = "my_package.mine:Mine"
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from smolcluster.config import canonical_strategy
from smolcluster.config.schema import StrategyConfig
from smolcluster.errors import UserError, unknown_name

if TYPE_CHECKING:
    from smolcluster.strategies.base import Options, OptionsT, Strategy

BUILT_IN = {
    "single": "smolcluster.strategies.single:Single",
    "allreduce": "smolcluster.strategies.allreduce:AllReduce",
    "syncps": "smolcluster.strategies.syncps:SyncPS",
    "edp": "smolcluster.strategies.edp:EDP",
    "fsdp": "smolcluster.strategies.fsdp:FSDP",
    "mesh": "smolcluster.strategies.mesh:Mesh",
    "pipeline": "smolcluster.strategies.pipeline:Pipeline",
    "tensor": "smolcluster.strategies.tensor:TensorParallel",
}

# The same algorithms where members may come and go.
ELASTIC = {
    "allreduce": "smolcluster.strategies.allreduce:AllReduce",
    "fsdp": "smolcluster.strategies.fsdp_elastic:ElasticFSDP",
}

# An option that only the elastic one has: who says it wants that one.
ELASTIC_BY_OPTION = {"fsdp": "staleness_bound"}

# Those that run on the elastic plane only.
ELASTIC_ONLY = {"syncps", "edp"}

# Named in the documentation and in ready cluster files, and still to come.
PLANNED = {"diloco", "dipaco", "swarm"}


def known_strategies() -> dict[str, str]:
    """Name -> `module:Class`, without importing any of them."""
    return {**{e.name: e.value for e in entry_points(group="smolcluster.strategies")}, **BUILT_IN}


def check_name(name: str) -> str:
    """The canonical name, or an error that lists the known ones."""
    canonical = canonical_strategy(name)
    known = known_strategies()
    if canonical in PLANNED and canonical not in known:
        raise UserError(f"strategy '{name}' is not built yet; known: {', '.join(sorted(known))}")
    if canonical not in known:
        raise unknown_name("strategy", name, known)
    return canonical


def find_strategy(name: str, *, plane: str = "mesh") -> type[Strategy[Options]]:
    canonical = check_name(name)
    where = ELASTIC.get(canonical) if plane == "elastic" else None
    module, _, attribute = (where or known_strategies()[canonical]).partition(":")
    return cast("type[Strategy[Options]]", getattr(importlib.import_module(module), attribute))


def read_options(
    strategy: type[Strategy[OptionsT]], section: StrategyConfig, *, plane: str | None = None
) -> tuple[OptionsT, list[str]]:
    """The strategy's own options out of the section, and the names of those set that it does not use on this plane."""
    said = {k: v for k, v in section.model_dump(exclude={"name", "options"}).items() if v is not None}
    said |= section.options
    made = cast("type[OptionsT]", strategy.Config)
    known = made.model_fields
    if "reduce_bucket_size" in said and "bucket_mb" in known:
        if "bucket_mb" in said:
            raise UserError("strategy.bucket_mb and strategy.reduce_bucket_size say the same; leave one of them out")
        said["bucket_mb"] = said.pop("reduce_bucket_size") * 4 / 2**20
    try:
        options = made(**{k: v for k, v in said.items() if k in known})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"strategy.{place} = {first['input']!r}: {first['msg']}") from error
    unused = made.only_elastic if plane == "mesh" else frozenset()
    return options, sorted(said.keys() - (known.keys() - unused))
