"""Memory estimates in parallel: this process and a few others each take the next rank.

    parent -> child   a line: the configuration, then one line for each rank: a choice, a rank, the ways
    child -> parent   a line each: what was seen, or why it cannot be

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
from smolcluster.compute.ledger import Held, Peak
from smolcluster.config.schema import Config, StrategyConfig
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.planner.candidates import ALONE, Choice
from smolcluster.planner.forecast import Ask, Forecast, Subject, forecast, rehearse_rank
from smolcluster.planner.memory_estimate import Activations, CannotEstimate, MemoryEstimate
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.find import find_task

log = logging.getLogger(__name__)


FEW = 3  # estimates: so few are done here before a process has started


def forecast_all(
    subject: Subject,
    asked: Sequence[Choice],
    ways: Sequence[Activations],
    *,
    told: Callable[[str, int, int], None] | None = None,
    processes: int | None = None,
) -> list[Forecast]:
    """A forecast of every choice, in their order. `told` receives the label of each that is done, and how far it is."""
    num = min(processes or os.cpu_count() or 1, len(asked), 8)
    done = 0
    lock = threading.Lock()
    alone: list[MemoryEstimate] = []  # one worker without others, which several choices ask for
    waits = threading.Lock()
    idle: queue.SimpleQueue[Ask] = queue.SimpleQueue()

    def one(choice: Choice, ask: Ask | None = None) -> Forecast:
        nonlocal done
        made = forecast(subject, choice, ways=ways, ask=ask)
        with lock:
            done += 1
            if told is not None:
                told(choice.label, done, len(asked))
        return made

    def once(ask: Ask, choice: Choice, rank: int, some: Sequence[Activations]) -> MemoryEstimate:
        if choice != ALONE:
            return ask(choice, rank, some)
        with waits:
            if not alone:
                alone.append(ask(choice, rank, some))
            return alone[0]

    def on_idle(choice: Choice) -> Forecast:
        ask = idle.get()
        try:
            return one(choice, functools.partial(once, ask))
        except SmolclusterError:
            raise
        except Exception as error:  # a child that died or sent an invalid answer
            log.debug("a memory estimate failed", exc_info=error)
            raise SmolclusterError(f"a memory estimate failed: {type(error).__name__}: {error}") from error
        finally:
            idle.put(ask)

    if num == 1 or len(asked) < FEW:
        return [one(choice) for choice in asked]
    for choice in asked:  # here: some of torch's modules cannot be imported by two threads at once
        with contextlib.suppress(UserError):  # which a forecast tells of
            section = StrategyConfig.model_validate({}).with_options(choice.options, name=choice.strategy)
            find_strategy(choice.strategy, choice.plane, read_options(section, plane=choice.plane)[0])
    with ThreadPoolExecutor(num) as pool, contextlib.ExitStack() as children:
        # All of them start before this process has threads: it has imported torch already.
        for ask in [children.enter_context(_child(subject)) for _ in range(num - 1)]:
            idle.put(ask)
        idle.put(functools.partial(rehearse_rank, subject))
        return list(pool.map(on_idle, asked))


@contextlib.contextmanager
def _child(subject: Subject) -> Iterator[Ask]:
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
    tell, hear, words = process.stdin, process.stdout, process.stderr

    def ask(choice: Choice, rank: int, ways: Sequence[Activations]) -> MemoryEstimate:
        _write(tell, {"choice": dataclasses.asdict(choice), "rank": rank, "ways": list(ways)})
        line = hear.readline()
        if not line:
            said = words.read().decode(errors="replace").strip().splitlines()
            raise SmolclusterError(f"a memory estimate ended without an answer: {said[-1] if said else 'no word'}")
        answer = json.loads(line)
        if "user" in answer:
            raise UserError(answer["user"])
        if "cannot" in answer:
            raise CannotEstimate(answer["cannot"])
        return from_plain(answer)

    try:
        with contextlib.suppress(BrokenPipeError):
            _write(tell, {"config": subject.config.model_dump(mode="json"), "ranks": len(subject.nodes)})
        yield ask
    finally:
        tell.close()
        process.kill()  # nothing it does is worth waiting for
        process.wait()
        hear.close()
        words.close()


def _write(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def to_plain(seen: MemoryEstimate) -> dict[str, Any]:
    """Return a value as JSON."""
    ways = [[list(way), dataclasses.asdict(peak)] for way, peak in seen.ways.items()]
    return {"start": seen.start, "states": dataclasses.asdict(seen.states), "ways": ways}


def from_plain(said: dict[str, Any]) -> MemoryEstimate:
    ways = {
        Activations(*map(bool, way)): Peak(at=Held(**peak["at"]), each=Held(**peak["each"]))
        for way, peak in said["ways"]
    }
    return MemoryEstimate(start=int(said["start"]), states=Held(**said["states"]), ways=ways)


def main() -> None:
    """Run a child process."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a task may print; standard output is for answers
    orders = sys.stdin.buffer
    first = json.loads(orders.readline())
    config = Config.model_validate(first["config"])
    device = choose_device(config.training.device)
    subject = Subject.open(config, find_task(config), num_ranks=first["ranks"], device=device)
    for line in orders:
        order = json.loads(line)
        ways = [Activations(*way) for way in order["ways"]]
        try:
            answer = to_plain(rehearse_rank(subject, Choice(**order["choice"]), order["rank"], ways))
        except UserError as error:
            answer = {"user": str(error)}
        except CannotEstimate as error:
            answer = {"cannot": str(error)}
        _write(answers, answer)


if __name__ == "__main__":
    main()
