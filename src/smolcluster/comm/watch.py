"""Ranks that nobody watches watch each other: who is lost is named, and nobody waits for it for long.

A backend sees a connection close and does not know whose it was; of a machine that is cut off it sees nothing, and waits for
minutes. So every rank has a place on a roll (rollcall.py) that rank 0 keeps. A rank that dies is off the roll at once, one that
is cut off after SILENT_S. Whoever is then still waiting for it, deep in a backend, is ended GRACE_S later.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from smolcluster.comm.group import Group, gather_json
from smolcluster.comm.rollcall import SILENT, Fields, Keeper, Member, Roll, dial

SILENT_S = 30.0  # longer than anything that keeps a rank's own threads from running
GRACE_S = 1.5  # for the backend to notice by itself, so that the rank can end in order
GATHER_S = 20.0


class Watch:
    """One rank's place on the roll. `on_lost` is called at most once, on another thread, with a sentence that names who."""

    def __init__(self, group: Group, host: str, *, name: str, on_lost: Callable[[str], None]) -> None:
        """Every rank of the group calls this. `host` is where rank 0 can be reached, `name` this rank's machine."""
        self._host, self._on_lost = host, on_lost
        self._ended = threading.Lock()  # taken by whoever ends the process: the rank itself, or the watch
        self._done = False
        secret = secrets.token_hex(16)  # rank 0's counts: the ranks get it over the group, and nobody else has it
        self._keeper = Keeper(host, 0, silent_s=SILENT_S, secret=secret) if group.rank == 0 else None
        port, secret = gather_json(group, None if self._keeper is None else [self._keeper.port, secret])[0]
        sock = dial(host, port, within_s=GATHER_S)
        if sock is None:
            raise OSError(f"nobody answers at {host}:{port}")
        self._member = Member(sock, {"rank": group.rank, "name": name}, silent_s=SILENT_S, secret=secret)
        self._member.on_change = self._look
        self._member.wait(lambda: len(_ranks(self._member.roll)) == group.size, within_s=GATHER_S)

    def lost(self) -> str | None:
        """Who is, in a sentence; None while all are there, and when this rank needs them no longer."""
        roll, words = self._member.roll, []
        if self._done:
            return None
        for number, fields in sorted(roll.gone.items(), key=lambda item: _rank(item[1])):
            if not fields.get("done"):
                words.append(_obituary(fields, roll.how.get(number)))
        if not words and self._member.lost is not None:
            keeper = next((f for f in roll.members.values() if _rank(f) == 0), {"rank": 0, "name": self._host})
            words = [] if keeper.get("done") else [_obituary(keeper, self._member.lost)]
        return "; ".join(words) or None

    def explain(self, reason: str) -> str:
        """What a backend said, and who it was, as soon as that is known."""
        self._member.wait(lambda: self.lost() is not None, within_s=GRACE_S)
        lost = self.lost()
        return reason if lost is None else f"{lost} ({reason})"

    def claim(self) -> bool:
        """Whether the caller is the first to end this process."""
        return self._ended.acquire(blocking=False)

    def done(self) -> None:
        """This rank has all it needs from the others."""
        self._done = True
        self._member.say(done=True)

    def leave(self, words: str | None = None) -> None:
        """Off the roll. Last words reach the others first."""
        if words is not None:
            me = self._member.number
            self._member.say(words=words)
            self._member.wait(lambda: "words" in self._member.roll.members.get(me, {}), within_s=GRACE_S)
        self._member.close()
        if self._keeper is not None:
            self._keeper.close()

    def _look(self) -> None:
        """After every change of the roll."""
        if self.lost() is not None:
            timer = threading.Timer(GRACE_S, self._give_up)
            timer.daemon = True
            timer.start()

    def _give_up(self) -> None:
        message = self.lost()
        if message is not None and self.claim():
            self._on_lost(message)


def _ranks(roll: Roll) -> set[int]:
    return {_rank(fields) for fields in (*roll.members.values(), *roll.gone.values())}


def _rank(fields: Fields) -> int:
    rank = fields.get("rank")
    return rank if isinstance(rank, int) else -1


def _obituary(fields: Fields, how: str | None) -> str:
    """`rank 2 on pi5 is gone`."""
    who = f"rank {_rank(fields)} on {fields.get('name')}"
    if fields.get("words"):
        return f"{who} failed: {fields['words']}"
    return f"{who} has been silent for {SILENT_S:g} s" if how == SILENT else f"{who} is gone"
