"""Where some targets do not count, the loss of a step is the mean over all that do, however the step is divided.

Sequences have unlike numbers of targets and every fourth has none, so that a mean of means, of ranks or of micro-batches, is
another number; micro-batches of one sequence have none now and then. Tolerances as in test_allreduce.py and test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, EqualsSingle, Single, assert_same_run, weights
from tests.world import ElasticWorld, World, run_elastic_world, run_world

from smolcluster.config.strategies import strategy_names

STEPS = 3
GPT: dict[str, Any] = COMMON | {
    **{"model.model_dim": 16, "model.num_layers": 2, "model.num_heads": 2, "model.max_seq_len": 12, "model.ff_dim": 32},
    **{"training.steps": STEPS, "training.grad_clip_norm": 0.5, "training.eval_samples": 30},
}
WHOLE = GPT | {"training.batch_size": 8}  # in one batch: the mean over all its targets is the task's own
AT_ONCE = {"strategy.worker_update_interval": 1}
ELASTIC = {"cluster.plane": "elastic"}

# Strategy, ranks, batch size and accumulation of each, options: eight sequences a step in all of them.
MESH: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("single", 1, 1, 8, {}),
    ("allreduce", 2, 2, 2, {}),
    *[("fsdp", 2, 1, 4, {"strategy.fsdp_stage": stage}) for stage in range(4)],
    ("pipeline", 2, 4, 2, {"strategy.num_microbatches": 4}),
    ("tensor", 2, 1, 8, {}),
    ("mesh", 4, 1, 4, {"strategy.tp": 2}),
    ("mesh", 4, 2, 2, {"strategy.pp": 2, "strategy.num_microbatches": 2}),
    ("mesh", 4, 1, 4, {"strategy.cp": 2, "strategy.fsdp_stage": 3}),
    ("diloco", 1, 2, 4, {"strategy.inner_steps": 1, "strategy.outer_lr": 1.0, "strategy.outer_momentum": 0.0}),
]
SERVED: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("syncps", 2, 2, 2, AT_ONCE),
    ("edp", 1, 2, 4, AT_ONCE),
    ("allreduce", 2, 2, 2, ELASTIC),
    *[("fsdp", 2, 2, 2, ELASTIC | {"strategy.fsdp_stage": stage}) for stage in (0, 1)],
]


def label(case: tuple[str, int, int, int, dict[str, Any]]) -> str:
    name, size, batch_size, parts, options = case
    said = [f"{key.rpartition('.')[2]}-{value}" for key, value in options.items() if key not in ELASTIC | AT_ONCE]
    return "-".join([name, f"{size}x{batch_size}x{parts}", *said])


def divided(batch_size: int, parts: int, options: dict[str, Any]) -> dict[str, Any]:
    return GPT | {"training.batch_size": batch_size, "training.grad_accumulation": parts} | options


def test_all_strategies_are_here() -> None:
    assert {case[0] for case in (*MESH, *SERVED)} == set(strategy_names())


@pytest.mark.usual(when=lambda case: case not in (MESH[2], MESH[4], MESH[8], MESH[9]))
@pytest.mark.parametrize("case", MESH, ids=label)
def test_equals_single(
    equals_single: EqualsSingle, single: Single, case: tuple[str, int, int, int, dict[str, Any]]
) -> None:
    strategy, size, batch_size, parts, options = case
    config = divided(batch_size, parts, options)
    many = equals_single(strategy, size, WHOLE, config, task="RaggedGPT", tolerance=1e-9)
    assert single(WHOLE, "RaggedGPT").summary["train_loss"] == pytest.approx(many.summary["train_loss"], rel=1e-9)


@pytest.mark.parametrize("case", SERVED, ids=label)
def test_equals_single_where_members_come_and_go(
    tmp_path: Path, single: Single, case: tuple[str, int, int, int, dict[str, Any]]
) -> None:
    strategy, size, batch_size, parts, options = case
    config = divided(batch_size, parts, options)
    assert_served(
        single(WHOLE, "RaggedGPT"),
        run_elastic_world(size, tmp_path, config, task="RaggedGPT", strategy=strategy),
        tolerance=2e-5 if options == AT_ONCE else 1e-9,
    )


def assert_served(one: World, many: ElasticWorld, *, tolerance: float) -> None:
    assert set(many.statuses.values()) == {0}, many.story()
    assert many.server.losses() == pytest.approx(one.global_losses(), rel=1e-6)  # the server's loss is fp32
    assert many.summary["val_loss"] == pytest.approx(one.summary["val_loss"], rel=tolerance)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(many)[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("allreduce", {}), ("fsdp", {"strategy.fsdp_stage": 1}), ("syncps", AT_ONCE), ("allreduce", ELASTIC)],
    ids=["allreduce", "fsdp", "syncps", "elastic allreduce"],
)
def test_a_mean_over_nothing_is_not_taken(
    tmp_path: Path, single: Single, strategy: str, options: dict[str, Any]
) -> None:
    """Samples one by one, of which many weigh nothing: their own loss is NaN, and so is its gradient."""
    config = COMMON | {"training.steps": STEPS}
    one = single(config | {"training.batch_size": 8}, "Weighed")
    parts = config | options | {"training.batch_size": 1, "training.grad_accumulation": 4}
    if options in (AT_ONCE, ELASTIC):
        many = run_elastic_world(2, tmp_path, parts, task="Weighed", strategy=strategy)
        assert_served(one, many, tolerance=2e-5)
    else:
        assert_same_run(one, run_world(2, tmp_path, parts, task="Weighed", strategy=strategy), tolerance=1e-10)


def test_with_delayed_gradients(tmp_path: Path) -> None:
    """Two steps in flight on two ranks are those of one rank with the same delay."""
    config = GPT | {"training.steps": 6, "strategy.staleness_bound": 2}
    one = run_world(1, tmp_path / "one", config | {"training.batch_size": 4}, task="RaggedGPT")
    many = run_world(2, tmp_path / "many", config | {"training.batch_size": 2}, task="RaggedGPT")
    assert_same_run(one, many, tolerance=1e-9)
