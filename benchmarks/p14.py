"""P14: the loss after equal samples, at default settings: edp and diloco against single.

Work: what `smolcluster train` trains without a configuration (`configs/default.yaml`: a GPT of 0.8 M parameters on the
embedded text, learning rate 3e-3), at context 64, 16 samples per worker and step, 400 steps. The loss is that of the whole
validation set with the last weights.

Equal samples: on N workers a step of edp takes 16 N samples, whichever worker computed them, as one of allreduce does; in
diloco each worker takes local steps of 16. `single` takes batches of 16 N, with the same number of steps and the same schedule
of the learning rate, which is what `allreduce` computes. Where a run counted other than 16 N samples per step, `single` takes
as many steps as these samples make.

Compared: `single` against edp and diloco on 2, 4 and 8 workers, with equal workers, and with the last one at a quarter of its
core (`harness/slow.py`), from the first row on. All are real runs of the elastic plane over loopback; the server and each
worker have a core of their own where there are enough, and `--jobs` runs are made at once.

How: with each seed (weights and order of samples) every case once; a repeat is a seed. The gap is taken between runs of one
seed; the median over seeds counts.

Targets: edp within 0.03 of `single` (0.06 at most); diloco within 1 % in perplexity.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from benchmarks.harness import Session
from benchmarks.harness.network import ended_by_sigterm
from benchmarks.harness.processes import ROOT, child_environment
from benchmarks.programs.p14_run import BATCH, CONTEXT, Order
from smolcluster.errors import SmolclusterError, UserError

EXAMPLE = "python -m benchmarks p14 --only edp --workers 4 --repeats 3"
STRATEGIES = ("edp", "diloco")
WORKERS = (2, 4, 8)
SEED = 100
EDP_WITHIN, EDP_AT_MOST = 0.03, 0.06
DILOCO_WITHIN = math.log(1.01)
SINGLE_CORES = 2
COLUMNS = [
    *("strategy", "workers", "slow", "loss", "single", "gap", "least", "most", "train_gap", "perplexity_percent"),
    *("share_of_slow", "staleness", "verdict"),
]

Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=STRATEGIES, nargs="+", help="of ours (default: all)")
    parser.add_argument("--workers", type=int, nargs="+", help="(default: 2 4 8; quick: 2)")
    parser.add_argument("--slow", choices=["yes", "no", "both"], default="both", help="one slow worker, or none")
    parser.add_argument("--steps", type=int, help="of a run (default: 400; quick: 60)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"the first one (default: {SEED})")
    parser.add_argument("--jobs", type=int, help="runs at once (default: as many as have cores of their own)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="options of the strategies, other than default"
    )


def run(session: Session, arguments: argparse.Namespace) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("p14 gives every worker a core of its own; it needs Linux")
    cores = sorted(os.sched_getaffinity(0))
    orders = cases(session, arguments)
    session.parameters = {
        "context": CONTEXT,
        "batch_size": BATCH,
        "steps": orders[0].steps,
        "cores": len(cores),
        "shared_cores": max(map(cores_of, orders)) > len(cores),
    }
    done: dict[Order, Result] = {}
    jobs = arguments.jobs or len(cores)
    run_all([*orders, *(dict.fromkeys(map(single_of, orders)))], cores, jobs, done)
    # Other samples than expected: single takes as many.
    run_all(dict.fromkeys(single_of(order, done[order]) for order in orders), cores, jobs, done)
    rows = [row_of(group, done) for group in grouped(orders)]
    session.show(f"{orders[0].steps} steps, {session.repeats} seeds: the loss above that of single", rows, COLUMNS)


def cases(session: Session, arguments: argparse.Namespace) -> list[Order]:
    steps = arguments.steps or (60 if session.quick else 400)
    options = tuple(tuple(text.split("=", 1)) for text in arguments.set)
    slow = {"yes": [True], "no": [False], "both": [False, True]}[arguments.slow]
    return [
        Order(
            strategy=strategy,
            workers=workers,
            seed=seed,
            steps=steps,
            slow=is_slow,
            tiny=session.quick,
            options=options,
        )
        for seed in range(arguments.seed, arguments.seed + session.repeats)
        for workers in arguments.workers or ([2] if session.quick else WORKERS)
        for strategy in arguments.only or STRATEGIES
        for is_slow in slow
    ]


def single_of(order: Order, result: Result | None = None) -> Order:
    """Return the run of single on as many samples. `result`: of the other run."""
    per_step = BATCH * order.workers
    steps = order.steps if result is None else round(result["samples"] / per_step)
    return Order(strategy="single", workers=order.workers, seed=order.seed, steps=steps, tiny=order.tiny)


def grouped(orders: Sequence[Order]) -> list[list[Order]]:
    """Return the orders of each case, one for each seed."""
    groups: dict[Order, list[Order]] = {}
    for order in orders:
        groups.setdefault(dataclasses.replace(order, seed=0), []).append(order)
    return list(groups.values())


def row_of(orders: Sequence[Order], done: dict[Order, Result]) -> dict[str, Any]:
    first, results = orders[0], [done[order] for order in orders]
    singles = [done[single_of(order, done[order])] for order in orders]
    gaps = [ours["val_loss"] - theirs["val_loss"] for ours, theirs in zip(results, singles, strict=True)]
    train = [ours["train_loss"] - theirs["train_loss"] for ours, theirs in zip(results, singles, strict=True)]
    gap = statistics.median(gaps)
    shares = [result["share_of_slow"] for result in results]
    return {
        "strategy": first.name,
        "workers": first.workers,
        "slow": "one" if first.slow else "",
        "loss": statistics.median(result["val_loss"] for result in results),
        "single": statistics.median(result["val_loss"] for result in singles),
        "gap": gap,
        "least": min(gaps),
        "most": max(gaps),
        "train_gap": statistics.median(train),
        "perplexity_percent": 100 * math.expm1(gap),
        "share_of_slow": statistics.median(shares) if first.slow else None,
        "staleness": statistics.median(result["staleness"] or 0.0 for result in results),
        "verdict": verdict(first.strategy, gap),
        "samples": [result["samples"] for result in results],
        "seeds": [order.seed for order in orders],
        "runs": [{"ours": ours, "single": theirs} for ours, theirs in zip(results, singles, strict=True)],
    }


def verdict(strategy: str, gap: float) -> str:
    if strategy == "diloco":
        return "met" if gap <= DILOCO_WITHIN else "missed"
    return "met" if gap <= EDP_WITHIN else "within 0.06" if gap <= EDP_AT_MOST else "missed"


# Runs at once, each on cores of its own


def cores_of(order: Order) -> int:
    return SINGLE_CORES if order.strategy == "single" else order.workers + 1


def run_all(orders: Iterable[Order], cores: Sequence[int], jobs: int, done: dict[Order, Result]) -> None:
    """Run the longest first, then the largest. Orders that are in `done` are not run again."""
    waiting = sorted((o for o in orders if o not in done), key=_turn)
    free = list(cores)
    running: dict[Future[Result], tuple[Order, list[int]]] = {}
    with ended_by_sigterm(), ThreadPoolExecutor(jobs) as pool, _Children() as children:
        while waiting or running:
            for order in list(_fitting(waiting, free, room=jobs - len(running), cores=len(cores))):
                waiting.remove(order)
                own = [heapq.heappop(free) for _ in range(min(cores_of(order), len(cores)))]
                running[pool.submit(children.run, order, own)] = order, own
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                order, own = running.pop(future)
                done[order] = future.result()
                for core in own:
                    heapq.heappush(free, core)
                _tell(order, done[order])


def _turn(order: Order) -> tuple[bool, int, bool]:
    return order.strategy != "single", -order.workers, not order.slow


def _fitting(waiting: Sequence[Order], free: Sequence[int], *, room: int, cores: int) -> Iterator[Order]:
    left = len(free)
    for order in waiting:
        need = min(cores_of(order), cores)
        if need <= left and room > 0:
            left, room = left - need, room - 1
            yield order


def _tell(order: Order, result: Result) -> None:
    slow = ", one slow" if order.slow else ""
    steps, seconds = result["samples"] / (BATCH * order.workers), result["seconds"]
    print(
        f"  {order.name} {order.workers}{slow}, seed {order.seed}: loss {result['val_loss']:.4f} after {steps:g} steps, "
        f"{seconds:.0f} s",
        flush=True,
    )


class _Children:
    """The processes of `programs/p14_run.py`: none is left at the end of the `with`."""

    def __enter__(self) -> _Children:
        self._processes: list[subprocess.Popen[str]] = []
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()  # it ends what it has started
        for process in self._processes:
            process.wait()

    def run(self, order: Order, cores: Sequence[int]) -> Result:
        text = json.dumps({"order": dataclasses.asdict(order), "cores": list(cores)})
        command = [sys.executable, "-m", "benchmarks.programs.p14_run", text]
        process = subprocess.Popen(command, env=child_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        output, _ = process.communicate()
        self._processes.remove(process)
        if process.returncode != 0:
            raise SmolclusterError(f"{order.name} on {order.workers} workers ended with {process.returncode}")
        return dict(json.loads(output.splitlines()[-1]))
