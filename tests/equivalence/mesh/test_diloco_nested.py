"""diloco whose workers are sites of several ranks: what it computes is known from diloco and from fsdp alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.test_diloco import CONFIG, assert_close, weights
from tests.world import TASKS, World, run_world
from torch import Tensor

from smolcluster.config import load_config, resolve
from smolcluster.config.options import DiLoCoOptions
from smolcluster.engine.checkpoint.store import read_checkpoint
from smolcluster.observe.events import Notice
from smolcluster.parallel.placement import Node, Shape
from smolcluster.planner.dry_run import describe_memory
from smolcluster.planner.forecast import Workload
from smolcluster.strategies.diloco import DiLoCo
from smolcluster.strategies.diloco_nested import NestedDiLoCo
from smolcluster.strategies.registry import find_strategy
from smolcluster.tasks.find import find_task

STEPS, H = 7, 3  # the last round is shorter
PLAIN: dict[str, Any] = CONFIG | {"cluster.workers": [], "cluster.batch_size": {}, "training.steps": STEPS}
NESTED = {"strategy.inner": "fsdp", "strategy.inner_size": 2, "strategy.inner_steps": H}


def train(size: int, run_dir: Path, overrides: dict[str, Any], *, strategy: str = "diloco", **world: Any) -> World:
    return run_world(size, run_dir, PLAIN | overrides, task="Double", strategy=strategy, **world)


def test_two_sites_are_two_workers_with_twice_the_batch(tmp_path: Path) -> None:
    """And a checkpoint in the middle of a round has theta."""
    saves = {"training.checkpoint_steps": 5}
    sites = train(4, tmp_path / "sites", NESTED | saves | {"training.batch_size": 2})
    workers = train(2, tmp_path / "workers", saves | {"strategy.inner_steps": H, "training.batch_size": 4})
    for step in (5, STEPS):
        assert_close(weights(sites, step), weights(workers, step))
    assert sites.summary["samples"] == workers.summary["samples"]


@pytest.mark.slow
def test_one_site_with_an_outer_step_of_one_is_fsdp(tmp_path: Path) -> None:
    still = {"strategy.inner_steps": 1, "strategy.outer_lr": 1.0, "strategy.outer_momentum": 0.0}
    site = train(2, tmp_path / "site", NESTED | still)
    assert_close(weights(site, STEPS), weights(train(2, tmp_path / "fsdp", {}, strategy="fsdp"), STEPS))


def test_one_site_alone_says_so(tmp_path: Path) -> None:
    site = train(2, tmp_path / "site", NESTED | {"training.steps": 1})
    said = [event.message for rank in site.ranks for event in rank.events if isinstance(event, Notice)]
    assert sum(text.startswith("all 2 workers are one site: nothing is exchanged") for text in said) == 1


@pytest.mark.usual(when=lambda options: "strategy.preset" in options)
@pytest.mark.parametrize("options", [{}, {"strategy.preset": "wan", "strategy.outer_momentum": 0.5}], ids=str)
def test_resumed_to_the_bit_in_the_middle_of_a_round(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each rank with its own shards. Those of the same index have the same outer momentum, and moments of their own."""
    overrides = NESTED | options
    whole = train(4, tmp_path / "whole", overrides | {"training.checkpoint_steps": 5})
    saved = whole.run_dir / "checkpoints" / "step-00000005"
    own = [of_rank(saved, rank) for rank in range(4)]
    outer = [name for name in own[0] if name.startswith("outer/")]
    assert outer
    for name in outer:
        assert all(own[rank][name].equal(own[rank + 2][name]) for rank in range(2))
    moments = [name for name in own[0] if name.startswith("optimizer/exp_avg/")]
    assert any(not own[0][name].equal(own[2][name]) for name in moments)
    again = train(4, tmp_path / "again", overrides, resume=saved)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def of_rank(checkpoint: Path, rank: int) -> dict[str, Tensor]:
    extra, prefix = read_checkpoint(checkpoint).extra, f"{rank}/"
    return {name.removeprefix(prefix): tensor for name, tensor in extra.items() if name.startswith(prefix)}


# What does not fit, and what it costs

FOUR = [Node(name=f"n{i}", machine=f"m{i // 2}") for i in range(4)]


def test_memory_is_estimated() -> None:
    overrides = {"strategy.name": "diloco", "strategy.codec": "int8", "task": f"{TASKS}:Double"}
    config = resolve(load_config([], overrides={**NESTED, **overrides, "cluster.num_workers": 4}))
    workload = Workload.open(config, find_task(config), num_ranks=4, device=torch.device("cpu"))
    line, _ = describe_memory(workload, "mesh")
    assert line.startswith("ranks 0-3: ")
    assert "not known" not in line


def test_what_does_not_fit_is_refused() -> None:
    nested = DiLoCoOptions(inner="fsdp", codec="fp32")
    assert find_strategy("diloco", "mesh", nested) is NestedDiLoCo
    assert find_strategy("diloco", "mesh", DiLoCoOptions()) is DiLoCo
    (said,) = find_strategy("diloco", "elastic", nested).plan(nested, [Node(name="n", stays=False)], None).refusals
    assert said == "strategy.inner: fsdp is for cluster.plane mesh; set it to single"
    (said,) = NestedDiLoCo.plan(DiLoCoOptions(inner="fsdp", inner_size=3), FOUR, None).refusals
    assert said == "strategy.inner_size = 3 does not divide 4 workers; try 1, 2, 4"
    (said,) = NestedDiLoCo.plan(nested, FOUR[:3], None).refusals
    assert "consecutive ranks are 2 on m0, 1 on m1; use the same number" in said
    for other in ({"fragments": 2}, {"overlap": 1}, {"mixing": 0.5}):
        with pytest.raises(ValueError, match=r"leave out strategy\.fragments"):
            DiLoCoOptions(inner="fsdp", inner_steps=4, **other)
    with pytest.raises(ValueError, match=r"needs a number as strategy\.inner_steps"):
        DiLoCoOptions(inner="fsdp", inner_steps="auto")
    with pytest.raises(ValueError, match="'single' or 'fsdp'"):
        DiLoCoOptions(inner="tensor")


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_rank_exchanges_its_shards(codec: str) -> None:
    """As a worker of diloco would, of half the model; and inside of the site as fsdp does."""
    shape = Shape(parameters=64 * 64, tensors=[(64, 64)])
    half = Shape(parameters=32 * 64, tensors=[(32, 64)])
    options = DiLoCoOptions(inner="fsdp", codec=codec, inner_steps=4)
    across = DiLoCo.exchanged(options, FOUR[::2], half).cost.bytes_sent
    for cost in NestedDiLoCo.plan(options, FOUR, shape).costs:
        assert cost.bytes_sent == 3 * 4 * 64 * 64 // 2 + across // 4
        assert cost.bytes_at_once == across
