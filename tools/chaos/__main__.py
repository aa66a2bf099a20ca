from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.network import Network, check_possible, hosts
from tests.faults.elastic_history import lines_of

from smolcluster.errors import UserError
from tools.chaos import __doc__ as usage
from tools.chaos.books import Books, keep_books, measure_stalls, violations
from tools.chaos.plan import ALLOWED, GOODPUT, LINKS, METHODS, RATE_STEPS, Plan, Victim, schedule
from tools.chaos.world import Chaos, run


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
    """Run one strategy without faults, then with them. Return the number of violations."""
    strategy = what if isinstance(what, str) else what.strategy
    bound = options.staleness_bound if isinstance(what, str) else what.staleness_bound
    workers = options.workers if isinstance(what, str) else what.workers
    common: dict[str, Any] = {"workers": workers, "staleness_bound": bound, "network": network}

    if isinstance(what, Plan):
        plan = what
    else:
        rate = keep_books(run(strategy, folder / f"{strategy}-rate", steps=options.rate_steps, **common))
        plan = _plan(strategy, options, rate.step_s, network)
    path = folder / f"chaos-{strategy}-{plan.seed}.json"
    path.write_text(json.dumps({"plan": asdict(plan)}, indent=1) + "\n")

    calm = keep_books(run(strategy, folder / f"{strategy}-calm", steps=plan.steps, **common))
    chaos = Chaos(plan, network)
    world = run(strategy, folder / f"{strategy}-chaos", steps=plan.steps, chaos=chaos, **common)
    measure_stalls(lines_of(world), chaos.victims)
    books = keep_books(world, chaos.victims)
    margin = METHODS[strategy].loss_margin if options.loss_margin is None else options.loss_margin
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
            print(
                f"  {kind:<8} {len(stalls):>6} {middle:>12.2f} s {longest:>8.2f} s {ALLOWED[kind] + books.round_s:>7.1f} s"
            )
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
    parser = argparse.ArgumentParser(prog="chaos", description=(usage or "").splitlines()[0])
    parser.add_argument("--strategy", nargs="+", choices=METHODS, default=list(METHODS))
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
