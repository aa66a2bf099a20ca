"""A strategy of another package, registered by entry point: on both planes it is treated as one of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.command import TINY, Ended, Smol, read_summary
from tests.plugins import install_fedavg
from tests.warm import ADDS

STEPS_OF_ROUND = {"mesh": "strategy.local_steps=2", "elastic": "strategy.options.local_steps=2"}  # both are the same
PATIENCE_S = 280.0  # four processes that import torch at once, beside other tests, on two cores
ROOT = Path(__file__).parents[3]
TRAIN = ("--strategy", "Fed-Avg", "--workers", "2", "--steps", "4", "--override", *TINY, "training.checkpoint_steps=2")
# On the elastic plane a checkpoint has the optimizer state of one worker.
STATELESS = ("training.optimizer=sgd", "training.momentum=0")
PATIENT = ("cluster.silence_timeout=120", "cluster.stall_timeout=120")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_fedavg(tmp_path_factory.mktemp("site"))


def run(smol: Smol, installed: Path, folder: Path, *arguments: str | Path) -> Ended:
    return smol.run(*arguments, cwd=folder, timeout_s=PATIENCE_S, env=path_to(installed)).ok()


def path_to(installed: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(installed), ADDS: str(installed)}


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_it_trains_and_resumes(smol: Smol, installed: Path, tmp_path: Path, plane: str) -> None:
    """A resumed run ends with the very weights of the one that was not interrupted."""
    overrides = () if plane == "mesh" else (*PATIENT, "cluster.standby=false", *STATELESS)
    whole = ("train", "gpt", *TRAIN, *overrides, STEPS_OF_ROUND[plane], "--plane", plane, "--run-dir", "whole")
    out = run(smol, installed, tmp_path, *whole)
    assert "does not use" not in out.out + out.err
    first = read_summary(tmp_path / "whole")
    assert (first["strategy"], first["steps"]) == ("fedavg", 4)
    (middle,) = (tmp_path / "whole" / "checkpoints").glob("*2")
    run(smol, installed, tmp_path, *whole[:-1], "again", "--resume", middle)
    assert read_summary(tmp_path / "again")["weights_sha256"] == first["weights_sha256"]


def test_it_is_listed_planned_and_described(smol: Smol, installed: Path, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run(smol, installed, tmp_path, "strategies", "--json").out)}
    assert rows["fedavg"]["planes"] == ["mesh", "elastic"]
    assert rows["fedavg"]["options"]["local_steps"]["default"] == 10
    plan = ("plan", "--memory", "gpt", "--strategy", "fedavg", "--nodes", "2", "--json", "--override", *TINY)
    rows = {row["name"]: row for row in json.loads(run(smol, installed, tmp_path, *plan).out)["strategies"]}
    assert {name: row["runs"] for name, row in rows.items()} == {"fedavg": True, "fedavg, elastic": True}
    wrong, env = ("train", "gpt", *TRAIN, "strategy.options.local_steps=0"), path_to(installed)
    refused = smol.run(*wrong, cwd=tmp_path, timeout_s=PATIENCE_S, env=env)
    assert refused.status == 2
    assert "--override: strategy.local_steps = 0: Input should be greater than" in refused.err


def test_the_conformance_suite_has_it(installed: Path) -> None:
    """The rules that need few runs, on both planes, in the setting that the package names."""
    chosen = "fedavg and (equals_single or refused) and not local_steps"
    command = ("-m", "pytest", "-p", "fedavg.conformance", "-p", "no:xdist", "tests/conformance", "-k", chosen)
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
