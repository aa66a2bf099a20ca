"""Short notes between the ranks of a world, beside its exchanges: for threads that must not disturb the order of those.

Notes go through the key-value store at which the ranks met, over a connection of their own, as JSON.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from smolcluster.comm.group import PeerLost

_LOOK_S = 0.5  # how long to wait before looking whether it was closed


class Bulletin(Protocol):
    def post(self, key: str, value: Any) -> None: ...

    def read(self, key: str, *, within_s: float) -> Any:
        """Waits for the note. Raises PeerLost when it does not come, or when `close` is called meanwhile."""

    def remove(self, key: str) -> None: ...

    def close(self) -> None:
        """Ends whoever waits. From any thread."""


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
        full, until = f"{self._name}/{key}", time.monotonic() + within_s
        while not self._closed.is_set():
            left_s = min(_LOOK_S, until - time.monotonic())
            if left_s <= 0:
                raise PeerLost(f"no word of {key} within {within_s:g} s")
            try:
                self._store.wait([full], datetime.timedelta(seconds=left_s))
                return json.loads(self._store.get(full))
            except RuntimeError as error:
                if "imed out" not in str(error) and "imeout" not in str(error):
                    raise PeerLost(f"rank 0 is gone: {str(error).splitlines()[0]}") from error
        raise PeerLost("this rank is leaving")

    def remove(self, key: str) -> None:
        try:
            self._store.delete_key(f"{self._name}/{key}")
        except RuntimeError as error:
            raise PeerLost(f"rank 0 is gone: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        self._closed.set()
