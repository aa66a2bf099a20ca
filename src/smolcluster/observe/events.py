"""The events of a run, as typed values.

Every process emits events; sinks (console, files, trackers) receive them. An event crosses a pipe as one line of JSON
(`to_json`, `from_json`). Nothing here imports torch.

JSON has no NaN and no infinity: they are the strings "nan", "inf" and "-inf", on the pipe as in metrics.jsonl and summary.json.
`restore` makes them floats again in fields that hold numbers. In `RunStarted.config` they stay strings.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; the class name is the tag on the wire."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Emitted once per rank, when the model is built and the first step is about to run."""

    rank: int
    role: str
    host: str
    run_dir: str
    task: str
    strategy: str
    algorithm: str  # the name in run names: EDP, ClassicDP, ...
    world_size: int
    device: str
    parameters: int
    first_step: int
    steps: int
    batch_size: int
    global_batch: int
    learning_rate: float
    project_name: str
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLogged(Event):
    """One row of metrics.jsonl. Rates and times are means since the previous row of this rank."""

    step: int
    rank: int
    role: str
    host: str
    time: float
    loss: float
    lr: float
    grad_norm: float
    samples: int  # since the start of training, by this rank
    tokens: int
    tokens_per_s: float
    samples_per_s: float
    step_time_s: float
    compute_s: float
    comm_s: float
    bytes_sent: int  # since the start of this process
    bytes_received: int
    staleness: float
    staleness_max: int = 0  # since the start of this process, like the next
    stale_rejected: int = 0
    skipped: int = 0  # steps not applied because the gradient was not finite; since the start of training
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_ppl: float | None = None
    val_extra: dict[str, float] | None = None  # other metrics of an evaluation; `val_<name>` in metrics.jsonl
    gradient_norms: dict[str, float] | None = None
    machine: dict[str, Any] | None = None  # facts of the host, on some rows: see observe/machine.py


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str
    stall_s: float
    write_s: float
    size_bytes: int
    best: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    step: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A message for the user. Levels are those of the logging module."""

    level: str
    message: str
    rank: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Progress of work before training: a download, a token cache. `total` None: unknown; done == total ends it."""

    name: str
    done: int
    total: int | None
    unit: str = "B"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase(Event):
    """A rank entered a phase: `connected`, `training`, `finished`. For the launcher."""

    rank: int
    name: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleText(Event):
    """Text generated at the end of training."""

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    """The contents of summary.json."""

    summary: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The error that ended a process. `kind` is user, peer (a lost connection, so probably not the cause) or error."""

    rank: int
    kind: str
    message: str
    traceback: str = ""


VAL_FIELDS = ("val_loss", "val_accuracy", "val_ppl")  # results with a separate field in a row


def evaluation_fields(evaluation: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a row for the results of an evaluation, each `val_<name>`."""
    known = {name: evaluation[name] for name in VAL_FIELDS if name in evaluation}
    extra = {name.removeprefix("val_"): value for name, value in evaluation.items() if name not in known}
    return known | {"val_extra": extra or None}


def evaluation_of(row: StepLogged) -> dict[str, float]:
    """Return the results of an evaluation in a row, each `val_<name>`; empty without one."""
    known = {name: getattr(row, name) for name in VAL_FIELDS}
    extra = {f"val_{name}": value for name, value in (row.val_extra or {}).items()}
    return extra | {name: value for name, value in known.items() if value is not None}


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any) -> Any:
    """Return a value ready for JSON: non-finite numbers become strings, tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def restore(value: Any) -> Any:
    """Invert `plain` for values that hold numbers: "nan", "inf" and "-inf" become floats."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: restore(v) for k, v in value.items()}
    if isinstance(value, list):
        return [restore(v) for v in value]
    return value


def restore_fields(kind: type[Event], fields: dict[str, Any]) -> dict[str, Any]:
    """Apply `restore` to the fields that hold numbers in this kind of event; a host called "inf" keeps its name."""
    numeric = {f.name for f in dataclasses.fields(kind) if "float" in str(f.type) or f.name == "summary"}
    return {k: restore(v) if k in numeric or k.startswith("val_") else v for k, v in fields.items()}


def to_dict(event: Event) -> dict[str, Any]:
    """Return the fields of an event that are not None, ready for JSON."""
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    return {k: plain(v) for k, v in fields.items() if v is not None}


def to_json(event: Event) -> str:
    """Return one line of JSON, in ASCII so that any encoding keeps it."""
    return json.dumps({"event": type(event).__name__, **to_dict(event)}, allow_nan=False)


def from_json(line: str) -> Event:
    """Parse a line. Raises ValueError for one that is not an event."""
    fields = json.loads(line)
    name = fields.pop("event", None) if isinstance(fields, dict) else None
    kind = Event.kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"not an event: {line[:80]!r}")
    # `to_json` leaves fields out that are None.
    absent = {f.name: None for f in dataclasses.fields(kind) if f.name not in fields and "None" in str(f.type)}
    try:
        return kind(**absent, **restore_fields(kind, fields))
    except TypeError as error:  # a field is missing or unknown
        raise ValueError(f"not a {name}: {error}: {line[:80]!r}") from error
