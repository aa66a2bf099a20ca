"""The speed of the links from workers to their server, measured before workers get the plan.

    worker                                        server
      ASK                                 ----->
                                          <-----  ASK(bytes): at first 16 KiB, then what a slow link takes in about a second
      STATE: a payload of that many bytes ----->  measures the time
                                          <-----  PLAN, when the expected workers have been measured

Uploads are measured: they are the slow direction of a home connection. The result is that of the slowest worker. Not all of the
expected workers may connect: after a timeout from the first measurement the server decides with those that did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.link_speed import BUDGET_S, FIRST_BYTES, MAX_BYTES, TRIES, mbit_per_s, next_size


@dataclass(slots=True)
class _Measuring:
    nbytes: int
    requested_at: float  # time of the request
    left_s: float = BUDGET_S
    tries: int = 1


class LinkProbe:
    def __init__(
        self, *, expected: int, patience_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience_s`: time to wait for the remaining workers after the first was measured."""
        self._expected, self._patience_s, self._clock = expected, patience_s, clock
        self._measuring: dict[Link, _Measuring] = {}
        self._speeds: dict[Link, float] = {}
        self._deadline = math.inf

    @property
    def links(self) -> list[Link]:
        """The workers that wait for the plan."""
        return [*self._speeds, *self._measuring]

    @property
    def measuring(self) -> set[Link]:
        return set(self._measuring)

    @property
    def speed(self) -> float | None:
        """The Mbit/s of the slowest link, when enough of them are measured."""
        enough = len(self._speeds) >= self._expected or (self._speeds and self._clock() >= self._deadline)
        return min(self._speeds.values()) if enough else None

    def begin(self, link: Link) -> None:
        """Measure the link of a worker that requests the plan."""
        self._measuring[link] = _Measuring(FIRST_BYTES, self._clock())
        self._ask(link, FIRST_BYTES)

    def took(self, link: Link, message: Message) -> bool:
        """Take the payload of a worker. Return False if it was not requested."""
        mine, payload = self._measuring.get(link), message.payload
        if mine is None or payload is None or payload.nbytes != mine.nbytes:
            return False
        took_s = self._clock() - mine.requested_at
        mine.left_s -= took_s
        if mine.left_s < BUDGET_S / 2 or mine.tries == TRIES:
            del self._measuring[link]
            self._speeds[link] = mbit_per_s(mine.nbytes, took_s)
            self._deadline = min(self._deadline, self._clock() + self._patience_s)
        else:
            mine.nbytes, mine.tries = next_size(mine.nbytes, took_s, mine.left_s), mine.tries + 1
            mine.requested_at = self._clock()
            self._ask(link, mine.nbytes)
        return True

    def forget(self, link: Link) -> None:
        self._measuring.pop(link, None)
        self._speeds.pop(link, None)

    @staticmethod
    def _ask(link: Link, nbytes: int) -> None:
        link.send(Message(kind=Kind.ASK, meta={"bytes": nbytes}))


def bytes_requested(message: Message) -> int:
    """Return how many bytes a server requests from a worker, at most MAX_BYTES."""
    nbytes = message.meta.get("bytes")
    return min(nbytes, MAX_BYTES) if type(nbytes) is int and nbytes > 0 else 0
