"""A key-value store shared by the ranks, for threads that must not call collectives.

It is the rendezvous store, over a separate connection. Values are JSON.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from smolcluster.comm.work import PeerLost

_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.5  # intervals of polling, doubled each time


@contextlib.contextmanager
def _peer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"rank 0 is gone: {str(error).splitlines()[0]}") from error


class KeyValueStore:
    """A namespace `name` of the rendezvous store."""

    def __init__(self, host: str, port: int, *, name: str) -> None:
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._name = name
        self._closed = threading.Event()

    def set(self, key: str, value: Any) -> None:
        with _peer_lost():
            self._store.set(f"{self._name}/{key}", json.dumps(value))

    def get(self, key: str, *, timeout_s: float) -> Any:
        """Wait until the key is set; return its value. Raises PeerLost after the timeout, or when `close` is called."""
        full, until, pause_s = f"{self._name}/{key}", time.monotonic() + timeout_s, _FIRST_POLL_S
        with _peer_lost():
            while not self._store.check([full]):  # TCPStore.wait prints a stack trace at a timeout
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise PeerLost(f"no rank has set {key} within {timeout_s:g} s")
                if self._closed.wait(min(pause_s, left_s)):
                    raise PeerLost("this rank is leaving")
                pause_s = min(2 * pause_s, _LAST_POLL_S)
            return json.loads(self._store.get(full))

    def delete(self, key: str) -> None:
        with _peer_lost():
            self._store.delete_key(f"{self._name}/{key}")

    def close(self) -> None:
        """End every waiting `get`. Thread-safe."""
        self._closed.set()
