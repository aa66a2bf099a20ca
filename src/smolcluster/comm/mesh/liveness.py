"""Failure detection between ranks that have no launcher: name the lost rank, and end the others soon.

A backend detects a closed connection but does not name the rank; for a machine that is cut off it waits for minutes. So every
rank is a member of a heartbeat roster (heartbeats.py) that rank 0 serves. A dead rank is detected at once, one that is cut off
after SILENT_S. A rank that is then still blocked in a backend is ended after GRACE_S.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from smolcluster.comm.group import Group, gather_json
from smolcluster.comm.mesh.heartbeats import (
    SILENT,
    Fields,
    Membership,
    MembershipClient,
    MembershipServer,
)
from smolcluster.errors import UserError

SILENT_S = 30.0  # longer than any pause of a rank's own threads
GRACE_S = 1.5  # for the backend to raise first, so that the rank can shut down properly
GATHER_S = 20.0


class LivenessMonitor:
    """One rank's membership. `on_lost` is called at most once, on another thread, with the names of the lost ranks."""

    def __init__(self, group: Group, host: str, *, name: str, on_lost: Callable[[str], None]) -> None:
        """Every rank of the group calls this. `host`: the address of rank 0; `name`: of this rank's machine.

        Raises OSError if rank 0 cannot listen there or does not respond.
        """
        self._host, self._on_lost = host, on_lost
        self._ended = threading.Lock()  # held by what ends the process: the rank itself or this monitor
        self._done = False
        self._server: MembershipServer | None = None
        secret, address, problem = secrets.token_bytes(16), "", ""
        if group.rank == 0:
            try:
                self._server = MembershipServer(host, 0, silent_s=SILENT_S, secret=secret)
                address = self._server.address
            except UserError as error:  # sent to every rank
                problem = str(error)
        # The secret goes over the group only.
        address, key, problem = gather_json(group, [address, secret.hex(), problem])[0]
        if problem:
            raise OSError(problem)
        fields = {"rank": group.rank, "name": name}
        self._client = MembershipClient(address, fields, silent_s=SILENT_S, secret=bytes.fromhex(key))
        if not self._client.wait(lambda: self._client.number >= 0, timeout_s=GATHER_S):
            self.leave()
            raise OSError(f"no response from {address}: {self._client.refusal or self._client.problem}")
        self._client.on_change = self._on_view_change
        self._client.wait(lambda: len(_ranks(self._client.view)) == group.size, timeout_s=GATHER_S)

    def lost(self) -> str | None:
        """Return which ranks are lost; None if there are none, or after `done`."""
        view, losses = self._client.view, []
        if self._done:
            return None
        for number, fields in sorted(view.gone.items(), key=lambda item: _rank(item[1])):
            if not fields.get("done"):
                losses.append(_describe_loss(fields, view.how.get(number)))
        if not losses and self._client.lost is not None:
            first = next((f for f in view.members.values() if _rank(f) == 0), {"rank": 0, "name": self._host})
            losses = [] if first.get("done") else [_describe_loss(first, self._client.lost)]
        return "; ".join(losses) or None

    def explain(self, reason: str) -> str:
        """Add the names of the lost ranks to a backend's error, waiting up to GRACE_S for them."""
        self._client.wait(lambda: self.lost() is not None, timeout_s=GRACE_S)
        lost = self.lost()
        return reason if lost is None else f"{lost} ({reason})"

    def claim(self) -> bool:
        """Return whether the caller is the first to end this process."""
        return self._ended.acquire(blocking=False)

    def done(self) -> None:
        """Report that this rank needs nothing more from the others."""
        self._done = True
        self._client.say(done=True)

    def leave(self, error: str | None = None) -> None:
        """End the membership. `error`: a message, sent to the other ranks first."""
        if error is not None:
            me = self._client.number
            self._client.say(words=error)
            self._client.wait(lambda: "words" in self._client.view.members.get(me, {}), timeout_s=GRACE_S)
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _on_view_change(self) -> None:
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


def _describe_loss(fields: Fields, how: str | None) -> str:
    """Return a message such as `rank 2 on pi5 is gone`."""
    who = f"rank {_rank(fields)} on {fields.get('name')}"
    if fields.get("words"):
        return f"{who} failed: {fields['words']}"
    return f"{who} has been silent for {SILENT_S:g} s" if how == SILENT else f"{who} is gone"
