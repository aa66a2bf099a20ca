"""A TCP relay between a client and a server that can be slowed down, corrupted or cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from smolcluster.comm.addresses import join_address, split_address


class Relay:
    """Forwards connections to the server at `target`. Only what comes back from there is slowed down or changed.

    pace(passed)                  called before each read, with the bytes that have passed; returns how many are read at most
    change(number, passed, data)  returns what goes on in place of `data`; `number`: of the connection, from 0
    """

    def __init__(
        self,
        target: str = "",
        *,
        pace: Callable[[int], int] = lambda _: 64 << 10,
        change: Callable[[int, int, bytes], bytes] = lambda number, passed, data: data,
    ) -> None:
        self.target, self._pace, self._change = target, pace, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address(*self._listener.getsockname())
        self._ends: list[socket.socket] = []
        self._is_cut = threading.Event()
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """End the connections, and each new one at once, until `heal`."""
        self._is_cut.set()
        for end in self._ends:
            _shut(end)

    def heal(self) -> None:
        self._is_cut.clear()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            _shut(end)
        for thread in list(self._threads):
            thread.join(120.0)

    def _begin(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # what is held up stays at the server
                number = len(self._ends) // 2
                self._ends += [near, far]
                if self._is_cut.is_set():
                    _shut(near)
                    continue
                far.connect(split_address(self.target))
                self._begin(self._forward, near, far, lambda _: 64 << 10, lambda passed, data: data)
                self._begin(self._forward, far, near, self._pace, partial(self._change, number))

    def _forward(
        self,
        source: socket.socket,
        target: socket.socket,
        pace: Callable[[int], int],
        change: Callable[[int, bytes], bytes],
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(pace(passed)):
                target.sendall(change(passed, data))
                passed += len(data)
        _shut(source)
        _shut(target)


def _shut(end: socket.socket) -> None:
    """As the system does when a process dies: the other side is told, also where it still has something to send."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up
    end.close()
