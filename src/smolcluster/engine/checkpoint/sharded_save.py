"""One checkpoint, written by every rank of a world: each writes the part it has, beside training.

    lead      makes the unfinished folder, tells its name, writes its own part
    others    write their parts into it, each flushed to the disk, and tell sizes and hashes
    lead      writes the manifest with all of them, renames the folder, tells that it is there

Only notes travel (`comm/notes.py`), no tensors. All ranks must see one folder: `all_see` asks them. If one cannot
write, nobody's part counts: what was saved before stays as it is, and training goes on.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

from smolcluster.comm.group import Group, PeerLost, gather_json
from smolcluster.comm.notes import Notes
from smolcluster.engine.checkpoint.snapshot import Encoded, Layout, Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.durable_files import TEMPORARY, Files
from smolcluster.errors import SmolclusterError

WRITE_TIMEOUT_S = 1800.0  # for the slowest rank's part, after the lead has begun
GIVE_UP_S = 60.0  # a folder that came to nothing is cleared away when nobody writes into it any more


class LeadStore:
    """Saves with the help of the others. Only rank 0 has one."""

    def __init__(self, store: CheckpointStore, bulletin: Notes, *, size: int) -> None:
        self._store, self._bulletin, self._size = store, bulletin, size
        self._begun = False
        self._writing: set[int] = set()  # ranks that were not heard of since
        self._told: list[int] = []  # steps whose notes are still there

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        step, self._begun, problem = snapshot.step, False, ""
        try:
            return self._store.save(snapshot, best=best, others=self)
        except (OSError, SmolclusterError) as error:
            problem = str(error) or type(error).__name__
            raise
        finally:
            with contextlib.suppress(PeerLost):  # who is gone need not be told
                if not self._begun:  # it was there already, or could not be begun
                    self._bulletin.post(f"{step}/folder", None)
                self._bulletin.post(f"{step}/end", problem)
            self._told.append(step)

    def size_bytes(self, path: Path) -> int:
        return self._store.size_bytes(path)

    def begin(self, step: int, folder: str) -> None:
        self._begun = True
        self._writing = set(range(1, self._size))
        self._bulletin.post(f"{step}/folder", folder)

    def collect(self, step: int) -> tuple[dict[str, Any], Layout]:
        entries: dict[str, Any] = {}
        full_shapes: Layout = {}
        for rank in range(1, self._size):
            try:
                note = self._hear(step, rank, within_s=WRITE_TIMEOUT_S)
            except PeerLost as error:
                raise OSError(f"rank {rank} did not save its part: {error}") from error
            if note["problem"]:
                raise OSError(f"rank {rank} could not save its part: {note['problem']}")
            entries |= note["entries"]
            for kind, shapes in note["wholes"].items():
                full_shapes.setdefault(kind, {}).update(shapes)
        with contextlib.suppress(PeerLost):
            for told in self._told:  # whoever has written a part since has read how those ended
                self._bulletin.remove(f"{told}/folder")
                self._bulletin.remove(f"{told}/end")
        self._told.clear()
        return entries, full_shapes

    def give_up(self, step: int) -> None:
        for rank in sorted(self._writing):
            with contextlib.suppress(PeerLost):
                self._hear(step, rank, within_s=GIVE_UP_S)

    def _hear(self, step: int, rank: int, *, within_s: float) -> Any:
        note = self._bulletin.read(f"{step}/{rank}", within_s=within_s)
        self._bulletin.remove(f"{step}/{rank}")
        self._writing.discard(rank)
        return note


class PartStore:
    """Saves the part of a rank that is not the lead. What goes wrong, the lead reports."""

    def __init__(self, folder: Path, bulletin: Notes, *, rank: int, files: Files | None = None) -> None:
        self._folder, self._bulletin, self._rank = folder, bulletin, rank
        self._files = files or Files()
        self._written = 0

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        step = snapshot.step
        name = self._bulletin.read(f"{step}/folder", within_s=WRITE_TIMEOUT_S)
        if name is not None:
            self._bulletin.post(f"{step}/{self._rank}", self._write(snapshot, name, best=best))
        problem = self._bulletin.read(f"{step}/end", within_s=WRITE_TIMEOUT_S)
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


def all_see(group: Group, folder: Path) -> bool:
    """Whether every rank finds in `folder` what rank 0 puts there. All ranks call it."""
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
