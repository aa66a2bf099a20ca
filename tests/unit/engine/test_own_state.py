"""What a worker keeps on its own disk."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from smolcluster.engine.elastic.member.own_state import OwnState


def test_it_is_read_back_as_it_was_for_that_step_and_rank_alone(tmp_path: Path) -> None:
    own = OwnState(tmp_path / "own", rank=3, keep=2)
    own.save(4, {"residual/a.b": torch.arange(4.0)[::2]})
    assert own.load(4)["residual/a.b"].tolist() == [0.0, 2.0]
    assert own.load(5) == {}
    assert OwnState(tmp_path / "own", rank=2, keep=2).load(4) == {}
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700


def test_as_many_steps_are_kept_as_checkpoints(tmp_path: Path) -> None:
    one, other = (OwnState(tmp_path, rank=rank, keep=2) for rank in (1, 11))
    for step in (4, 8, 12):
        one.save(step, {"a": torch.zeros(1)})
        other.save(step, {"a": torch.ones(1)})
    assert [bool(one.load(step)) for step in (4, 8, 12)] == [False, True, True]
    assert other.load(12)["a"] == 1


def test_nothing_is_written_where_there_is_nothing(tmp_path: Path) -> None:
    OwnState(tmp_path / "own", rank=0, keep=1).save(4, {})
    assert not (tmp_path / "own").exists()


def test_what_cannot_be_written_or_read_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    OwnState(tmp_path / "file", rank=0, keep=1).save(4, {"a": torch.zeros(1)})
    own = OwnState(tmp_path, rank=0, keep=1)
    own.save(4, {"a": torch.zeros(100)})
    (path,) = tmp_path.glob("rank0-*")
    path.write_bytes(path.read_bytes()[:-1])
    assert own.load(4) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
