"""Strategies that the project itself does not have, installed for tests: the example package `examples/fedavg`, and what the
documentation shows of an outer optimizer with momentum."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "fedavg"


OUTER_RECORD = """
from pydantic import Field
from smolcluster.config.options import LocalStepOptions
from smolcluster.config.strategies import Record


class OuterOptions(LocalStepOptions):
    outer_lr: float = Field(0.7, gt=0, description="rate of the outer step")


RECORD = Record(
    name="outer",
    algorithm="Outer",
    summary="local steps, then an outer one with momentum",
    where={"mesh": "outer.strategy:Outer", "elastic": "outer.strategy:Outer"},
    options=OuterOptions,
)
"""
OUTER_STRATEGY = """
import torch
from outer import OuterOptions
from smolcluster.strategies.base.local_steps import LocalSteps


class Outer(LocalSteps[OuterOptions]):
    def outer_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=self.options.outer_lr, momentum=0.9, nesterov=True)

    @classmethod
    def outer_states(cls, options):
        return 1
"""


def install_fedavg(folder: Path) -> Path:
    """Put it into a folder as pip would. Who has the folder on the path has the strategy."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(EXAMPLE / "fedavg", folder / "fedavg", ignore=shutil.ignore_patterns("__pycache__"))
    (points,) = project["entry-points"].values()
    return _register(folder, project["name"].replace("-", "_"), points)


def install_outer(folder: Path) -> Path:
    (folder / "outer").mkdir()
    (folder / "outer" / "__init__.py").write_text(OUTER_RECORD, encoding="utf-8")
    (folder / "outer" / "strategy.py").write_text(OUTER_STRATEGY, encoding="utf-8")
    return _register(folder, "outer", {"outer": "outer:RECORD"})


def _register(folder: Path, name: str, points: dict[str, str]) -> Path:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = ["[smolcluster.strategies]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
