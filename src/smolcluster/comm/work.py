"""Exchanges under way and what they moved. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from smolcluster.errors import SmolclusterError


class PeerLost(SmolclusterError):
    """Another rank stopped answering: it died, or the network between us did."""


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the result is in place. On a GPU: when the current stream will see it."""

    @property
    def done(self) -> bool:
        """True: `wait` returns, or raises, at once. It may be False a little longer than it must."""


class Done:
    """Work with nothing left to do."""

    done = True

    def wait(self) -> None:
        return None


@dataclass(slots=True)
class Traffic:
    """Bytes that were moved: of a group, payloads by the algorithm's formula; of a link, all that crossed it.

    Tests hold both against the kernel's counters.
    """

    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, sent: float, received: float) -> None:
        self.bytes_sent += round(sent)
        self.bytes_received += round(received)
