"""`smolcluster plan --memory`, as a user would type it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.command import TINY, Smol


def test_a_table_and_what_to_take(smol: Smol, tmp_path: Path) -> None:
    said = ("plan", "--memory", "gpt", "--nodes", "2", "--strategy", "mp", "--limit", "2GB")
    ended = smol.run(*said, "--override", *TINY, "model.num_layers=2", cwd=tmp_path).ok()
    lines = ended.out.splitlines()
    assert lines[0].endswith("parameters on 2 ranks, device cpu: bytes of the rank that needs most")
    for name in ("pipeline 1f1b", "pipeline gpipe"):
        row, bar = [line for line in lines if line.startswith(f"{name} ")]
        assert row.rstrip().endswith("yes")
        assert set(bar.removeprefix(name).strip()) <= set("pgoa")
    assert any(
        line.startswith("cannot run: pipeline zbv: 4 stages (2 ranks, schedule zbv) and only 2") for line in lines
    )
    assert lines[-1].startswith(
        "the first that fits: pipeline 1f1b  (smolcluster train ... --workers 2 --strategy pipeline"
    )
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_json_and_too_little_room(smol: Smol, tmp_path: Path) -> None:
    said = ("plan", "--memory", "gpt", "--nodes", "a,b", "--strategy", "edp", "--limit", "300.1MB", "--json")
    plan = json.loads(smol.run(*said, "--override", *TINY, cwd=tmp_path).ok().out)
    assert plan["recommended"] is None
    (edp,) = plan["strategies"]
    assert [seat["role"] for seat in edp["seats"]] == ["worker", "server"]
    assert edp["fits"] is False
    assert edp["peak_bytes"] > plan["limit_bytes"] == 100_000
