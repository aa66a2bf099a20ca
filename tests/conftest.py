"""For all tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from tests import warm as warm_processes

if TYPE_CHECKING:
    from tests.e2e.serve.fake_chat import Fake

# How long one example takes says something about the machine, and nothing about the code.
settings.register_profile("smolcluster", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("smolcluster")

# As many processes run tests as there are cores, or more: threads of each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Commands of ours start in a moment from here on: see warm.py."""
    installed = warm_processes.install()
    yield
    warm_processes.uninstall(installed)


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Fake]:
    from tests.e2e.serve.fake_chat import Fake, serving

    with serving(Fake()) as fake:
        yield fake


@pytest.fixture
def fake(fake_server: Fake) -> Fake:
    """A chat server with scripted answers, reset for each test."""
    fake_server.reset()
    return fake_server


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
