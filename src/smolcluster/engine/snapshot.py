"""One checkpoint: what is in it, and its folder on disk.

    step-00000100/
        weights.safetensors      the whole model, unsharded
        optimizer.safetensors    "<state name>/<parameter name>", for example "exp_avg/blocks.0.attn.qkv.weight"
        state.json               everything else that resuming needs: data position, counters, loss scale, ...
        manifest.json            format, step, and the size and SHA-256 of the three files above and of itself

The manifest is written last: a folder without a good manifest is not a checkpoint. Its own hash is its first entry and
is taken over its bytes with the 64 digits of that hash set to '0', so that a single flipped bit anywhere is found.
Reading runs no code from a checkpoint and allocates no more than the files hold.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from safetensors import SafetensorError
from torch import Tensor

from smolcluster.engine.files import Files
from smolcluster.engine.tensorfile import HashedFile, TensorFile, read_tensors
from smolcluster.errors import DamagedCheckpoint, UserError

FORMAT = "smolcluster-checkpoint"
VERSION = 1

WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_CONTENTS = (WEIGHTS, OPTIMIZER, STATE)

_MANIFEST_LIMIT_BYTES = 256 << 20
_DIGEST_AT = len(b'{\n  "sha256": "')
_NO_DIGEST = "0" * 64

Size = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclasses.dataclass(kw_only=True)
class Snapshot:
    """The state of a run after `step` steps. Tensors are whole and on the CPU; `state` and `info` are JSON values."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


class FileEntry(BaseModel):
    sha256: Digest
    size: Size
    tensors: Size | None = None
    aliases: dict[str, str] = {}


class Manifest(BaseModel):
    format: str = FORMAT
    version: int = VERSION
    step: Size
    created: str
    best: bool
    files: dict[str, FileEntry]
    metrics: dict[str, float]
    info: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


class Encoded:
    """A snapshot ready to be written. Making one refuses what cannot be saved, before the disk is touched."""

    def __init__(self, snapshot: Snapshot, *, best: bool) -> None:
        if snapshot.step < 0:
            raise ValueError(f"a snapshot's step is a count, not {snapshot.step}")
        self.step, self.best = snapshot.step, best
        self.tensor_files = {WEIGHTS: TensorFile.plan(snapshot.weights), OPTIMIZER: TensorFile.plan(snapshot.optimizer)}
        self.state = json.dumps(_checked(snapshot.state, "state")).encode("utf-8")
        # JSON has no NaN and no infinity, and other tools read the manifest: they become strings.
        self.metrics = {
            k: v if math.isfinite(v) else repr(v) for k, v in ((k, float(v)) for k, v in snapshot.metrics.items())
        }
        self.info = json.loads(json.dumps(_checked(snapshot.info, "info")))

    def write_to(self, folder: Path, *, files: Files) -> None:
        """Writes all files into an empty folder, each flushed to the disk, the manifest last."""
        entries: dict[str, Any] = {}
        for name in _CONTENTS:
            with files.create(folder / name) as raw:
                file = HashedFile(raw)
                plan = self.tensor_files.get(name)
                if plan is None:
                    file.write(self.state)
                else:
                    plan.write_to(file)
                raw.fsync()
            entries[name] = {"sha256": file.sha256, "size": file.size}
            if plan is not None:
                entries[name] |= {"tensors": len(plan.tensors), "aliases": plan.aliases}
        with files.create(folder / MANIFEST) as raw:
            raw.write(self._manifest(entries))
            raw.fsync()

    def _manifest(self, entries: dict[str, Any]) -> bytes:
        fields = {
            "sha256": _NO_DIGEST,
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "best": self.best,
            "files": entries,
            "metrics": self.metrics,
            "info": self.info,
        }
        raw = json.dumps(fields, indent=2).encode("utf-8")
        return _with_digest(raw, hashlib.sha256(raw).hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its own hash checked. Raises DamagedCheckpoint."""
    where = f"{folder.name}/{MANIFEST}"
    if _size(folder, MANIFEST) > _MANIFEST_LIMIT_BYTES:
        raise DamagedCheckpoint(f"{where}: far too large for a manifest")
    raw = (folder / MANIFEST).read_bytes()
    # The hash comes first: nothing a damaged manifest says is worth looking at, not even its version.
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
    if set(manifest.files) != set(_CONTENTS):
        raise DamagedCheckpoint(f"{where}: lists the files {sorted(manifest.files)}, not {sorted(_CONTENTS)}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Checks size and hash of every file. Raises DamagedCheckpoint with the file and what differs."""
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


def read_checkpoint(folder: Path, *, optimizer: bool = True) -> Snapshot:
    """Verifies a checkpoint and loads it. Raises DamagedCheckpoint, or UserError for a newer format.

    Without the optimizer's tensors it takes a third of the memory; they are verified all the same.
    """
    manifest = verify(folder)
    return Snapshot(
        step=manifest.step,
        weights=_read_tensors(folder, WEIGHTS, manifest.files[WEIGHTS]),
        optimizer=_read_tensors(folder, OPTIMIZER, manifest.files[OPTIMIZER]) if optimizer else {},
        state=_read_state(folder),
        metrics=manifest.metrics,
        info=manifest.info,
    )


def check_compatible(snapshot: Snapshot, model_state: Mapping[str, Tensor]) -> None:
    """Raises UserError unless the weights have the names and shapes of this model."""
    saved = {name: tuple(tensor.shape) for name, tensor in snapshot.weights.items()}
    model = {name: tuple(tensor.shape) for name, tensor in model_state.items()}
    different = [
        f"{n} is {saved[n]}, the model has {model[n]}" for n in sorted(saved) if n in model and saved[n] != model[n]
    ]
    missing = [f"{name} {model[name]}" for name in sorted(model.keys() - saved.keys())]
    unexpected = [f"{name} {saved[name]}" for name in sorted(saved.keys() - model.keys())]
    kinds = {"of another shape": different, "missing": missing, "not in the model": unexpected}
    found = [f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds.items() if names]
    if found:
        raise UserError(
            f"the checkpoint of step {snapshot.step} is of another model ({'; '.join(found)}); "
            "use the config.yaml of the run that saved it, or start afresh without --resume"
        )


def _first(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _with_digest(raw: bytes, digest: str) -> bytes:
    return raw[:_DIGEST_AT] + digest.encode() + raw[_DIGEST_AT + len(digest) :]


def _size(folder: Path, name: str) -> int:
    """Size of a regular file: a device or a pipe in its place must not be opened."""
    try:
        status = (folder / name).stat()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder.name}/{name}: missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpoint(f"{folder.name}/{name}: not a regular file")
    return status.st_size


def _read_tensors(folder: Path, name: str, entry: FileEntry) -> dict[str, Tensor]:
    try:
        tensors = read_tensors(folder / name)
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{folder.name}/{name}: not a valid safetensors file: {error}") from error
    if len(tensors) != entry.tensors:
        raise DamagedCheckpoint(f"{folder.name}/{name}: {len(tensors)} tensors, the manifest says {entry.tensors}")
    stored = dict(tensors)
    for alias, target in entry.aliases.items():
        if alias in stored or target not in stored:
            raise DamagedCheckpoint(f"{folder.name}/{MANIFEST}: '{alias}' cannot be another name of '{target}'")
        tensors[alias] = stored[target]
    return tensors


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpoint(f"{folder.name}/{STATE}: not valid JSON: {error}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder.name}/{STATE}: holds a {type(state).__name__}, not an object")
    return state


def _checked(value: Any, where: str) -> Any:
    """JSON turns other keys into strings without a word, and they would come back changed."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is a {type(key).__name__}; JSON has only string keys")
            _checked(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _checked(item, f"{where}[{index}]")
    return value
