"""`smolcluster bench`, as typed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.e2e.command import TINY, Smol, read_rows


def test_bench_alone_lists_what_there_is(smol: Smol, tmp_path: Path) -> None:
    assert "smolcluster bench scaling" in smol.run("bench", cwd=tmp_path).ok().out


def test_scaling_of_two_sizes_and_one_that_does_not_divide(smol: Smol, tmp_path: Path) -> None:
    sizes = ("--workers", "1,2,3", "--repeats", "1", "--steps", "6", "--warmup", "2", "--out", "here")
    ended = smol.run("bench", "scaling", "gpt", *sizes, "--override", *TINY, cwd=tmp_path).ok()
    assert "\x1b" not in ended.out
    assert "run 2 of 3: repeat 1 of 1, 2 workers" in ended.out
    assert "a step of 4 samples cannot be divided among 3 data shards" in ended.out
    found = json.loads((tmp_path / "here" / "scaling.json").read_text())
    one, two, three = found["sizes"]
    assert (found["status"], found["strategy"], found["scaling"]) == ("finished", "allreduce", "strong")
    assert (one["batch_size"], two["batch_size"], three["samples"]) == (4, 2, [])
    # Six steps of four samples, after the first two; start-up is not in them.
    assert sum(stretch["samples"] for stretch in two["samples"][0]["stretches"]) == 24
    rows = read_rows(tmp_path / "here" / "runs" / "workers-1-repeat-1")
    seconds = sum(row["step_time_s"] * 2 for row in rows if row["step"] > 2)
    assert one["median_samples_per_s"] == pytest.approx(24 / seconds)
    assert two["efficiency"] == two["median_samples_per_s"] / one["median_samples_per_s"] / 2
    assert (tmp_path / "here" / "scaling.svg").is_file()
    again = smol.run("bench", "scaling", "--out", "here", cwd=tmp_path)
    assert (again.status, "already has a scaling.json" in again.err) == (2, True)


def test_an_interrupt_leaves_what_there_is(smol: Smol, tmp_path: Path) -> None:
    command = ("bench", "scaling", "gpt", "--workers", "1", "--steps", "1000000", "--out", "here")
    running = smol.start(*command, "--override", *TINY, cwd=tmp_path, group=True)
    run = tmp_path / "here" / "runs" / "workers-1-repeat-1"
    running.until(lambda: read_rows(run), what="a first row")
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert (ended.status, "interrupted" in ended.err) == (130, True)
    assert json.loads((tmp_path / "here" / "scaling.json").read_text())["status"] == "interrupted"
