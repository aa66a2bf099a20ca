"""For all tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import warm as warm_processes

# How long one example takes says something about the machine, and nothing about the code.
settings.register_profile("smolcluster", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("smolcluster")


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Commands of ours start in a moment from here on: see warm.py."""
    installed = warm_processes.install()
    yield
    warm_processes.uninstall(installed)


@pytest.fixture
def slower() -> Callable[[], float]:
    """By what factor the machine has been slower than it is since the test began. A virtual one is told how much of its
    processor time went to others; what must happen in so many seconds cannot, while it stands still."""

    def spent() -> tuple[int, int]:
        try:
            fields = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return sum(fields) - fields[3] - fields[4], fields[7]  # idle and waiting for a disk; stolen

    busy_before, stolen_before = spent()

    def factor() -> float:
        busy, stolen = spent()
        busy, stolen = busy - busy_before, stolen - stolen_before
        return busy / (busy - stolen) if 0 < stolen < busy else 1.0

    return factor


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`usual(when=...)` chooses among the cases of a test by their parameters; the others are slow."""
    for item in items:
        usual = item.get_closest_marker("usual")
        if isinstance(item, pytest.Function) and usual is not None and not usual.kwargs["when"](**item.callspec.params):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed reaches the process that reports it as UTF-8: with `-n` it could not be sent otherwise."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
