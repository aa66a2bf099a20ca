"""The control channel of a worker: stop requests, the rendezvous port, the death of the launcher.

PipeChannel      under our launcher: JSON lines on standard input; its end means the launcher is gone
SignalChannel    on its own (torchrun, one rank by hand): SIGINT, SIGTERM and SIGHUP
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from smolcluster.comm.group import PeerLost
from smolcluster.engine.spec import SIGNALS_TOGETHER_S
from smolcluster.stopping import HANGUP, ignore_hangup, leave_terminal, stop_signals, terminals

log = logging.getLogger(__name__)

ORPHAN_GRACE_S = 30.0


class ControlChannel(Protocol):
    orphaned: bool  # the launcher died

    def stop_requested(self) -> bool: ...

    def rendezvous_port(self) -> int:
        """Wait for the port of rank 0 from the launcher; 0 where the port was given at the start."""

    @property
    def announce(self) -> Callable[[int], None] | None:
        """Where rank 0 reports the port it listens on."""


class SignalChannel:
    """The first signal requests a clean stop, the second ends at once; two close together count as one (`timeout` sends
    its signal to the process and to its group).

    Python runs signal handlers on the main thread, which may wait in C++ for minutes (for a rank that does not come). So the
    interpreter writes each signal's number to a socket, and a thread acts on it.
    """

    announce: Callable[[int], None] | None = None
    orphaned = False

    def __init__(self) -> None:
        self._stop = False
        self._wakeup_reader, wakeup_writer = socket.socketpair()
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer  # keep open while the process lives
        signal.set_wakeup_fd(wakeup_writer.fileno())
        self._numbers, self._shown = stop_signals(), terminals()
        for number in self._numbers:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, daemon=True, name="signal-channel").start()

    def _listen(self) -> None:
        while number := self._wakeup_reader.recv(1):
            if number[0] not in self._numbers:
                continue
            if number[0] == HANGUP:
                leave_terminal(self._shown)
            if self._stop:
                os._exit(130)
            self._stop = True
            self._wakeup_reader.settimeout(SIGNALS_TOGETHER_S)
            with contextlib.suppress(TimeoutError):
                while self._wakeup_reader.recv(1):  # signals that count as the same one
                    pass
            self._wakeup_reader.settimeout(None)
            log.warning("stopping after this step and saving; press Ctrl-C again to exit at once")

    def stop_requested(self) -> bool:
        return self._stop

    def rendezvous_port(self) -> int:
        return 0


class PipeChannel:
    """Read the launcher's messages in a thread."""

    def __init__(self, first: bytes, *, announce: Callable[[int], None]) -> None:
        self.announce: Callable[[int], None] | None = announce
        self._stop = threading.Event()
        self._port: int | None = None
        self._news = threading.Condition()
        self._gone = False
        self.orphaned = False
        # Ctrl-C reaches the whole process group; only the launcher acts on it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ignore_hangup()
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher starts us with it blocked
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        threading.Thread(target=self._listen, args=(first,), daemon=True, name="launcher-channel").start()

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def rendezvous_port(self) -> int:
        """Wait for the port, also after a stop request: rank 0 waits for all ranks, which stop after the first step."""
        with self._news:
            self._news.wait_for(lambda: self._port is not None or self._gone)
        if self._port is None:
            raise PeerLost("the launcher exited before all workers had connected")
        return self._port

    def _listen(self, buffer: bytes) -> None:
        descriptor = sys.stdin.fileno()
        while True:
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                self._handle(json.loads(line))
            chunk = os.read(descriptor, 65536)  # raw: a buffered reader would hold a lock at interpreter exit
            if not chunk:
                break
            buffer += chunk
        with self._news:
            self._gone = True
            self._news.notify_all()
        self.orphaned = not self._stop.is_set()
        self._stop.set()
        log.warning("the launcher exited: saving and exiting")
        timer = threading.Timer(ORPHAN_GRACE_S, lambda: os._exit(1))
        timer.daemon = True
        timer.start()

    def _handle(self, message: dict[str, Any]) -> None:
        with self._news:
            if message["op"] == "stop":
                self._stop.set()
            elif message["op"] == "port":
                self._port = int(message["port"])
            self._news.notify_all()
