"""The benchmark harness with variants whose samples are known, and one benchmark in its smallest form."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import BENCHMARKS, p3, p4
from benchmarks.__main__ import main
from benchmarks.harness import Comparison, Measured, Session, Target, Variant
from benchmarks.harness.comparison import measure, table
from benchmarks.harness.jobs import call_each
from benchmarks.harness.methods import DDP, METHODS, MUON_PEER
from benchmarks.harness.network import Network, check_possible, hosts, parse_rate
from benchmarks.harness.peer_programs import Program, usable
from benchmarks.harness.plot import draw
from benchmarks.harness.processes import crossed, descendants, environment_of, started
from benchmarks.harness.session import machine
from benchmarks.harness.slow import busy, slowed
from benchmarks.harness.workload import Shape, make_config
from benchmarks.p2 import first_at
from benchmarks.p3 import NAMED, NOT_ABOVE, SETTINGS, WITHIN, Runs, _chosen, _confirm_best
from benchmarks.p4 import ROWS, _split, reached
from benchmarks.p6 import counted, most, zero
from benchmarks.p7 import check_same_work
from benchmarks.p9 import _again, transfer_seconds
from benchmarks.peers.bare import Recipe
from benchmarks.peers.work import Work
from benchmarks.tasks.counted import kernel_bytes, per_step

from smolcluster.compute.optim import warmup_cosine
from smolcluster.errors import SmolclusterError, UserError


def variant(name: str, samples: Iterable[float], role: str = "ours", target: Target | None = None) -> Variant:
    values = iter(samples)
    return Variant(name=name, run=lambda: next(values), role=role, target=target)


def seen(ours: list[list[float]], peer: list[list[float]], *, unit: str = "s", **fields: object) -> Measured:
    """As if these had been measured: a list of rounds per repeat."""
    variants = [variant("peer", [], "peer"), variant("ours", [], **fields)]
    return Measured(Comparison(name="c", variants=variants, unit=unit), {"peer": peer, "ours": ours})


# Order


def test_variants_take_turns_and_the_order_turns_with_every_round() -> None:
    calls: list[str] = []

    def call(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return 1.0

        return run

    variants = [Variant(name=n, run=call(n), role="peer" if n == "a" else "ours") for n in "abc"]
    measured = measure(Comparison(name="c", variants=variants, rounds=3, warmup=0), repeats=2)
    assert "".join(calls) == "abccbaabccbaabccba"
    assert {len(rounds) for repeats in measured.samples.values() for rounds in repeats} == {3}
    assert {len(repeats) for repeats in measured.samples.values()} == {2}


def test_warmup_is_run_and_not_kept() -> None:
    variants = [variant("peer", [9.0, 9.0, 1.0, 2.0], "peer"), variant("ours", [9.0, 9.0, 3.0, 4.0])]
    measured = measure(Comparison(name="c", variants=variants, rounds=1, warmup=2), repeats=2)
    assert measured.samples == {"peer": [[1.0], [2.0]], "ours": [[3.0], [4.0]]}


def test_samples_belong_to_their_round_although_the_order_turns() -> None:
    variants = [variant("peer", [1.0, 2.0, 3.0, 4.0], "peer"), variant("ours", [10.0, 20.0, 30.0, 40.0])]
    measured = measure(Comparison(name="c", variants=variants, rounds=2, warmup=0), repeats=2)
    assert measured.samples["ours"] == [[10.0, 20.0], [30.0, 40.0]]
    assert measured.ratios("ours", "peer") == [10.0, 10.0]


# Numbers


def test_the_median_is_that_of_repeats_and_a_ratio_is_taken_within_a_round() -> None:
    measured = seen(ours=[[2.0, 3.0, 100.0], [4.0, 4.0, 4.0]], peer=[[1.0, 1.0, 50.0], [4.0, 2.0, 1.0]])
    assert measured.medians("ours") == [3.0, 4.0]
    assert measured.median("ours") == 3.5
    assert measured.ratios("ours", "peer") == [2.0, 2.0]
    assert measured.ratio("ours", "peer") == 2.0


def test_drift_that_hits_all_alike_leaves_the_ratio_alone() -> None:
    drift = [1.0, 1.5, 4.0, 2.0, 9.0]
    measured = seen(ours=[[1.2 * d] for d in drift], peer=[[d] for d in drift])
    assert measured.ratio("ours", "peer") == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("unit", "limit", "ours", "verdict"),
    [
        ("s", 1.03, 1.03, "met"),
        ("s", 1.03, 1.04, "missed"),
        ("1/s", 2.0, 2.0, "met"),
        ("1/s", 2.0, 1.9, "missed"),
    ],
)
def test_seconds_stay_below_a_target_and_rates_above(unit: str, limit: float, ours: float, verdict: str) -> None:
    measured = seen(ours=[[ours]], peer=[[1.0]], unit=unit, target=Target(limit=limit))
    assert measured.verdict(measured.comparison.variants[1]) == verdict


def test_a_target_may_bound_the_median_itself() -> None:
    measured = seen(ours=[[0.2], [0.25], [0.4]], peer=[[0.01]] * 3, target=Target(limit=0.3, of="median"))
    assert measured.verdict(measured.comparison.variants[1]) == "met"
    assert "<= 300 ms" in table(measured, repeats=3)


def test_the_ratio_to_every_peer_counts() -> None:
    variants = [
        variant("slow", [], "peer"),
        variant("fast", [], "peer"),
        variant("ours", [], target=Target(limit=1.0)),
    ]
    samples = {"slow": [[2.0]], "fast": [[1.0]], "ours": [[1.5]]}
    measured = Measured(Comparison(name="c", variants=variants), samples)
    assert measured.ratio("ours", "slow") < 1.0
    assert measured.verdict(variants[2]) == "missed"
    assert "/ slow" in table(measured, repeats=1)
    assert "/ fast" in table(measured, repeats=1)


@pytest.mark.parametrize(
    ("twin", "ours", "verdict"),
    [
        *((1.02, 1.01, "within noise"), (1.02, 1.03, "missed"), (1.02, 0.99, "met")),
        *((1.20, 1.10, "unclear"), (1.20, 0.90, "unclear"), (1.20, 0.70, "met"), (1.20, 1.30, "missed")),
    ],
)
def test_noise_is_how_far_a_peer_lies_from_itself(twin: float, ours: float, verdict: str) -> None:
    variants = [
        variant("peer", [], "peer"),
        variant("ours", [], target=Target(limit=1.0)),
        variant("twin", [], "noise"),
    ]
    samples = {"peer": [[1.0]] * 2, "ours": [[ours]] * 2, "twin": [[twin], [2.0 - twin]]}
    measured = Measured(Comparison(name="c", variants=variants), samples)
    assert measured.noise == pytest.approx(twin - 1.0)
    assert measured.verdict(variants[1]) == verdict
    assert f"{twin - 1:.1%}" in table(measured, repeats=2)


def test_a_comparison_needs_a_peer_and_distinct_names() -> None:
    with pytest.raises(ValueError, match="no peer"):
        Comparison(name="c", variants=[variant("ours", [])])
    with pytest.raises(ValueError, match="same name"):
        Comparison(name="c", variants=[variant("a", [], "peer"), variant("a", [])])


# What is kept


def test_the_file_holds_raw_samples_figures_and_the_machine(tmp_path: Path) -> None:
    session = Session("fake", repeats=2)
    session.parameters = {"link": "loopback"}
    variants = [variant("peer", [2.0] * 4, "peer"), variant("ours", [1.0, 3.0, 1.0, 1.0], target=Target(limit=1.5))]
    session.compare(Comparison(name="c", variants=variants, rounds=2, warmup=0, parameters={"workers": 2}))
    path = session.write(tmp_path / "new")
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "fake.json"
    assert (kept["benchmark"], kept["repeats"], kept["quick"]) == ("fake", 2, False)
    assert kept["parameters"] == {"link": "loopback"}
    assert kept["date"].endswith("+00:00")
    (comparison,) = kept["comparisons"]
    assert comparison["parameters"] == {"workers": 2}
    ours = comparison["variants"]["ours"]
    assert ours["samples"] == [[1.0, 3.0], [1.0, 1.0]]
    assert ours["median"] == 1.5
    assert ours["spread"] == [1.0, 2.0]
    assert ours["ratio"] == {"peer": 0.75}
    assert ours["ratios"] == {"peer": [1.0, 0.5]}
    assert ours["target"] == {"limit": 1.5, "of": "ratio"}
    assert ours["verdict"] == "met"
    assert comparison["variants"]["peer"]["verdict"] is None


def test_the_machine_is_described_without_its_name() -> None:
    described = machine()
    assert described["cores"] == os.cpu_count()
    assert described["python"].startswith("3.")
    assert described["torch"]
    assert socket.gethostname() not in json.dumps(described)
    assert "/" not in described["cpu"]


# The command


def test_without_a_name_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and summary in listed for name, summary in BENCHMARKS.items())
    assert "Example: python -m benchmarks" in listed


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"Example: python -m benchmarks {name}" in shown
    assert "Target" in shown


def test_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["p77"]) == 2
    assert "did you mean 'p7'" in capsys.readouterr().err


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


# Parts


def test_bytes_of_a_step_leave_out_the_beginning_and_what_is_under_way() -> None:
    rows = [(1000 + 10 * step, 5000 + (80 if step % 4 == 0 else 0) + 20 * (step // 4)) for step in range(40)]
    rows = [(10**6, 10**6)] * 4 + rows  # the state travels
    assert per_step(rows, interval=4) == (10.0, 5.0)
    with pytest.raises(ValueError, match="too few"):
        per_step(rows[:11], interval=4)


def test_the_kernel_counts_the_bytes_of_this_process() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("TCP_INFO is Linux's")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        before = kernel_bytes()
        ours.sendall(bytes(12_345))
        assert len(theirs.recv(12_345, socket.MSG_WAITALL)) == 12_345
        after = kernel_bytes()
    if after == (0, 0):
        pytest.skip("this kernel does not count bytes per socket")
    assert (after[0] - before[0], after[1] - before[1]) == (12_345, 12_345)


def test_a_loss_is_reached_when_the_mean_of_the_last_rows_is_there() -> None:
    curve = [(float(i), 3.0) for i in range(ROWS)]
    assert not reached(curve[:-1], 5.0), "too few rows"
    assert reached(curve, 3.0)
    assert not reached([*curve, (9.0, 3.1)], 3.0)


def test_samples_of_each_worker_are_means_over_steps() -> None:
    commits = [{"contributors": [{"rank": 0, "samples": n}, {"rank": 1, "samples": 32 - n}]} for n in (24, 26)]
    assert _split(commits) == [25.0, 7.0]


def test_a_worker_counts_again_with_a_new_instance_only() -> None:
    def commit(when: float, *instances: str) -> dict[str, object]:
        return {"time": when, "contributors": [{"rank": int(i[0]), "instance": i} for i in instances]}

    lines = [commit(1.0, "0a", "1a"), commit(2.0, "0a", "1a"), commit(3.0, "0a")]
    assert _again(lines, 1, 1) is None
    assert _again([*lines, commit(4.0, "0a", "1b")], 1, 1) == 4.0


def test_bytes_and_losses_are_held_against_the_peer() -> None:
    """With Muon inside, also against the synchronous run with Muon."""
    runs = Runs(100)
    runs.done = {
        (name, 1): {"bytes": size, "bytes_per_step": size / 100, "val_loss": loss}
        for name, size, loss in [
            (DDP, 1000, 2.0),
            (MUON_PEER, 1000, 1.5),
            ("diloco, wan", 100, 2.005),
            ("diloco, wan, muon", 100, 1.6),
        ]
    }
    row = runs.row("diloco, wan", 1)
    assert (row["fewer_bytes"], row["fewer_per_step"], row[WITHIN], row[NOT_ABOVE]) == (10.0, 10.0, "yes", "no")
    row = runs.row("diloco, wan, muon", 1)
    assert (round(row["difference"], 9), round(row["to_same"], 9)) == (-0.4, 0.1)
    assert (row[WITHIN], row[NOT_ABOVE]) == ("no", "yes")
    names = [*METHODS, *(setting.name for setting in SETTINGS)]
    assert len(set(names)) == len(names)


def test_the_best_setting_of_each_goal_is_confirmed_with_the_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest one that is within 0.01 is not, with other seeds: then the next one is tried."""
    losses = {DDP: 2.0, "small": 2.005, "middle": 2.008, "large": 1.9}
    sizes = {DDP: 1000, "small": 1, "middle": 2, "large": 3}
    made: list[tuple[str, int]] = []

    def train(name: str, steps: int, seed: int) -> dict[str, float]:
        made.append((name, seed))
        higher = 0.1 if name == "small" and seed > p3.SEED else 0.0
        return {"bytes": sizes[name], "bytes_per_step": sizes[name], "val_loss": losses[name] + higher}

    monkeypatch.setattr(p3, "_train", train)
    session, runs = Session("p3", repeats=3), Runs(100)
    runs.complete(*losses, seeds=[p3.SEED])
    rows = [{**runs.row(DDP, p3.SEED), WITHIN: "peer"}, *(runs.row(name, p3.SEED) for name in losses if name != DDP)]
    _confirm_best(session, rows, runs)
    within, not_above = session.parameters["tables"].values()
    assert [(row["setting"], row["holds"], row["fewer_bytes"]) for row in within] == [
        ("small", "no", 1000.0),
        ("middle", "yes", 500.0),
    ]
    assert [(row["setting"], row["holds"]) for row in not_above] == [("large", "yes")]
    assert sorted(made) == sorted((name, p3.SEED + n) for name in losses for n in range(3)), "each once"


def where(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_independent_measurements_run_in_processes_of_their_own() -> None:
    results = call_each(where, [(number,) for number in range(3)], jobs=2)
    assert [number for number, _ in results] == [0, 1, 2]
    assert os.getpid() not in {process for _, process in results}
    assert call_each(where, [(7,)], jobs=1) == [(7, os.getpid())]


def test_a_measurement_that_was_kept_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def square(number: int) -> int:
        if number == 3:
            raise KeyboardInterrupt
        made.append(number)
        return number * number

    kept = tmp_path / "kept.jsonl"
    with pytest.raises(KeyboardInterrupt):
        call_each(square, [(1,), (2,), (3,)], jobs=1, keep=kept)
    assert call_each(square, [(2,), (1,), (4,)], jobs=1, keep=kept) == [4, 1, 16]
    assert made == [1, 2, 4]


def test_where_a_curve_comes_down_to_a_loss() -> None:
    curve = [(30.0, 4.0), (60.0, 3.0), (90.0, 3.5), (120.0, 2.0)]
    assert [first_at(curve, loss) for loss in (5.0, 3.5, 2.5, 1.9)] == [30.0, 45.0, 110.0, None]


def test_a_picture_has_every_line_in_its_panel() -> None:
    panels = {"1 Mbit/s": {"a < b": [(1.0, 4.0), (100.0, 2.0)], "c": [(10.0, 3.0), (10.0, 2.0)]}, "10 Mbit/s": {}}
    picture = ElementTree.fromstring(draw(panels, title="t", across="seconds"))
    lines = [line.get("points") for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert lines == ["0.0,56.0 290.0,348.0", "145.0,202.0 145.0,348.0"]
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1 Mbit/s", "10 Mbit/s", "a < b", "c", "seconds", "2.5"} <= set(words)


def test_peers_that_are_not_installed_are_left_out_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert usable({"a peer": ("no_such_package", {}), "its variant": ("no_such_package", {})}) == []
    assert (
        capsys.readouterr().out.count("no_such_package is not installed (pip install 'smolcluster[bench]'): left out")
        == 1
    )


def test_peers_are_run_beside_a_few_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p3, "usable", list)
    session = Session("p3", repeats=1)

    def chosen(*, only: list[str] | None = None, peers: bool = False) -> tuple[list[str], list[str], list[str]]:
        settings, methods, named = _chosen(session, argparse.Namespace(only=only, peers=peers))
        return [s.name for s in settings], methods, named

    assert chosen() == ([s.name for s in SETTINGS], p3.COMPARED, list(NAMED))
    assert chosen(peers=True) == (list(p3.BESIDE), list(p3.BESIDE_METHODS), list(NAMED))
    assert chosen(only=["Ray", "powersgd 32"], peers=True) == (
        ["syncps, powersgd 32"],
        [],
        ["hivemind, powersgd 32, no state", "Ray, parameter server, fp32"],
    )
    with pytest.raises(SmolclusterError, match="no setting has 'rey' in its name: hivemind"):
        chosen(only=["rey"])
    assert set(p4.BESIDE) <= p4.OURS.keys()


def test_workers_have_the_same_weights_and_share_the_samples_of_a_step() -> None:
    def work(batch_size: int, rank: int, size: int) -> Work:
        config = make_config(Shape("tiny", 16, 1, 2, 8, batch_size), steps=4, overrides={"training.device": "cpu"})
        return Work(config, rank=rank, size=size)

    alone, *parts = work(4, 0, 1), work(2, 0, 2), work(2, 1, 2)
    for own, *others in zip(*(w.model.parameters() for w in (alone, *parts)), strict=True):
        assert all(own.equal(other) for other in others)
    for _ in range(2):
        whole, shares = alone.batch()[0].tolist(), [part.batch()[0].tolist() for part in parts]
        assert sorted(whole) == sorted(shares[0] + shares[1])
    assert alone.gradient() > 0


SS = """
ESTAB 0 0 127.0.0.1:50 127.0.0.1:80 users:(("a",pid=1,fd=3)) cubic bytes_sent:1000 bytes_acked:1000
ESTAB 0 0 [::ffff:127.0.0.1]:80 [::ffff:127.0.0.1]:50 users:(("b",pid=2,fd=3)) cubic bytes_received:1000
ESTAB 0 0 127.0.0.1:51 127.0.0.1:80 users:(("a",pid=11,fd=3),("a",pid=1,fd=9)) cubic bytes_sent:200 bytes_acked:200
ESTAB 0 0 127.0.0.1:80 127.0.0.1:51 users:(("b",pid=2,fd=4)) cubic bytes_sent:30 bytes_acked:30
ESTAB 0 0 127.0.0.1:60 127.0.0.1:61 users:(("a",pid=1,fd=5)) cubic bytes_sent:7777 bytes_acked:7777
ESTAB 0 0 127.0.0.1:61 127.0.0.1:60 users:(("c",pid=11,fd=5)) cubic bytes_sent:7777 bytes_acked:7777
ESTAB 0 0 127.0.0.1:70 127.0.0.1:71 users:(("a",pid=1,fd=6)) cubic bytes_sent:5555 bytes_acked:5555
ESTAB 0 0 127.0.0.1:71 127.0.0.1:70 users:(("stranger",pid=99,fd=6)) cubic bytes_sent:5555 bytes_acked:5555
TIME-WAIT 0 0 127.0.0.1:52 127.0.0.1:80
""".strip()


def test_bytes_count_that_went_from_one_machine_to_another() -> None:
    assert crossed(SS, {1: 0, 11: 0, 2: 1}) == 1000 + 200 + 30


PROGRAM = """
import json, os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    other = socket.create_connection(listener.getsockname())
    listener.close()
    while True:
        other.sendall(bytes(len(other.recv(1000))))  # as many back
connection, _ = listener.accept()
for row in ({"child": child}, {"step": 1}, {"val_loss": 2.0}):
    connection.sendall(bytes(500))
    assert len(connection.recv(500, socket.MSG_WAITALL)) == 500
    print(json.dumps(row), flush=True)
    sys.stdin.readline()
"""


def test_a_program_waits_at_every_row_and_its_bytes_can_be_counted_there() -> None:
    if shutil.which("ss") is None:
        pytest.skip("ss of iproute2 is needed")
    with started([sys.executable, "-c", PROGRAM], listen=True) as process:
        child = json.loads(process.stdout.readline())["child"]
        program = Program([process], [[process.pid], [child]])
        assert (program.machine(0), program.machine(1)) == ({process.pid}, {child})
        assert program.bytes_sent() == 1000
        process.stdin.write(b"\n")
        process.stdin.flush()
        seen = [(row, program.bytes_sent()) for row in program.rows()]
    assert seen == [({"step": 1}, 2000), ({"val_loss": 2.0}, 3000)]


def test_a_transfer_over_loopback_is_timed() -> None:
    assert 0 < transfer_seconds(1 << 20) < 5


def test_a_command_is_ended_with_all_it_has_started() -> None:
    if not Path("/proc/self/stat").is_file():
        pytest.skip("/proc is Linux's")
    child = "import time; time.sleep(60)"
    script = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{child}']); print(1, flush=True); {child}"
    )
    with started([sys.executable, "-c", script], environ={"MARK": "here"}, listen=True) as process:
        assert process.stdout.readline() == b"1\n"
        (grandchild,) = descendants(process.pid)
        mark = environment_of(grandchild).get("MARK")
        assert mark == "here"
    left = bool(environment_of(grandchild))
    assert not left
    assert process.returncode == -9


def test_competitors_are_gone_afterwards() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("affinity is Linux's")
    before = set(descendants(os.getpid()))
    with busy(min(os.sched_getaffinity(0))):
        assert len(set(descendants(os.getpid())) - before) == 3
    assert set(descendants(os.getpid())) == before


def test_a_slow_process_gets_a_quarter_of_its_core() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("affinity is Linux's")
    core = max(os.sched_getaffinity(0))
    spin = "import time\nt = 0.0\nwhile True:\n    t += 0.3\n    while time.process_time() < t: pass\n    print(flush=True)"
    with started([sys.executable, "-c", spin], listen=True) as process:
        assert process.stdout is not None
        os.sched_setaffinity(process.pid, {core})
        with slowed(process.pid, core=core):
            process.stdout.readline()
            began = time.monotonic()
            process.stdout.readline()
            took_s = time.monotonic() - began
    assert took_s > 0.3 * 2.5


def test_unequal_work_is_refused() -> None:
    check_same_work({10: 2.5, 20: 2.0}, {1: 5.5, 10: 2.5, 20: 2.0}, name="single", exact=True)
    with pytest.raises(SmolclusterError, match="at step 20"):
        check_same_work({10: 2.5, 20: 2.0}, {10: 2.5, 20: 2.1}, name="single", exact=True)
    with pytest.raises(SmolclusterError, match="no step"):
        check_same_work({10: 2.5}, {5: 2.5}, name="single", exact=True)


def test_the_peers_learning_rates_are_ours() -> None:
    recipe = Recipe(learning_rate=1e-3, min_lr=1e-4, warmup=5, steps=40, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0)
    ours = warmup_cosine(peak=1e-3, floor=1e-4, warmup=5, steps=40)
    assert all(math.isclose(recipe.rate(n), ours(n)) for n in range(50))


def test_link_rates_are_read_as_tc_spells_them() -> None:
    assert parse_rate("100mbit") == 1e8
    assert parse_rate("1gbit") == 1e9
    assert parse_rate("1.5mbit") == 1.5e6
    with pytest.raises(UserError, match="like 100mbit"):
        parse_rate("fast")


def test_hosts_have_names_and_addresses_of_their_own() -> None:
    network = Network(3, "100mbit")
    assert network.namespace(1) == f"smolbench-{os.getpid()}-1"
    assert [network.address(i) for i in range(3)] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert network.environment({"A": "1"}) == {"A": "1", "GLOO_SOCKET_IFNAME": "eth0"}


def test_limited_links_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(UserError, match="iproute2"):
        check_possible()
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000, raising=False)
    with pytest.raises(UserError, match="root"):
        check_possible()


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"smolbench-{os.getpid()}-")]


def test_hosts_reach_each_other_and_nobody_else_and_are_gone_afterwards() -> None:
    try:
        with hosts(2, rate="100mbit"):
            pass
    except UserError as error:
        pytest.skip(str(error))
    probe = "import socket, sys; socket.create_connection((sys.argv[1], 9), 2)"

    def connect(network: Network, address: str) -> str:
        command = [sys.executable, "-c", probe, address]
        return str(network.run(0, command, capture_output=True, text=True).stderr)

    with hosts(2, rate="100mbit") as network:
        assert len(namespaces()) == 3  # two hosts and the bridge
        assert "ConnectionRefusedError" in connect(network, network.address(1)), "the other host was not reached"
        assert "Network is unreachable" in connect(network, "192.0.2.1")
        waiting = network.popen(1, [sys.executable, "-c", "import signal; signal.pause()"])
    assert namespaces() == []
    assert waiting.returncode == -9


def test_hosts_are_gone_after_an_error_too() -> None:
    def fail() -> None:
        with hosts(1, rate=None):
            assert len(namespaces()) == 2
            raise RuntimeError("in the middle")

    try:
        fail()
    except UserError as error:
        pytest.skip(str(error))
    except RuntimeError:
        pass
    assert namespaces() == []


def test_p6_knows_the_formulas_of_zero_and_who_has_most() -> None:
    assert [zero(stage, "fp32", 100, 4) for stage in range(4)] == [1600, 1000, 700, 400]
    assert [zero(stage, "bf16", 100, 4) for stage in range(4)] == [1600, 700, 550, 400]
    noted = {"peak": {"at": {"parameters": 3, "other": 4}}}
    assert counted(noted) == 7
    assert most([noted, noted | {"allocated": 9}])["allocated"] == 9
