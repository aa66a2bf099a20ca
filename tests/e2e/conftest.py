"""Fixtures of the end-to-end tests. The helpers themselves are in command.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.browser import lone_page
from tests.e2e.command import Smol


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token cache for all runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smol(warm: None, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smol]:
    runner = Smol(cache, tmp_path_factory.mktemp("output"))
    yield runner
    runner.close()


@pytest.fixture
def lone(browser: Any) -> Iterator[Any]:
    """A page that may report errors. The fixture `browser` is the test module's."""
    with lone_page(browser) as page:
        yield page


# Makes the import of torch an error in every process but a server or worker.
GUARD = """
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise AssertionError("the launcher imports torch")

if not {"smolcluster.engine.process.main", "smolcluster.engine.process.warm_elastic"} & set(sys.orig_argv):
    sys.meta_path.insert(0, Guard())
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("guard")
    (folder / "sitecustomize.py").write_text(GUARD, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
