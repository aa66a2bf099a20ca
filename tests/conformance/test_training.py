"""What every strategy must keep to while it trains: `single` is its reference, a kill costs nothing that was saved, any other's
checkpoint is its own, and neither evaluating nor saving nor logging changes anything.

A tiny GPT on the embedded text, over real processes and sockets; gradients are accumulated, clipped and travel in many small
buckets. Against `single` in fp64: `Case.tolerance` says how far a strategy may be from it, and why. Where runs must end with
the same bits, in fp32 with dropout.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import Case, all_cases, assert_good_end, over
from tests.world import ElasticWorld, World, run_world

from smolcluster.config.strategies import record_of
from smolcluster.engine.checkpoint.snapshot import Snapshot, read_checkpoint
from smolcluster.observe.events import CheckpointSaved, Event

CASES = all_cases()
STEPS, SAVED = 4, 2
BATCH, PARTS = 12, 2  # samples of all workers in one part of a step, and parts
CONFIG: dict[str, Any] = {
    "model.model_dim": 32,
    "model.num_heads": 4,
    "model.max_seq_len": 16,
    "model.ff_dim": 64,
    "training.steps": STEPS,
    "training.learning_rate": 0.01,
    "training.weight_decay": 0.1,
    "training.grad_clip_norm": 0.5,
    "training.eval_steps": SAVED,
    "training.eval_samples": 24,
    "training.checkpoint_steps": SAVED,
    "training.seed": 3,
    "lr_schedule.warmup_iters": 2,
}
BUCKET_MB = 0.005

Single = Callable[[int], World]
Trained = Callable[[Case, int], World | ElasticWorld]
NEVER = {"training.eval_steps": 0, "training.checkpoint_steps": 0, "logging.log_interval": 1000}


def layers(case: Case) -> int:
    """Two, or one for each stage of a pipeline, and no more: each of them takes time."""
    stages = 1 if case.options.get("schedule", "1f1b") in ("1f1b", "gpipe", "sequential") else 2  # on each rank
    return max(2, stages * case.workers) if case.strategy == "pipeline" else 2


def train(
    case: Case, run_dir: Path, overrides: dict[str, Any] | None = None, *, depth: int = 0, **world: Any
) -> World | ElasticWorld:
    parts = {"training.batch_size": BATCH // case.readers, "training.grad_accumulation": PARTS}
    parts["model.num_layers"] = depth or layers(case)
    config = CONFIG | parts | case.overrides(bucket_mb=BUCKET_MB) | (overrides or {})
    return case.train(run_dir, config, **{"task": "DoubleGPT", **world})


def random(case: Case) -> dict[str, Any]:
    """In fp32 with dropout, which follows from the step. Not where a worker counts its own steps, anew when it is started."""
    return {"overrides": {} if record_of(case.strategy).own_steps else {"model.dropout": 0.2}, "task": None}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    """On one process, each step in one piece; the step after SAVED is kept, and the last. By the number of layers."""

    @functools.cache
    def run(depth: int) -> World:
        overrides = {
            "training.batch_size": BATCH * PARTS,
            "training.checkpoint_steps": SAVED + 1,
            "training.eval_steps": STEPS,
        }
        config = CONFIG | overrides | {"model.num_layers": depth}
        return run_world(1, tmp_path_factory.mktemp("one"), config, task="DoubleGPT", strategy="single")

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """From beginning to end, once for each case and number of layers."""

    @functools.cache
    def run(case: Case, depth: int) -> World | ElasticWorld:
        world = train(case, tmp_path_factory.mktemp("trained"), depth=depth)
        assert_good_end(world)
        return world

    return run


def saved(world: World | ElasticWorld, step: int = STEPS) -> Snapshot:
    return read_checkpoint(world.run_dir / "checkpoints" / f"step-{step:08d}")


def losses(world: World | ElasticWorld) -> dict[int, float]:
    """By step; a server tells the mean over a round, at its last step."""
    if isinstance(world, World):
        return dict(enumerate(world.global_losses(), start=1))
    return {row.step: row.loss for row in world.server.rows()}


def mean_losses(world: World, steps: Iterable[int]) -> dict[int, float]:
    """Over the steps up to each of these, from the one before it on."""
    told = losses(world)
    return {
        last: statistics.fmean(told[step] for step in range(before + 1, last + 1))
        for before, last in itertools.pairwise([0, *steps])
    }


def assert_close(found: Any, expected: Any, *, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance)


@pytest.mark.usual(when=lambda case: case.usual)
@over([case for case in CASES if case.equals_single])
def test_equals_single(single: Single, trained: Trained, case: Case) -> None:
    """At the same global batch: losses, weights, optimizer state and what the evaluation says."""
    world, one = trained(case, layers(case)), single(layers(case))
    # The loss that a server logs is an fp32 number.
    told = losses(world)
    assert list(told)[-1] == STEPS
    assert told == pytest.approx(
        mean_losses(one, told), rel=max(case.tolerance, 1e-6 if case.plane == "elastic" else 0.0)
    )
    assert_close(saved(world).weights, saved(one).weights, tolerance=case.tolerance)
    assert_close(saved(world).optimizer, saved(one).optimizer, tolerance=case.tolerance)
    assert world.summary["val_loss"] == pytest.approx(one.summary["val_loss"], rel=case.tolerance)
    assert world.summary["samples"] == STEPS * BATCH * PARTS


@pytest.mark.usual(when=lambda case: case.chosen)
@over(CASES)
def test_killed_and_resumed_is_bitwise_uninterrupted_and_unseen(tmp_path: Path, case: Case) -> None:
    """kill -9 of every process in the middle. What is left in the run's own directory leads to the weights of a run that is not
    killed, and that, unlike this one, neither evaluates nor saves every second step, and does not log every one."""
    free, run_dir = tmp_path / "free", tmp_path / "run"
    # A whole step after the one that is saved, and the batch that some strategies look at before the first.
    environ = {"HOLD_FROM": str((SAVED + 1) * PARTS + 1), "HOLD_UNTIL": str(free)}
    fired = []

    def kill_ranks(rank: int, event: Event, processes: Sequence[BaseProcess]) -> None:
        if isinstance(event, CheckpointSaved):
            fired.append(event.step)
            for process in processes:
                process.kill()

    def kill_all(world: ElasticWorld) -> None:
        world.wait(lambda: any(isinstance(e, CheckpointSaved) for e in world.server.events), what="a checkpoint")
        fired.append(SAVED)
        for who in ("server", *range(case.workers)):
            world.kill(who)

    faults: dict[str, Any] = {"on_event": kill_ranks} if case.plane == "mesh" else {"script": kill_all}
    held = random(case) | {"task": "HeldGPT", "environ": environ}
    train(case, run_dir, **held, **faults)
    assert fired == [SAVED], "nobody was killed"
    free.touch()
    resumed = train(case, run_dir, **held, resume=run_dir / "checkpoints")
    assert_good_end(resumed)
    assert resumed.summary["steps"] == STEPS
    unseen = train(case, tmp_path / "unseen", random(case)["overrides"] | NEVER, task=None)
    assert_good_end(unseen)
    assert resumed.summary["weights_sha256"] == unseen.summary["weights_sha256"]


RING = [case for case in CASES if case.usual and case.equals_single]


@pytest.mark.usual(when=lambda case: case.chosen)
@over(RING)
def test_goes_on_from_another_strategys_checkpoint(
    single: Single, trained: Trained, tmp_path: Path, case: Case
) -> None:
    """Of the one before it in the table. After one step at a rate that changes no weight the weights are the loaded ones, to
    the bit; optimizer state, position in the samples and rate are those of `single`."""
    before = next(RING[at] for at in range(RING.index(case) - 1, -len(RING), -1) if RING[at].ends)
    depth = max(layers(before), layers(case))
    one, start, rate = single(depth), saved(trained(before, depth), SAVED), 1e-300
    changes = {"training.learning_rate": rate, "training.checkpoint_steps": SAVED + 1}
    source = trained(before, depth).run_dir / "checkpoints" / f"step-{SAVED:08d}"
    world = train(case, tmp_path, changes, depth=depth, resume=source)
    assert_good_end(world)
    after = min(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    ended = saved(world, after)  # a server saves after a round
    assert after == SAVED + 1 or {"local_steps", "inner_steps"} & case.options.keys(), "no checkpoint when it was due"
    assert ended.weights.keys() == start.weights.keys()
    assert [name for name in ended.weights if not torch.equal(ended.weights[name], start.weights[name])] == []
    if after == SAVED + 1:  # later gradients are of other weights
        assert_close(ended.optimizer, saved(one, after).optimizer, tolerance=max(case.tolerance, before.tolerance))
    assert ended.state["sampler"]["position"] == after * BATCH * PARTS
    row = (world.ranks[0] if isinstance(world, World) else world.server).rows()[0]
    assert row.lr / rate == pytest.approx(one.ranks[0].rows()[row.step - 1].lr / CONFIG["training.learning_rate"])
