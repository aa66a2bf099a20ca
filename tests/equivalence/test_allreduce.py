"""`allreduce` computes what `single` computes, over real processes and sockets.

In fp64 the only difference is the order of sums, so ten digits agree. In fp32 AdamW divides by the root of tiny squared
gradients and so enlarges rounding; 2e-5 after 8 steps at learning rate 0.01 is the size of that effect.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.same_run import COMMON, STEPS, EqualsSingle, Single, named, weights
from tests.tasks import Double, spirals
from tests.world import run_world
from torch import nn

from smolcluster.compute.optim import warmup_cosine
from smolcluster.compute.rng import seed_everything
from smolcluster.data.sampler import Sampler


@pytest.mark.parametrize(("clip", "accumulation"), [(None, 1), (0.05, 1), (None, 3)])
def test_equals_single_at_the_same_global_batch(
    equals_single: EqualsSingle, clip: float | None, accumulation: int
) -> None:
    """On one process in one piece, where the others accumulate. With both at once: tests/conformance."""
    whole = COMMON | {"training.grad_clip_norm": clip, "training.batch_size": 12 * accumulation}
    equals_single("allreduce", 3, whole, {"training.batch_size": 4, "training.grad_accumulation": accumulation})


@pytest.mark.usual(when=lambda size: size == 3)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_single_in_single_precision(equals_single: EqualsSingle, size: int) -> None:
    config, parts = COMMON | {"training.batch_size": 24}, {"training.batch_size": 24 // size}
    equals_single("allreduce", size, config, parts, task="Tiny", tolerance=2e-5)


def test_one_worker_is_bitwise_single(tmp_path: Path, single: Single) -> None:
    config = COMMON | {"training.batch_size": 8}
    one, alone = single(config, "Dropout"), run_world(1, tmp_path, config, task="Dropout")
    assert one.ranks[0].losses() == alone.ranks[0].losses()
    assert one.summary["weights_sha256"] == alone.summary["weights_sha256"]


@pytest.mark.usual(when=lambda strategy, options: options.get("fsdp_stage") in (None, 0, 3))
@pytest.mark.parametrize(
    ("strategy", "options"), [("allreduce", {}), *(("fsdp", {"fsdp_stage": stage}) for stage in range(4))], ids=str
)
def test_unlike_batch_sizes_are_weighted_by_samples(
    equals_single: EqualsSingle, strategy: str, options: dict[str, int]
) -> None:
    hosts = {"cluster.workers": ["a", "b", "c"], "cluster.batch_size": {"a": 7, "b": 2}, "training.batch_size": 3}
    many = equals_single(strategy, 3, COMMON | {"training.batch_size": 12}, hosts | named(options))
    assert [rank.rows()[0].samples for rank in many.ranks] == [7, 2, 3]


@pytest.mark.parametrize(
    ("strategy", "options", "accumulation"),
    [
        *((strategy, options, 6) for strategy, options in (("allreduce", {}), ("fsdp", {"fsdp_stage": 0}))),
        *((strategy, options, 1) for strategy, options in (("allreduce", {}), ("fsdp", {"fsdp_stage": 0}))),
        ("fsdp", {"fsdp_stage": 1}, 1),
    ],
    ids=str,
)
def test_a_head_that_not_all_samples_use(
    equals_single: EqualsSingle, strategy: str, options: dict[str, int], accumulation: int
) -> None:
    """Micro-batches of one sample, each for one of two heads: what earlier ones gave a head counts. Both samples of a step may
    be for the same head: the other one does not decay, as with `single`."""
    parts = named(options) | {"training.batch_size": 1, "training.grad_accumulation": accumulation}
    equals_single(strategy, 2, COMMON | {"training.batch_size": 2 * accumulation}, parts, task="TwoHeads")


def test_with_dropout_replicas_agree_and_a_rerun_is_bitwise_the_same(tmp_path: Path) -> None:
    config = COMMON | {"training.batch_size": 8}
    runs = [run_world(2, tmp_path / str(i), config, task="Dropout") for i in range(2)]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]
    assert [r.losses() for r in runs[0].ranks] == [r.losses() for r in runs[1].ranks]
    plain = run_world(2, tmp_path / "plain", config, task="Tiny")
    assert plain.ranks[0].losses() != runs[0].ranks[0].losses(), "dropout had no effect"


@pytest.mark.usual(when=lambda size, bound: size == 3 and bound != 1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_replicas_are_bit_identical(tmp_path: Path, size: int, bound: int) -> None:
    """Every rank hashes its own weights at the end."""
    config = COMMON | {"training.batch_size": 4, "strategy.staleness_bound": bound}
    world = run_world(size, tmp_path / "run", config, task="Fingerprint")
    prints = {row.message for rank in world.ranks for row in rank.events if type(row).__name__ == "Notice"}
    assert len(prints) == 1
    assert all(any(type(e).__name__ == "Notice" for e in rank.events) for rank in world.ranks)


# Delayed gradients, against a simulation written without any of the strategy's code.


def delayed_gradients(*, workers: int, batch: int, bound: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient of step s at weights version max(0, s - K), averaged over the global batch, applied in order."""
    seed_everything(COMMON["training.seed"], "weights", device=torch.device("cpu"))
    model = Double(config=None).model()
    x, y = spirals()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.95)
    )
    rate = warmup_cosine(peak=0.01, floor=0.001, warmup=2, steps=STEPS)
    sampler = Sampler(len(x), seed=COMMON["training.seed"])
    losses: list[float] = []
    waiting: list[list[torch.Tensor]] = []
    applied = 0

    def apply(gradients: list[torch.Tensor]) -> None:
        nonlocal applied
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(applied)
        optimizer.step()
        applied += 1

    for step in range(STEPS):
        picked = torch.from_numpy(sampler.indices(step * workers * batch, workers * batch))
        loss = F.cross_entropy(model(x[picked]), y[picked])
        losses.append(loss.item())
        waiting.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        if len(waiting) > bound:
            apply(waiting.pop(0))
    while waiting:
        apply(waiting.pop(0))
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.usual(when=lambda bound: bound in (1, 5))
@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_staleness_equals_a_simulation_of_delayed_gradients(tmp_path: Path, bound: int) -> None:
    config = COMMON | {"training.batch_size": 4, "strategy.staleness_bound": bound}
    world = run_world(3, tmp_path / "run", config, task="Double")
    losses, expected = delayed_gradients(workers=3, batch=4, bound=bound)
    assert world.global_losses() == pytest.approx(losses, rel=1e-10)
    for name, tensor in weights(world).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)
    staleness = [row.staleness for row in world.ranks[0].rows()]
    assert staleness == [min(step, bound) for step in range(STEPS)]
    assert world.summary["staleness_max"] == min(bound, STEPS - 1)
    assert world.summary["staleness_mean"] == pytest.approx(sum(staleness) / STEPS)
    assert world.summary["stale_rejected"] == 0
    assert world.ranks[0].rows()[-1].staleness_max == min(bound, STEPS - 1)


def test_running_means_are_those_of_rank_0_everywhere(tmp_path: Path) -> None:
    """Both ranks evaluate with the same buffers: validation shared over ranks equals validation on one."""
    config = COMMON | {"training.batch_size": 6, "training.eval_steps": 4}
    world = run_world(2, tmp_path / "run", config, task="BatchNorm")
    saved = weights(world)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).double()
    model.load_state_dict(saved)
    x, y = spirals()
    expected = F.cross_entropy(model.eval()(x[:50]), y[:50]).item()
    assert world.summary["val_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("strategy", "options"), [("allreduce", {}), ("fsdp", {"fsdp_stage": 1})], ids=["allreduce", "stage 1"]
)
def test_a_parameter_that_is_never_used_needs_no_state(tmp_path: Path, strategy: str, options: dict[str, int]) -> None:
    """It stays as it is. In stage 1 its owner has no optimizer state at all to save, and none to go on with."""
    config = COMMON | named(options) | {"training.batch_size": 4} | {"training.checkpoint_steps": 4}
    many = run_world(2, tmp_path / "many", config, task="NeverUsed", strategy=strategy)
    assert weights(many)["extra"].eq(1.0).all()
    half = tmp_path / "many" / "checkpoints" / "step-00000004"
    resumed = run_world(2, tmp_path / "resumed", config, task="NeverUsed", strategy=strategy, resume=half)
    assert [rank.failed for rank in resumed.ranks] == [None] * 2
    assert resumed.summary["weights_sha256"] == many.summary["weights_sha256"]


def test_stop_asked_of_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    config = COMMON | {"training.batch_size": 4, "training.steps": 1000}
    world = run_world(3, tmp_path / "run", config, task="Tiny", hook=("stop_after", 5))
    assert [rank.status for rank in world.ranks] == [130] * 3
    assert {rank.rows()[-1].step for rank in world.ranks} == {5}
    assert world.summary["status"] == "interrupted"
    assert (Path(world.summary["checkpoint"]) / "manifest.json").is_file()
