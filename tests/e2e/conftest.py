"""Fixtures of the end-to-end tests. The helpers themselves are in command.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
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
