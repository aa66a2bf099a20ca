"""Save one checkpoint from all ranks: each writes its part in the background.

    lead      creates the temporary folder, posts its name, writes its own part
    others    write their parts into it, each flushed to the disk, and post sizes and hashes
    lead      writes the manifest with all of them, renames the folder, posts the outcome

Only keys and values are exchanged (`comm/kv_store.py`), no tensors. All ranks must share the folder (`is_shared`). If one rank
cannot write, the checkpoint is dropped: earlier ones stay as they are, and training continues.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

from smolcluster.comm.group import Group, PeerLost, gather_json
from smolcluster.comm.kv_store import KeyValueStore
from smolcluster.durable_files import TEMPORARY, Files
from smolcluster.engine.checkpoint.snapshot import Encoded, Layout, Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.errors import SmolclusterError

WRITE_TIMEOUT_S = 1800.0  # for the slowest rank's part, after the lead has begun
ABORT_TIMEOUT_S = 60.0  # wait for the other ranks before a failed folder is removed


class LeadStore:
    """Save together with the other ranks. Only rank 0 has one."""

    def __init__(self, store: CheckpointStore, kv_store: KeyValueStore, *, size: int) -> None:
        self._store, self._kv_store, self._size = store, kv_store, size
        self._begun = False
        self._writing: set[int] = set()  # ranks that have not posted their part
        self._posted: list[int] = []  # steps whose keys are not deleted yet

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        step, self._begun, problem = snapshot.step, False, ""
        try:
            return self._store.save(snapshot, best=best, others=self)
        except (OSError, SmolclusterError) as error:
            problem = str(error) or type(error).__name__
            raise
        finally:
            with contextlib.suppress(PeerLost):
                if not self._begun:  # it existed already, or the folder could not be made
                    self._kv_store.set(f"{step}/folder", None)
                self._kv_store.set(f"{step}/end", problem)
            self._posted.append(step)

    def size_bytes(self, path: Path) -> int:
        return self._store.size_bytes(path)

    def begin(self, step: int, folder: str) -> None:
        self._begun = True
        self._writing = set(range(1, self._size))
        self._kv_store.set(f"{step}/folder", folder)

    def collect(self, step: int) -> tuple[dict[str, Any], Layout]:
        entries: dict[str, Any] = {}
        full_shapes: Layout = {}
        for rank in range(1, self._size):
            try:
                note = self._take_note(step, rank, timeout_s=WRITE_TIMEOUT_S)
            except PeerLost as error:
                raise OSError(f"rank {rank} did not save its part: {error}") from error
            if note["problem"]:
                raise OSError(f"rank {rank} could not save its part: {note['problem']}")
            entries |= note["entries"]
            for kind, shapes in note["wholes"].items():
                full_shapes.setdefault(kind, {}).update(shapes)
        with contextlib.suppress(PeerLost):
            for earlier in self._posted:  # ranks that have written this part have read those keys
                self._kv_store.delete(f"{earlier}/folder")
                self._kv_store.delete(f"{earlier}/end")
        self._posted.clear()
        return entries, full_shapes

    def abort(self, step: int) -> None:
        for rank in sorted(self._writing):
            with contextlib.suppress(PeerLost):
                self._take_note(step, rank, timeout_s=ABORT_TIMEOUT_S)

    def _take_note(self, step: int, rank: int, *, timeout_s: float) -> Any:
        note = self._kv_store.get(f"{step}/{rank}", timeout_s=timeout_s)
        self._kv_store.delete(f"{step}/{rank}")
        self._writing.discard(rank)
        return note


class PartStore:
    """Save the part of a rank that is not the lead. The lead reports errors."""

    def __init__(self, folder: Path, kv_store: KeyValueStore, *, rank: int, files: Files | None = None) -> None:
        self._folder, self._kv_store, self._rank = folder, kv_store, rank
        self._files = files or Files()
        self._written = 0

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        step = snapshot.step
        name = self._kv_store.get(f"{step}/folder", timeout_s=WRITE_TIMEOUT_S)
        if name is not None:
            self._kv_store.set(f"{step}/{self._rank}", self._write(snapshot, name, best=best))
        problem = self._kv_store.get(f"{step}/end", timeout_s=WRITE_TIMEOUT_S)
        if problem:
            raise OSError(problem)
        return self._folder

    def size_bytes(self, path: Path) -> int:
        return self._written

    def _write(self, snapshot: Snapshot, name: str, *, best: bool) -> dict[str, Any]:
        try:
            entries = Encoded(snapshot, best=best).write_tensors(self._folder / name, files=self._files)
        except (OSError, SmolclusterError) as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        self._written = sum(entry["size"] for entry in entries.values())
        return {"problem": "", "entries": entries, "wholes": snapshot.full_shapes}


def is_shared(group: Group, folder: Path) -> bool:
    """Return whether all ranks see the same folder, by a file that rank 0 creates in it. All ranks call it."""
    probe = folder / f"{TEMPORARY}{gather_json(group, secrets.token_hex(8))[0]}"
    if group.rank == 0:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    group.barrier()
    seen = all(gather_json(group, probe.exists()))
    if group.rank == 0:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return seen
