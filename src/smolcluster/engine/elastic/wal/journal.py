"""The write-ahead log of a server: committed steps survive its death.

    journal/
        log-00000007, log-00000008    the records, in order; the last file is being written
        snapshots/step-00000007/      the state before the first record of log-00000007 (its files: see snapshot.py)
        .lock                         held by the server that writes

`log_files.py` has the format of a log file, `recovery.py` what is kept when they are read.

**Durability.** When `append` returns, the kernel has the record: killing the process loses nothing. A thread flushes the log to
the disk and then appends a sync marker, about every `sync_s`, so a power cut loses at most the records of the last `sync_s` and
of the current flush.

**Recovery** starts from the newest good snapshot and reads records while every frame is complete and in sequence. Records
after an invalid frame that no sync marker follows were in flight when the machine stopped: they are dropped. A missing record
before a sync marker was on the disk once: the disk is damaged, and DamagedJournal names the file. Writing continues in a new
file, whose `open` frame voids all records of earlier files from its number on: dropped and half-written records stay dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from smolcluster.durable_files import Closing, Files, OutputFile, ensure_folder
from smolcluster.engine.checkpoint.async_saver import Saver
from smolcluster.engine.checkpoint.safetensors_writer import tensor_bytes
from smolcluster.engine.checkpoint.snapshot import OtherRanks, Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.elastic.wal.log_files import OPEN, RECORD, SYNC, make_frame, read_log
from smolcluster.engine.elastic.wal.recovery import Recovered, damaged, records_in_turn
from smolcluster.errors import DamagedCheckpoint, SmolclusterError, UserError
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved

logger = logging.getLogger(__name__)

# A snapshot is due when the log exceeds the larger of SNAPSHOT_BYTES and SNAPSHOT_RATIO times the state, or SNAPSHOT_RECORDS.
SNAPSHOT_BYTES, SNAPSHOT_RATIO, SNAPSHOT_RECORDS = 64 << 20, 4.0, 500
MAX_DURING_SNAPSHOT = 0.5  # share of the log limit that may be logged while a snapshot is written; then appends wait
MAX_BETWEEN_TRIES = 64  # records between two attempts while snapshots fail
_RECORD_BYTES = 4096  # of a record without its tensors, roughly


def disk_bound(*, state_bytes: int, record_bytes: int) -> int:
    """Return the most bytes that a journal takes: a snapshot, the next one on its way, and the log."""
    log = max(SNAPSHOT_BYTES, int(SNAPSHOT_RATIO * state_bytes))
    log = min(log, SNAPSHOT_RECORDS * (record_bytes + _RECORD_BYTES))
    return 2 * state_bytes + int((1 + MAX_DURING_SNAPSHOT) * log)


def least_disk(*, state_bytes: int, record_bytes: int) -> int:
    """Return the fewest bytes with which a journal works: two records, then a snapshot."""
    return 2 * state_bytes + int((1 + MAX_DURING_SNAPSHOT) * 2 * (record_bytes + _RECORD_BYTES)) + (1 << 20)


class JournalFull(SmolclusterError):
    """The disk is full or failing: nothing was written, and the journal is as before."""


class Journal(Closing):
    """The log of one server. Call `recover` first, once; `append` and `snapshot` from one thread."""

    def __init__(
        self,
        folder: Path,
        *,
        files: Files | None = None,
        sync_s: float | None = 0.2,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        snapshot_ratio: float = SNAPSHOT_RATIO,
    ) -> None:
        """Raises UserError when another process has the journal open. `sync_s` None: only `sync` flushes."""
        self.folder = folder
        self._files = files or Files()
        self._sync_s, self._snapshot_bytes, self._snapshot_ratio = sync_s, snapshot_bytes, snapshot_ratio
        self._disk_bytes: int | None = None
        self._closing = contextlib.ExitStack()
        self._store = _Snapshots(folder / "snapshots", self, files=self._files)
        self._saver = Saver(self._store, on_saved=self._snapshot_saved, on_failed=self._snapshot_failed)

        self._lock = threading.Lock()  # shared by three threads: the caller, the flusher, the saver
        self._current: _Segment | None = None  # None: the next append creates one
        self._retired: list[_Segment] = []  # complete, not yet flushed
        self._number = -1  # of the newest log file or snapshot
        self._records = 0  # appended since the run began
        self._synced = 0
        self._unflushed_name = False
        self._unsure = -1  # the newest log file whose flush failed: no sync marker until a snapshot replaces it

        self._log_bytes = 0  # since the start of the last snapshot that was not abandoned
        self._log_records = 0
        self._replaced = (0, 0, False)  # the two before it was started, and _snapshot_wanted
        self._failures = 0  # failed snapshots in a row
        self._retry_at = 0  # no snapshot before this many records
        self._state_bytes = 0  # of the last snapshot
        self._snapshot_wanted = False
        self._snapshot_running = False
        self._snapshot_error = ""

        self._flushing = threading.Lock()  # one flush at a time
        self._dirty, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._flush_forever, name="journal", daemon=True)
        self._take_lock()

    # Recovery

    def recover(self) -> Recovered:
        """Return what was committed; make the journal ready for `append`.

        Tensors of records are memory-mapped. Raises DamagedJournal.
        """
        assert self._number < 0, "recover once"
        first, base, state, meta = self._load_snapshot()
        paths = self._log_files()
        segments = [read_log(path) for number, path in paths.items() if number >= first]
        if state is not None and (first not in paths or segments[0].start != base):
            raise damaged(self.folder, self._log_path(first), "missing, or not the file that follows the snapshot")
        records = records_in_turn(self.folder, segments, base)

        self._records = base + len(records)
        self._number = max(paths, default=-1)
        self._log_bytes, self._state_bytes = sum(s.valid_bytes for s in segments), _nbytes(state or {})
        self._log_records = len(records)
        self._start_file([s.path for s in segments])
        self._forget(first)
        if self._sync_s is not None:
            self._thread.start()
        return Recovered(state=state, meta=meta, records=records)

    def _load_snapshot(self) -> tuple[int, int, dict[str, Tensor] | None, dict[str, Any] | None]:
        try:
            loaded = self._store.load_latest()
        except DamagedCheckpoint as error:
            raise damaged(self.folder, self._store.folder, str(error)) from error
        if loaded is None:
            return 0, 0, None, None
        snapshot = loaded[1]
        return snapshot.step, snapshot.state["records"], dict(snapshot.weights), snapshot.state["meta"]

    def _start_file(self, old: list[Path]) -> None:
        """Create a new log file, after the old ones are flushed: the process before may have left that to the kernel."""
        try:
            for path in old:
                self._files.fsync_file(path)
            with self._lock:
                self._open_segment()
            self._flush()
        except OSError as error:
            raise self._full("the journal cannot be opened for writing", error) from error

    # Appending

    def append(self, meta: dict[str, Any], payload: Tensor | Sequence[Tensor] | None = None) -> None:
        """Append one record, `meta` as JSON. It then survives kill -9, and a power cut after about `sync_s`.

        Several tensors are written one after the other, without a copy, and are recovered as one row of bytes.

        Raises JournalFull when it could not be written whole: the record is not in the journal, the step must not be
        committed, and `append` may be retried.
        """
        views = [tensor_bytes(t) for t in ([payload] if isinstance(payload, Tensor) else payload or [])]
        num_bytes = sum(view.nbytes for view in views)
        tensor: list[Any] | None = None if payload is None else ["uint8", [num_bytes]]
        if isinstance(payload, Tensor):
            tensor = [str(payload.dtype).removeprefix("torch."), list(payload.shape)]
        text = json.dumps([meta, tensor], separators=(",", ":")).encode()
        crc = 0
        for view in views:
            crc = zlib.crc32(view, crc)
        if self._snapshot_running and self._log_bytes > MAX_DURING_SNAPSHOT * self._log_limit:
            self._saver.wait()  # keep training from filling a disk that is slower
        with self._lock:
            self._check_ready()
            fresh: _Segment | None = None
            try:
                segment = self._current or (fresh := self._open_segment())
                head = make_frame(RECORD, self._records, text=text, payload_bytes=num_bytes, crc=crc, at=segment.size)
                self._write(segment, head, *views, records=1)
            except OSError as error:
                if fresh is not None:
                    self._remove_empty(fresh)
                raise self._full("a record cannot be written", error) from error
        self._dirty.set()

    def sync(self) -> None:
        """Return when all records are on the disk itself. Raises JournalFull."""
        try:
            self._flush()
        except OSError as error:
            raise self._full("records cannot be flushed to the disk", error) from error

    def _open_segment(self) -> _Segment:
        """Create the file that appends go to from now on. Call with the lock."""
        self._number += 1
        path = self._log_path(self._number)
        file = self._files.create(path)
        try:
            frame = make_frame(OPEN, self._records)
            file.write(frame)
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self._files.remove(path)
            raise
        self._retire()
        self._current = _Segment(self._number, path, file, len(frame))
        self._unflushed_name = True
        return self._current

    def _write(self, segment: _Segment, *parts: bytes | memoryview, records: int = 0) -> None:
        """Write all parts or none: no frame may follow an incomplete one. Call with the lock."""
        try:
            for part in parts:
                segment.file.write(part)
            self._records += records
            self._log_records += records
        except BaseException:
            self._retire()
            with contextlib.suppress(OSError):
                os.truncate(segment.path, segment.size)  # only to free the space: reading stops there anyway
            raise
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        segment.size += num_bytes
        self._log_bytes += num_bytes

    def _remove_empty(self, segment: _Segment) -> None:
        """Remove a file whose first record did not fit, so that retries leave no empty files. Call with the lock."""
        segment.void = True
        self._discard([segment])
        with contextlib.suppress(OSError):
            self._files.remove(segment.path)

    def _retire(self) -> None:
        if self._current is not None:
            self._retired.append(self._current)
            self._current = None
            self._dirty.set()

    # Flushing

    def _flush_forever(self) -> None:
        assert self._sync_s is not None
        failing = False
        while True:
            self._dirty.wait()
            if self._stopping.is_set():
                return
            self._dirty.clear()
            try:
                self._flush()
                failing = False
            except OSError as error:
                if not failing:
                    logger.error(
                        "%s: flushing fails, so a power cut could lose committed steps: %s", self.folder, error
                    )
                failing = True
            self._stopping.wait(self._sync_s)

    def _flush(self, *, since: int = 0) -> None:
        """Flush log files from number `since` on, and their names, to the disk; then append a sync marker."""
        with self._flushing:
            with self._lock:
                retired = [s for s in self._retired if s.number >= since]
                current = [self._current] if self._current is not None else []
                records, unflushed_name, self._unflushed_name = self._records, self._unflushed_name, False
            try:
                for segment in retired + current:
                    self._fsync(segment)
                if unflushed_name:
                    self._files.fsync_folder(self.folder)
            except OSError:
                with self._lock:
                    self._unflushed_name |= unflushed_name
                raise
            with self._lock:
                self._discard(retired)  # not those retired since: they may have grown after their flush
                if self._current is not None and not self._retired and self._unsure < 0 and records > self._synced:
                    self._write(self._current, make_frame(SYNC, records))
                    self._synced = records

    def _fsync(self, segment: _Segment) -> None:
        try:
            segment.file.fsync()
        except ValueError:  # closed meanwhile
            if not segment.void:
                raise
        except OSError:
            # The kernel may have dropped the pages, and a second fsync would succeed: only a snapshot helps.
            with self._lock:
                self._unsure = max(self._unsure, segment.number)
                self._snapshot_wanted = True
            raise

    def _discard(self, segments: list[_Segment]) -> None:
        """Close files that are flushed. Call with the lock."""
        self._retired = [s for s in self._retired if s not in segments]
        for segment in segments:
            with contextlib.suppress(OSError):
                segment.file.close()

    # Snapshots

    @property
    def should_snapshot(self) -> bool:
        """Return whether the log has reached its bound in bytes, which limits disk use, or in records, which limits replay."""
        if self._snapshot_running or self._records < self._retry_at:
            return False
        return self._snapshot_wanted or self._log_bytes > self._log_limit or self._log_records >= SNAPSHOT_RECORDS

    def bound_disk(self, num_bytes: int) -> None:
        """Limit the journal to this many bytes, with a shorter log and more snapshots."""
        self._disk_bytes = num_bytes

    @property
    def _log_limit(self) -> float:
        limit = max(self._snapshot_bytes, self._snapshot_ratio * self._state_bytes)
        if self._disk_bytes is not None:
            limit = min(limit, (self._disk_bytes - 2 * self._state_bytes) / (1 + MAX_DURING_SNAPSHOT))
        return max(0.0, limit)

    def snapshot(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], *, wait: bool = False) -> None:
        """Save the state after all records so far; they are deleted once it is on the disk.

        Returns when the tensors are copied. A snapshot that cannot be written is logged as an error and retried a few records
        later; its records are kept. With `wait` returns when it is on the disk, or raises JournalFull.
        """
        with self._lock:
            self._check_ready()
            self._replaced = self._log_bytes, self._log_records, self._snapshot_wanted
            self._log_bytes, self._log_records, self._snapshot_wanted = 0, 0, False
            self._state_bytes = _nbytes(tensors)
            try:
                number, records = self._open_segment().number, self._records
            except OSError as error:
                self._abandon_snapshot()
                failure = self._full("a snapshot cannot be started", error)
                if wait:
                    raise failure from error
                logger.error("%s; the log keeps growing", failure)
                return
        copies = self._saver.snapshot_tensors(tensors)
        self._snapshot_running, self._snapshot_error = True, ""
        self._saver.submit(Snapshot(step=number, weights=copies, state={"records": records, "meta": meta}))
        if wait:
            self._saver.wait()
            if self._snapshot_error:
                raise JournalFull(self._snapshot_error)

    def _abandon_snapshot(self) -> None:
        """Count the log that it would have replaced, and schedule a retry with back-off. Call with the lock."""
        num_bytes, records, wanted = self._replaced
        self._log_bytes += num_bytes
        self._log_records += records
        self._snapshot_wanted |= wanted
        self._retry_at = self._records + min(2**self._failures, MAX_BETWEEN_TRIES)
        self._failures += 1

    def _snapshot_saved(self, event: CheckpointSaved) -> None:
        with self._lock:
            self._failures = self._retry_at = 0
        self._snapshot_running = False

    def _snapshot_failed(self, event: CheckpointFailed) -> None:
        self._snapshot_error = f"{self.folder}: a snapshot cannot be written: {event.reason}"
        with self._lock:
            self._abandon_snapshot()
        self._snapshot_running = False
        logger.error("%s; the log keeps growing", self._snapshot_error)

    def _forget(self, number: int) -> None:
        """Remove the log files that snapshot `number` replaces. One that cannot be removed is retried with the next."""
        with self._flushing, self._lock:
            self._discard([s for s in self._retired if s.number < number])
            if self._unsure < number:
                self._unsure = -1
        for older, path in self._log_files().items():
            if older < number:
                try:
                    self._files.remove(path)
                except OSError as error:
                    logger.warning("cannot remove %s: %s", path, error)

    # The end

    def close(self) -> None:
        """Wait for a snapshot in progress, flush, and release the lock."""
        self._stopping.set()
        self._dirty.set()
        with self._closing:
            if self._thread.is_alive():
                self._thread.join()
            try:
                self._saver.close()
            finally:
                try:
                    self._flush()
                except OSError as error:
                    logger.error("%s: cannot be flushed: %s", self.folder, error)
                with self._lock:
                    self._retire()
                    self._discard(self._retired)

    def _take_lock(self) -> None:
        ensure_folder(self.folder, files=self._files)
        try:
            alone = self._closing.enter_context(self._files.lock(self.folder / ".lock"))
        except BlockingIOError as error:
            raise UserError(
                f"another server is using the journal {self.folder}; stop it, or choose another --run-dir"
            ) from error
        if not alone:
            logger.warning("%s: this file system has no locks; make sure that only one server runs", self.folder)

    def _check_ready(self) -> None:
        assert self._number >= 0, "recover first"
        assert not self._stopping.is_set(), "closed"

    def _log_path(self, number: int) -> Path:
        return self.folder / f"log-{number:08d}"

    def _log_files(self) -> dict[int, Path]:
        """Return the log files by number, lowest first."""
        names = [p.name for p in self.folder.iterdir() if re.fullmatch(r"log-[0-9]{8,18}", p.name)]
        return {number: self._log_path(number) for number in sorted(int(name[4:]) for name in names)}

    def _full(self, what: str, error: OSError) -> JournalFull:
        return JournalFull(f"{self.folder}: {what}: {error}; free space there, or repair the disk")


class _Snapshots(CheckpointStore):
    """The snapshots of a journal: checkpoints whose number is that of the log file that follows."""

    def __init__(self, folder: Path, journal: Journal, *, files: Files) -> None:
        super().__init__(folder, keep=1, files=files)
        self._journal = journal

    def save(self, snapshot: Snapshot, *, best: bool = False, others: OtherRanks | None = None) -> Path:
        # In this order: a snapshot on the disk implies that the log file after it is there too.
        self._journal._flush(since=snapshot.step)
        path = super().save(snapshot)
        self._journal._forget(snapshot.step)
        return path


@dataclass(eq=False, slots=True)
class _Segment:
    """A log file being written."""

    number: int
    path: Path
    file: OutputFile
    size: int  # of its complete frames
    void: bool = False  # removed: it never had a complete record


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
