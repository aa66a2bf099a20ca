"""What each member may add to the record of a run: rows of its own, in proportion to the run's progress."""

from __future__ import annotations

from collections import Counter

FIRST_ROWS = 1000  # before any sample counted, and for steps that are refused
ROW_BYTES = 16 << 10
TENSOR_BYTES = 128  # of a row for each tensor: its name and gradient norm


class RowQuota:
    """A row of a worker stands for at least one sample that it trained on: more rows than samples are not believed."""

    def __init__(self, *, tensors: int) -> None:
        self._row_bytes = ROW_BYTES + TENSOR_BYTES * tensors
        self._rows: Counter[int] = Counter()  # by rank, whoever holds it
        self._warned: set[int] = set()

    def admits(self, rank: int, row: str, *, samples: int) -> bool:
        """Count a row of this rank, in a run that has counted so many samples. False: it is too long, or one too many."""
        if len(row) > self._row_bytes or self._rows[rank] >= FIRST_ROWS + samples:
            return False
        self._rows[rank] += 1
        return True

    def first_refusal(self, rank: int) -> bool:
        """Whether this is the first time that it is asked: a warning is logged once for each rank."""
        first = rank not in self._warned
        self._warned.add(rank)
        return first
