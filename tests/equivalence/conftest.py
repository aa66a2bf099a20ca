"""Runs on one process, and runs of several that must equal them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import EqualsSingle, Single, assert_same_run
from tests.world import World, run_world


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    """Return the run of a task on one process; each is made once."""
    runs: dict[str, World] = {}

    def run(config: dict[str, Any], task: str | None = "Double", *, environ: dict[str, str] | None = None) -> World:
        key = repr((sorted(config.items()), task, environ))
        if key not in runs:
            folder = tmp_path_factory.mktemp("single")
            runs[key] = run_world(1, folder, config, task=task, strategy="single", environ=environ)
        return runs[key]

    return run


@pytest.fixture
def equals_single(tmp_path: Path, single: Single) -> EqualsSingle:
    """Train on `size` ranks of the mesh plane, and assert that this equals the run on one process.

    `config` is that of both, with the batch of all ranks together; `parts` is what the ranks have instead.
    """

    def check(
        strategy: str,
        size: int,
        config: dict[str, Any],
        parts: dict[str, Any],
        *,
        task: str = "Double",
        tolerance: float = 1e-10,
        environ: dict[str, str] | None = None,
    ) -> World:
        one = single(config, task, environ=environ)
        many = run_world(size, tmp_path / "many", config | parts, task=task, strategy=strategy, environ=environ)
        assert_same_run(one, many, tolerance=tolerance)
        assert one.summary["val_loss"] == pytest.approx(many.summary["val_loss"], rel=max(tolerance, 1e-9))
        assert one.summary["samples"] == many.summary["samples"]
        return many

    return check
