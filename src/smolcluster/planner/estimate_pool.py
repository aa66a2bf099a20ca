"""Estimate memory in parallel, in this process and a few children.

    parent -> child   a line with the configuration, then a line for each estimate: a choice, a rank, the ways
    child -> parent   a line for each: the estimate, or the error

Lines are JSON. A child exits at the end of its input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smolcluster.compute.device import choose_device
from smolcluster.compute.memory_tracker import MemoryUse, Peak
from smolcluster.config.schema import Config, StrategyConfig
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.planner.candidates import ALONE, Choice
from smolcluster.planner.forecast import EstimateRank, Forecast, Workload, estimate_rank, forecast
from smolcluster.planner.memory_estimate import Activations, CannotEstimate, MemoryEstimate
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.find import find_task

log = logging.getLogger(__name__)


FEW = 3  # fewer choices are estimated in this process in less time than a child needs to start


def forecast_all(
    workload: Workload,
    requested: Sequence[Choice],
    ways: Sequence[Activations],
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
    processes: int | None = None,
) -> list[Forecast]:
    """Return the forecasts of all choices, in order. `on_progress` gets a finished label and two counts: finished, all."""
    num = min(processes or os.cpu_count() or 1, len(requested), 8)
    done = 0
    lock = threading.Lock()
    alone: list[MemoryEstimate] = []  # of a single worker, which several choices need
    alone_lock = threading.Lock()
    idle: queue.SimpleQueue[EstimateRank] = queue.SimpleQueue()

    def one(choice: Choice, estimate: EstimateRank | None = None) -> Forecast:
        nonlocal done
        made = forecast(workload, choice, ways=ways, estimate=estimate)
        with lock:
            done += 1
            if on_progress is not None:
                on_progress(choice.label, done, len(requested))
        return made

    def once(estimate: EstimateRank, choice: Choice, rank: int, some: Sequence[Activations]) -> MemoryEstimate:
        if choice != ALONE:
            return estimate(choice, rank, some)
        with alone_lock:
            if not alone:
                alone.append(estimate(choice, rank, some))
            return alone[0]

    def on_idle(choice: Choice) -> Forecast:
        estimate = idle.get()
        try:
            return one(choice, functools.partial(once, estimate))
        except SmolclusterError:
            raise
        except Exception as error:  # a child that died or sent an invalid response
            log.debug("a memory estimate failed", exc_info=error)
            raise SmolclusterError(f"a memory estimate failed: {type(error).__name__}: {error}") from error
        finally:
            idle.put(estimate)

    if num == 1 or len(requested) < FEW:
        return [one(choice) for choice in requested]
    for choice in requested:  # import before threads start: two cannot import some of torch's modules at once
        with contextlib.suppress(UserError):  # the forecast reports it
            section = StrategyConfig.model_validate({}).with_options(choice.options, name=choice.strategy)
            find_strategy(choice.strategy, choice.plane, read_options(section, plane=choice.plane)[0])
    with ThreadPoolExecutor(num) as pool, contextlib.ExitStack() as children:
        for estimate in [children.enter_context(_child(workload)) for _ in range(num - 1)]:
            idle.put(estimate)
        idle.put(functools.partial(estimate_rank, workload))
        return list(pool.map(on_idle, requested))


@contextlib.contextmanager
def _child(workload: Workload) -> Iterator[EstimateRank]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "smolcluster.planner.estimate_pool"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    requests, responses, errors = process.stdin, process.stdout, process.stderr

    def estimate(choice: Choice, rank: int, ways: Sequence[Activations]) -> MemoryEstimate:
        _write(requests, {"choice": dataclasses.asdict(choice), "rank": rank, "ways": list(ways)})
        line = responses.readline()
        if not line:
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise SmolclusterError(f"a memory estimate ended without a result: {last[0]}")
        response = json.loads(line)
        if "user" in response:
            raise UserError(response["user"])
        if "cannot" in response:
            raise CannotEstimate(response["cannot"])
        return from_plain(response)

    try:
        with contextlib.suppress(BrokenPipeError):
            _write(requests, {"config": workload.config.model_dump(mode="json"), "ranks": len(workload.nodes)})
        yield estimate
    finally:
        requests.close()
        process.kill()
        process.wait()
        responses.close()
        errors.close()


def _write(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def to_plain(seen: MemoryEstimate) -> dict[str, Any]:
    ways = [[list(way), dataclasses.asdict(peak)] for way, peak in seen.ways.items()]
    return {"start": seen.start, "states": dataclasses.asdict(seen.states), "ways": ways}


def from_plain(plain: dict[str, Any]) -> MemoryEstimate:
    ways = {
        Activations(*map(bool, way)): Peak(
            at_peak=MemoryUse(**peak["at_peak"]), of_each_kind=MemoryUse(**peak["of_each_kind"])
        )
        for way, peak in plain["ways"]
    }
    return MemoryEstimate(start=int(plain["start"]), states=MemoryUse(**plain["states"]), ways=ways)


def main() -> None:
    """Run a child process."""
    responses = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a task may print; standard output is for responses
    requests = sys.stdin.buffer
    first = json.loads(requests.readline())
    config = Config.model_validate(first["config"])
    device = choose_device(config.training.device)
    workload = Workload.open(config, find_task(config), num_ranks=first["ranks"], device=device)
    for line in requests:
        request = json.loads(line)
        ways = [Activations(*way) for way in request["ways"]]
        try:
            response = to_plain(estimate_rank(workload, Choice(**request["choice"]), request["rank"], ways))
        except UserError as error:
            response = {"user": str(error)}
        except CannotEstimate as error:
            response = {"cannot": str(error)}
        _write(responses, response)


if __name__ == "__main__":
    main()
