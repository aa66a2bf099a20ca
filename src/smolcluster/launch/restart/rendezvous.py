"""The rendezvous of the launchers of `train --elastic`: which machines run which ranks. Nothing here imports torch.

Here a round is the life of one process group: a fixed assignment of ranks to machines. It ends when a worker dies, a machine
leaves or is lost, or one joins and there is room. The next begins when every remaining machine is ready for it and they have
enough workers.

The machine of --rdzv-endpoint leads: it serves the heartbeat roster of all launchers (`heartbeats.py`), decides the next round,
and has rank 0 and the run directory. Fields of a launcher's report:

    host, workers     its name, how many workers it offers
    asks              the round it is ready for; a member that requests the next has left the current one
    why               what ended the round there; `victim`: its worker only lost a peer elsewhere
    user_error        a user error there; `leaves`: interrupted by the user; `done`: its workers have finished
    plan, port        leader only: the current round; the port of its rank 0
    over              leader only: how the run ended

torch's rendezvous is not used: it unpickles what any machine writes into its store, and compares clocks between machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from smolcluster.comm.mesh.heartbeats import SILENT, Fields, MembershipClient
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.version import __version__

SILENT_S = 6.0  # heartbeat timeout
LAST_CALL_S = 3.0  # the first round waits this time for more machines once it has enough workers

_ENDS: dict[str, type[SmolclusterError]] = {"user": UserError, "failed": WorkerFailed, "stopped": Interrupted}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The assignment of one round. `parts`: [launcher's number in the roster, its number of ranks], in rank order."""

    number: int = 0
    world_size: int = 0
    parts: list[list[int]] = field(default_factory=list)
    run_dir: str = ""
    resume: str | None = None

    def ranks(self, launcher: int) -> range:
        first = 0
        for number, count in self.parts:
            if number == launcher:
                return range(first, first + count)
            first += count
        return range(0)


class RunOver(Exception):
    """The leader has ended the run. `error` None: it finished."""

    def __init__(self, error: SmolclusterError | None) -> None:
        self.error = error


def largest_world(sizes: Sequence[int], workers: int) -> int:
    """Return the largest world size that this many workers can fill; 0 for none."""
    return max((size for size in sizes if size <= workers), default=0)


def assign_ranks(launchers: Mapping[int, Fields], sizes: Sequence[int]) -> tuple[int, list[list[int]]]:
    """Return the world size of these launchers and its `parts`: the leader first, then in order of arrival."""
    order = sorted(launchers, key=lambda number: (not launchers[number].get("leads"), number))
    left = world_size = largest_world(sizes, sum(int(launchers[number]["workers"]) for number in order))
    parts = []
    for number in order:
        count = min(left, int(launchers[number]["workers"]))
        if count:
            parts.append([number, count])
        left -= count
    return world_size, parts


def next_round(
    current: RoundPlan, launchers: Mapping[int, Fields], sizes: Sequence[int], *, last_call: bool
) -> tuple[int, list[list[int]]] | None:
    """Return world size and parts of the next round; None while it cannot begin. `last_call`: wait for no more machines."""
    ready = {number: fields for number, fields in launchers.items() if int(fields.get("asks", 0)) > current.number}
    members = {number for number, _ in current.parts}
    if any(number in members and number not in ready for number in launchers):
        return None  # a member has not left the current round yet
    world_size, parts = assign_ranks(ready, sizes)
    if not world_size or not any(fields.get("leads") for fields in ready.values()):
        return None
    return (world_size, parts) if last_call or world_size == max(sizes) else None


@dataclass(frozen=True, slots=True)
class RoundBroken:
    """Why a launcher with healthy workers should leave the round. `graceful`: they can save first."""

    why: str
    graceful: bool


def broken(
    current: RoundPlan, me: int, launchers: Mapping[int, Fields], gone: Mapping[int, Fields], sizes: Sequence[int]
) -> RoundBroken | None:
    """Return why member `me` should leave the current round; None while it should stay."""
    members = {number for number, _ in current.parts} - {me}
    for number in sorted(members):
        if number in gone and not gone[number].get("done"):
            return RoundBroken(_departure(gone[number]), graceful=bool(gone[number].get("leaves")))
        fields = launchers.get(number, {})
        if int(fields.get("asks", 0)) > current.number and fields.get("why"):
            return RoundBroken(str(fields["why"]), graceful=False)
    for number in sorted(members):
        if int(launchers.get(number, {}).get("asks", 0)) > current.number:
            return RoundBroken("another machine restarts", graceful=True)
    waiting = [f for n, f in launchers.items() if n not in members | {me} and int(f.get("asks", 0)) > current.number]
    if waiting and assign_ranks(launchers, sizes)[0] > current.world_size:
        return RoundBroken(f"{', '.join(sorted({str(f.get('host')) for f in waiting}))} has joined", graceful=True)
    return None


def _is_launcher(fields: Fields) -> bool:
    """Return whether these are a launcher's fields: any process with the token may connect to the endpoint."""
    return isinstance(fields.get("workers"), int) and isinstance(fields.get("asks", 0), int)


def _departure(fields: Fields) -> str:
    if fields.get("user_error"):
        return f"{fields.get('host')} has left: {fields['user_error']}"
    return f"{fields.get('host')} {'has left' if fields.get('leaves') else 'is gone'}"


class Rendezvous:
    """One launcher's side of the rendezvous. Without a `client` this machine is alone."""

    def __init__(
        self, client: MembershipClient | None, *, host: str, workers: int, leads: bool, sizes: Sequence[int]
    ) -> None:
        self.current = RoundPlan()
        self.leads, self.sizes = leads, sizes
        self._client = client
        self._requested_at: float | None = None  # when the next round was first requested
        self._enough_at: float | None = None  # when there were enough workers for it
        self._mine: Fields = {"host": host, "workers": workers, "leads": leads, "asks": 0, "version": __version__}
        self.report()

    def report(self, **fields: Any) -> None:
        self._mine |= fields
        if self._client is not None:
            self._client.say(**self._mine)

    @property
    def me(self) -> int:
        return 0 if self._client is None else self._client.number

    @property
    def launchers(self) -> dict[int, Fields]:
        """Return the latest report of every launcher."""
        others = {} if self._client is None else self._client.view.members
        return {**{number: fields for number, fields in others.items() if _is_launcher(fields)}, self.me: self._mine}

    @property
    def gone(self) -> dict[int, Fields]:
        return {} if self._client is None else self._client.view.gone

    @property
    def workers(self) -> int:
        """Return how many workers all machines offer together."""
        return sum(int(fields["workers"]) for fields in self.launchers.values())

    def _leader(self) -> Fields:
        return next((fields for fields in self.launchers.values() if fields.get("leads")), {})

    # The next round

    @property
    def waited_s(self) -> float:
        """Return how long this launcher has been waiting for the next round."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def begins(self, make: Callable[[], dict[str, Any]], *, timeout_s: float) -> bool:
        """Request the next round. Return whether it begins. `make` returns the leader's run_dir and resume for it.

        Raises `RunOver` when the run has ended, WorkerFailed when too few workers join `timeout_s`.
        """
        self._requested_at = self._requested_at or time.monotonic()
        self.check()
        if self._leader() and self._mine["asks"] <= self.current.number:
            self._check_version()
            self.report(asks=self.current.number + 1)
        if self._lead(make) if self.leads else self._follow():
            self._requested_at = self._enough_at = None
            self.report(why=None, victim=False)
            return True
        if self.leads and self.waited_s > timeout_s:
            raise WorkerFailed(
                f"{self.workers} worker{'s' * (self.workers != 1)} joined within {timeout_s:g} s, at least "
                f"{min(self.sizes)} needed"
            )
        return False

    def _lead(self, make: Callable[[], dict[str, Any]]) -> bool:
        """Begin the next round, as the leader, if it can begin."""
        if self._enough_at is None and assign_ranks(self.launchers, self.sizes)[0]:
            self._enough_at = time.monotonic()
        waited = self._enough_at is not None and time.monotonic() - self._enough_at > LAST_CALL_S
        found = next_round(self.current, self.launchers, self.sizes, last_call=waited or self.current.number > 0)
        if found is None:
            return False
        world_size, parts = found
        self.current = RoundPlan(number=self.current.number + 1, world_size=world_size, parts=parts, **make())
        self.report(plan=asdict(self.current))
        return True

    def _follow(self) -> bool:
        """Return whether the leader has begun a round with this machine in it."""
        self.current = self._announced()
        return 0 < self._mine["asks"] <= self.current.number and bool(self.current.ranks(self.me))

    def _announced(self) -> RoundPlan:
        plan = self._leader().get("plan")
        return self.current if not plan or plan["number"] <= self.current.number else RoundPlan(**plan)

    # During a round

    def broken(self) -> RoundBroken | None:
        self.check()
        return broken(self.current, self.me, self.launchers, self.gone, self.sizes)

    def check(self) -> None:
        """Raise if the leader is lost or has ended the run."""
        over = self._leader().get("over")
        if over is not None and not self.leads:
            kind = _ENDS.get(over["kind"])
            raise RunOver(None if kind is None else kind(over["message"]))
        # A user error ends the run only in the first round; a machine that joins later just leaves.
        for fields in (*self.launchers.values(), *self.gone.values()):
            if self.leads and fields.get("user_error") and self.current.number <= 1:
                raise UserError(f"{fields.get('host')}: {fields['user_error']}")
        if self._client is not None and self._client.lost is not None:
            how = f"sent no heartbeat for {SILENT_S:g} s" if self._client.lost == SILENT else "closed its connection"
            raise WorkerFailed(f"the leader at --rdzv-endpoint {how}; the run has ended")

    def _check_version(self) -> None:
        """Refuse to join a leader of another version: it may form rounds differently."""
        version = self._leader().get("version")
        if version != __version__:
            raise UserError(
                f"this machine has smolcluster {__version__} and the one of --rdzv-endpoint has {version}; "
                "install the same version on every machine"
            )

    def port(self) -> int | None:
        """Return the port of this round's rank 0; None until the leader knows it."""
        port = self._leader().get("port")
        return int(port[1]) if port and port[0] == self.current.number else None

    def reasons(self) -> tuple[list[str], list[str]]:
        """Return why the last round ended: machines that left, and worker deaths, reported by those that saw the cause."""
        members = {number for number, _ in self.current.parts}
        left = {number: fields for number, fields in self.gone.items() if number in members}
        changes = [_departure(fields) for fields in left.values()]
        reports = [fields for fields in self.launchers.values() if fields.get("why")]
        known = [fields for fields in reports if not fields.get("victim")]
        return changes, sorted({str(fields["why"]) for fields in known or ([] if left else reports)})
