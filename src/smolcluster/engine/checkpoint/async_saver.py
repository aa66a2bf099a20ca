"""Save checkpoints in the background.

Training stops only for one memory copy of its state (`Saver.snapshot_tensors`). A thread then writes that copy; hashing
and writing release the GIL. A save that fails is reported, and training continues.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from smolcluster.durable_files import Closing
from smolcluster.engine.checkpoint.safetensors_writer import find_aliases
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.errors import SmolclusterError
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved

_FREE_SETS = 6  # weights, optimizer and the rest of one snapshot being written and one waiting


@dataclasses.dataclass(frozen=True)
class _PendingSave:
    snapshot: Snapshot
    best: bool
    final: bool
    stall_s: float


class Store(Protocol):
    """Where snapshots go: `store.CheckpointStore`, or one of `sharded_save.py`, where every rank writes a part."""

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path: ...

    def size_bytes(self, path: Path) -> int: ...


class Saver(Closing):
    """Write snapshots to a store in the background: at most one being written and one waiting.

    A new snapshot replaces the waiting one. But a waiting `best` is replaced only by a newer `best` (another new snapshot is
    skipped instead), and a `final` one never: `submit` then blocks until there is room. `on_skipped(step, by)` gets the
    skipped step and the one kept instead. `patient` skips nothing: ranks that write parts must all save the same steps.

    `on_saved` and `on_failed` are called on the writing thread, `on_skipped` on the caller's. The next `submit`, `wait` or
    `close` raises an error that is neither of the disk nor of the user.
    """

    def __init__(
        self,
        store: Store,
        *,
        patient: bool = False,
        on_saved: Callable[[CheckpointSaved], None],
        on_failed: Callable[[CheckpointFailed], None],
        on_skipped: Callable[[int, int], None] | None = None,
    ) -> None:
        self._store, self._patient = store, patient
        self._on_saved, self._on_failed, self._on_skipped = on_saved, on_failed, on_skipped
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._changed = threading.Condition()  # guards the next three
        self._waiting: _PendingSave | None = None
        self._writing = False
        self._bug: BaseException | None = None
        self._future: Future[None] | None = None
        self._buffers = SnapshotBuffers()
        self._reserved: list[Future[None]] = []

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for a copy of `tensors` in the background: it takes longer than the copy (pinning 4 GB: 3 s)."""
        self._reserved.append(self._executor.submit(self._buffers.reserve, _describe(tensors)))

    def snapshot_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to the CPU, into the memory of a written snapshot if there is one.

        After `submit` the copy belongs to the saver, which reuses its memory.
        """
        while self._reserved:
            self._reserved.pop().result()
        return self._buffers.copy(tensors)

    def submit(self, snapshot: Snapshot, *, best: bool = False, final: bool = False, stall_s: float = 0.0) -> None:
        """Queue a snapshot in memory of its own. `stall_s`: how long training stopped for it, for the report."""
        job = _PendingSave(snapshot, best, final, stall_s)
        with self._changed:
            self._raise_bug()
            waiting = self._waiting
            if waiting is not None and (self._patient or waiting.final or (final and waiting.best)):
                self._changed.wait_for(lambda: self._waiting is None)
                self._raise_bug()
                waiting = None
            skipped: _PendingSave | None = waiting
            if waiting is not None and waiting.best and not best:
                skipped, job = job, waiting
            if not self._writing:
                self._future = self._executor.submit(self._write_all)
                self._writing = True
            self._waiting = job
        if skipped is not None:
            self._release(skipped)
            if self._on_skipped is not None:
                self._on_skipped(skipped.snapshot.step, job.snapshot.step)

    def wait(self) -> None:
        """Wait until every submitted snapshot is written, or reported as failed."""
        if self._future is not None:
            self._future.result()

    def close(self) -> None:
        """Wait, then end the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown(wait=True)

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug

    def _write_all(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._write(job)
                self._release(job)
        except BaseException as bug:
            with self._changed:
                self._bug, self._writing, self._waiting = bug, False, None
                self._changed.notify_all()
            raise

    def _next(self) -> _PendingSave | None:
        with self._changed:
            job, self._waiting = self._waiting, None
            if job is None:
                self._writing = False
            self._changed.notify_all()
            return job

    def _write(self, job: _PendingSave) -> None:
        start = time.perf_counter()
        try:
            path = self._store.save(job.snapshot, best=job.best)
            size_bytes = self._store.size_bytes(path)
        except (OSError, SmolclusterError) as error:
            self._on_failed(CheckpointFailed(step=job.snapshot.step, reason=f"{type(error).__name__}: {error}"))
            return
        self._on_saved(
            CheckpointSaved(
                step=job.snapshot.step,
                path=str(path),
                stall_s=job.stall_s,
                write_s=time.perf_counter() - start,
                size_bytes=size_bytes,
                best=job.best,
            )
        )

    def _release(self, job: _PendingSave) -> None:
        self._buffers.release(job.snapshot.weights)
        self._buffers.release(job.snapshot.optimizer)
        self._buffers.release(job.snapshot.extra)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The memory of one copied tensor. `same_as` names the tensor whose memory it shares."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pinned: bool
    same_as: str | None


class _Copies(dict[str, Tensor]):
    """Memory for one set of tensors."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self.slots = slots
        for slot in slots:
            if slot.same_as is None:
                self[slot.name] = torch.empty(slot.shape, dtype=slot.dtype, pin_memory=slot.pinned)
        self.update({slot.name: self[slot.same_as] for slot in slots if slot.same_as is not None})


def _describe(tensors: Mapping[str, Tensor]) -> Sequence[_Slot]:
    aliases = find_aliases(tensors)
    return [_Slot(name, t.shape, t.dtype, t.is_cuda, aliases.get(name)) for name, t in tensors.items()]


class SnapshotBuffers:
    """Memory for copies of tensors, reused after `release`: allocating pages takes longer than the copy."""

    def __init__(self) -> None:
        self._free: list[_Copies] = []
        self._lock = threading.Lock()  # the training thread copies, the writing thread releases

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to the CPU; tied tensors stay tied. From CUDA into pinned memory, with one synchronization at the end."""
        slots = _describe(tensors)
        copies = self._take(slots) or _Copies(slots)
        streams = set()
        for slot in slots:
            if slot.same_as is None:
                tensor = tensors[slot.name]
                copies[slot.name].copy_(tensor.detach(), non_blocking=True)
                if tensor.is_cuda:
                    streams.add(torch.cuda.current_stream(tensor.device))
        for stream in streams:
            stream.synchronize()
        return copies

    def reserve(self, slots: Sequence[_Slot]) -> None:
        """Allocate memory for one copy, and touch its pages."""
        copies = _Copies(slots)
        for tensor in copies.values():
            tensor.zero_()
        self.release(copies)

    def release(self, copies: Mapping[str, Tensor]) -> None:
        """Free the memory of a copy for reuse. Other dicts are ignored."""
        if isinstance(copies, _Copies):
            with self._lock:
                self._free = [*self._free, copies][-_FREE_SETS:]

    def _take(self, slots: Sequence[_Slot]) -> _Copies | None:
        with self._lock:
            for index, free in enumerate(self._free):
                if free.slots == slots:
                    return self._free.pop(index)
        return None
