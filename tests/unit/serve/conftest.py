"""A scripted engine behind the HTTP service: one for all tests of a file, new for each test, or a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.scripted_engine import ScriptedEngine, serving


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedEngine, int]]:
    engine = ScriptedEngine()
    with serving(engine) as number:
        yield engine, number


@pytest.fixture
def engine(served: tuple[ScriptedEngine, int]) -> ScriptedEngine:
    """Behind `port`, as if it were new."""
    engine = served[0]
    engine.__init__()  # type: ignore[misc]
    return engine


@pytest.fixture
def port(served: tuple[ScriptedEngine, int], engine: ScriptedEngine) -> int:
    return served[1]


@pytest.fixture
def own() -> ScriptedEngine:
    """For a server of the test's own."""
    return ScriptedEngine()
