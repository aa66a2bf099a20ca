"""Asynchronous work, and traffic counters. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from smolcluster.errors import SmolclusterError


class PeerLost(SmolclusterError):
    """Another rank was lost: its process, its machine or the network failed."""


class Work(Protocol):
    """An asynchronous operation."""

    def wait(self) -> None:
        """Wait until the result is in place (on a GPU: until the current stream is ordered after it). May be called again."""

    @property
    def done(self) -> bool:
        """True if `wait` returns or raises at once. May become True a little late."""


class Done:
    """Work that is complete."""

    done = True

    def wait(self) -> None:
        return None


@dataclass(slots=True)
class Traffic:
    """Bytes sent and received: of a group, payloads by the algorithm's formula; of a link, all bytes.

    Tests compare both with the kernel's counters.
    """

    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, sent: float, received: float) -> None:
        self.bytes_sent += round(sent)
        self.bytes_received += round(received)
