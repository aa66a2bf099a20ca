"""Short notes between the ranks of a world, beside its exchanges: for threads that must not disturb the order of those.

Notes go through the key-value store at which the ranks met, over a connection of their own, as JSON.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from smolcluster.comm.work import PeerLost

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.5  # between one look for a note and the next: longer each time


class Bulletin(Protocol):
    def post(self, key: str, value: Any) -> None: ...

    def read(self, key: str, *, within_s: float) -> Any:
        """Waits for the note. Raises PeerLost when it does not come, or when `close` is called meanwhile."""

    def remove(self, key: str) -> None: ...

    def close(self) -> None:
        """End every `read` that waits. From any thread."""


class StoreBulletin:
    """`name` sets these notes apart from those of others in the same store."""

    def __init__(self, host: str, port: int, *, name: str) -> None:
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._name = name
        self._closed = threading.Event()

    def post(self, key: str, value: Any) -> None:
        try:
            self._store.set(f"{self._name}/{key}", json.dumps(value))
        except RuntimeError as error:
            raise PeerLost(f"rank 0 is gone: {str(error).splitlines()[0]}") from error

    def read(self, key: str, *, within_s: float) -> Any:
        full, until, pause_s = f"{self._name}/{key}", time.monotonic() + within_s, _FIRST_LOOK_S
        try:
            while not self._store.check([full]):  # a wait of the store's own would fill the terminal each time it ends
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise PeerLost(f"no word of {key} within {within_s:g} s")
                if self._closed.wait(min(pause_s, left_s)):
                    raise PeerLost("this rank is leaving")
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
            return json.loads(self._store.get(full))
        except RuntimeError as error:
            raise PeerLost(f"rank 0 is gone: {str(error).splitlines()[0]}") from error

    def remove(self, key: str) -> None:
        try:
            self._store.delete_key(f"{self._name}/{key}")
        except RuntimeError as error:
            raise PeerLost(f"rank 0 is gone: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        self._closed.set()
