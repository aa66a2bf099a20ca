"""Eager updates are the paper's: in the mean of the round before, a worker puts its newest contribution in place of its old."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.test_diloco import (
    COUNTS,
    WAN,
    assert_close,
    leased,
    local_models,
    mesh_reads,
    train,
    weights,
)
from tests.faults.elastic_history import assert_sound
from tests.world import ElasticWorld
from torch import Tensor

from smolcluster.config.options import DiLoCoOptions
from smolcluster.engine.checkpoint.snapshot import read_checkpoint

STEPS, H, SEEN = 11, 4, 9  # the step whose weights of each worker are looked at
LR, MOMENTUM = 0.7, 0.9
EAGER = {"strategy.inner_steps": H, "strategy.eager": True, "training.steps": STEPS}


def simulated(
    *, fragments: int, shares: Sequence[float], reads: Sequence[Sequence[Any]] | None = None
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Theta at the end, and the weights of each worker after step SEEN. Each worker has weights and a velocity of its own.

    `shares`: what each worker takes its share of the mean to be.
    """
    task, models, inner, (x, y) = local_models()
    reads = mesh_reads(STEPS) if reads is None else reads
    theta = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(p) for p in theta]
    starts = [[p.clone() for p in theta] for _ in models]
    velocities = [[torch.zeros_like(p) for p in theta] for _ in models]
    old = [[torch.zeros_like(p) for p in theta] for _ in models]
    means = [torch.zeros_like(p) for p in theta]
    seen: list[dict[str, Tensor]] = []
    for t in range(1, STEPS + 1):
        for model, optimizer, mine in zip(models, inner, reads, strict=True):
            read = torch.from_numpy(mine[t - 1])
            optimizer.zero_grad()
            task.loss(model, (x[read], y[read])).backward()
            optimizer.step()
        for place in range(len(theta)):
            turn = place // 2 % fragments  # a weight and a bias make a layer
            if t < STEPS and t % H != H * turn // fragments:
                continue
            now = [starts[m][place] - list(model.parameters())[place].detach() for m, model in enumerate(models)]
            arrived = [means[place]]
            means[place] = sum(c * delta for c, delta in zip(COUNTS, now, strict=True)) / sum(COUNTS)
            for mean in arrived if t < STEPS else [*arrived, means[place]]:
                velocity[place] = MOMENTUM * velocity[place] + mean
                theta[place] = theta[place] - LR * (mean + MOMENTUM * velocity[place])
            for m, model in enumerate(models):
                mixed = arrived[0] - shares[m] * old[m][place] + shares[m] * now[m]
                velocities[m][place] = MOMENTUM * velocities[m][place] + mixed
                starts[m][place] = starts[m][place] - LR * (mixed + MOMENTUM * velocities[m][place])
                list(model.parameters())[place].data.copy_(starts[m][place])
                old[m][place] = now[m]
        if t == SEEN:
            seen = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]
    return dict(zip(models[0].state_dict(), theta, strict=True)), seen


@pytest.mark.usual(when=lambda fragments, **_: fragments == 2)
@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_eager_updates_are_those_of_a_loop(tmp_path: Path, plane: str, fragments: int) -> None:
    """On the elastic plane a worker does not know yet what the others weigh: its share is that of one among equals."""
    world = train(plane, tmp_path, EAGER | {"strategy.fragments": fragments, "training.checkpoint_steps": SEEN})
    if isinstance(world, ElasticWorld):
        assert_sound(world, steps=STEPS)
        assert world.summary["replicas_agree"] is True
        theta, _ = simulated(fragments=fragments, shares=[1 / len(COUNTS)] * len(COUNTS), reads=leased(world))
    else:
        theta, seen = simulated(fragments=fragments, shares=[count / sum(COUNTS) for count in COUNTS])
        saved = read_checkpoint(world.run_dir / "checkpoints" / f"step-{SEEN:08d}")
        for rank, expected in enumerate(seen):
            assert_close({name: saved.extra[f"{rank}/weights/{name}"] for name in expected}, expected)
    assert_close(weights(world, STEPS), theta)


@pytest.mark.usual(when=lambda plane, options: (plane == "mesh") == (options == {}))
@pytest.mark.parametrize("options", [{}, WAN], ids=["dense", "wan"])
@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_eager_updates_are_resumed_to_the_bit(tmp_path: Path, plane: str, options: dict[str, Any]) -> None:
    """With the result in flight, and what each worker has used of it already."""
    step = 5 if plane == "mesh" else 6
    overrides = EAGER | options | {"strategy.fragments": 2, "training.checkpoint_steps": step}
    whole = train(plane, tmp_path / "whole", overrides)
    saved = whole.run_dir / "checkpoints" / f"step-{step:08d}"
    # On the elastic plane workers have their own part in the run's directory.
    run_dir = whole.run_dir if plane == "elastic" else tmp_path / "again"
    again = train(plane, run_dir, overrides, resume=saved)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_what_does_not_go_with_eager_updates() -> None:
    assert DiLoCoOptions(eager=True, inner_steps=5).streaming.overlap == 5
    assert DiLoCoOptions(eager=True, inner_steps=5, overlap=5).streaming.eager
    with pytest.raises(
        ValueError, match=r"strategy\.overlap is 3; with strategy\.eager it is strategy\.inner_steps, 5"
    ):
        DiLoCoOptions(eager=True, inner_steps=5, overlap=3)
    with pytest.raises(ValueError, match=r"strategy\.mixing has no effect with strategy\.eager"):
        DiLoCoOptions(eager=True, mixing=0.5)
