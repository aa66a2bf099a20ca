"""What a journal holds when a server starts: the records after its newest snapshot, read up to the first gap."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from smolcluster.engine.elastic.wal.log_files import JournalRecord, LogFile
from smolcluster.errors import SmolclusterError

logger = logging.getLogger(__name__)


class DamagedJournal(SmolclusterError):
    """Committed records were on the disk and cannot be read any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The newest good snapshot, None when there was none yet, and every record after it."""

    state: dict[str, Tensor] | None
    meta: dict[str, Any] | None
    records: list[JournalRecord]


def damaged(folder: Path, path: Path, what: str) -> DamagedJournal:
    return DamagedJournal(
        f"the journal is damaged: {path}: {what}; restore it from a copy, or move {folder} away and resume from "
        "the last checkpoint"
    )


def records_in_turn(folder: Path, files: list[LogFile], base: int) -> list[JournalRecord]:
    """Return the records from number `base` up to the first gap. Raises DamagedJournal where synced records are lost."""
    records: list[JournalRecord] = []
    broken: Path | None = None  # the first file after the last that added records
    for file in files:
        follows = file.start is not None and base <= file.start <= base + len(records)
        if file.start is not None and follows:
            records[file.start - base :] = file.records
            broken = None
        if file.damage or not follows:
            broken = broken or file.path
            bad = file.damage == "corrupt" or (file.records and not follows)
            logger.log(
                logging.ERROR if bad else logging.WARNING,
                "%s: %s; kept %d records of its %d bytes",
                file.path,
                file.damage or "does not follow the records before it",
                len(file.records) if follows else 0,
                file.size,
            )
    lost = max((file.synced for file in files), default=0) - base - len(records)
    if lost > 0:
        raise damaged(folder, broken or folder, f"{lost} records that were safe on the disk cannot be read")
    return records
