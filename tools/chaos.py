"""Ten minutes of faults on the elastic plane, and the books afterwards.

    python -m tools.chaos                              each strategy, four workers, ten minutes of faults
                                                       after as much without: about an hour and a half
    python -m tools.chaos --strategy edp --minutes 2 --seed 7 --faults kill,server
    python -m tools.chaos --replay chaos-allreduce-7.json

Workers and the server are processes on hosts of their own (network namespaces; on loopback, without cut links, where those
cannot be had). Which fault comes when is a function of the seed alone, and is written to a file that --replay reads.

    kill      kill -9 a worker; another is started in its place
    server    kill -9 the server, or coordinator; it is started again
    freeze    SIGSTOP a worker for some seconds
    cut       the link of a worker's host goes down for some seconds; nobody is told
    partial   a worker reaches the server and no other worker, for some seconds
    oneway    what a worker sends to the other workers is dropped, for some seconds; it hears them
    slow      what a worker sends crawls, for some seconds
    join      a worker leaves in good order, and one with its rank joins

What must hold, or the exit status is 1:

    rules     `engine.history.check` has nothing to say: no committed step lost or doubled, no sample lost or counted twice
    hashes    where every worker has the whole model, all end with the same bits
    stalls    from a fault to the next committed step that does not need the victim: at most what ALLOWED says
    goodput   at least 95 % of that of a run without faults (--least-goodput)
    loss      at the end within 0.02 (edp: 0.05) of a run of as many steps without faults, in validation (--loss-margin)

Goodput is the share of the living workers' time that went into gradients that counted:

    committed samples x seconds of computing per sample / seconds that workers were alive

Computing is measured by the workers themselves, in the same run. A worker is alive from the moment it is ready to join until it
is killed, and not while it is frozen or cut off. With kills only, all of that time counts. Other faults are known only after a
silence, in which everybody waits in vain: that time, up to what is allowed, is left out of the goodput that is held against
95 %, and the table shows both.

A step of a worker takes PACE_S, most of which it sleeps: so five machines fit onto one with two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.network import Network, check_possible, hosts
from tests.faults.elastic_history import Lines, commits, instance_of, instances, lines_of
from tests.world import ElasticWorld, Life, Who, run_elastic_world

from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.engine.elastic import history
from smolcluster.errors import UserError
from smolcluster.observe.events import RunStarted

STRATEGIES = ("syncps", "edp", "allreduce", "fsdp")
ALLOWED = {
    **{"kill": 1.5, "server": 5.0, "freeze": 2.5, "cut": 2.5, "join": 1.0},
    **{"partial": 10.0, "oneway": 10.0, "slow": 10.0},  # a worker may come back before its links do
}  # seconds
LINKS = ("cut", "partial", "oneway", "slow")  # need network namespaces
SLOW_RATE = "1mbit"
GOODPUT = 0.95
LOSS = {"syncps": 0.02, "edp": 0.05, "allreduce": 0.02, "fsdp": 0.02}
PACE_S = 0.04
BATCH = 8
RATE_STEPS = 100  # to learn how many a minute has
LEAVE_S = 5.0  # so long a worker may take to leave
RESTART_S = 1.0  # from a death to the start of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float  # since the first committed step
    kind: str
    worker: int  # the victim; no matter for `server`
    lasts_s: float = 0.0


def schedule(seed: int, *, seconds: float, period_s: float, workers: int, kinds: Sequence[str]) -> list[Fault]:
    """One fault in every period, of each kind equally often, on random workers."""
    dice = random.Random(f"chaos {seed}")
    faults: list[Fault] = []
    bag: list[str] = []
    for number in range(int(seconds / period_s)):
        if not bag:
            bag = dice.sample(list(kinds), len(kinds))
        kind, worker = bag.pop(), dice.randrange(workers)
        at_s = period_s * (number + 0.25 * dice.random())
        lasts_s = dice.uniform(0.15, 0.4) * period_s if kind in ("freeze", *LINKS) else 0.0
        faults.append(Fault(at_s=round(at_s, 3), kind=kind, worker=worker, lasts_s=round(lasts_s, 3)))
    return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a run with faults follows from; what --replay reads."""

    strategy: str
    staleness_bound: int
    workers: int
    seed: int
    steps: int
    period_s: float
    faults: list[Fault]

    @classmethod
    def read(cls, path: Path) -> Plan:
        try:
            plan = json.loads(path.read_text())["plan"]
            return cls(**plan | {"faults": [Fault(**fault) for fault in plan["faults"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a schedule that this program wrote ({error})") from error


@dataclass(slots=True, eq=False)
class Victim:
    """A fault that happened."""

    fault: Fault
    time: float
    instance: str = ""
    away: list[tuple[int, float, float]] = field(default_factory=list)  # a worker that was not alive: rank, from, to
    stall_s: float | None = None


class Chaos:
    """Runs the faults of a plan against a world."""

    def __init__(self, plan: Plan, network: Network | None) -> None:
        self.plan, self.network = plan, network
        self.victims: list[Victim] = []

    def script(self, world: ElasticWorld) -> None:
        world.wait_for_step(1, within_s=120.0)
        began = time.monotonic()
        for fault in self.plan.faults:
            if not self._rest(world, until=began + fault.at_s):
                break
            self._commit(world, fault)
        # As a launcher does: whoever comes when the server has left is sent home.
        self._rest(world, until=began + 10 * self.plan.steps)
        for rank in range(self.plan.workers):
            with contextlib.suppress(AssertionError):
                world.wait_for_exit(rank, within_s=LEAVE_S)
            if world.alive(rank):
                world.kill(rank)

    def _commit(self, world: ElasticWorld, fault: Fault) -> None:
        who, kind = fault.worker, fault.kind
        victim = Victim(fault, time.time(), "" if kind == "server" else instance_of(world, who))
        self.victims.append(victim)
        if kind == "server":
            world.restart("server")
        elif kind == "kill":
            world.kill(who)
            if self._rest(world, until=time.monotonic() + RESTART_S):
                world.start(who)
        elif kind == "join":
            world.ask_to_stop(who)
            world.wait_for_exit(who)
            if self._rest(world, until=time.monotonic() + RESTART_S):
                world.start(who)
        else:
            self._away(world, victim)

    def _away(self, world: ElasticWorld, victim: Victim) -> None:
        who, kind = victim.fault.worker, victim.fault.kind
        if kind == "freeze":
            world.freeze(who)
        else:
            self._spoil_link(who + 1, kind, mend=False)
        self._rest(world, until=time.monotonic() + victim.fault.lasts_s)
        if kind == "freeze":
            world.thaw(who)
        else:
            self._spoil_link(who + 1, kind, mend=True)
        victim.away.append((who, victim.time, time.time()))

    def _spoil_link(self, host: int, kind: str, *, mend: bool) -> None:
        """Break the link of a worker's host, or mend it. Host 0 is the server's."""
        network = self.network
        assert network is not None
        if kind == "cut":
            (network.mend if mend else network.cut)(host)
        elif kind == "slow" and mend:
            network.mend_rate(host)
        elif kind == "slow":
            network.slow(host, SLOW_RATE)
        else:
            for other in range(1, network.count):
                if other != host:
                    change = network.unblock if mend else network.block
                    change(host, other)
                    if kind == "partial":
                        change(other, host)

    @staticmethod
    def _rest(world: ElasticWorld, *, until: float) -> bool:
        """Until that time; False when the run is over before."""
        left = until - time.monotonic()
        with contextlib.suppress(AssertionError):
            world.wait(lambda: not world.alive("server"), what="the end", within_s=max(0.0, left))
        return world.alive("server")


# A world


def run(
    strategy: str,
    run_dir: Path,
    *,
    workers: int,
    steps: int,
    staleness_bound: int,
    network: Network | None,
    chaos: Chaos | None = None,
) -> ElasticWorld:
    shape = {"model_dim": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32, "ff_dim": 64}
    config: dict[str, Any] = {f"model.{key}": value for key, value in shape.items()}
    config |= {
        "training.steps": steps,
        "training.batch_size": BATCH,
        "training.learning_rate": 0.003,
        "training.eval_steps": 0,
        "training.eval_samples": None,  # all: on a part of them clean runs differ by more than the margin
        "training.checkpoint_steps": 0,
        "training.seed": 1,
        "cluster.plane": "elastic",
    }
    if strategy == "allreduce":
        config["strategy.staleness_bound"] = staleness_bound
    if strategy == "fsdp":
        config["strategy.fsdp_stage"] = 1
    places: dict[Who, tuple[str, str]] = {}
    if network is not None:
        seats: list[Who] = ["server", *range(workers)]
        places = {who: (network.namespace(host), network.address(host)) for host, who in enumerate(seats)}
    return run_elastic_world(
        workers,
        run_dir,
        config,
        task="Paced",
        strategy=strategy,
        script=chaos.script if chaos is not None else None,
        environ={"PACE_S": str(PACE_S), "SMOLCLUSTER_TOKEN": new_token()},
        places=places,
        patient=False,
        timeout_s=120.0 + 10 * steps * PACE_S,
    )


# The books


@dataclass(slots=True)
class Books:
    """What a run came to."""

    seconds: float
    samples: int
    compute_s: float  # per sample
    alive_s: float  # of all workers
    stalled_s: float = 0.0  # of that: while a fault was not yet known, as far as it is allowed
    loss: float = float("nan")

    @property
    def goodput(self) -> float:
        return self.samples * self.compute_s / self.alive_s

    @property
    def goodput_outside(self) -> float:
        return self.samples * self.compute_s / (self.alive_s - self.stalled_s)


def keep_books(world: ElasticWorld, victims: Sequence[Victim] = ()) -> Books:
    lines = commits(lines_of(world))
    first, last = lines[0]["time"], lines[-1]["time"]
    rows = [row for worker in world.workers for row in worker.rows()]
    away = [interval for victim in victims for interval in victim.away]
    alive_s = 0.0
    for rank, seat in enumerate(world.workers):
        for life in seat.lives:
            alive_s += _alive_s(life, [(a, b) for r, a, b in away if r == rank], since=first, until=last)
    stalled_s = 0.0
    for victim in victims:
        if victim.stall_s is not None:
            others = len(world.workers) - (victim.fault.kind != "server")
            stalled_s += others * min(victim.stall_s, ALLOWED[victim.fault.kind])
    return Books(
        seconds=last - first,
        samples=sum(part["samples"] for line in lines for part in line["contributors"]),
        compute_s=statistics.median(row.compute_s for row in rows) / BATCH,
        alive_s=alive_s,
        stalled_s=stalled_s,
        loss=float(world.summary["val_loss"]),
    )


def _alive_s(life: Life, away: Sequence[tuple[float, float]], *, since: float, until: float) -> float:
    """From ready to dead, without the time it was frozen or cut off."""
    to_wall = time.time() - time.monotonic()
    ready = [when for event, when in zip(life.events, life.times, strict=True) if isinstance(event, RunStarted)]
    if not ready:
        return 0.0
    # Its last event is at most a step before its end.
    start, end = max(since, ready[0] + to_wall), min(until, life.times[-1] + to_wall)
    lost = sum(max(0.0, min(end, b) - max(start, a)) for a, b in away)
    return max(0.0, end - start - lost)


def measure_stalls(lines: Lines, victims: Sequence[Victim]) -> None:
    for victim in victims:
        # One that was away for so short a time that nobody missed it may count as soon as it is back.
        back = [end for _, _, end in victim.away]
        found = (
            line["time"] - victim.time
            for line in commits(lines)
            if line["time"] >= victim.time
            and (victim.instance not in instances(line) or any(line["time"] >= end for end in back))
        )
        victim.stall_s = next(found, None)  # None: the run was over


def violations(
    world: ElasticWorld,
    plan: Plan,
    victims: Sequence[Victim],
    books: Books,
    calm: Books,
    *,
    least: float,
    margin: float,
) -> list[str]:
    """`least` goodput, as a share of that without faults; `margin`: by how much the loss may be higher."""
    lines = lines_of(world)
    found = history.check(lines)
    if [line["step"] for line in commits(lines)] != list(range(1, plan.steps + 1)):
        found.append("not every step was committed once, in order")
    if world.summary["status"] != "finished":
        found.append(f"the run ended as {world.summary['status']}")
    if plan.strategy in ("allreduce", "fsdp") and world.summary["replicas_agree"] is not True:
        found.append("the replicas differ at the end")
    for victim in victims:
        kind, stall_s, allowed = victim.fault.kind, victim.stall_s, ALLOWED[victim.fault.kind]
        if stall_s is not None and stall_s > allowed:
            found.append(f"{kind} at {victim.fault.at_s:.0f} s: a stall of {stall_s:.2f} s, allowed are {allowed:g} s")
    kills_only = all(victim.fault.kind == "kill" for victim in victims)
    goodput = books.goodput if kills_only else books.goodput_outside
    if goodput < least * calm.goodput:
        found.append(f"goodput is {goodput / calm.goodput:.1%} of a run without faults, less than {least:.0%}")
    if not books.loss <= calm.loss + margin:
        found.append(f"the loss is {books.loss:.4f}, without faults {calm.loss:.4f}; allowed is {margin} more")
    return found


# The program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder = Path(tempfile.mkdtemp(prefix="chaos-")) if options.out is None else Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}; runs and schedules are in {folder}", flush=True)
    plans: list[Plan | str] = [Plan.read(Path(options.replay))] if options.replay else list(options.strategy)
    wrong = 0
    for plan in plans:
        with _network(options) as network:
            wrong += _try(plan, options, folder, network)
    return 1 if wrong else 0


def _try(what: Plan | str, options: argparse.Namespace, folder: Path, network: Network | None) -> int:
    """One strategy: without faults, then with them. Returns the number of violations."""
    strategy = what if isinstance(what, str) else what.strategy
    bound = options.staleness_bound if isinstance(what, str) else what.staleness_bound
    workers = options.workers if isinstance(what, str) else what.workers
    common: dict[str, Any] = {"workers": workers, "staleness_bound": bound, "network": network}

    if isinstance(what, Plan):
        plan = what
    else:
        rate = keep_books(run(strategy, folder / f"{strategy}-rate", steps=options.rate_steps, **common))
        plan = _plan(strategy, options, rate.seconds / (options.rate_steps - 1), network)
    path = folder / f"chaos-{strategy}-{plan.seed}.json"
    path.write_text(json.dumps({"plan": asdict(plan)}, indent=1) + "\n")

    calm = keep_books(run(strategy, folder / f"{strategy}-calm", steps=plan.steps, **common))
    chaos = Chaos(plan, network)
    world = run(strategy, folder / f"{strategy}-chaos", steps=plan.steps, chaos=chaos, **common)
    measure_stalls(lines_of(world), chaos.victims)
    books = keep_books(world, chaos.victims)
    margin = LOSS[strategy] if options.loss_margin is None else options.loss_margin
    found = violations(world, plan, chaos.victims, books, calm, least=options.least_goodput, margin=margin)
    results = {
        "plan": asdict(plan),
        "calm": asdict(calm),
        "chaos": asdict(books),
        "faults": [asdict(victim.fault) | {"time": victim.time, "stall_s": victim.stall_s} for victim in chaos.victims],
        "violations": found,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    _print_table(plan, chaos.victims, books, calm, found)
    return len(found)


def _plan(strategy: str, options: argparse.Namespace, step_s: float, network: Network | None) -> Plan:
    kinds = [kind for kind in options.faults if kind not in LINKS or network is not None]
    steps = round(options.minutes * 60 / step_s)
    faults = schedule(
        options.seed, seconds=options.minutes * 60, period_s=options.period, workers=options.workers, kinds=kinds
    )
    return Plan(
        strategy=strategy,
        staleness_bound=options.staleness_bound,
        workers=options.workers,
        seed=options.seed,
        steps=steps,
        period_s=options.period,
        faults=faults,
    )


def _print_table(plan: Plan, victims: Sequence[Victim], books: Books, calm: Books, found: Sequence[str]) -> None:
    name = plan.strategy + (f" K={plan.staleness_bound}" if plan.strategy == "allreduce" else "")
    print(f"\n{name}, {plan.workers} workers, {plan.steps} steps in {books.seconds:.0f} s, {len(victims)} faults")
    print("  fault     times   stall median    longest   allowed")
    for kind in sorted({victim.fault.kind for victim in victims}):
        stalls = [v.stall_s for v in victims if v.fault.kind == kind and v.stall_s is not None]
        if stalls:
            middle, longest = statistics.median(stalls), max(stalls)
            print(f"  {kind:<8} {len(stalls):>6} {middle:>12.2f} s {longest:>8.2f} s {ALLOWED[kind]:>7.1f} s")
    raw, outside = books.goodput / calm.goodput, books.goodput_outside / calm.goodput
    print(f"  goodput {books.goodput:.3f}, without faults {calm.goodput:.3f}: {raw:.1%}; outside stalls {outside:.1%}")
    print(f"  loss    {books.loss:.4f}, without faults {calm.loss:.4f}")
    for sentence in found:
        print(f"  VIOLATION: {sentence}")
    print("  all rules kept" if not found else f"  {len(found)} violations", flush=True)


@contextlib.contextmanager
def _network(options: argparse.Namespace) -> Iterator[Network | None]:
    try:
        if not options.loopback:
            check_possible()
    except UserError as error:
        print(f"on loopback, without cut links: {error}", file=sys.stderr)
        options.loopback = True
    if options.loopback:
        yield None
    else:
        with hosts(options.workers + 1, rate=None) as network:
            yield network


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, for each strategy")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--staleness-bound", type=int, default=1, help="of allreduce")
    parser.add_argument("--period", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--faults", type=_kinds, default=list(ALLOWED), help=f"some of {','.join(ALLOWED)}")
    parser.add_argument("--rate-steps", type=int, default=RATE_STEPS, help="to learn how many a minute has")
    parser.add_argument("--least-goodput", type=float, default=GOODPUT, help="as a share of that without faults")
    parser.add_argument("--loss-margin", type=float, help="by how much the loss may be higher")
    parser.add_argument("--replay", help="a file that an earlier run wrote")
    parser.add_argument(
        "--out", help="folder for runs and schedules; default: a new one in the system's temporary folder"
    )
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, and no cut links")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    return options


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = [kind for kind in kinds if kind not in ALLOWED]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no fault '{unknown[0]}'; known: {', '.join(ALLOWED)}")
    return kinds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
