"""The example package `examples/fedavg`, installed for tests: a strategy that the project itself does not have."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "fedavg"


def install_fedavg(folder: Path) -> Path:
    """Put it into a folder as pip would. Who has the folder on the path has the strategy."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(EXAMPLE / "fedavg", folder / "fedavg", ignore=shutil.ignore_patterns("__pycache__"))
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [
        f"[{group}]\n{key} = {value}\n"
        for group, points in project["entry-points"].items()
        for key, value in points.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines), encoding="utf-8")
    return folder
