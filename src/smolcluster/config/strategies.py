"""Every strategy as data: its names, its planes, where its code is. Beside these only the schema's descriptions name one.

The records are in config/ because the schema, the console, the launchers and the dashboard all read them, and none of these
imports torch. Code is named by strings, `module:Class`, and imported by `strategies/registry.py`.

A package of your own registers its record by entry point:

    [project.entry-points."smolcluster.strategies"]
    mine = "my_package.record:RECORD"

A `Strategy` class may stand there instead: it then runs on the mesh plane, under the name of the entry point. A record is
better off in a module that does not import torch: launchers read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from smolcluster.errors import UserError, unknown_name

GROUP = "smolcluster.strategies"

Topology = Literal["alone", "star", "ring", "line"]
Variant = tuple[str, Mapping[str, Any]]  # what follows the name in a label, and options


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan wants variants for."""

    plane: str
    num_ranks: int
    every: bool = False  # variant, or the usual ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a strategy before its code is imported."""

    name: str
    algorithm: str  # the name users know it by, as in run names
    summary: str
    where: Mapping[str, str]  # plane, mesh or elastic -> `module:Class`; the first plane is the default
    aliases: tuple[str, ...] = ()
    topology: Topology = "ring"  # who exchanges with whom: a server and its workers, neighbours, a chain
    variants: Callable[[Asked], Iterable[Variant]] = lambda _: [("", {})]  # that a plan compares
    elastic_option: str = ""  # an option that only the elastic plane has: setting it chooses that plane
    own_steps: bool = False  # its workers count steps of their own, which are not the run's
    assembled: bool = False  # elastic plane: a checkpoint puts its optimizer state together from the members' parts

    @property
    def planes(self) -> tuple[str, ...]:
        return tuple(self.where)


def _stages(asked: Asked) -> Iterable[Variant]:
    if asked.plane == "elastic":
        return [("1", {"fsdp_stage": 1})]
    half = [n for n in range(2, asked.num_ranks) if asked.num_ranks % n == 0]
    hybrid = [(f"3, hybrid {size}", {"fsdp_stage": 3, "shard_size": size}) for size in half[-1:]]
    whole = [(str(stage), {"fsdp_stage": stage, "shard_size": None}) for stage in range(4)]
    return [*whole[:3], *hybrid, whole[3]]


def _schedules(asked: Asked) -> Iterable[Variant]:
    names = ("1f1b", "gpipe", *(("interleaved", "zero-bubble", "zbv") if asked.every else ()))
    return [(name, {"schedule": name}) for name in names]


def _axes(asked: Asked) -> Iterable[Variant]:
    for pp, tp in ((2, 1), (1, 2), (2, 2)) if asked.num_ranks > 2 else ():
        parts = {"dp": asked.num_ranks // (pp * tp), "tp": tp, "pp": pp}
        label = " x ".join(f"{name} {n}" for name, n in parts.items() if n > 1)
        yield label, {"pp": pp, "tp": tp, "cp": None, "dp": None, "fsdp_stage": 0, "shard_size": None}


_HERE = "smolcluster.strategies"

# In the order in which a plan looks at them: those that exchange least first, those that save most last.
_RECORDS = (
    Record(
        name="single",
        algorithm="Single",
        summary="one process on one device; the reference for all others",
        where={"mesh": f"{_HERE}.single:Single"},
        topology="alone",
    ),
    Record(
        name="allreduce",
        algorithm="ClassicDP",
        summary="whole model on every worker, averaged gradients, optional bounded staleness",
        where={"mesh": f"{_HERE}.allreduce:AllReduce", "elastic": f"{_HERE}.allreduce:AllReduce"},
        aliases=("classicdp", "dp", "ddp", "dataparallel"),
    ),
    Record(
        name="fsdp",
        algorithm="FSDP",
        summary="ZeRO 0-3 and hybrid: optimizer state, gradients and parameters cut up among the workers",
        where={"mesh": f"{_HERE}.fsdp:FSDP", "elastic": f"{_HERE}.fsdp_elastic:ElasticFSDP"},
        aliases=("zero",),
        variants=_stages,
        elastic_option="staleness_bound",
        assembled=True,
    ),
    Record(
        name="pipeline",
        algorithm="MP",
        summary="each rank has some of the layers; micro-batches follow each other through them",
        where={"mesh": f"{_HERE}.pipeline:Pipeline"},
        aliases=("mp", "modelparallelism", "modelparallel"),
        topology="line",
        variants=_schedules,
    ),
    Record(
        name="mesh",
        algorithm="3D",
        summary="pipeline x data x tensor parallel, with ZeRO stages along the data axis",
        where={"mesh": f"{_HERE}.mesh:Mesh"},
        variants=_axes,
    ),
    Record(
        name="tensor",
        algorithm="Tensor",
        summary="every layer's work shared out among the ranks (Megatron), sequence and vocabulary parallel",
        where={"mesh": f"{_HERE}.tensor:TensorParallel"},
    ),
    Record(
        name="syncps",
        algorithm="SyncPS",
        summary="a server averages the gradients of all workers, step by step; stragglers are not waited for",
        where={"elastic": f"{_HERE}.syncps:SyncPS"},
        aliases=("ps", "synchronousps"),
        topology="star",
    ),
    Record(
        name="edp",
        algorithm="EDP",
        summary="an asynchronous server; no worker waits for another, fast ones do more",
        where={"elastic": f"{_HERE}.edp:EDP"},
        topology="star",
        own_steps=True,
    ),
)

BUILT_IN: Mapping[str, Record] = {record.name: record for record in _RECORDS}

ALONE = "single"  # what runs on one worker where no strategy is named

# Named in the documentation and in ready cluster files, and still to come.
PLANNED = ("diloco", "dipaco", "swarm")

ALIASES: Mapping[str, str] = {alias: record.name for record in _RECORDS for alias in record.aliases}

_SPELLINGS = {**ALIASES, **{name: name for name in (*BUILT_IN, *PLANNED)}}


def canonical_strategy(name: str) -> str:
    """The strategy's own name: `ClassicDP` -> `allreduce`. Case, `-` and `_` do not matter. Others pass unchanged."""
    name = name.strip()
    plain = _plain(name)
    if plain in _SPELLINGS:
        return _SPELLINGS[plain]
    others = _registered()
    own = next((known for known in others if _plain(known) == plain), None)
    return own or next((known for known in others if plain in _aliases_of(known)), name)


def check_name(name: str) -> str:
    """The canonical name, or an error that lists the known ones."""
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
    """All names, sorted, those of other packages too. Nothing is imported."""
    return sorted({*BUILT_IN, *_registered()})


def record_of(name: str) -> Record:
    """The record of a strategy. One of another package is imported now."""
    canonical = check_name(name)
    return BUILT_IN.get(canonical) or _load(_registered()[canonical])


def all_records() -> dict[str, Record]:
    """Of every strategy that can be imported here, those of other packages last."""
    others = {name: record for name in _registered() if (record := find_record(name)) is not None}
    return {**BUILT_IN, **others}


@functools.lru_cache(maxsize=64)
def find_record(name: str) -> Record | None:
    """The record, where this machine has it: a run that is looked at may have been made on another."""
    try:
        return record_of(name)
    except UserError:
        return None


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
    said = (found.__doc__ or "").strip().splitlines()
    return Record(
        name=entry.name,
        algorithm=found.__name__,
        summary=said[0] if said else entry.value,
        where={"mesh": entry.value},
    )
