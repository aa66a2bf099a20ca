"""A strategy of another package, registered by entry point: on both planes it is treated as one of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.command import TINY, Ended, Smol, read_summary

RECORD = """
from pydantic import Field

from smolcluster.config.options import Options, SyncPSOptions
from smolcluster.config.strategies import Record


class AveragingOptions(Options):
    factor: float = Field(1.0, gt=0, description="of the averaged gradient")


class ElasticOptions(SyncPSOptions):
    worker_update_interval: int = 1
    factor: float = Field(1.0, gt=0, description="of the averaged gradient")


RECORD = Record(
    name="averaging",
    algorithm="Averaging",
    summary="gradients averaged tensor by tensor",
    where={"mesh": "averaging.strategy:Averaging", "elastic": "averaging.strategy:ElasticAveraging"},
    options={"mesh": AveragingOptions, "elastic": ElasticOptions},
    aliases=("mean",),
    topology="ring",
)
"""
STRATEGY = """
from averaging import AveragingOptions, ElasticOptions
from smolcluster.strategies.base import StepReport
from smolcluster.parallel.placement import Cost, Placement, worker_on_each
from smolcluster.strategies.replicated import Replicated
from smolcluster.strategies.syncps import SyncPS


class Averaging(Replicated[AveragingOptions]):
    @classmethod
    def plan(cls, options, nodes, shape):
        if shape is None:
            return Placement(seats=worker_on_each(nodes))
        size, n = shape.parameters * shape.bytes_per_parameter, len(nodes)
        cost = Cost(
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=size * shape.optimizer_states,
            bytes_sent=2 * (n - 1) * size // n,
            bytes_received=2 * (n - 1) * size // n,
            messages=2 * (n - 1) * len(shape.tensors),
        )
        return Placement(seats=worker_on_each(nodes), costs=[cost] * n)

    def step(self, batch):
        rate, loss = self.replica.learning_rate, self.replica.compute(batch)
        for parameter in self.replica.parameters:
            parameter.grad.mul_(self.options.factor / self.context.group.size)
            self.context.group.all_reduce(parameter.grad).wait()
        norm, stop = self.replica.apply(), self.context.stop_requested()
        return StepReport(
            loss=loss, grad_norm=norm, learning_rate=rate, samples=batch.samples, tokens=batch.tokens, stop=stop
        )


class ElasticAveraging(SyncPS):
    Config = ElasticOptions
"""
FACTOR = {"mesh": "strategy.factor=0.5", "elastic": "strategy.options.factor=0.5"}  # both are the same
SETTINGS = """
from tests.conformance.cases import SETTINGS, Setting

SETTINGS["averaging"] = Setting(workers=(2,))
"""
PATIENCE_S = 280.0  # four processes that import torch at once, beside other tests, on two cores
ROOT = Path(__file__).parents[2]
TRAIN = ("--strategy", "Mean", "--workers", "2", "--steps", "4", "--override", *TINY, "training.checkpoint_steps=2")
PATIENT = ("strategy.timeout=120", "cluster.silence_timeout=120", "cluster.stall_timeout=120")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distribution as pip would leave it, in a folder that processes have on their path."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "averaging").mkdir()
    (folder / "averaging" / "__init__.py").write_text(RECORD, encoding="utf-8")
    (folder / "averaging" / "strategy.py").write_text(STRATEGY, encoding="utf-8")
    (folder / "averaging" / "conformance.py").write_text(SETTINGS, encoding="utf-8")
    info = folder / "averaging-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: averaging\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[smolcluster.strategies]\naveraging = averaging:RECORD\n", encoding="utf-8")
    return folder


def run(smol: Smol, installed: Path, folder: Path, *arguments: str | Path) -> Ended:
    return smol.run(*arguments, cwd=folder, within_s=PATIENCE_S, env={"PYTHONPATH": str(installed)}).ok()


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_it_trains_and_resumes(smol: Smol, installed: Path, tmp_path: Path, plane: str) -> None:
    """A resumed run ends with the very weights of the one that was not interrupted."""
    sets = () if plane == "mesh" else (*PATIENT, "cluster.standby=false")
    whole = ("train", "gpt", *TRAIN, *sets, FACTOR[plane], "--plane", plane, "--run-dir", "whole")
    out = run(smol, installed, tmp_path, *whole)
    assert "does not use" not in out.out + out.err
    first = read_summary(tmp_path / "whole")
    assert (first["strategy"], first["steps"]) == ("averaging", 4)
    (middle,) = (tmp_path / "whole" / "checkpoints").glob("*2")
    run(smol, installed, tmp_path, *whole[:-1], "again", "--resume", middle)
    assert read_summary(tmp_path / "again")["weights_sha256"] == first["weights_sha256"]


def test_it_is_listed_planned_and_described(smol: Smol, installed: Path, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run(smol, installed, tmp_path, "strategies", "--json").out)}
    assert rows["averaging"]["aliases"] == ["mean"]
    assert rows["averaging"]["planes"] == ["mesh", "elastic"]
    factor = {"default": 1.0, "description": "of the averaged gradient"}
    assert rows["averaging"]["options"]["factor"] == factor | {"planes": {"mesh": factor, "elastic": factor}}
    plan = ("plan", "--memory", "gpt", "--strategy", "averaging", "--nodes", "2", "--json", "--override", *TINY)
    rows = {row["name"]: row for row in json.loads(run(smol, installed, tmp_path, *plan).out)["strategies"]}
    assert {name: row["runs"] for name, row in rows.items()} == {"averaging": True, "averaging, elastic": True}
    wrong, env = ("train", "gpt", *TRAIN, "strategy.options.factor=-1"), {"PYTHONPATH": str(installed)}
    refused = smol.run(*wrong, cwd=tmp_path, within_s=PATIENCE_S, env=env)
    assert refused.status == 2
    assert "--override: strategy.options.factor = -1: Input should be greater than 0" in refused.err


def test_the_conformance_suite_has_it(installed: Path) -> None:
    """The rules that need few runs, on both planes, in the setting that the package names."""
    chosen = "averaging and (equals_single or refused)"
    command = ("-m", "pytest", "-p", "averaging.conformance", "-p", "no:xdist", "tests/conformance", "-k", chosen)
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "8 passed" in ended.stdout
