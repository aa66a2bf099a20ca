"""A newcomer gets the state while the others train, however slow its link is.

A relay stands between the newcomer and the server. It lets through what a newcomer needs to be admitted, then so little that
the state does not come until the test says so. What happens meanwhile is read in the run's history.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.faults.elastic_history import assert_sound, changes, commits, lines_of, log_of, wait_for_history
from tests.relay import Relay
from tests.world import ElasticWorld, run_elastic_world

STEPS = 40
SETTINGS: dict[str, Any] = {
    "training.steps": STEPS,
    "training.batch_size": 8,
    "training.learning_rate": 0.001,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 0,
    "training.seed": 11,
    "cluster.num_workers": 2,
}
ELASTIC = {"cluster.plane": "elastic"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "syncps": ("syncps", {}),
    "edp": ("edp", {}),
    "allreduce": ("allreduce", ELASTIC),
    "allreduce-2": ("allreduce", ELASTIC | {"strategy.staleness_bound": 2}),
    "allreduce, int8": ("allreduce", ELASTIC | {"strategy.codec": "int8"}),
    "fsdp, stage 0": ("fsdp", ELASTIC | {"strategy.fsdp_stage": 0}),
}
FREE_BYTES = 256 << 10  # the handshake and the plan, and no state
TRICKLE_BYTES, TRICKLE_S = 4096, 0.05  # less than a thousandth of the state in a step: the link lives
FOLLOWS = "receives the state while the others train"
NEWCOMER = 2


class Trickle(Relay):
    """What comes from the server comes only drop by drop, until it is opened."""

    def __init__(self) -> None:
        super().__init__(pace=self._held_up)
        self.withheld_at: float | None = None  # when the state began to be held up
        self.opened = threading.Event()

    def _held_up(self, passed: int) -> int:
        if passed <= FREE_BYTES or self.opened.is_set():
            return 64 << 10
        self.withheld_at = self.withheld_at or time.time()
        self.opened.wait(TRICKLE_S)
        return TRICKLE_BYTES

    def via(self, rank: int, server: str) -> str:
        if rank != NEWCOMER:
            return server
        self.target = server
        return self.address


@pytest.fixture
def relay() -> Iterator[Trickle]:
    with Trickle() as relay:
        yield relay


def run(kind: str, run_dir: Path, relay: Trickle, **options: Any) -> ElasticWorld:
    strategy, chosen = KINDS[kind]
    options = {"slow": dict.fromkeys(range(3), 0.2), "start": [0, 1]} | options
    return run_elastic_world(
        3, run_dir, SETTINGS | chosen, task="WideDigits", strategy=strategy, via=relay.via, **options
    )


def hold_up(world: ElasticWorld, relay: Trickle) -> None:
    """Start the newcomer; return when its state is on the way and is held up."""
    world.wait_for_step(3)
    world.start(NEWCOMER)
    world.wait(lambda: relay.withheld_at is not None, what="the state to be on its way")


def announced(world: ElasticWorld) -> float:
    """When the server began with the state: the newcomer follows, or is a member that has not read it."""
    rows = [json.loads(line) for line in log_of(world).splitlines()]
    times = [datetime.fromisoformat(row["time"]).timestamp() for row in rows if row["message"].endswith(FOLLOWS)]
    return min([*times, *(float(line["time"]) for line in changes(lines_of(world), "joined", NEWCOMER))])


def wait_for_commits(world: ElasticWorld, count: int, *, after: float) -> None:
    what = f"{count} steps while a newcomer gets its state"
    wait_for_history(
        world, lambda lines: sum(line["time"] > after for line in commits(lines)) >= count, what=what, timeout_s=90.0
    )


def counts(line: dict[str, Any]) -> bool:
    return any(part["rank"] == NEWCOMER for part in line["contributors"])


def wait_until_it_counts(world: ElasticWorld) -> None:
    wait_for_history(world, lambda lines: any(map(counts, commits(lines))), what="a gradient of the newcomer")


@pytest.mark.usual(when=lambda kind: kind in ("syncps", "allreduce, int8", "fsdp, stage 0"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_train_while_a_newcomer_gets_its_state(tmp_path: Path, relay: Trickle, kind: str) -> None:
    def script(world: ElasticWorld) -> None:
        hold_up(world, relay)
        wait_for_commits(world, 3, after=announced(world))
        assert not any(map(counts, commits(lines_of(world))))
        relay.opened.set()
        wait_until_it_counts(world)

    world = run(kind, tmp_path, relay, script=script)
    assert_sound(world, steps=STEPS)
    if KINDS[kind][0] not in ("syncps", "edp"):
        assert world.summary["replicas_agree"] is True
        [joined] = changes(lines_of(world), "joined", NEWCOMER)
        before = [line for line in commits(lines_of(world)) if announced(world) < line["time"] < joined["time"]]
        assert len(before) >= 3, "it was a member before it had the state"


def test_the_others_wait_for_one_that_is_too_slow_to_catch_up(tmp_path: Path, relay: Trickle) -> None:
    """Results would pile up for it: after some of them training pauses, and says so."""
    said = "receives the state more slowly than the others train: they wait for it"

    def script(world: ElasticWorld) -> None:
        hold_up(world, relay)
        world.wait(lambda: any(said in notice for notice in world.server.notices()), what="the warning")
        assert changes(lines_of(world), "joined", NEWCOMER) == []
        relay.opened.set()
        wait_until_it_counts(world)

    world = run("allreduce", tmp_path, relay, script=script)
    assert_sound(world, steps=STEPS)
    assert world.summary["replicas_agree"] is True


@pytest.mark.parametrize("killed", [0, NEWCOMER], ids=["a member", "the newcomer"])
def test_whoever_dies_meanwhile_costs_the_others_nothing_more(tmp_path: Path, relay: Trickle, killed: int) -> None:
    """Rank 0 is the one that the state came from."""

    def script(world: ElasticWorld) -> None:
        hold_up(world, relay)
        world.kill(killed)
        if killed == NEWCOMER:
            wait_for_commits(world, 10, after=time.time())
            world.start(NEWCOMER)
        relay.opened.set()
        wait_until_it_counts(world)

    world = run("allreduce", tmp_path, relay, script=script)
    assert_sound(world, steps=STEPS)
    assert world.summary["replicas_agree"] is True
