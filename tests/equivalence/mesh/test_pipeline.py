"""`pipeline` computes what `single` computes, over real processes and sockets, also on models that have to be traced.

All schedules on a GPT: tests/conformance. Tolerances as in test_allreduce.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON, GPT, EqualsSingle, Single, assert_same_run, named
from tests.world import run_world

from smolcluster.observe.events import Notice

GPT4 = GPT | {"model.num_layers": 4}


@pytest.mark.usual(when=lambda options, **_: bool(options) and "pp" not in options)
@pytest.mark.parametrize(
    ("size", "strategy", "options"),
    [
        (2, "pipeline", {}),
        (3, "pipeline", {"schedule": "zbv"}),
        (2, "pipeline", {"layer_distribution": "auto"}),
        (4, "mesh", {"pp": 2, "fsdp_stage": 3}),
    ],
    ids=["1f1b", "zbv", "auto", "mesh"],
)
def test_a_traced_model_equals_single(
    equals_single: EqualsSingle, size: int, strategy: str, options: dict[str, Any]
) -> None:
    config = COMMON | {"training.batch_size": 12, "training.grad_clip_norm": 0.1}
    parts = named(options) | {"training.batch_size": 6 if strategy == "mesh" else 12}
    equals_single(strategy, size, config, parts, task="Residual")


def test_a_model_that_cannot_be_traced_is_told_why(tmp_path: Path) -> None:
    failed = run_world(
        2, tmp_path, COMMON | {"training.batch_size": 8}, task="BranchesOnValues", strategy="pipeline"
    ).ranks
    assert [rank.failed.kind for rank in failed if rank.failed] == ["user", "user"]
    assert (
        "Branches cannot be cut into stages: its forward cannot be traced (symbolically traced variables cannot be"
        in (failed[0].failed.message)
    )


@pytest.mark.usual(when=lambda schedule, shape: schedule == "1f1b" and not shape)
@pytest.mark.parametrize(("schedule", "shape"), [("1f1b", {}), ("zbv", {}), ("1f1b", {"dp": 2, "pp": 2})])
def test_layers_by_measured_speed(tmp_path: Path, single: Single, schedule: str, shape: dict[str, int]) -> None:
    """A slow rank gets fewer layers: of eight, four stages leave it its two; and all is as on one machine."""
    config = COMMON | GPT | {"model.num_layers": 8, "training.steps": 2, "training.batch_size": 8}
    parts = named({**shape, "layer_distribution": "auto", "schedule": schedule, "num_microbatches": 2})
    parts |= {"training.batch_size": 8 // shape.get("dp", 1)}
    size, strategy = (4, "mesh") if shape else (2, "pipeline")
    many = run_world(size, tmp_path / "many", config | parts, task="UnlikeGPT", strategy=strategy)
    assert_same_run(single(config, "DoubleGPT"), many, tolerance=1e-9)
    told = [e.message for e in many.ranks[0].events if isinstance(e, Notice) and "layer_distribution" in e.message]
    counts = [int(number) for number in re.search(r"gives \[(.*)\];", told[0])[1].split(",")]
    assert sum(counts) == 8
    # In the mesh the slow rank is the second of the first stage; on two ranks it is the last stage, or the two in the middle.
    slow = {"1f1b": counts[-1:], "zbv": counts[1:3]}[schedule] if not shape else counts[:1]
    assert sum(slow) <= 2


@pytest.mark.usual(when=lambda schedule: schedule == "1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_picture_of_a_step(tmp_path: Path, schedule: str) -> None:
    """Every forward and backward of every micro-batch is in it once, and it changes nothing."""
    config = COMMON | GPT4 | {"training.batch_size": 8, "strategy.schedule": schedule, "strategy.num_microbatches": 4}
    plain = run_world(2, tmp_path / "plain", config, strategy="pipeline")
    drawn = run_world(2, tmp_path / "drawn", config | {"strategy.draw_schedule": True}, strategy="pipeline")
    assert drawn.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert not (tmp_path / "plain" / "schedule.svg").exists()
    picture = (tmp_path / "drawn" / "schedule.svg").read_text()
    shown = re.findall(r"<title>(\w+)(?:, (activations|weights) only)?, stage (\d), micro-batch (\d),", picture)
    stages = 2 if schedule == "1f1b" else 4
    halves = [("backward", "")] if schedule == "1f1b" else [("backward", "activations"), ("backward", "weights")]
    expected = [
        (*kind, str(stage), str(number))
        for kind in [("forward", ""), *halves]
        for stage in range(stages)
        for number in range(4)
    ]
    if schedule == "zbv":  # a backward that nothing waits for is done in one piece
        whole = {s for s in shown if s[:2] == ("backward", "")}
        split = {(h[0], "", *h[2:]) for h in shown if h[1]}
        assert {s[2:] for s in shown if s[0] == "forward"} == {e[2:] for e in expected}
        assert {s[2:] for s in whole | split} == {e[2:] for e in expected}
    else:
        assert sorted(shown) == sorted(expected)
    told = [e.message for e in drawn.ranks[0].events if isinstance(e, Notice) and "schedule.svg" in e.message]
    assert "2 ranks, 4 micro-batches: idle" in told[0]


def test_a_picture_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "schedule.svg").mkdir()  # in its way
    config = COMMON | GPT4 | {"training.steps": 4, "training.batch_size": 8, "strategy.draw_schedule": True}
    world = run_world(2, tmp_path, config, strategy="pipeline")
    assert [rank.status for rank in world.ranks] == [0, 0], [rank.failed for rank in world.ranks]
    assert world.summary["status"] == "finished"
    told = [e for e in world.ranks[0].events if isinstance(e, Notice) and "schedule.svg" in e.message]
    assert [(e.level, "could not be drawn: Is a directory" in e.message) for e in told] == [("WARNING", True)]


@pytest.mark.parametrize(
    ("task", "options"),
    [("Turned", {"strategy.layer_distribution": [2, 3]}), ("TracedTie", {"strategy.num_microbatches": 2})],
    ids=["as it lies in memory", "a weight in two layers of a stage"],
)
def test_unusual_models_equal_single(equals_single: EqualsSingle, task: str, options: dict[str, Any]) -> None:
    equals_single("pipeline", 2, COMMON | {"training.batch_size": 8}, options, task=task)


@pytest.mark.parametrize(
    ("task", "size", "options", "said"),
    [
        ("Tied", 2, {}, "0.weight and 2.weight is one weight on several stages of the pipeline"),
        ("Turned", 4, {"strategy.layer_distribution": [1, 1, 1, 2]}, "have no trainable parameters"),
        (
            "Turned",
            2,
            {"strategy.num_microbatches": 1},
            "raise strategy.num_microbatches, or use strategy.schedule=gpipe",
        ),
    ],
)
def test_what_cannot_be_cut_is_told(tmp_path: Path, task: str, size: int, options: dict[str, Any], said: str) -> None:
    config = COMMON | {"training.batch_size": 8} | options
    if task == "Tied":
        config |= {"strategy.layer_distribution": [2, 3]}
    world = run_world(size, tmp_path, config, task=task, strategy="pipeline")
    told = [rank.failed for rank in world.ranks if rank.failed is not None and rank.failed.kind == "user"]
    assert any(said in failed.message for failed in told), [rank.failed for rank in world.ranks]


def test_a_sequence_that_tp_does_not_divide_is_told(tmp_path: Path) -> None:
    config = COMMON | GPT | {"training.batch_size": 4, "model.max_seq_len": 33, "training.steps": 1}
    refused = run_world(2, tmp_path / "cut", config, strategy="tensor")
    assert "tp = 2 does not divide sequences of 33 tokens" in refused.refusal
    whole = run_world(2, tmp_path / "whole", config | {"strategy.sequence_parallel": False}, strategy="tensor")
    assert [rank.status for rank in whole.ranks] == [0, 0], whole.ranks[0].failed
