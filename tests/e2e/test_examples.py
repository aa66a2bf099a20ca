"""The examples do what they say. They are the first code a user reads, so they stay short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.e2e.command import Smol, read_summary

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_task_of_your_own_fits_on_a_screen() -> None:
    lines = (EXAMPLES / "my_task.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40


def test_my_task_as_its_docstring_says(smol: Smol, tmp_path: Path) -> None:
    source = (EXAMPLES / "my_task.py").read_text(encoding="utf-8")
    match = re.search(r"^ *smolcluster (train .+)$", ast.get_docstring(ast.parse(source)) or "", flags=re.MULTILINE)
    assert match is not None
    arguments = match[1].replace("examples/", f"{EXAMPLES}/").split()
    ended = smol.run(*arguments, cwd=tmp_path).ok()
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = read_summary(run_dir)
    assert (summary["strategy"], summary["workers"], summary["steps"]) == ("allreduce", 2, 300)
    assert summary["val_loss"] < 0.02  # the noise alone is 0.0025; untrained it is 0.6
    assert re.search(r"sin\(2\) is 0\.91; the model says 0\.[89]", ended.out)


def test_training_from_python(smol: Smol, tmp_path: Path) -> None:
    ended = smol.run(cwd=tmp_path, python=(str(EXAMPLES / "from_python.py"),)).ok()
    found = re.findall(r"^(\d) worker\(s\): validation loss (\S+), in (\S+)$", ended.out, flags=re.MULTILINE)
    assert [workers for workers, _, _ in found] == ["1", "2"]
    losses = []
    for workers, loss, run_dir in found:
        summary = read_summary(tmp_path / run_dir)
        assert summary["workers"] == int(workers)
        assert summary["val_loss"] == pytest.approx(float(loss), abs=1e-6)
        losses.append(summary["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
