"""Looking changes nothing: a run that is evaluated, logged and saved computes what one computes that nobody looks at.

What is in flight and what each rank has of its own is saved, so a run goes on to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, STEPS
from tests.world import World, run_world

from smolcluster.engine.checkpoint.snapshot import Snapshot, read_checkpoint
from smolcluster.observe.events import Notice

BOUND, SAVED = 2, 4
QUIET = {"training.eval_steps": 0, "training.checkpoint_steps": 0, "logging.log_interval": 100}
LOOKED_AT = {"training.eval_steps": 2, "training.checkpoint_steps": 2, "logging.log_interval": 1}
# Half-way and at the end alone: one that comes while another is written and a third waits would be given up.
KEPT = QUIET | {"training.checkpoint_steps": SAVED, "logging.log_interval": 1}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "in flight": ("allreduce", {"strategy.staleness_bound": BOUND}),
    "synchronous": ("allreduce", {}),
    "stage 0": ("fsdp", {"strategy.fsdp_stage": 0}),
    "stage 1": ("fsdp", {"strategy.fsdp_stage": 1}),
    "stage 3": ("fsdp", {"strategy.fsdp_stage": 3, "strategy.param_dtype": "fp32"}),
}


def train(folder: Path, way: str, *, looks: dict[str, Any], resume: Path | None = None, **more: Any) -> World:
    strategy, options = WAYS[way]
    config = COMMON | {"training.batch_size": 4} | options | looks | more
    world = run_world(2, folder, config, task="BatchNorm", strategy=strategy, resume=resume)
    assert [rank.status for rank in world.ranks] == [0, 0], [rank.failed for rank in world.ranks]
    return world


def checkpoint(world: World, step: int) -> Path:
    return world.run_dir / "checkpoints" / f"step-{step:08d}"


def assert_same_extra(one: Snapshot, other: Snapshot) -> None:
    assert one.extra.keys() == other.extra.keys()
    assert [name for name in one.extra if not torch.equal(one.extra[name], other.extra[name])] == []


def told(world: World) -> list[str]:
    return [event.message for event in world.ranks[0].events if isinstance(event, Notice)]


@pytest.mark.usual(when=lambda way: way in ("in flight", "stage 1"))
@pytest.mark.parametrize("way", WAYS)
def test_whoever_looks_changes_nothing(tmp_path: Path, way: str) -> None:
    looked_at = train(tmp_path / "looked at", way, looks=LOOKED_AT)
    alone = train(tmp_path / "alone", way, looks=QUIET)
    assert looked_at.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert looked_at.summary["val_loss"] == pytest.approx(alone.summary["val_loss"], rel=1e-12)


@pytest.mark.usual(when=lambda way: way in ("in flight", "stage 1"))
@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_to_the_last_bit(tmp_path: Path, way: str) -> None:
    """Each rank with its own running means, and gradients that were in flight applied in their turn."""
    whole = train(tmp_path / "whole", way, looks=KEPT)
    saved = read_checkpoint(checkpoint(whole, SAVED))
    scopes = {name.partition("/")[0] for name in saved.extra}
    assert scopes == ({"all", "1"} if way == "in flight" else {"1"})
    assert saved.state["strategy"]["updates"] == (SAVED - BOUND if way == "in flight" else SAVED)
    resumed = train(tmp_path / "resumed", way, looks=KEPT, resume=checkpoint(whole, SAVED))
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert [row.staleness for row in resumed.ranks[0].rows()] == [row.staleness for row in whole.ranks[0].rows()][
        SAVED:
    ]
    assert_same_extra(read_checkpoint(checkpoint(whole, STEPS)), read_checkpoint(checkpoint(resumed, STEPS)))
    assert not any("not restored" in line for line in told(resumed))


def test_fewer_in_flight_than_were_saved_are_applied_at_once(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "in flight", looks=KEPT)
    resumed = train(tmp_path / "resumed", "synchronous", looks=KEPT, resume=checkpoint(whole, SAVED))
    assert [row.staleness for row in resumed.ranks[0].rows()] == [0] * (STEPS - SAVED)
    assert read_checkpoint(checkpoint(resumed, STEPS)).state["strategy"]["updates"] == STEPS
    assert not any("not restored" in line for line in told(resumed))


def test_another_strategy_says_what_it_cannot_take_over(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "in flight", looks=KEPT)
    resumed = train(tmp_path / "resumed", "stage 1", looks=KEPT, resume=checkpoint(whole, SAVED))
    assert read_checkpoint(checkpoint(resumed, STEPS)).state["strategy"]["updates"] == STEPS
    (line,) = [line for line in told(resumed) if "not restored" in line]
    assert f"{BOUND} gradients in flight of allreduce" in line
    assert "the local state of 2 ranks" in line
