"""The registry of strategies: names, planes, options, and module of each. No other code names a strategy.

The records are in config/ because the schema, the console, the launchers and the dashboard all read them, and none of these
imports torch. Code is named by strings, `module:Class`, and imported by `strategies/registry.py`; option classes need no torch.

A package of your own registers its record by entry point:

    [project.entry-points."smolcluster.strategies"]
    mine = "my_package.record:RECORD"

A `Strategy` class may stand there instead: it then runs on the mesh plane, under the name of the entry point. A record is
better off in a module that does not import torch: launchers read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.fields import FieldInfo

from smolcluster.config.options import (
    AllReduceOptions,
    DiLoCoOptions,
    EDPOptions,
    ElasticFSDPOptions,
    FSDPOptions,
    MeshOptions,
    Options,
    PipelineOptions,
    SyncPSOptions,
    TensorOptions,
    Written,
)
from smolcluster.errors import UserError, unknown_name

GROUP = "smolcluster.strategies"

Topology = Literal["alone", "star", "ring", "line"]
Variant = tuple[str, Mapping[str, Any]]  # what follows the name in a label, and options


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan wants variants for."""

    plane: str
    num_ranks: int
    every: bool = False  # variant, or the default ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A strategy's description, available without importing its code."""

    name: str
    algorithm: str  # the name users know it by, as in run names
    summary: str
    where: Mapping[str, str]  # plane, mesh or elastic -> `module:Class`; the first plane is the default
    # Of all planes, or by plane. None: known only to its code, and first read when a run begins.
    options: type[Options] | Mapping[str, type[Options]] | None = None
    # Mesh plane: options with separate code; None: as `where` says.
    code_for: Callable[[Any], str | None] | None = None
    use_when: str = ""
    aliases: tuple[str, ...] = ()
    topology: Topology = "ring"  # who exchanges with whom: a server and its workers, neighbours, a chain
    variants: Callable[[PlanRequest], Iterable[Variant]] = lambda _: [("", {})]  # that a plan compares
    elastic_option: str = ""  # an option that only the elastic plane has: setting it chooses that plane
    own_steps: bool = False  # its workers count local steps, which are not the run's
    assembled: bool = False  # elastic plane: a checkpoint puts its optimizer state together from the members' parts

    @property
    def planes(self) -> tuple[str, ...]:
        return tuple(self.where)

    def options_on(self, plane: str) -> type[Options] | None:
        return self.options.get(plane) if isinstance(self.options, Mapping) else self.options


def _stages(request: PlanRequest) -> Iterable[Variant]:
    if request.plane == "elastic":
        return [("1", {"fsdp_stage": 1})]
    half = [n for n in range(2, request.num_ranks) if request.num_ranks % n == 0]
    hybrid = [(f"3, hybrid {size}", {"fsdp_stage": 3, "shard_size": size}) for size in half[-1:]]
    whole = [(str(stage), {"fsdp_stage": stage, "shard_size": None}) for stage in range(4)]
    return [*whole[:3], *hybrid, whole[3]]


def _schedules(request: PlanRequest) -> Iterable[Variant]:
    names = ("1f1b", "gpipe", *(("interleaved", "zero-bubble", "zbv") if request.every else ()))
    return [(name, {"schedule": name}) for name in names]


def _axes(request: PlanRequest) -> Iterable[Variant]:
    for pp, tp in ((2, 1), (1, 2), (2, 2)) if request.num_ranks > 2 else ():
        parts = {"dp": request.num_ranks // (pp * tp), "tp": tp, "pp": pp}
        label = " x ".join(f"{name} {n}" for name, n in parts.items() if n > 1)
        yield label, {"pp": pp, "tp": tp, "cp": None, "dp": None, "fsdp_stage": 0, "shard_size": None}


def _sharded(options: FSDPOptions) -> str | None:
    """Stages 2 and 3 are torch's."""
    return f"{_HERE}.fsdp_sharded:ShardedFSDP" if options.fsdp_stage >= 2 else None


_HERE = "smolcluster.strategies"

# In the order in which a plan looks at them: those that exchange least first, those that save most last.
_RECORDS = (
    Record(
        name="single",
        algorithm="Single",
        summary="one process on one device; the reference for all others",
        where={"mesh": f"{_HERE}.single:Single"},
        options=Options,
        use_when="one machine",
        topology="alone",
    ),
    Record(
        name="allreduce",
        algorithm="ClassicDP",
        summary="whole model on every worker, averaged gradients, optional bounded staleness",
        where={"mesh": f"{_HERE}.allreduce:AllReduce", "elastic": f"{_HERE}.allreduce:AllReduce"},
        options=AllReduceOptions,
        use_when="the model fits on every machine",
        aliases=("classicdp", "dp", "ddp", "dataparallel"),
    ),
    Record(
        name="fsdp",
        algorithm="FSDP",
        summary="ZeRO 0-3 and hybrid: optimizer state, gradients and parameters sharded over the workers",
        where={"mesh": f"{_HERE}.fsdp:FSDP", "elastic": f"{_HERE}.fsdp:FSDP"},
        options={"mesh": FSDPOptions, "elastic": ElasticFSDPOptions},
        code_for=_sharded,
        use_when="the optimizer state or the model does not fit on one machine (ZeRO stages 0 to 3)",
        aliases=("zero",),
        variants=_stages,
        elastic_option="staleness_bound",
        assembled=True,
    ),
    Record(
        name="pipeline",
        algorithm="MP",
        summary="the layers are split over the ranks; micro-batches are pipelined through them",
        where={"mesh": f"{_HERE}.pipeline:Pipeline"},
        options=PipelineOptions,
        use_when="the model does not fit on one machine, and the network is slow",
        aliases=("mp", "modelparallelism", "modelparallel"),
        topology="line",
        variants=_schedules,
    ),
    Record(
        name="mesh",
        algorithm="3D",
        summary="pipeline x data x tensor parallel, with ZeRO stages along the data axis",
        where={"mesh": f"{_HERE}.mesh:Mesh"},
        options=MeshOptions,
        use_when="fsdp, pipeline and tensor combined; long sequences (context parallelism)",
        variants=_axes,
    ),
    Record(
        name="tensor",
        algorithm="Tensor",
        summary="every layer is split over the ranks (Megatron), with sequence and vocabulary parallelism",
        where={"mesh": f"{_HERE}.tensor:TensorParallel"},
        options=TensorOptions,
        use_when="layers are large, and all ranks are on one machine",
    ),
    Record(
        name="syncps",
        algorithm="SyncPS",
        summary="a synchronous parameter server; a straggler costs one timeout, not one per step",
        where={"elastic": f"{_HERE}.syncps:SyncPS"},
        options=SyncPSOptions,
        use_when="one reliable machine as the server, workers of similar speed",
        aliases=("ps", "synchronousps"),
        topology="star",
    ),
    Record(
        name="edp",
        algorithm="EDP",
        summary="an asynchronous parameter server; workers wait for each other only briefly, and fast ones do more",
        where={"elastic": f"{_HERE}.edp:EDP"},
        options=EDPOptions,
        use_when="machines of very different speed, unreliable networks",
        topology="star",
        own_steps=True,
    ),
    Record(
        name="diloco",
        algorithm="DiLoCo",
        summary="workers train independently; every inner_steps steps an outer optimizer applies the mean of their changes",
        where={"mesh": f"{_HERE}.diloco:DiLoCo", "elastic": f"{_HERE}.diloco:DiLoCo"},
        options=DiLoCoOptions,
        code_for=lambda options: f"{_HERE}.diloco_nested:NestedDiLoCo" if options.inner == "fsdp" else None,
        use_when="machines at different sites, with 1 to 100 Mbit/s between them",
        aliases=("opendiloco",),
    ),
)

BUILT_IN: Mapping[str, Record] = {record.name: record for record in _RECORDS}

# Where no strategy is named: on one worker, on several, and where machines differ, come and go.
ALONE, DEFAULT, UNLIKE = "single", "allreduce", "edp"

# Named in the documentation and in ready cluster files, and still to come.
PLANNED = ("dipaco", "swarm")

ALIASES: Mapping[str, str] = {alias: record.name for record in _RECORDS for alias in record.aliases}

_SPELLINGS = {**ALIASES, **{name: name for name in (*BUILT_IN, *PLANNED)}}


def canonical_strategy(name: str) -> str:
    """Return the canonical name: `ClassicDP` -> `allreduce`. Ignores case, `-` and `_`. Unknown names pass unchanged."""
    name = name.strip()
    plain = _plain(name)
    if plain in _SPELLINGS:
        return _SPELLINGS[plain]
    others = _registered()
    own = next((known for known in others if _plain(known) == plain), None)
    return own or next((known for known in others if plain in _aliases_of(known)), name)


def check_name(name: str) -> str:
    """Return the canonical name. Raises UserError with the known ones."""
    canonical = canonical_strategy(name)
    if canonical in BUILT_IN:
        return canonical
    known = strategy_names()
    if canonical in PLANNED and canonical not in known:
        raise UserError(f"strategy '{name}' is not built yet; known: {', '.join(known)}")
    if canonical not in known:
        raise unknown_name("strategy", name, known)
    return canonical


def strategy_names() -> list[str]:
    """Return all names, sorted, including those of other packages, without importing anything."""
    return sorted({*BUILT_IN, *_registered()})


def record_of(name: str) -> Record:
    """Return the record of a strategy. One of another package is imported now."""
    canonical = check_name(name)
    return BUILT_IN.get(canonical) or _load(_registered()[canonical])


def all_records() -> dict[str, Record]:
    """Return the records of all strategies that can be imported, those of other packages last."""
    others = {name: record for name in _registered() if (record := find_record(name)) is not None}
    return {**BUILT_IN, **others}


@functools.lru_cache(maxsize=64)
def find_record(name: str) -> Record | None:
    """Return the record, or None: a run may have been made on a machine with other packages."""
    try:
        return record_of(name)
    except UserError:
        return None


# Options


class StrategyOption(NamedTuple):
    """An option of a strategy; `plane` is empty if it is the same on all planes."""

    key: str
    strategy: str
    plane: str
    field: FieldInfo

    @property
    def taker(self) -> str:
        return f"{self.strategy} ({self.plane})" if self.plane else self.strategy


def options_of(record: Record) -> Iterator[StrategyOption]:
    by_plane = {plane: made.on(plane) for plane in record.planes if (made := record.options_on(plane)) is not None}
    for key in dict.fromkeys(key for fields in by_plane.values() for key in fields):
        fields = {plane: by_plane[plane][key] for plane in by_plane if key in by_plane[plane]}
        different = {(field.description, repr(field.default)) for field in fields.values()}
        if len(different) == 1 and len(fields) == len(record.planes):
            fields = {"": fields[record.planes[0]]}
        for plane, field in fields.items():
            yield StrategyOption(key, record.name, plane, field)


@functools.cache
def built_in_options() -> Mapping[str, Sequence[StrategyOption]]:
    """Return every option of the built-in strategies, with the strategies that have it."""
    found: dict[str, list[StrategyOption]] = {}
    for record in BUILT_IN.values():
        for option in options_of(record):
            found.setdefault(option.key, []).append(option)
    return found


def option_fields() -> dict[str, Any]:
    """Return them as fields of the `strategy` section; None: not given."""
    return {
        key: (written(takers[0].field), Field(None, description=describe_option(takers)))
        for key, takers in built_in_options().items()
    }


def written(field: FieldInfo) -> Any:
    """Return the type of the value in a file, or null."""
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return next((part.type for part in field.metadata if isinstance(part, Written)), kind) | None


def describe_option(takers: Iterable[StrategyOption]) -> str:
    """Format as `allreduce, fsdp: meaning. edp: meaning`."""
    takers_by_text: dict[str, list[str]] = {}
    for option in takers:
        takers_by_text.setdefault(option.field.description or "", []).append(option.taker)
    return ". ".join(f"{', '.join(names)}: {text}" for text, names in takers_by_text.items())


# Packages


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _aliases_of(name: str) -> tuple[str, ...]:
    record = find_record(name)
    return () if record is None else tuple(map(_plain, record.aliases))


@functools.cache
def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def _load(entry: EntryPoint) -> Record:
    try:
        found = entry.load()
    except Exception as error:  # another package's code
        raise UserError(f"strategy {entry.name}: {entry.value} cannot be imported: {error}") from error
    if isinstance(found, Record):
        if found.name != entry.name:
            raise UserError(f"strategy {entry.name}: the record at {entry.value} is of '{found.name}'; use one name")
        return found
    lines = (found.__doc__ or "").strip().splitlines()
    return Record(
        name=entry.name,
        algorithm=found.__name__,
        summary=lines[0] if lines else entry.value,
        where={"mesh": entry.value},
        options=getattr(found, "Config", None),
    )
