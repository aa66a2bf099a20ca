"""The layout of the package: rules that a reader relies on to find things by folder and name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "smolcluster"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_FILES = 20  # side by side
MOST_LINES = 500
MANY_BY_NATURE = {PACKAGE / "cli"}  # one file per command
SMALL = 4  # a package of fewer modules needs no list
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def listed_packages() -> list[Path]:
    """Packages whose modules are listed in the package's docstring: all with several modules but cli/, which lists commands."""
    packages = {path.parent for path in MODULES if path.name == "__init__.py"} - MANY_BY_NATURE - {PACKAGE}
    return sorted(folder for folder in packages if len(list(folder.glob("*.py"))) > SMALL)


@pytest.mark.parametrize("folder", listed_packages(), ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_a_package_lists_its_modules(folder: Path) -> None:
    listed = ast.get_docstring(TREES[folder / "__init__.py"]) or ""
    modules = {path.name for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")}
    packages = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert sorted(name for name in modules | packages if name not in listed) == []


def test_no_folder_and_no_file_is_too_large() -> None:
    folders = {path.parent for path in MODULES} - MANY_BY_NATURE
    assert [folder for folder in folders if len(list(folder.glob("*.py"))) > MOST_FILES] == []
    assert [path for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES] == []


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
