"""Ranks that nobody watches watch each other: who is lost is named, and nobody waits for it for long.

A backend sees a connection close and does not know whose it was; of a machine that is cut off it sees nothing, and waits for
minutes. So every rank is a member of a heartbeat roster (heartbeats.py) that rank 0 serves. A rank that dies is missed at once,
one that is cut off after SILENT_S. A rank that still waits for it then, deep in a backend, is ended GRACE_S later.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from smolcluster.comm.elastic.membership.heartbeats import (
    SILENT,
    Fields,
    Membership,
    MembershipClient,
    MembershipServer,
)
from smolcluster.comm.group import Group, gather_json
from smolcluster.errors import UserError

SILENT_S = 30.0  # longer than anything that keeps a rank's own threads from running
GRACE_S = 1.5  # for the backend to notice by itself, so that the rank can end in order
GATHER_S = 20.0


class Watch:
    """One rank's membership. `on_lost` is called at most once, on another thread, with a sentence that names who."""

    def __init__(self, group: Group, host: str, *, name: str, on_lost: Callable[[str], None]) -> None:
        """Every rank of the group calls this. `host` is where rank 0 can be reached, `name` this rank's machine.

        OSError when rank 0 cannot listen there, or does not answer.
        """
        self._host, self._on_lost = host, on_lost
        self._ended = threading.Lock()  # taken by the one that ends the process: the rank itself, or the watch
        self._done = False
        self._server: MembershipServer | None = None
        secret, address, problem = secrets.token_bytes(16), "", ""
        if group.rank == 0:
            try:
                self._server = MembershipServer(host, 0, silent_s=SILENT_S, secret=secret)
                address = self._server.address
            except UserError as error:  # every rank has to know
                problem = str(error)
        said = gather_json(group, [address, secret.hex(), problem])[0]  # over the group: nobody else has the secret
        if said[2]:
            raise OSError(said[2])
        fields = {"rank": group.rank, "name": name}
        self._client = MembershipClient(said[0], fields, silent_s=SILENT_S, secret=bytes.fromhex(said[1]))
        if not self._client.wait(lambda: self._client.number >= 0, within_s=GATHER_S):
            self.leave()
            raise OSError(f"nobody answers at {said[0]}: {self._client.refusal or self._client.problem}")
        self._client.on_change = self._look
        self._client.wait(lambda: len(_ranks(self._client.view)) == group.size, within_s=GATHER_S)

    def lost(self) -> str | None:
        """Who is, in a sentence; None while all are there, and when this rank needs them no longer."""
        view, words = self._client.view, []
        if self._done:
            return None
        for number, fields in sorted(view.gone.items(), key=lambda item: _rank(item[1])):
            if not fields.get("done"):
                words.append(_obituary(fields, view.how.get(number)))
        if not words and self._client.lost is not None:
            first = next((f for f in view.members.values() if _rank(f) == 0), {"rank": 0, "name": self._host})
            words = [] if first.get("done") else [_obituary(first, self._client.lost)]
        return "; ".join(words) or None

    def explain(self, reason: str) -> str:
        """What a backend said, and who it was, as soon as that is known."""
        self._client.wait(lambda: self.lost() is not None, within_s=GRACE_S)
        lost = self.lost()
        return reason if lost is None else f"{lost} ({reason})"

    def claim(self) -> bool:
        """Whether the caller is the first to end this process."""
        return self._ended.acquire(blocking=False)

    def done(self) -> None:
        """This rank has all it needs from the others."""
        self._done = True
        self._client.say(done=True)

    def leave(self, words: str | None = None) -> None:
        """End the membership. Last words reach the others first."""
        if words is not None:
            me = self._client.number
            self._client.say(words=words)
            self._client.wait(lambda: "words" in self._client.view.members.get(me, {}), within_s=GRACE_S)
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _look(self) -> None:
        """After every change of the membership."""
        if self.lost() is not None:
            timer = threading.Timer(GRACE_S, self._give_up)
            timer.daemon = True
            timer.start()

    def _give_up(self) -> None:
        message = self.lost()
        if message is not None and self.claim():
            self._on_lost(message)


def _ranks(view: Membership) -> set[int]:
    return {_rank(fields) for fields in (*view.members.values(), *view.gone.values())}


def _rank(fields: Fields) -> int:
    rank = fields.get("rank")
    return rank if isinstance(rank, int) else -1


def _obituary(fields: Fields, how: str | None) -> str:
    """`rank 2 on pi5 is gone`."""
    who = f"rank {_rank(fields)} on {fields.get('name')}"
    if fields.get("words"):
        return f"{who} failed: {fields['words']}"
    return f"{who} has been silent for {SILENT_S:g} s" if how == SILENT else f"{who} is gone"
