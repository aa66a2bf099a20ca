"""Run directories for tests of the dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.run_folder import T0, aged, append, begin, configure, folder_of_runs, log, member, row, write_rows


@pytest.fixture
def elastic(tmp_path: Path) -> Path:
    """A run of edp: a server, two workers, one of which is lost at 5 s."""
    run = configure(tmp_path / "runs" / "one", strategy="edp", more="  device: cpu\nname: x\n")
    append(run / "history.jsonl", begin(0), member("joined", 0, 1), member("joined", 1, 1))
    for step in range(1, 6):
        write_rows(run, row(step, 0), row(step, 1, host="pi5", machine={"device": "cpu", "load": 0.5}))
        write_rows(run, row(step, 2, role="server", time=T0 + step + 0.1))
    append(run / "history.jsonl", member("left", 1, 5, "the connection was closed"))
    append(run / "logs" / "worker-rank1-pi5.log", log("starts as process 7"), log("lost the server", "WARNING", 6))
    aged(run, T0 + 6)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of_runs(tmp_path)
