"""One checkpoint: its contents and its folder on disk.

    step-00000100/
        weights.safetensors      the whole model, unsharded
        optimizer.safetensors    "<state name>/<parameter name>", for example "exp_avg/blocks.0.attn.qkv.weight"
        state.json               everything else that resuming needs: data position, counters, loss scale, ...
        strategy.safetensors     state that only the same strategy can use, if any: of all ranks together
                                 ("all/...": gradients in flight) or of one rank ("3/...": its own buffers)
        manifest.json            format, step, and the size and SHA-256 of the files above and of itself

Ranks that have only a part of the model write their parts (`sharded_save.py`), and the manifest has the full shapes:

        weights-0.safetensors, weights-1.safetensors, ...      boxes of the tensors: "<name>@<offsets of the box>", for
        optimizer-0.safetensors, ...                           example "blocks.0.attn.qkv.weight@96,0"
        strategy-1.safetensors, ...                            whole tensors

The manifest is written last: a folder without a valid manifest is not a checkpoint. Its first entry is its own hash, computed
with the 64 digits of that hash set to '0', so that any flipped bit is found. Reading runs no code from a checkpoint and
allocates no more than the size of its files.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel
from torch import Tensor

from smolcluster.compute.optim import without_state
from smolcluster.compute.replica import Replica
from smolcluster.config.strategies import find_record
from smolcluster.durable_files import Files
from smolcluster.engine.checkpoint.lazy_tensors import FileEntry, Size, StoredTensors
from smolcluster.engine.checkpoint.safetensors_writer import HashedFile, TensorFile
from smolcluster.errors import DamagedCheckpoint, UserError
from smolcluster.models.parts import first_of
from smolcluster.parallel.stages import COPY
from smolcluster.strategies.base import IN_FLIGHT, State

FORMAT = "smolcluster-checkpoint"
VERSION = 3
_UNSHARDED, _SHARDED, _WITH_EXTRA = 1, 2, 3  # versions: older programs still read an unsharded checkpoint

WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
EXTRA = "strategy.safetensors"
ALL = "all"  # scope of an extra tensor that all ranks share, instead of a rank
_CONTENTS = (WEIGHTS, OPTIMIZER, STATE)
_PART = re.compile(r"(weights|optimizer|strategy)-[0-9]{1,6}\.safetensors")

_MANIFEST_LIMIT_BYTES = 256 << 20
_DIGEST_AT = len(b'{\n  "sha256": "')
_NO_DIGEST = "0" * 64


Layout = dict[str, dict[str, list[int]]]  # of "weights" and "optimizer": the shape of each whole tensor


@dataclasses.dataclass(kw_only=True)
class Snapshot:
    """The state of a run after `step` steps. Tensors are on the CPU; `state` and `info` are JSON values.

    With `full_shapes` the tensors are the boxes that rank `part` saves, by their names in its file; else they are whole.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # "all/..." or "<rank>/..."
    full_shapes: Layout | None = None
    part: int = 0


class Manifest(BaseModel):
    format: str = FORMAT
    version: int = VERSION
    step: Size
    created: str
    best: bool
    files: dict[str, FileEntry]
    metrics: dict[str, float]
    info: dict[str, Any]
    wholes: dict[str, dict[str, list[Size]]] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


class OtherRanks(Protocol):
    """The ranks that write the other parts of a checkpoint."""

    def begin(self, step: int, folder: str) -> None:
        """Let them write into the folder of this name."""

    def collect(self, step: int) -> tuple[dict[str, Any], Layout]:
        """Wait until they have written. Return the entries of their files and the full shapes. Raises OSError."""

    def abort(self, step: int) -> None:
        """Return when no rank writes into the folder any more."""


class Encoded:
    """A snapshot ready to be written. Raises for a snapshot that cannot be saved, before anything is written."""

    def __init__(self, snapshot: Snapshot, *, best: bool) -> None:
        if snapshot.step < 0:
            raise ValueError(f"the step of a snapshot cannot be {snapshot.step}")
        self.step, self.best, self.full_shapes = snapshot.step, best, snapshot.full_shapes
        self.tensor_files = {WEIGHTS: TensorFile.plan(snapshot.weights), OPTIMIZER: TensorFile.plan(snapshot.optimizer)}
        if snapshot.extra:
            self.tensor_files[EXTRA] = TensorFile.plan(snapshot.extra)
        if snapshot.full_shapes is not None:
            files = self.tensor_files.items()
            self.tensor_files = {name.replace(".", f"-{snapshot.part}."): plan for name, plan in files if plan.tensors}
        self.state = json.dumps(_checked(snapshot.state, "state")).encode("utf-8")
        # JSON has no NaN and no infinity, and other tools read the manifest: they become strings.
        self.metrics = {
            k: v if math.isfinite(v) else repr(v) for k, v in ((k, float(v)) for k, v in snapshot.metrics.items())
        }
        self.info = json.loads(json.dumps(_checked(snapshot.info, "info")))

    def write_to(self, folder: Path, *, files: Files, others: OtherRanks | None = None) -> None:
        """Write all files into an empty folder, each flushed to the disk, the manifest last."""
        if others is not None:
            others.begin(self.step, folder.name)
        entries = self.write_tensors(folder, files=files)
        entries[STATE] = _write_file(folder / STATE, self.state, files=files)
        full_shapes = self.full_shapes
        if others is not None and full_shapes is not None:
            other_entries, other_shapes = others.collect(self.step)
            entries |= other_entries
            full_shapes = {kind: shapes | other_shapes.get(kind, {}) for kind, shapes in full_shapes.items()}
            _check_parts(folder, entries, full_shapes)
        with files.create(folder / MANIFEST) as raw:
            raw.write(self._manifest(entries, full_shapes))
            raw.fsync()

    def write_tensors(self, folder: Path, *, files: Files) -> dict[str, Any]:
        """Write the files with tensors. Return their entries in the manifest."""
        entries = {}
        for name, plan in self.tensor_files.items():
            entry = _write_file(folder / name, plan, files=files)
            entries[name] = entry | {"tensors": len(plan.tensors), "aliases": plan.aliases}
        return entries

    def _manifest(self, entries: dict[str, Any], full_shapes: Layout | None) -> bytes:
        fields = {
            "sha256": _NO_DIGEST,
            "format": FORMAT,
            "version": _WITH_EXTRA if _extra_in(entries) else _UNSHARDED if full_shapes is None else _SHARDED,
            "step": self.step,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "best": self.best,
            "files": entries,
            "metrics": self.metrics,
            "info": self.info,
        }
        if full_shapes is not None:
            fields["wholes"] = full_shapes
        raw = json.dumps(fields, indent=2).encode("utf-8")
        return _with_digest(raw, hashlib.sha256(raw).hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after checking its hash. Raises DamagedCheckpoint."""
    where = f"{folder.name}/{MANIFEST}"
    if _size(folder, MANIFEST) > _MANIFEST_LIMIT_BYTES:
        raise DamagedCheckpoint(f"{where}: far too large for a manifest")
    raw = (folder / MANIFEST).read_bytes()
    # Check the hash before anything else, even the version: a damaged manifest must not be interpreted.
    found = hashlib.sha256(_with_digest(raw, _NO_DIGEST)).hexdigest()
    if raw != _with_digest(raw, found):
        raise DamagedCheckpoint(f"{where}: its bytes do not match the hash in its first line")
    try:
        fields = json.loads(raw)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise DamagedCheckpoint(f"{where}: not the manifest of a smolcluster checkpoint")
        version = fields.get("version")
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"{folder}: written by a newer smolcluster (checkpoint format {version}, this one reads up to "
                f"{VERSION}); update with: pip install -U smolcluster"
            )
        manifest = Manifest.model_validate(fields)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: not a valid manifest: {error}") from error
    # Fixed names only: a manifest can never point outside its folder.
    if manifest.wholes is None and set(manifest.files) - {EXTRA} != set(_CONTENTS):
        raise DamagedCheckpoint(f"{where}: lists the files {sorted(manifest.files)}, not {sorted(_CONTENTS)}")
    if manifest.wholes is not None:
        strange = [name for name in manifest.files if name != STATE and not _PART.fullmatch(name)]
        if strange or STATE not in manifest.files or set(manifest.wholes) != {"weights", "optimizer"}:
            raise DamagedCheckpoint(f"{where}: lists the files {sorted(manifest.files)}")
    return manifest


def manifest_sha256(folder: Path) -> str | None:
    """Return the hash of the manifest, by which two ranks compare checkpoints; None if it cannot be read."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def verify(folder: Path) -> Manifest:
    """Check size and hash of every file. Raises DamagedCheckpoint with the file and the difference."""
    try:
        manifest = read_manifest(folder)
        for name, entry in manifest.files.items():
            size = _size(folder, name)
            if size != entry.size:
                raise DamagedCheckpoint(f"{folder.name}/{name}: {size} bytes, the manifest says {entry.size}")
            with (folder / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != entry.sha256:
                raise DamagedCheckpoint(f"{folder.name}/{name}: sha256 is {sha256}, the manifest says {entry.sha256}")
    except OSError as error:
        raise DamagedCheckpoint(f"{folder.name}: cannot be read: {error}") from error
    return manifest


def read_checkpoint(folder: Path, *, optimizer: bool = True, lazily: bool = False) -> Snapshot:
    """Verify a checkpoint and load it. Raises DamagedCheckpoint, or UserError for a newer format.

    `optimizer=False` takes a third of the memory, and verifies all files too. `lazily`: each access reads a tensor.
    """
    return open_checkpoint(folder, verify(folder), optimizer=optimizer, lazily=lazily)


def open_checkpoint(folder: Path, manifest: Manifest, *, optimizer: bool = True, lazily: bool = False) -> Snapshot:
    """Load a checkpoint that was verified already, perhaps by another rank."""
    weights = _stored(folder, manifest, WEIGHTS)
    moments = _stored(folder, manifest, OPTIMIZER)
    extra = StoredTensors(folder, {name: manifest.files[name] for name in _extra_in(manifest.files)}, None)
    return Snapshot(
        step=manifest.step,
        weights=weights if lazily else weights.read_all(),
        optimizer={} if not optimizer else moments if lazily else moments.read_all(),
        state=_read_state(folder),
        metrics=manifest.metrics,
        info=manifest.info,
        extra={} if not optimizer else extra if lazily else extra.read_all(),
    )


def _stored(folder: Path, manifest: Manifest, file: str) -> StoredTensors:
    kind = file.partition(".")[0]
    entries = {name: entry for name, entry in manifest.files.items() if name.startswith(kind)}
    return StoredTensors(folder, entries, None if manifest.wholes is None else manifest.wholes[kind])


def _extra_in(files: Iterable[str]) -> list[str]:
    return [name for name in files if name.startswith(EXTRA.partition(".")[0])]


def state_for(snapshot: Snapshot, *, strategy: str, rank: int | None, num_ranks: int) -> tuple[State, list[str]]:
    """Return the state that a strategy can use, and descriptions of the rest. `rank` None: the state of a server."""
    numbers, saved_by = dict(snapshot.state["strategy"]), snapshot.info.get("strategy")
    state, unused = State(weights=snapshot.weights, optimizer=snapshot.optimizer, numbers=numbers), []
    scoped: dict[str, dict[str, str]] = {}  # scope -> name -> key
    for key in snapshot.extra:
        scope, _, name = key.partition("/")
        scoped.setdefault(scope, {})[name] = key
    same, shared = saved_by == strategy, scoped.get(ALL, {})
    if (not same or rank is None) and (in_flight := numbers.pop("in_flight", [])):
        numbers["updates"] = snapshot.step  # as if those gradients had changed nothing
        shared = {name: key for name, key in shared.items() if not name.startswith(IN_FLIGHT)}
        unused.append(f"{len(in_flight)} gradients in flight of {saved_by}")
    if same:
        state.shared = {name: snapshot.extra[key] for name, key in shared.items()}
    elif shared:
        kinds = sorted({name.partition("/")[0] for name in shared})
        unused.append(f"shared state of {saved_by}: {', '.join(kinds)}")
    if same and rank is not None and snapshot.info.get("world_size") == num_ranks:
        state.own = {name: snapshot.extra[key] for name, key in scoped.get(str(rank), {}).items()}
    elif scoped.keys() - {ALL}:
        unused.append(f"the local state of {snapshot.info.get('world_size')} ranks")
    return state, unused


def _check_parts(folder: Path, entries: dict[str, Any], full_shapes: Layout) -> None:
    """Check by headers that the parts of all ranks fill every tensor. Raises DamagedCheckpoint."""
    others = {STATE, *_extra_in(entries)}
    files = {name: FileEntry.model_validate(entry) for name, entry in entries.items() if name not in others}
    for kind, shapes in full_shapes.items():
        mine = {name: entry for name, entry in files.items() if name.startswith(kind)}
        StoredTensors(folder, mine, shapes).close()


def check_compatible(snapshot: Snapshot, model_state: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the weights have the names and shapes of this model."""
    weights = snapshot.weights
    saved = weights.shapes() if isinstance(weights, StoredTensors) else {n: tuple(t.shape) for n, t in weights.items()}
    model = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    different = [
        f"{n} is {saved[n]}, the model has {model[n]}" for n in sorted(saved) if n in model and saved[n] != model[n]
    ]
    missing = [f"{name} {model[name]}" for name in sorted(model.keys() - saved.keys())]
    unexpected = [f"{name} {saved[name]}" for name in sorted(saved.keys() - model.keys())]
    kinds = {"of another shape": different, "missing": missing, "not in the model": unexpected}
    found = [f"{len(names)} {kind}: {first_of(names)}" for kind, names in kinds.items() if names]
    if found:
        raise UserError(
            f"the checkpoint of step {snapshot.step} is of another model ({'; '.join(found)}); "
            "use the config.yaml of the run that saved it, or start without --resume"
        )


def check_complete(snapshot: Snapshot, replica: Replica) -> None:
    """Raise UserError if optimizer state of a trained parameter is missing in an assembled checkpoint of the elastic plane.

    In other checkpoints such a parameter may never have had a gradient.
    """
    leased = "holes" in (snapshot.state.get("sampler") or {})  # only the elastic plane leases samples
    record = find_record(str(snapshot.info.get("strategy", "")))
    without = [
        name for name in without_state(replica.model, replica.optimizer, snapshot.optimizer) if not name.endswith(COPY)
    ]
    if without and snapshot.optimizer and leased and record is not None and record.assembled:
        raise UserError(
            f"the checkpoint of step {snapshot.step} has no optimizer state for {len(without)} parameters: "
            f"{first_of(without)}; a worker was lost while it was saved: choose another with --resume FOLDER"
        )


def _with_digest(raw: bytes, digest: str) -> bytes:
    return raw[:_DIGEST_AT] + digest.encode() + raw[_DIGEST_AT + len(digest) :]


def _write_file(path: Path, contents: bytes | TensorFile, *, files: Files) -> dict[str, Any]:
    with files.create(path) as raw:
        file = HashedFile(raw)
        if isinstance(contents, bytes):
            file.write(contents)
        else:
            contents.write_to(file)
        raw.fsync()
    return {"sha256": file.sha256, "size": file.size}


def _size(folder: Path, name: str) -> int:
    """Return the size of a regular file; refuse a device or a pipe, which must not be opened."""
    try:
        status = (folder / name).stat()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder.name}/{name}: missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpoint(f"{folder.name}/{name}: not a regular file")
    return status.st_size


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpoint(f"{folder.name}/{STATE}: not valid JSON: {error}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder.name}/{STATE}: holds a {type(state).__name__}, not an object")
    return state


def _checked(value: Any, where: str) -> Any:
    """Refuse keys that are not strings: JSON would silently convert them."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is a {type(key).__name__}; JSON has only string keys")
            _checked(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _checked(item, f"{where}[{index}]")
    return value
