"""`inner_steps: auto`: machines of unlike speed take as many steps in a round as each has time for."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.test_diloco import assert_close, weights
from tests.faults.elastic_history import Lines, assert_sound, commits, lines_of, wait_for_counted, wait_for_next_step
from tests.tasks import Double
from tests.world import ElasticWorld, run_elastic_world
from torch import Tensor

from smolcluster.compute.optim import warmup_cosine
from smolcluster.compute.rng import seed_everything
from smolcluster.config import load_config, resolve
from smolcluster.config.options import DiLoCoOptions
from smolcluster.data.sampler import Sampler
from smolcluster.engine.checks import check_balance
from smolcluster.engine.elastic.adopted_config import adopt
from smolcluster.errors import UserError
from smolcluster.launch.join.worker import worker_spec
from smolcluster.parallel.placement import Node
from smolcluster.strategies.diloco import DiLoCo
from smolcluster.strategies.registry import read_options

SEED, RATE, BATCH, STEPS = 5, 0.01, 2, 14
CONFIG: dict[str, Any] = {
    "training.steps": STEPS,
    "training.seed": SEED,
    "training.learning_rate": RATE,
    "training.weight_decay": 0.0,
    "training.grad_clip_norm": 0.0,
    "training.batch_size": BATCH,
    "lr_schedule.warmup_iters": 4,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 6,
    "cluster.plane": "elastic",
    "strategy.inner_steps": "auto",
}


def train(run_dir: Path, overrides: dict[str, Any] | None = None, *, workers: int = 2, **world: Any) -> ElasticWorld:
    return run_elastic_world(workers, run_dir, CONFIG | (overrides or {}), strategy="diloco", task="Unlike", **world)


def steps_of(lines: Lines) -> list[dict[int, int]]:
    """The steps of each rank in each round."""
    return [{part["rank"]: part["samples"] // BATCH for part in line["contributors"]} for line in commits(lines)]


def simulated(rounds: list[tuple[int, list[int]]]) -> dict[str, Tensor]:
    """One model for each worker, in turn. `rounds`: the run's steps, and those of each worker."""
    task = Double(config=None)  # type: ignore[arg-type]
    seed_everything(SEED, "weights", device=torch.device("cpu"))
    theta = task.model()
    count, position, first = len(rounds[0][1]), 0, 0
    models = [copy.deepcopy(theta) for _ in range(count)]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0) for model in models]
    outer = torch.optim.SGD(theta.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    x, y = task.train_data()
    sampler = Sampler(len(x), seed=SEED)
    rate_of = warmup_cosine(peak=RATE, floor=RATE / 10, warmup=4, steps=STEPS)
    for steps, own in rounds:
        for parameter in theta.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for model, optimizer, taken in zip(models, inner, own, strict=True):
            model.load_state_dict(theta.state_dict())
            for j in range(taken):
                passed = j * (steps - 1) // (taken - 1) if taken > 1 else steps - 1
                optimizer.param_groups[0]["lr"] = rate_of(first + passed)
                read = torch.from_numpy(sampler.indices(position, BATCH))
                position += BATCH
                optimizer.zero_grad()
                task.loss(model, (x[read], y[read])).backward()
                optimizer.step()
            for common, mine in zip(theta.parameters(), model.parameters(), strict=True):
                assert common.grad is not None
                common.grad += (common.detach() - mine.detach()) * taken / sum(own)
        outer.step()
        first += steps
    return dict(theta.state_dict())


def test_unequal_steps_are_those_of_a_loop(tmp_path: Path) -> None:
    """Each trains on samples of its own, at the learning rate of the run's step, and counts by its samples."""
    world = train(tmp_path, environ={"TIMES": "1,3"})
    assert_sound(world, steps=STEPS)
    expected = [(6, [12, 4]), (6, [12, 4]), (2, [4, 1])]  # the median is 2
    assert steps_of(lines_of(world)) == [dict(enumerate(own)) for _, own in expected]
    assert world.summary["samples"] == BATCH * sum(sum(own) for _, own in expected)
    assert_close(weights(world, STEPS), simulated(expected))


def test_machines_that_are_alike_train_as_with_a_number(tmp_path: Path) -> None:
    alike = train(tmp_path / "auto", environ={"TIMES": "1,1.2"})
    number = train(tmp_path / "number", {"strategy.inner_steps": 6})
    assert steps_of(lines_of(alike)) == [{0: 6, 1: 6}, {0: 6, 1: 6}, {0: 2, 1: 2}]
    assert alike.summary["weights_sha256"] == number.summary["weights_sha256"]


@pytest.mark.usual(when=lambda codec: codec == "int8")
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_resumed_to_the_bit(tmp_path: Path, codec: str) -> None:
    """In the run's directory, where each worker finds its moments and error feedback."""
    environ, overrides = {"TIMES": "1,3"}, {"strategy.codec": codec}
    whole = train(tmp_path, overrides, environ=environ)
    again = train(tmp_path, overrides, environ=environ, resume=tmp_path / "checkpoints" / "step-00000006")
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_slow_machine_takes_fewer_steps(tmp_path: Path) -> None:
    """By the clock. After every round all have the same weights, and no sample is lost or counted twice."""
    told = tmp_path / "weights"
    told.mkdir()
    environ = {"REST": "0.05,0.05,0.2", "WEIGHTS": str(told)}
    world = train(tmp_path / "run", {"training.steps": 30}, workers=3, environ=environ)
    assert_sound(world, steps=30)
    first, *later = steps_of(lines_of(world))
    assert first == {0: 6, 1: 6, 2: 6}, "no time was known"
    assert sum(own[2] for own in later) < 0.75 * sum(own[0] for own in later), later
    assert world.summary["samples"] == BATCH * sum(sum(own.values()) for own in (first, *later))
    one, *others = [(told / str(rank)).read_text().splitlines() for rank in range(3)]
    assert [int(line.split()[0]) for line in one] == [6, 12, 18, 24, 30]
    assert others == [one, one]


@pytest.mark.slow  # usually: tests/unit/engine/test_local_rounds.py
def test_when_all_become_slower_rounds_are_short_until_that_is_the_usual_time(tmp_path: Path) -> None:
    """A deadline that nobody meets: the rounds count with the steps that were done."""
    environ = {"REST": "0.02,0.02", "LATER": "13", "RESTS": "10"}
    world = train(tmp_path, {"training.steps": 48}, environ=environ)
    assert_sound(world, steps=48)
    longest = [max(own.values()) for own in steps_of(lines_of(world))]
    short = [number for number, steps in enumerate(longest) if steps < 6]
    assert short, "the deadline was met"
    assert max(longest[short[0] :]) >= 6, longest
    assert world.summary["samples"] == BATCH * sum(sum(own.values()) for own in steps_of(lines_of(world)))


@pytest.mark.slow
def test_unlike_machines_come_and_die_and_come_back(tmp_path: Path) -> None:
    """The slow one, then the coordinator, which asks all for their times: no sample is lost or counted twice."""
    done = tmp_path / "done"

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(12)
        killed = time.time()
        world.kill(2)
        wait_for_next_step(world, after=killed)
        started = time.time()
        world.start(2)
        wait_for_counted(world, 2, after=started)
        restarted = time.time()
        world.restart("server")
        for rank in range(3):
            wait_for_counted(world, rank, after=restarted)
        done.touch()

    environ = {"REST": "0.3,0.3,1.2", "UNTIL": str(done)}
    overrides = {"training.steps": 600, "training.checkpoint_steps": 0}
    world = train(tmp_path / "run", overrides, workers=3, environ=environ, script=script)
    assert_sound(world, steps=600)
    assert world.summary["samples"] == BATCH * sum(sum(own.values()) for own in steps_of(lines_of(world)))


# What does not fit


def test_it_is_refused_where_it_cannot_be_with_what_to_do() -> None:
    options = DiLoCoOptions(inner_steps="AUTO")
    assert (options.steps_per_round, options.equal_time) == (30, True)
    (said,) = DiLoCo.plan(options, [Node(name="a"), Node(name="b")], None).refusals
    assert said.startswith("strategy.inner_steps auto is for cluster.plane elastic")
    assert said.endswith("; set it to 30")
    assert DiLoCo.plan(options, [Node(name="a", stays=False)], None).refusals == ()
    with pytest.raises(ValueError, match=r"set inner_steps to a number, such as 30"):
        DiLoCoOptions(inner_steps="auto", overlap=2)
    with pytest.raises(ValueError, match=r"strategy\.fragments is 4, which must divide strategy\.inner_steps, 30"):
        DiLoCoOptions(inner_steps="auto", fragments=4)


@pytest.mark.parametrize("batch_size", ["auto", {"a": 2, "b": "auto"}])
def test_samples_and_steps_by_speed_are_one_too_many(batch_size: object) -> None:
    overrides = {"strategy.name": "diloco", "strategy.inner_steps": "auto", "cluster.workers": ["a", "b"]}
    config = resolve(load_config([], overrides={**overrides, "cluster.batch_size": batch_size}))
    with pytest.raises(UserError, match=r"leave cluster\.batch_size out, or set strategy\.inner_steps to a number"):
        check_balance(config, read_options(config.strategy, plane="elastic")[0])
    config = resolve(load_config([], overrides={**overrides, "cluster.batch_size": {"a": 2}}))
    check_balance(config, read_options(config.strategy, plane="elastic")[0])


@pytest.mark.parametrize("steps", [0, -1, 2.5, "often"])
def test_other_numbers_of_steps_are_refused(steps: object) -> None:
    with pytest.raises(UserError, match=r"strategy\.inner_steps = .* must be a whole number, at least 1, or auto"):
        load_config([], overrides={"strategy.name": "diloco", "strategy.inner_steps": steps})


@pytest.mark.parametrize("own", [30, "auto"])
def test_a_worker_whose_rounds_have_another_length_does_not_join(own: object) -> None:
    overrides = {"strategy.name": "diloco", "cluster.plane": "elastic"}
    theirs = resolve(load_config([], overrides=overrides)).model_dump(mode="json")
    mine = resolve(load_config([], overrides={**overrides, "strategy.inner_steps": own}))
    with pytest.raises(
        UserError, match=f"strategy.inner_steps is {own!r} on rank 1 and not set on the server at here:1"
    ):
        adopt(theirs, own=mine, given={}, rank=1, server="here:1")
    with pytest.raises(UserError, match=r"strategy\.inner_steps is set by the server, which sends it to this worker"):
        worker_spec(1, "a", server="here:1", overrides=[f"strategy.inner_steps={own}"])
