"""`fsdp`, all stages, computes what `single` computes, over real processes and sockets: unusual models, mixed precision.

On a GPT: tests/conformance. Tolerances as in test_allreduce.py: in fp64 only the order of sums differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, EqualsSingle, assert_same_run, weights
from tests.world import run_world

from smolcluster.observe.events import Notice

STAGES = [0, 1, 2, 3]


@pytest.mark.usual(
    when=lambda task, size, stage: (task, stage) not in (("Tied", 0), ("Tied", 2), ("Frozen", 0), ("Frozen", 3))
)
@pytest.mark.parametrize(
    ("task", "size", "stage"),
    [
        *((task, 2, stage) for task in ("Tied", "Frozen") for stage in STAGES),
        ("OneWeight", 3, 1),  # more workers than parameters
        *((task, 2, 3) for task in ("ListsOfLists", "Twice")),
    ],
)
def test_unusual_models_equal_single(equals_single: EqualsSingle, task: str, size: int, stage: int) -> None:
    """A weight in two layers, one that is not trained, and lists of layers."""
    parts = {"training.batch_size": 12 // size, "strategy.fsdp_stage": stage}
    equals_single("fsdp", size, COMMON | {"training.batch_size": 12}, parts, task=task)


@pytest.mark.usual(when=lambda options, told: told is None or "across" in told)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy.fsdp_stage": 2, "strategy.shard_size": 2}, None),
        ({"strategy.fsdp_stage": 3, "strategy.shard_size": 1}, None),
        (
            {"strategy.fsdp_stage": "HYBRID_SHARD", "cluster.workers": ["a", "a", "b", "b"]},
            "sharded inside a machine, replicated across machines; 2 x 2",
        ),
        ({"strategy.fsdp_stage": "HYBRID_SHARD"}, "over all ranks, which are on one machine: as FULL_SHARD; 1 x 4"),
    ],
    ids=["2x2", "4x1", "two machines", "one machine"],
)
def test_hybrid_equals_single(equals_single: EqualsSingle, options: dict[str, Any], told: str | None) -> None:
    config, parts = COMMON | GPT | {"training.steps": 3, "training.batch_size": 8}, {"training.batch_size": 2} | options
    many = equals_single("fsdp", 4, config, parts, task="DoubleGPT", tolerance=1e-9)
    said = [e.message for e in many.ranks[0].events if isinstance(e, Notice) and "HYBRID_SHARD" in e.message]
    assert (told or "") in "".join(said)
    assert bool(told) == bool(said)


def test_buffers_have_a_type_of_their_own(tmp_path: Path) -> None:
    """While training; a checkpoint has them in the model's type."""
    config = COMMON | {"training.steps": 2, "training.batch_size": 8, "training.precision": "bf16"}
    # On a CPU this norm wants its weights and its running means in one type.
    types = [{"strategy.param_dtype": name, "strategy.buffer_dtype": name} for name in ("bf16", "fp32")]
    rounded = run_world(2, tmp_path / "rounded", config | types[0], task="BatchNorm32", strategy="fsdp")
    plain = run_world(2, tmp_path / "plain", config | types[1], task="BatchNorm32", strategy="fsdp")
    assert rounded.ranks[0].failed is None, rounded.ranks[0].failed
    mean, exact = (weights(world)["1.running_mean"] for world in (rounded, plain))
    assert mean.dtype == exact.dtype == torch.float32
    torch.testing.assert_close(mean, exact, rtol=0.05, atol=0.01)
    assert torch.equal(mean, mean.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_model_of_two_types_and_a_parameter_without_a_gradient(tmp_path: Path, stage: int) -> None:
    config = COMMON | {"training.batch_size": 6}
    summed = run_world(2, tmp_path / "summed", config, task="Unused", strategy="allreduce")
    many = run_world(2, tmp_path / "many", config | {"strategy.fsdp_stage": stage}, task="Unused", strategy="fsdp")
    assert_same_run(summed, many, tolerance=1e-10)


@pytest.mark.usual(when=lambda skips, stage, **_: stage == (3 if len(skips) > 1 else 2))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("skips", "at", "said"),
    [
        ([(1, 0, 8, 0)], 0, "one rank used block blocks."),
        ([(1, 0, 8, 2)], 0, "one rank used "),
        ([(1, 2, 8, 1)], 2, "a step used block blocks.2 of the model where the first used block blocks.1;"),
        ([(0, 2, 8, 2)], 2, "a step used no further block of the model where the first used block blocks.2;"),
        (
            [(0, 0, 8, 2), (1, 0, 3, 2)],
            3,
            "a step used block blocks.2 of the model where the first used no further block;",
        ),
    ],
)
def test_blocks_that_not_all_ranks_use_end_the_run(
    tmp_path: Path, skips: list[tuple[int, int, int, int]], at: int, said: str, stage: int
) -> None:
    """Before an update: what is exchanged of one would take the place of another one of its size."""
    config = COMMON | {"training.batch_size": 6, "strategy.fsdp_stage": stage}
    world = run_world(2, tmp_path, config, task="Skips", strategy="fsdp", environ={"SKIPS": json.dumps(skips)})
    told = {rank.failed.message for rank in world.ranks if rank.failed is not None and rank.failed.kind == "user"}
    assert told
    assert all(message.startswith(said) for message in told), told
    assert max(len(rank.rows()) for rank in world.ranks) == at


def test_a_block_that_nobody_uses_is_left_alone(equals_single: EqualsSingle) -> None:
    nobody = {"SKIPS": json.dumps([(0, 0, 8, 1), (1, 0, 8, 1)])}
    config, half = COMMON | {"training.batch_size": 12}, {"training.batch_size": 6, "strategy.fsdp_stage": 2}
    equals_single("fsdp", 2, config, half, task="Skips", environ=nobody)


def test_a_model_of_two_types_is_not_cut_up(tmp_path: Path) -> None:
    config = COMMON | {"training.batch_size": 6, "strategy.fsdp_stage": 3}
    assert run_world(2, tmp_path, config, task="Unused", strategy="fsdp").refusal == (
        "fsdp_stage 3 cuts up parameters of one type and the model has float32, float64; use stage 0 or 1"
    )


def test_masters_in_full_precision_are_saved(tmp_path: Path) -> None:
    """Stage 1 in bf16: a resumed run ends with the same bits."""
    config = COMMON | {"training.batch_size": 4, "strategy.fsdp_stage": 1, "training.checkpoint_steps": 3}
    config |= {"training.precision": "bf16", "strategy.param_dtype": "bf16"}
    whole = run_world(3, tmp_path / "whole", config, task="Dropout", strategy="fsdp")
    half = tmp_path / "whole" / "checkpoints" / "step-00000003"
    resumed = run_world(3, tmp_path / "resumed", config, task="Dropout", strategy="fsdp", resume=half)
    assert resumed.ranks[0].losses() == whole.ranks[0].losses()[3:]
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.usual(when=lambda stage: stage != 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_mixed_precision_follows_single(tmp_path: Path, stage: int) -> None:
    """Parameters travel and compute in bf16, masters and sums stay in fp32. bf16 has three digits: losses agree to two."""
    config = COMMON | GPT | {"training.precision": "bf16"}
    one = run_world(1, tmp_path / "one", config | {"training.batch_size": 8}, strategy="single")
    parts = {"training.batch_size": 4, "strategy.fsdp_stage": stage}
    lower = {"strategy.param_dtype": "bf16"} if stage == 1 else {}  # the others take it from the precision
    many = run_world(2, tmp_path / "many", config | parts | lower, strategy="fsdp")
    assert one.global_losses() == pytest.approx(many.global_losses(), rel=1e-2)
    exact = run_world(2, tmp_path / "exact", config | parts | {"strategy.param_dtype": "fp32"}, strategy="fsdp")
    assert one.global_losses() == pytest.approx(exact.global_losses(), rel=2e-3)
    # Handed out in two bytes each instead of four, averaged in four.
    share = {1: (2 + 4) / (4 + 4), 2: (2 + 4) / (4 + 4), 3: (2 + 2 + 4) / (4 + 4 + 4)}[stage]
    sent = [world.ranks[0].rows()[5].bytes_sent - world.ranks[0].rows()[3].bytes_sent for world in (many, exact)]
    assert sent[0] / sent[1] == pytest.approx(share, rel=0.02)
    # What is saved was never rounded.
    for name, saved in weights(many).items():
        assert saved.dtype == torch.float32
        assert saved.ndim < 2 or not torch.equal(saved, saved.bfloat16().float()), name


def test_stage_1_in_bf16_takes_the_steps_of_stage_0(tmp_path: Path) -> None:
    """One has rounded matrices, and masters at their owners; the other has all in fp32 and rounds at every use. Without
    lookups and accumulation the gradients are the same numbers, and two of them have one sum."""
    config = COMMON | {"training.precision": "bf16", "training.batch_size": 4, "strategy.param_dtype": "bf16"}
    runs = [
        run_world(2, tmp_path / str(stage), config | {"strategy.fsdp_stage": stage}, task="Dropout", strategy="fsdp")
        for stage in (0, 1)
    ]
    assert_same_run(*runs, tolerance=0)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"training.precision": "fp32"}, "without a lower training.precision"),
        ({"training.precision": "bf16", "training.grad_accumulation": 2}, "which bf16 would round"),
    ],
)
def test_stage_1_rounds_nothing_where_that_would_lose_something(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    overrides = COMMON | {"training.batch_size": 4, "training.steps": 2, "strategy.fsdp_stage": 1} | config
    plain = run_world(2, tmp_path / "plain", overrides, task="Dropout", strategy="fsdp")
    asked = run_world(
        2, tmp_path / "asked", overrides | {"strategy.param_dtype": "bf16"}, task="Dropout", strategy="fsdp"
    )
    assert asked.summary["weights_sha256"] == plain.summary["weights_sha256"]
    said = [e.message for e in asked.ranks[0].events if isinstance(e, Notice)]
    assert any(why in text for text in said), said


def test_names_with_a_slash_are_saved(tmp_path: Path) -> None:
    parts = {"training.batch_size": 4, "strategy.fsdp_stage": 1, "training.checkpoint_steps": 4}
    whole = run_world(2, tmp_path / "whole", COMMON | parts, task="Slashes", strategy="fsdp")
    resumed = run_world(
        2,
        tmp_path / "resumed",
        COMMON | parts,
        task="Slashes",
        strategy="fsdp",
        resume=tmp_path / "whole" / "checkpoints" / "step-00000004",
    )
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.usual(when=lambda strategy, shards: strategy == "fsdp")
@pytest.mark.parametrize(("strategy", "shards"), [("fsdp", 2), ("tensor", 1)])
def test_plain_gradient_descent_equals_single(equals_single: EqualsSingle, strategy: str, shards: int) -> None:
    """torch has no fused form of it for parts of tensors."""
    sgd = {"training.optimizer": "sgd", "training.learning_rate": 0.1, "training.batch_size": 4}
    parts = {"training.batch_size": 4 // shards}
    equals_single(strategy, 2, COMMON | GPT | sgd, parts, task="DoubleGPT", tolerance=1e-9)


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("SingleNumber", {}, "cannot cut up scale, a single number; give it the shape (1,)"),
        ("OtherMethod", {}, "call its blocks as block(x)"),
        ("BatchNorm32", {"training.precision": "bf16"}, "set strategy.buffer_dtype to the type of the weights"),
    ],
)
def test_what_cannot_be_cut_up_is_told(tmp_path: Path, task: str, options: dict[str, Any], said: str) -> None:
    config = COMMON | {"training.steps": 2, "training.batch_size": 8} | options
    many = run_world(2, tmp_path / "run", config, task=task, strategy="fsdp")
    assert {rank.failed.kind for rank in many.ranks if rank.failed is not None} <= {"user", "peer"}
    told = [rank for rank in many.ranks if rank.failed is not None and rank.failed.kind == "user"]
    assert told  # the other one may have heard first that this one is gone
    for rank in told:
        assert rank.status == 2
        assert said in rank.failed.message
        assert "use stage 0 or 1" in rank.failed.message
