"""A GPT on the embedded text that counts: at every step of a worker, the bytes of its sockets as the kernel sees them.

Rows go to the folder named in SMOLBENCH_COUNTS, a file per process: bytes sent and received so far, at the beginning of each
step. There is no validation, so that nobody but workers computes.

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
    """Over all open TCP sockets of this process. (0, 0) where the kernel does not count."""
    sent = received = 0
    descriptors = Path("/proc/self/fd")
    for entry in descriptors.iterdir() if descriptors.is_dir() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            acked, got = struct.unpack_from("=QQ", info, _ACKED)
            if len(info) >= _SENT + 16:  # sent is ahead of acked by what is under way
                out, again = struct.unpack_from("=QQ", info, _SENT)
                acked = out - again
            sent, received = sent + acked, received + got
        except (OSError, struct.error):
            continue  # not TCP, or closed while we looked
    return sent, received


def note(name: object) -> None:
    """A row in the file of this name, if anybody wants it."""
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
    """The rows of every process that took part."""
    return [read_rows(path) for path in sorted(folder.glob("*.txt"))]


def read_rows(path: Path) -> list[Counts]:
    rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [(int(sent), int(received)) for sent, received in rows]


def per_step(rows: Sequence[Counts], *, interval: int, skip: int = 4) -> tuple[float, float]:
    """Bytes sent and received in a step: the median over all stretches of half the run.

    So the first steps, in which the state travels, do not count, and neither does what happens to be under way at the moment
    of a reading. Stretches have whole intervals, and so as many of what comes once in `interval` steps as they should.
    """
    rows = rows[skip:]
    window = len(rows) // 2 // interval * interval
    if window == 0:
        raise ValueError(f"{len(rows)} rows after the first {skip} are too few: two intervals of {interval} are needed")
    pairs = list(zip(rows, rows[window:], strict=False))
    sent, received = (statistics.median(later[i] - earlier[i] for earlier, later in pairs) / window for i in (0, 1))
    return sent, received
