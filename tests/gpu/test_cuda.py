"""On a GPU: every precision, compile, checkpointing, two workers on one card, a stop that is read one step late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.world import run_elastic_world, run_world

from smolcluster.compute.memory import free_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPE = {"model_dim": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
COMMON = {f"model.{k}": v for k, v in SHAPE.items()} | {
    "training.device": "cuda",
    "training.batch_size": 8,
    "training.steps": 30,
    "training.learning_rate": 3e-3,
    "training.eval_samples": 16,
    "lr_schedule.warmup_iters": 5,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.precision": "bf16"},
        {"training.precision": "fp16"},
        {"training.gradient_checkpointing": True},
        {"training.compile": True, "training.precision": "bf16"},
    ],
)
def test_learns_in_every_mode(tmp_path: Path, changes: dict[str, Any]) -> None:
    world = run_world(1, tmp_path / "run", COMMON | changes, strategy="single", timeout_s=300)
    losses = world.ranks[0].losses()
    assert losses[0] == pytest.approx(5.55, abs=0.3)
    assert losses[-1] < 3.6
    assert world.summary["peak_memory_bytes"] > 2**20


@pytest.mark.parametrize("bound", [0, 2])
def test_two_workers_share_a_card_over_gloo(tmp_path: Path, bound: int) -> None:
    one = run_world(1, tmp_path / "one", COMMON | {"training.batch_size": 16}, strategy="single", timeout_s=200)
    two = run_world(2, tmp_path / "two", COMMON | {"strategy.staleness_bound": bound}, timeout_s=200)  # by itself
    if bound == 0:
        assert two.global_losses() == pytest.approx(one.global_losses(), rel=2e-3)
    assert two.global_losses()[-1] < 3.8


def test_nccl_wants_a_card_for_each_worker(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there is more than one card")
    world = run_world(2, tmp_path / "run", COMMON, timeout_s=100, backend="nccl")
    assert [rank.status for rank in world.ranks] == [2, 2]
    assert "--backend gloo" in world.ranks[0].failed.message


def test_a_stop_is_agreed_one_step_late(tmp_path: Path) -> None:
    config = COMMON | {"training.steps": 500}
    world = run_world(2, tmp_path / "run", config, hook=("stop_after", 5), timeout_s=200, backend="gloo")
    assert [rank.status for rank in world.ranks] == [130, 130]
    assert {rank.rows()[-1].step for rank in world.ranks} == {6}


def test_resume_is_bitwise(tmp_path: Path) -> None:
    config = COMMON | {"model.dropout": 0.1, "training.checkpoint_steps": 10}
    straight = run_world(1, tmp_path / "straight", config, strategy="single", timeout_s=200)
    checkpoint = tmp_path / "straight" / "checkpoints" / "step-00000020"
    again = run_world(1, tmp_path / "again", config, strategy="single", resume=checkpoint, timeout_s=200)
    assert again.summary["weights_sha256"] == straight.summary["weights_sha256"]


@pytest.mark.parametrize("strategy", ["syncps", "allreduce", "fsdp"])
def test_a_cpu_and_a_card_train_one_model(tmp_path: Path, strategy: str) -> None:
    """Synchronous strategies over unlike devices follow one process; only the rounding differs."""
    one = run_world(1, tmp_path / "one", COMMON | {"training.batch_size": 16}, strategy="single", timeout_s=200)
    changes = {"training.device": "cpu", "strategy.timeout": 60, "strategy.worker_update_interval": 1}
    unlike = run_elastic_world(
        2,
        tmp_path / "unlike",
        COMMON | changes,
        strategy=strategy,
        overrides={0: {"training.device": "cuda"}},
        timeout_s=200,
    )
    assert unlike.summary["status"] == "finished"
    assert unlike.server.losses() == pytest.approx(one.global_losses(), rel=2e-3)


@pytest.mark.parametrize("strategy", ["edp", "allreduce"])
def test_precision_is_each_hosts_own(tmp_path: Path, strategy: str) -> None:
    changes = {"training.device": "cpu", "cluster.batch_size": "auto"}
    own = {0: {"training.device": "cuda", "training.precision": "bf16"}, 1: {"training.precision": "fp32"}}
    world = run_elastic_world(2, tmp_path / "run", COMMON | changes, strategy=strategy, overrides=own, timeout_s=200)
    assert world.server.losses()[-1] < 4.2
    assert world.summary["stale_rejected"] == 0


def test_memory_that_torch_keeps_for_later_is_free_memory() -> None:
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    before = free_bytes(device)
    taken = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    during = free_bytes(device)
    del taken
    after = free_bytes(device)
    assert before - during >= 255 << 20
    assert abs(after - before) < 32 << 20
