"""The bytes that a run on the mesh plane says it moved are those that crossed its sockets, and those of the formulas.

Over gloo on loopback, against the kernel's own counters. gloo's headers are in the 2 % that may come on top; nothing may be
missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
from benchmarks.harness.mesh_bytes import CASES, TASK, MeshCase, compare, formula, fsdp, settings
from benchmarks.harness.workload import Shape
from benchmarks.tasks import counted
from tests.world import run_world

SHAPE = Shape("tiny", 64, 4, 4, 64, 8)
STEPS = 10
CHOSEN = [
    "fsdp 1",
    "fsdp 3, hybrid of 2",
    "pipeline interleaved",
    "tensor, sequence",
    "tensor",
    "mesh dp 2 x tp 1 x pp 2, stage 3",
    "mesh dp 1 x tp 2 x pp 2, stage 0",
]


def chosen() -> list[MeshCase]:
    """Of each name the smallest."""
    found: dict[str, MeshCase] = {}
    for case in CASES:
        found.setdefault(case.name, case)
    return [found[name] for name in CHOSEN]


@pytest.mark.usual(when=lambda case: case.name == "fsdp 3, hybrid of 2")
@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.name)
def test_what_is_counted_is_what_crosses_the_sockets(tmp_path: Path, case: MeshCase) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("TCP_INFO is Linux's")
    counts = tmp_path / "counts"
    counts.mkdir()
    config = {**settings(SHAPE), **case.overrides(), "training.steps": STEPS, "task": TASK}
    environ = {counted.FOLDER: str(counts)}
    world = run_world(case.workers, tmp_path / "run", config, strategy=case.strategy, environ=environ)
    assert [rank.status for rank in world.ranks] == [0] * case.workers, world.ranks[0].failed
    rows = [dataclasses.asdict(row) for rank in world.ranks for row in rank.rows()]
    row = compare(case, SHAPE, rows, counts)
    assert row["verdict"] == "met", row
    for said, sent, received, *_ in row["samples"]:
        assert sent == pytest.approx(said, rel=0.03), row
        assert received == pytest.approx(said, rel=0.03), row


def test_an_evaluation_is_counted_too(tmp_path: Path) -> None:
    """Stage 2 gathers for it, and the step after it finds its parameters gathered already: as many bytes over the pair."""
    config = {**settings(SHAPE), "training.steps": 6, "training.batch_size": 2, "strategy.fsdp_stage": 2}
    config |= {"training.eval_steps": 2, "training.eval_samples": 8}
    rows = run_world(2, tmp_path / "run", config, strategy="fsdp").ranks[0].rows()
    once = formula(fsdp(2, 2), SHAPE)[0] / 2
    sent = [(later.bytes_sent - earlier.bytes_sent) / once for earlier, later in itertools.pairwise(rows)]
    assert sent == pytest.approx([3, 1, 3, 1, 3], rel=0.02)
