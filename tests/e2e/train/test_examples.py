"""The examples do what they say. They are the first code a user reads, so they stay short."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.command import Beside, Ended, Smol, read_summary

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module", autouse=True)
def beside(smol: Smol, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Beside]:
    def from_python() -> tuple[Path, Ended]:
        folder = tmp_path_factory.mktemp("from-python")
        return folder, smol.run(cwd=folder, python=(str(EXAMPLES / "from_python.py"),)).ok()

    with Beside(request, {"test_training_from_python": from_python}) as running:
        yield running


def test_a_task_of_your_own_fits_on_a_screen() -> None:
    lines = (EXAMPLES / "my_task.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40


def test_my_task_as_its_docstring_says(smol: Smol, tmp_path: Path) -> None:
    source = (EXAMPLES / "my_task.py").read_text(encoding="utf-8")
    match = re.search(r"^ *smolcluster (train .+)$", ast.get_docstring(ast.parse(source)) or "", flags=re.MULTILINE)
    arguments = match[1].replace("examples/", f"{EXAMPLES}/").split()
    ended = smol.run(*arguments, cwd=tmp_path).ok()
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = read_summary(run_dir)
    assert (summary["strategy"], summary["workers"], summary["steps"]) == ("allreduce", 2, 300)
    assert summary["val_loss"] < 0.02  # the noise alone is 0.0025; untrained it is 0.6
    assert re.search(r"sin\(2\) is 0\.91; the model says 0\.[89]", ended.out)


SCRIPT = """
import json

import torch
from torch import nn

import smolcluster
from smolcluster.errors import UserError
from smolcluster.observe.events import StepLogged


class Line(smolcluster.Task):
    def model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        return (torch.linspace(-1, 1, 64)[:, None],)

    def loss(self, model, batch):
        return (model(batch[0]) - 2 * batch[0]).square().mean()


class Losses(list):
    def handle(self, event):
        if isinstance(event, StepLogged):
            self.append(event.loss)

    def close(self):
        self.append("closed")


if __name__ == "__main__":
    losses = Losses()
    summary = smolcluster.train(Line, steps=3, seed=1, run_dir="run", overrides=["logging.log_interval=1"], sinks=[losses])
    problems = []
    for wrong in ({"training.batch_sise": 4}, {"data.name": "wikitxt"}):
        try:
            smolcluster.train("gpt", workers=1, overrides=wrong, sinks=[])
        except UserError as error:
            problems.append(str(error))
    print(json.dumps({"summary": summary, "losses": losses, "problems": problems}))
"""


def test_a_task_class_of_the_calling_script(smol: Smol, tmp_path: Path) -> None:
    """The class itself is a source; a sink of one's own sees every event; mistakes are exceptions."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    said = json.loads(smol.run(cwd=tmp_path, python=("script.py",)).ok().out)
    assert (said["summary"]["status"], said["summary"]["steps"], said["summary"]["run_dir"]) == ("finished", 3, "run")
    assert said["summary"] == read_summary(tmp_path / "run")
    assert len(said["losses"]) == 4
    assert said["losses"][0] > said["losses"][2]
    assert said["losses"][3] == "closed"
    unknown_key, unknown_dataset = said["problems"]
    assert "did you mean 'training.batch_size'?" in unknown_key
    assert "did you mean 'wikitext'?" in unknown_dataset
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["run", "script.py"]


def test_training_from_python(beside: Beside) -> None:
    folder, ended = beside["test_training_from_python"]
    found = re.findall(r"^(\d) worker\(s\): validation loss (\S+), in (\S+)$", ended.out, flags=re.MULTILINE)
    assert [workers for workers, _, _ in found] == ["1", "2"]
    losses = []
    for workers, loss, run_dir in found:
        summary = read_summary(folder / run_dir)
        assert summary["workers"] == int(workers)
        assert summary["val_loss"] == pytest.approx(float(loss), abs=1e-6)
        losses.append(summary["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
