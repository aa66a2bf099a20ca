"""How the launchers of `train --elastic` agree on who takes part: in rounds. Nothing here imports torch.

    a round     which machines have which ranks; one process group lives in it
    it ends     when a worker dies, a machine leaves or is lost, or one comes and there is room
    the next    begins when every machine that is left has asked for it, and they have enough workers

The machine of --rdzv-endpoint leads: it serves the heartbeat roster of all launchers (`heartbeats.py`), decides what the next
round is, and has rank 0, and so the run directory. What each launcher reports:

    host, workers     where it is, how many workers it offers
    asks              the round it is ready for; a member that asks for the next has left the present one
    why               what ended the round there, in words; `victim`: another machine knows better
    mistake           of the user, there; `leaves`: by the user's wish; `done`: its workers have come to the end
    decree, port      the leader's: the present round; where its rank 0 listens
    over              the leader's: the run has ended, and how

torch's own rendezvous is not used: it unpickles what any machine writes into its store, and compares clocks between machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from smolcluster.comm.elastic.membership.heartbeats import SILENT, Fields, MembershipClient
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.version import __version__

SILENT_S = 6.0  # a launcher has nothing to do but to listen
LAST_CALL_S = 3.0  # once there are enough: how long the first round waits for more

_ENDS: dict[str, type[SmolclusterError]] = {"user": UserError, "failed": WorkerFailed, "stopped": Interrupted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decree:
    """A round. `parts` are launchers by their number in the roster, with how many ranks each has, in the order of ranks."""

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


class Over(Exception):
    """The leader has ended the run. `error` None: it came to its end."""

    def __init__(self, error: SmolclusterError | None) -> None:
        self.error = error


def largest(sizes: Sequence[int], workers: int) -> int:
    """The largest world that so many workers can make; 0 for none."""
    return max((size for size in sizes if size <= workers), default=0)


def deal(agents: Mapping[int, Fields], sizes: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The world these launchers make, and who has how many of its ranks: the leader first, then in order of arrival."""
    order = sorted(agents, key=lambda number: (not agents[number].get("leads"), number))
    left = world_size = largest(sizes, sum(int(agents[number]["workers"]) for number in order))
    parts = []
    for number in order:
        count = min(left, int(agents[number]["workers"]))
        if count:
            parts.append([number, count])
        left -= count
    return world_size, parts


def next_round(
    current: Decree, agents: Mapping[int, Fields], sizes: Sequence[int], *, last_call: bool
) -> tuple[int, list[list[int]]] | None:
    """What the next round would be; None while it cannot begin. `last_call`: do not wait for more machines."""
    ready = {number: fields for number, fields in agents.items() if int(fields.get("asks", 0)) > current.number}
    members = {number for number, _ in current.parts}
    if any(number in members and number not in ready for number in agents):
        return None  # it is on its way
    world_size, parts = deal(ready, sizes)
    if not world_size or not any(fields.get("leads") for fields in ready.values()):
        return None
    return (world_size, parts) if last_call or world_size == max(sizes) else None


@dataclass(frozen=True, slots=True)
class Break:
    """Why a round is over for a launcher whose own workers are well. `gently`: there is time to save."""

    why: str
    gently: bool


def broken(
    current: Decree, me: int, agents: Mapping[int, Fields], gone: Mapping[int, Fields], sizes: Sequence[int]
) -> Break | None:
    """Whether the members of a round should leave it, seen from one of them."""
    members = {number for number, _ in current.parts} - {me}
    for number in sorted(members):
        if number in gone and not gone[number].get("done"):
            return Break(_leaving(gone[number]), gently=bool(gone[number].get("leaves")))
        fields = agents.get(number, {})
        if int(fields.get("asks", 0)) > current.number and fields.get("why"):
            return Break(str(fields["why"]), gently=False)
    for number in sorted(members):
        if int(agents.get(number, {}).get("asks", 0)) > current.number:
            return Break("another machine starts again", gently=True)
    waiting = [f for n, f in agents.items() if n not in members | {me} and int(f.get("asks", 0)) > current.number]
    if waiting and deal(agents, sizes)[0] > current.world_size:
        return Break(f"{', '.join(sorted({str(f.get('host')) for f in waiting}))} has come", gently=True)
    return None


def _is_launcher(fields: Fields) -> bool:
    """Return whether these are the fields of a launcher: any process may connect to the endpoint."""
    return isinstance(fields.get("workers"), int) and isinstance(fields.get("asks", 0), int)


def _leaving(fields: Fields) -> str:
    """`pi5 is gone`."""
    if fields.get("mistake"):
        return f"{fields.get('host')} has left: {fields['mistake']}"
    return f"{fields.get('host')} {'has left' if fields.get('leaves') else 'is gone'}"


class Rounds:
    """One launcher's part in it. Without a `client` this machine is alone."""

    def __init__(
        self, client: MembershipClient | None, *, host: str, workers: int, leads: bool, sizes: Sequence[int]
    ) -> None:
        self.current = Decree()
        self.leads, self.sizes = leads, sizes
        self._client = client
        self._asked_at: float | None = None  # the next round
        self._enough_at: float | None = None  # workers were there for it
        self._mine: Fields = {"host": host, "workers": workers, "leads": leads, "asks": 0, "version": __version__}
        self.say()

    def say(self, **fields: Any) -> None:
        self._mine |= fields
        if self._client is not None:
            self._client.say(**self._mine)

    @property
    def me(self) -> int:
        return 0 if self._client is None else self._client.number

    @property
    def agents(self) -> dict[int, Fields]:
        """Return the latest report of every launcher."""
        others = {} if self._client is None else self._client.view.members
        return {**{number: fields for number, fields in others.items() if _is_launcher(fields)}, self.me: self._mine}

    @property
    def gone(self) -> dict[int, Fields]:
        return {} if self._client is None else self._client.view.gone

    @property
    def workers(self) -> int:
        """Offered by all machines together."""
        return sum(int(fields["workers"]) for fields in self.agents.values())

    def _leader(self) -> Fields:
        return next((fields for fields in self.agents.values() if fields.get("leads")), {})

    # The next round

    @property
    def waited_s(self) -> float:
        """How long the next round has been asked for."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def begins(self, make: Callable[[], dict[str, Any]], *, within_s: float) -> bool:
        """Ask for the next round. Return whether it begins. `make` gives the leader's further words of it.

        Raises `Over` when the run has ended meanwhile.
        """
        self._asked_at = self._asked_at or time.monotonic()
        self.check()
        if self._leader() and self._mine["asks"] <= self.current.number:
            self._check_version()
            self.say(asks=self.current.number + 1)
        if self._lead(make) if self.leads else self._follow():
            self._asked_at = self._enough_at = None
            self.say(why=None, victim=False)
            return True
        if self.leads and self.waited_s > within_s:
            raise WorkerFailed(
                f"there {'are' if self.workers != 1 else 'is'} {self.workers} worker{'s' * (self.workers != 1)}, and "
                f"{min(self.sizes)} are needed; none has come within {within_s:g} s"
            )
        return False

    def _lead(self, make: Callable[[], dict[str, Any]]) -> bool:
        """Begin the next round if it can begin."""
        if self._enough_at is None and deal(self.agents, self.sizes)[0]:
            self._enough_at = time.monotonic()
        waited = self._enough_at is not None and time.monotonic() - self._enough_at > LAST_CALL_S
        found = next_round(self.current, self.agents, self.sizes, last_call=waited or self.current.number > 0)
        if found is None:
            return False
        world_size, parts = found
        self.current = Decree(number=self.current.number + 1, world_size=world_size, parts=parts, **make())
        self.say(decree=asdict(self.current))
        return True

    def _follow(self) -> bool:
        """Whether a round that this machine asked for has begun with it."""
        self.current = self._announced()
        return 0 < self._mine["asks"] <= self.current.number and bool(self.current.ranks(self.me))

    def _announced(self) -> Decree:
        decree = self._leader().get("decree")
        return self.current if not decree or decree["number"] <= self.current.number else Decree(**decree)

    # While it lasts

    def broken(self) -> Break | None:
        self.check()
        return broken(self.current, self.me, self.agents, self.gone, self.sizes)

    def check(self) -> None:
        """Raises when the leader is lost, or has ended the run."""
        over = self._leader().get("over")
        if over is not None and not self.leads:
            kind = _ENDS.get(over["kind"])
            raise Over(None if kind is None else kind(over["message"]))
        # A machine that comes later does not end the run by its mistake: it leaves.
        for fields in (*self.agents.values(), *self.gone.values()):
            if self.leads and fields.get("mistake") and self.current.number <= 1:
                raise UserError(f"{fields.get('host')}: {fields['mistake']}")
        if self._client is not None and self._client.lost is not None:
            how = f"has been silent for {SILENT_S:g} s" if self._client.lost == SILENT else "is gone"
            raise WorkerFailed(f"the machine of --rdzv-endpoint {how}, and the run with it")

    def _check_version(self) -> None:
        """Before this machine takes part: rounds of another version may be other rounds."""
        theirs = self._leader().get("version")
        if theirs != __version__:
            raise UserError(
                f"this machine has smolcluster {__version__} and the one of --rdzv-endpoint has {theirs}; "
                "install the same version on every machine"
            )

    def port(self) -> int | None:
        """Where rank 0 of this round listens, as soon as the leader knows."""
        said = self._leader().get("port")
        return int(said[1]) if said and said[0] == self.current.number else None

    def reasons(self) -> tuple[list[str], list[str]]:
        """What ended the last round: machines that left, and deaths of workers as the best informed launchers report them."""
        members = {number for number, _ in self.current.parts}
        left = {number: fields for number, fields in self.gone.items() if number in members}
        changes = [_leaving(fields) for fields in left.values()]
        told = [fields for fields in self.agents.values() if fields.get("why")]
        known = [fields for fields in told if not fields.get("victim")]
        return changes, sorted({str(fields["why"]) for fields in known or ([] if left else told)})
