"""`python -m benchmarks`: the list, the help, and benchmarks in their smallest form."""

from __future__ import annotations

import json
import os
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from benchmarks import BENCHMARKS
from benchmarks.__main__ import main
from benchmarks.harness.processes import descendants


def test_benchmarks_are_listed_and_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and summary in listed for name, summary in BENCHMARKS.items())
    assert "Example: python -m benchmarks" in listed
    assert main(["p77"]) == 2
    assert "did you mean 'p7'" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"Example: python -m benchmarks {name}" in shown
    assert "Target" in shown


def test_p7_in_its_smallest_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: data, the real loop with two strategies, the bare loop, equal losses, a file."""
    assert main(["p7", "--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    assert "allreduce" in capsys.readouterr().out
    kept = json.loads((tmp_path / "p7.json").read_text(encoding="utf-8"))
    assert kept["quick"]
    samples = {name: v["samples"] for name, v in kept["comparisons"][0]["variants"].items()}
    assert samples.keys() == {"bare loop", "single", "allreduce", "bare loop again"}
    assert all(0 < seconds < 60 for repeats in samples.values() for rounds in repeats for seconds in rounds)


def test_exchange_in_its_smallest_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real local steps and exchanges of every method; the parts are the whole, and bytes those of the wire."""
    assert main(["exchange", "--quick", "--repeats", "1", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "the parts of an exchange" in capsys.readouterr().out
    kept = json.loads((tmp_path / "exchange.json").read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in next(iter(kept["parameters"]["tables"].values()))}
    assert list(rows) == ["wan", "lan", "bf16", "fp32"]
    for name, row in rows.items():
        assert row["compute"] == pytest.approx(30 * row["step"])
        assert row["ratio"] == pytest.approx(row["exchange"] / row["compute"])
        assert (row["verdict"] in ("met", "missed")) == (name in ("wan", "lan"))
        assert row["wire at 1 Mbit/s"] * 1e6 * 30 * 4 * 2 * 32 == pytest.approx(8 * row["bytes"])
        parts = ("pseudo-gradient", "encode", "decode", "mean", "outer step") if name != "fp32" else ("outer step",)
        assert all(row[part] > 0 for part in parts)
    dense = rows["fp32"]["bytes"]
    assert rows["bf16"]["bytes"] == pytest.approx(dense, rel=0.01)  # three halves of the model; twice three quarters
    assert rows["lan"]["bytes"] < 0.27 * dense
    assert rows["wan"]["bytes"] < 0.02 * dense


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("p3", ["--only", "topk 0.01", "bare", "--jobs", "2"], "syncps, topk 0.01"),
        ("trends", ["--only", "dropped", "--jobs", "2"], "50% dropped"),
        ("p4", ["--only", "allreduce, auto"], "of the limit"),
        ("p9", ["--only", "syncps"], "counts again"),
        ("p12", ["--only", "allreduce"], "met by all"),
    ],
)
def test_benchmarks_of_the_elastic_plane_run_to_their_end(
    name: str, options: list[str], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2:
        pytest.skip("two cores and Linux are needed")
    resource_tracker.ensure_running()  # of Python: it stays once a pool of processes was used
    before = descendants(os.getpid())
    assert main([name, "--quick", "--repeats", "1", "--out", str(tmp_path), *options]) == 0
    assert shown in capsys.readouterr().out
    assert set(descendants(os.getpid())) <= set(before), "something is left running"
    assert (tmp_path / f"{name}.json").is_file()
