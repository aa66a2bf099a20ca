"""A GPT on the embedded text that records, at every step of a worker, the bytes of its sockets as the kernel counts them.

Rows go to the folder named in SMOLBENCH_COUNTS, a file per process: bytes sent and received so far, at the beginning of each
step. There is no validation, so that only workers compute.

    Counted           reads the counters when the loss is taken; a file is named after its process
    CountedByRank     when samples are read, which every rank of a mesh does once a step; a file is named after its rank
"""

from __future__ import annotations

import os
import socket
import stat
import statistics
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from smolcluster.data.dataset import Dataset
from smolcluster.data.sampler import Indices
from smolcluster.tasks.gpt import GPTTask

FOLDER = "SMOLBENCH_COUNTS"
Counts = tuple[int, int]  # sent, received

_TCP_INFO = 11
_ACKED, _SENT = 120, 200  # offsets in the kernel's struct tcp_info: bytes acked, received; bytes sent, sent again


def kernel_bytes() -> Counts:
    """Return the bytes of all open TCP sockets of this process; (0, 0) where the kernel does not count them."""
    sent = received = 0
    descriptors = Path("/proc/self/fd")
    for entry in descriptors.iterdir() if descriptors.is_dir() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            acked, got = struct.unpack_from("=QQ", info, _ACKED)
            if len(info) >= _SENT + 16:  # sent includes bytes that are not acknowledged yet
                out, again = struct.unpack_from("=QQ", info, _SENT)
                acked = out - again
            sent, received = sent + acked, received + got
        except (OSError, struct.error):
            continue  # not TCP, or closed meanwhile
    return sent, received


def note(name: object) -> None:
    """Add a row to the file of this name, if SMOLBENCH_COUNTS is set."""
    folder = os.environ.get(FOLDER)
    if folder:
        with (Path(folder) / f"{name}.txt").open("a", encoding="ascii") as file:
            file.write("{} {}\n".format(*kernel_bytes()))


class Counted(GPTTask):
    quick_check = False  # it would count as a step, also of the server

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        note(os.getpid())
        return super().loss(model, batch)

    def val_data(self) -> Any:
        return None


class CountedByRank(GPTTask):
    quick_check = False

    def train_data(self) -> Any:
        return _Noted(super().train_data())

    def val_data(self) -> Any:
        return None


class _Noted:
    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Indices) -> Any:
        note(dist.get_rank())
        return self._data.batch(indices)


def read_counts(folder: Path) -> list[list[Counts]]:
    """Return the rows of every process."""
    return [read_rows(path) for path in sorted(folder.glob("*.txt"))]


def read_rows(path: Path) -> list[Counts]:
    rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [(int(sent), int(received)) for sent, received in rows]


def per_step(rows: Sequence[Counts], *, interval: int, skip: int = 4) -> tuple[float, float]:
    """Return the bytes sent and received in a step: the median over all windows of half the run.

    This excludes the first steps, in which the state is transferred, and bytes in flight at a reading. A window has whole
    intervals, so what happens once in `interval` steps is counted in proportion.
    """
    rows = rows[skip:]
    window = len(rows) // 2 // interval * interval
    if window == 0:
        raise ValueError(f"{len(rows)} rows after the first {skip} are too few: two intervals of {interval} are needed")
    pairs = list(zip(rows, rows[window:], strict=False))
    sent, received = (statistics.median(later[i] - earlier[i] for earlier, later in pairs) / window for i in (0, 1))
    return sent, received
