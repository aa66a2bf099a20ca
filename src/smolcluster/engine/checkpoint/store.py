"""The checkpoints of a run: saved crash-safe, and verified when they are loaded.

    checkpoints/
        step-00000100/  step-00000200/  ...    see snapshot.py
        latest, best                           text files with the name of a folder, for people and scripts
        damaged-step-...                       a checkpoint that failed verification and was written again
        aside-step-...                         a checkpoint after the step that a run went back to
        .tmp-..., .lock                        unfinished work; the lock of the writer

Saving, in this order: write a `.tmp-` folder and flush every file, the manifest last; flush the folder; rename it to its final
name; flush the parent; point `latest` and `best` at it; remove old checkpoints. A crash at any point leaves the previous
checkpoint or the new one complete, and the next save removes the rest. A good checkpoint is never overwritten.

Loading uses the highest step whose files all match their hashes. It does not depend on `latest`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from smolcluster.durable_files import (
    TEMPORARY,
    Files,
    durable_write_text,
    ensure_folder,
    temporary_name,
)
from smolcluster.engine.checkpoint.snapshot import (
    MANIFEST,
    Encoded,
    OtherRanks,
    Snapshot,
    read_checkpoint,
    read_manifest,
    verify,
)
from smolcluster.errors import DamagedCheckpoint, UserError

logger = logging.getLogger(__name__)

_POINTER_LIMIT_BYTES = 256


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


class CheckpointStore:
    """The checkpoints in one folder. One process writes; any number may read."""

    def __init__(self, folder: Path, *, keep: int, files: Files | None = None) -> None:
        if keep < 1:
            raise UserError(f"max_checkpoints_to_keep is {keep}; keep at least 1")
        self.folder = folder
        self.keep = keep
        self._files = files or Files()

    # Saving

    def save(self, snapshot: Snapshot, *, best: bool = False, others: OtherRanks | None = None) -> Path:
        """Write a checkpoint durably and return its folder. `others` write parts of it.

        A good checkpoint of the same step is kept; a damaged one is moved aside. OSError leaves earlier ones as they are.
        """
        encoded = Encoded(snapshot, best=best)
        ensure_folder(self.folder, files=self._files)
        with self._files.lock(self.folder / ".lock") as alone:
            if alone:
                # Left by crashes: while this process holds the lock, no other writes.
                self._remove([path for path in self.folder.iterdir() if path.name.startswith(TEMPORARY)])
            final = self.folder / folder_name(snapshot.step)
            if self._is_good(final):
                logger.info("%s exists and is good: kept, not written again", final.name)
            else:
                self._write(final, encoded, others)
            self._point("latest", self.list()[-1].name)
            best_path = final if best else self.best()
            if best_path is not None:
                self._point("best", best_path.name)
            self._prune(final.name)
        return final

    def move_aside_after(self, step: int) -> list[Path]:
        """Move checkpoints of later steps aside: a run that goes back to `step` will write these steps again."""
        later = [path for path in self.list() if _step_of(path.name) > step]
        if not later:
            return []
        with self._files.lock(self.folder / ".lock"):
            moved = [self._move_aside(path, "aside") for path in later]
            self._files.fsync_folder(self.folder)
            # A pointer must not name a folder that will be written again.
            for pointer, target in (("latest", next(reversed(self.list()), None)), ("best", self.best())):
                if target is not None:
                    self._point(pointer, target.name)
                else:
                    self._files.remove(self.folder / pointer)
        logger.warning("going back to step %d: %s moved aside", step, ", ".join(path.name for path in later))
        return moved

    def size_bytes(self, path: Path) -> int:
        return read_manifest(path).size_bytes

    def _write(self, final: Path, encoded: Encoded, others: OtherRanks | None) -> None:
        temporary = self.folder / temporary_name(final.name)
        try:
            self._files.mkdir(temporary)
            encoded.write_to(temporary, files=self._files, others=others)
            self._files.fsync_folder(temporary)
            if final.exists():
                self._move_aside(final, "damaged")
            self._files.rename(temporary, final)
        except OSError:
            if others is not None:
                others.abort(encoded.step)
            with contextlib.suppress(OSError):
                self._files.remove(temporary)
            raise
        self._files.fsync_folder(self.folder)

    def _is_good(self, path: Path) -> bool:
        if not path.exists():
            return False
        try:
            verify(path)
        except DamagedCheckpoint as damage:
            logger.error("checkpoint %s is damaged and will be written again: %s", path, damage)
            return False
        return True

    def _move_aside(self, path: Path, why: str) -> Path:
        target = path.with_name(temporary_name(path.name).replace(TEMPORARY, f"{why}-", 1))
        self._files.rename(path, target)
        return target

    def _point(self, pointer: str, name: str) -> None:
        if self._target(pointer) != name:
            durable_write_text(self.folder / pointer, f"{name}\n", files=self._files)

    def _prune(self, saved: str) -> None:
        """Remove all but the last `keep` and the best. Failures cost only space, so they are logged."""
        names = [path.name for path in self.list()]
        kept = {saved, *names[-self.keep :], *self._best_names(names)}
        # Rename first: a crash while removing must not leave a partial checkpoint.
        doomed = {self.folder / name: self.folder / temporary_name(name) for name in names if name not in kept}
        if not doomed:
            return
        try:
            for path, unfinished in doomed.items():
                self._files.rename(path, unfinished)
            self._files.fsync_folder(self.folder)
        except OSError as error:
            logger.warning("cannot remove old checkpoints: %s", error)
            return
        self._remove(doomed.values())

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                self._files.remove(path)
            except OSError as error:
                logger.warning("cannot remove %s (the next save tries again): %s", path, error)

    # Loading

    def list(self) -> list[Path]:
        """Return all checkpoint folders, damaged ones too, by step."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _step_of(path.name) >= 0 and path.is_dir()]
        return sorted(found, key=lambda path: _step_of(path.name))

    def best(self) -> Path | None:
        names = self._best_names([path.name for path in self.list()])
        return self.folder / names[0] if names else None

    def load_latest(self, *, optimizer: bool = True, lazily: bool = False) -> tuple[Path, Snapshot] | None:
        """Load the newest good checkpoint; None without any. Damaged ones are logged; raises if all are damaged."""
        paths = self.list()
        damages = []
        for path in reversed(paths):
            try:
                return path, self._load(path, optimizer=optimizer, lazily=lazily)
            except DamagedCheckpoint as damage:
                logger.error("checkpoint %s is damaged, trying the one before it: %s", path, damage)
                damages.append(str(damage))
        if damages:
            raise DamagedCheckpoint(
                f"no good checkpoint in {self.folder}, {len(paths)} damaged ({'; '.join(damages)}); "
                "restore one from a copy, or start without --resume"
            )
        return None

    def load(self, which: str | Path = "latest", *, optimizer: bool = True, lazily: bool = False) -> Snapshot:
        """Load `latest`, `best`, a checkpoint of this store by its name, or any checkpoint by its path."""
        if which == "latest":
            latest = self.load_latest(optimizer=optimizer, lazily=lazily)
            if latest is None:
                raise UserError(f"no checkpoint in {self.folder} yet; start without --resume")
            return latest[1]
        if which == "best":
            best = self.best()
            if best is None:
                raise UserError(f"no best checkpoint in {self.folder} yet; known: {self._known()}")
            return self._load(best, optimizer=optimizer, lazily=lazily)
        for path in (self.folder / which, Path(which)):
            if (path / MANIFEST).exists() or (path.is_dir() and _step_of(path.name) >= 0):
                return self._load(path, optimizer=optimizer, lazily=lazily)
        raise UserError(f"no checkpoint at '{which}'; known here: {self._known()}")

    def _load(self, path: Path, *, optimizer: bool, lazily: bool) -> Snapshot:
        snapshot = read_checkpoint(path, optimizer=optimizer, lazily=lazily)
        if _step_of(path.name) not in (-1, snapshot.step):
            raise DamagedCheckpoint(f"{path.name}: contains step {snapshot.step}; the folder was renamed")
        return snapshot

    def _known(self) -> str:
        return ", ".join(path.name for path in self.list()) or "none"

    def _best_names(self, names: Sequence[str]) -> Sequence[str]:
        """Return the target of `best` and the newest saved as best, newer first: they differ after a crash between the two."""
        pointed = self._target("best")
        marked = next((name for name in reversed(names) if self._was_best(name)), None)
        return sorted({name for name in (pointed, marked) if name and name in names}, key=_step_of, reverse=True)

    def _was_best(self, name: str) -> bool:
        try:
            return read_manifest(self.folder / name).best
        except (DamagedCheckpoint, UserError, OSError):
            return False

    def _target(self, pointer: str) -> str | None:
        """Return the checkpoint named in a pointer file."""
        try:
            with (self.folder / pointer).open("rb") as file:
                name = file.read(_POINTER_LIMIT_BYTES).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return name if _step_of(name) >= 0 else None


def _step_of(name: str) -> int:
    """Return the step in a folder's name, or -1 for any other name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else -1
