"""Who is there, and what each says of itself: a roll that one process keeps and all see. Nothing here imports torch.

    member -> keeper    a line of JSON: everything it has to say of itself, again whenever that changes
    keeper -> members   a line of JSON: the roll, whenever it changes
    both ways           an empty line every BEAT_S: I am here

A process that dies closes its connection, and the others know at once. One whose machine or network is gone closes nothing: it
is missed when it has been silent for `silent_s`. Time is measured by whoever listens; clocks are not compared.

The mesh plane uses it twice: between the launchers of `train --elastic` (launch/rounds.py) and between ranks that nobody else
watches (watch.py). Like torch.distributed beside it, it neither authenticates nor encrypts; what comes in is bounded JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.addresses import reach

BEAT_S = 0.5
LINE_BYTES = 1 << 20  # the longest line that is read
MOST_MEMBERS = 4096
MOST_GONE = 256  # of those that left, so many are remembered
RETRY_S = 0.1
REACH_S = 10.0  # for one attempt: a name may mean another machine by then

CLOSED, SILENT = "closed", "silent"  # how somebody left
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Roll:
    """Numbers are given in the order of arrival, and not again."""

    members: dict[int, Fields] = field(default_factory=dict)
    gone: dict[int, Fields] = field(default_factory=dict)  # what each said last
    how: dict[int, str] = field(default_factory=dict)  # each of these left


class Keeper:
    """Keeps the roll. Listens from the start; OSError when it cannot."""

    def __init__(self, host: str, port: int, *, silent_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._silent_s = silent_s
        self._lock = threading.Lock()  # guards all below, and the order of what is sent
        self._roll = Roll()
        self._lines: dict[int, socket.socket] = {}
        self._count = 0
        self._open = True
        for work in (self._accept, self._beat):
            threading.Thread(target=work, daemon=True, name=f"roll-{work.__name__}").start()

    def close(self) -> None:
        with self._lock:
            self._open = False
            lines = list(self._lines.values())
        for line in (self._listener, *lines):
            _end(line)

    def _accept(self) -> None:
        while self._open:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(line,), daemon=True, name="roll-line").start()

    def _listen(self, line: socket.socket) -> None:
        """One member, from its first line to its end."""
        line.settimeout(self._silent_s)
        number, how = None, CLOSED
        try:
            for said in _lines_of(line):
                with self._lock:
                    if number is None:
                        number = self._admit(line)
                    self._roll.members[number] = said
                    self._tell_all()
        except TimeoutError:
            how = SILENT
        except (OSError, ValueError):
            pass  # it is gone, or speaks another language
        finally:
            _end(line)
            if number is not None:
                with self._lock:
                    del self._lines[number]
                    self._strike(number, how)
                    self._tell_all()

    def _admit(self, line: socket.socket) -> int:
        if len(self._lines) >= MOST_MEMBERS:
            raise ValueError("the roll is full")
        number, self._count = self._count, self._count + 1
        self._lines[number] = line
        _send(line, {"you": number})
        return number

    def _strike(self, number: int, how: str) -> None:
        self._roll.gone[number] = self._roll.members.pop(number)
        self._roll.how[number] = how
        if len(self._roll.gone) > MOST_GONE:
            oldest = min(self._roll.gone)
            del self._roll.gone[oldest], self._roll.how[oldest]

    def _tell_all(self) -> None:
        roll = {"members": self._roll.members, "gone": self._roll.gone, "how": self._roll.how}
        for line in self._lines.values():
            _send(line, roll)

    def _beat(self) -> None:
        while self._open:
            time.sleep(BEAT_S)
            with self._lock:
                for line in self._lines.values():
                    _send(line, None)


class Member:
    """A place on the roll. `on_change` is called after every change, on the thread that listens."""

    def __init__(self, line: socket.socket, fields: Fields, *, silent_s: float) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.roll = Roll()
        self.number = -1
        self.lost: str | None = None  # how the keeper left
        self._line, self._fields = line, dict(fields)
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._open = True
        line.settimeout(silent_s)
        self.say()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True, name=f"roll-{work.__name__}").start()

    def say(self, **fields: Any) -> None:
        """Change what this member says of itself, and send it."""
        with self._sending:
            self._fields |= fields
            _send(self._line, self._fields)

    def wait(self, question: Callable[[], bool], *, within_s: float) -> bool:
        """Until the answer is yes, asked at every change; False when the time is over or the keeper is lost."""
        with self._news:
            self._news.wait_for(lambda: self.lost is not None or question(), timeout=within_s)
        return question()

    def close(self) -> None:
        self._open = False
        _end(self._line)

    def _listen(self) -> None:
        how = CLOSED
        try:
            for said in _lines_of(self._line):
                with self._news:
                    if "you" in said:
                        self.number = int(said["you"])
                    else:
                        self.roll = Roll(*({int(k): v for k, v in said[part].items()} for part in Roll.__slots__))
                    self._news.notify_all()
                self._changed()
        except TimeoutError:
            how = SILENT
        except (OSError, ValueError, KeyError):
            pass
        with self._news:
            self.lost = how
            self._news.notify_all()
        self._changed()

    def _changed(self) -> None:
        if self._open:
            self.on_change()

    def _beat(self) -> None:
        while self._open and self.lost is None:
            time.sleep(BEAT_S)
            with self._sending:
                _send(self._line, None)


def dial(host: str, port: int, *, within_s: float, until: Callable[[], bool] = lambda: False) -> socket.socket | None:
    """A connection to a keeper that may not be there yet; None when nobody answers in time, or `until` says to give up."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not until():
        with contextlib.suppress(OSError):
            return reach(host, port, within_s=max(0.1, min(REACH_S, deadline - time.monotonic())))
        time.sleep(RETRY_S)
    return None


def _send(line: socket.socket, said: Fields | None) -> None:
    """A beat for None. A line that is broken is noticed by whoever listens to it."""
    with contextlib.suppress(OSError):
        line.sendall(b"\n" if said is None else json.dumps(said).encode() + b"\n")


def _lines_of(line: socket.socket) -> Iterator[Fields]:
    """What is said, object by object; beats are left out. Ends with the connection; TimeoutError when it is silent."""
    buffer = b""
    while True:
        chunk = line.recv(65536)
        if not chunk:
            return
        *whole, buffer = (buffer + chunk).split(b"\n")
        if len(buffer) > LINE_BYTES:
            raise ValueError("a line is too long")
        for text in filter(None, whole):
            said = json.loads(text)
            if not isinstance(said, dict):
                raise ValueError("not an object")
            yield said


def _end(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
