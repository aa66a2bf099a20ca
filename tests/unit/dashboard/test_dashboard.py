"""The dashboard without a browser: reading a run directory, keeping it small, telling it, in a terminal too."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.run_folder import (
    T0,
    aged,
    append,
    begin,
    configure,
    folder_of_runs,
    log,
    member,
    row,
    summarize,
    write_rows,
)

from smolcluster.cli.top import top
from smolcluster.comm.elastic.transport.api import LEFT
from smolcluster.dashboard.downsample import Curve, limit_for
from smolcluster.dashboard.follow import LineFollower
from smolcluster.dashboard.links import ByteCounts, links_of, shape_of
from smolcluster.dashboard.logs import read_page
from smolcluster.dashboard.ranks import LEFT_REASON, RankRecord, RankState, known_facts, state_of
from smolcluster.dashboard.run_curve import MAX_METRICS, RunCurve
from smolcluster.dashboard.run_files import checkpoint_of, flat_config
from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.runs import NoSuchRun, RunFolder, compare
from smolcluster.dashboard.server import choose
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.dashboard.step_times import StepTimes
from smolcluster.dashboard.terminal import frame
from smolcluster.errors import UserError
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.machine import MachineFacts, describe_machine, parse_smi
from smolcluster.observe.run_state import loss_curve
from smolcluster.observe.text import number


def reader_of(run: Path, *, now: float = T0 + 10) -> RunReader:
    reader = RunReader(run, now=lambda: now)
    reader.poll_to_the_end()
    return reader


def snapshot_of(run: Path, **options: Any) -> dict[str, Any]:
    return SnapshotStream(reader_of(run, **options)).snapshot()


# Following a file that grows ----------------------------------------------------------------------------------------


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "file"
    follower = LineFollower(path)
    assert follower.poll().lines == []  # not there yet
    path.write_bytes(b"one\ntw")
    assert follower.poll().lines == [b"one"]
    assert follower.poll().lines == []
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert follower.poll().lines == [b"two", b"three"]


def test_a_file_that_was_replaced_cut_or_rewritten_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(20)))
    follower = LineFollower(path)
    follower.poll()
    other = tmp_path / "other"
    other.write_bytes(b"new 1\nnew 2\n")
    other.replace(path)
    news = follower.poll()
    assert (news.restarted, news.lines) == (True, [b"new 1", b"new 2"])

    path.write_bytes(b"new 1\n")  # cut off in place
    news = follower.poll()
    assert (news.restarted, news.lines) == (True, [b"new 1"])

    path.write_bytes(b"other\nand longer than before\n")  # cut off, and grown beyond where we stood, between two polls
    news = follower.poll()
    assert (news.restarted, news.lines) == (True, [b"other", b"and longer than before"])

    path.unlink()
    assert follower.poll().restarted
    assert not follower.poll().restarted


def test_a_long_file_comes_in_pieces_and_a_line_without_an_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\n" + b"x" * 5000 + b"\nc\nd")
    follower, found = LineFollower(path, max_bytes=64), []
    for _ in range(200):
        news = follower.poll()
        found += news.lines
        if not news.more:
            break
    assert found == [b"a", b"b", b"c"]


def test_only_the_end_of_a_long_log_is_looked_through(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(b"line %03d\n" % i for i in range(100)))
    assert LineFollower(path, skip_to_last=25).poll().lines == [b"line 098", b"line 099"]


def test_a_file_that_did_not_change_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    follower = LineFollower(path)
    follower.poll()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert follower.poll().lines == []


@pytest.mark.skipif(sys.platform == "win32", reason="no links and pipes to be had")
def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret\n")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    assert LineFollower(tmp_path / "link").poll().lines == []
    assert LineFollower(tmp_path / "pipe").poll().lines == []  # and does not wait for a writer


# Curves that stay small ---------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.sampled_from([2, 4, 10]))
def test_thinning_keeps_means_and_extremes(values: list[float], limit: int) -> None:
    curve = Curve(("loss",), limit=limit)
    for i, value in enumerate(values):
        curve.add({"loss": value}, step=i, time=i)
    assert len(curve.points) <= limit
    assert sum(point.rows for point in curve.points) == len(values)
    assert {point.rows for point in curve.points[:-1]} <= {curve.stride}
    start = 0
    for point in curve.points:
        part = values[start : start + point.rows]
        start += point.rows
        assert point.means()[0] == pytest.approx(math.fsum(part) / len(part), abs=1e-6 * len(part))
        assert (point.lowest, point.highest) == (min(part), max(part))
        assert point.step == start - 1


def test_many_rows_are_a_few_hundred_points_and_the_spike_is_still_there() -> None:
    curve = Curve(("loss",))
    for i in range(100_000):
        curve.add({"loss": 99.0 if i == 12_345 else 1.0}, step=i, time=i)
    assert len(curve.points) <= 480
    assert curve.num_rows == 100_000
    assert max(point.highest or 0 for point in curve.points) == 99.0
    assert len(json.dumps(curve.columns())) < 40_000


def test_a_late_row_takes_its_place_and_a_value_that_is_no_number_leaves_a_gap() -> None:
    curve = Curve(("loss",))
    for step in (1, 2, 4):
        curve.add({"loss": float(step)}, step=step, time=step)
    curve.forget_changes()
    curve.add({"loss": 3.0}, step=3, time=3)
    assert curve.columns()["step"] == [1, 2, 3, 4]
    assert curve.changed == 2  # what lies before is as it was
    for i, value in enumerate(["nan", math.nan, math.inf, None, True, [1], 10**400, "3"]):
        curve.add({"loss": value}, step=5 + i, time=5 + i)
    assert curve.columns()["loss"] == [1, 2, 3, 4] + [None] * 8


def test_a_late_row_counts_in_a_curve_that_was_thinned() -> None:
    curve = Curve(("loss",), limit=4)
    for step in range(1, 21):
        curve.add({"loss": 1.0}, step=step, time=step)
    curve.add({"loss": 9.0}, step=3, time=3.5)
    assert sum(point.rows for point in curve.points) == 21
    assert curve.points[0].highest == 9.0
    assert curve.points[-1].highest == 1.0


def test_many_machines_share_the_room() -> None:
    assert limit_for(1) == 480
    assert limit_for(1024) * 1024 < 100_000


# One curve out of many ranks ----------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 40), st.randoms(use_true_random=False), st.booleans())
def test_the_joined_curve_is_that_of_the_console(
    ranks: int, steps: int, chance: random.Random, with_server: bool
) -> None:
    """`observe.run_state.loss_curve` sees all rows at once, in any order; we see them one by one and keep few."""
    rows = [row(s, r, samples=s * (r + 1), loss=chance.random()) for s in range(1, steps + 1) for r in range(ranks)]
    rows.sort(key=lambda r: r["step"] + chance.random() * 3)  # ranks are up to three steps apart, each in its own order
    for rank in range(ranks):
        own = sorted((r for r in rows if r["rank"] == rank), key=lambda r: r["step"])
        places = [i for i, r in enumerate(rows) if r["rank"] == rank]
        for place, one in zip(places, own, strict=True):
            rows[place] = one
    for i, one in enumerate(rows):
        one["time"] = T0 + i * 0.01
    if with_server:
        rows += [row(s, ranks, role="server", loss=chance.random(), time=T0 + s) for s in range(1, steps + 1)]
    joined = RunCurve()
    for one in rows:
        joined.add(one, num_workers=ranks)
    joined.flush()
    expected_steps, expected = loss_curve(rows)
    columns = joined.curve.columns()
    assert columns["step"] == expected_steps
    assert columns["loss"] == pytest.approx(expected, rel=1e-5)


def far_apart(step: int, rank: int, *, apart_s: float) -> dict[str, Any]:
    """A row of one of two ranks that are about as fast; the second has three times the samples of the first."""
    when = T0 + step * apart_s + rank * 0.01 * apart_s
    return row(step, rank, time=when, loss=step + 2.0 * rank, samples=step * (1 + 2 * rank))


@pytest.mark.parametrize("apart_s", [0.1, 11.0, 60.0, 3600.0])
@pytest.mark.parametrize("live", [False, True])
def test_all_ranks_count_however_far_apart_their_rows_are(tmp_path: Path, apart_s: float, live: bool) -> None:
    run, steps = configure(tmp_path / "run"), range(1, 6)
    reader = RunReader(run, now=lambda: T0)
    for step in steps:
        for rank in (0, 1) if step % 2 else (1, 0):  # either may be the first to write
            write_rows(run, far_apart(step, rank, apart_s=apart_s))
            if live:
                reader.poll()
    reader.poll()
    columns = reader.run_curve.curve.columns()
    assert columns["step"] == list(steps)
    assert columns["loss"] == [step + 1.5 for step in steps]  # (1 * own + 3 * (own + 2)) / 4
    assert columns["tokens_per_s"] == [200.0] * 5
    assert SnapshotStream(reader).snapshot()["numbers"]["loss"] == 6.5
    assert reader.workers.curve.columns()["sent_per_s"][-1] == pytest.approx(2 * 1000 / apart_s, rel=0.1)


@pytest.mark.parametrize("apart_s", [1.0, 60.0])
@pytest.mark.parametrize("died", [1, 6])
def test_a_rank_that_died_is_not_waited_for(tmp_path: Path, died: int, apart_s: float) -> None:
    """Nor one that never comes: `train --elastic 1:2` goes on with one, while the configuration says two."""
    run = configure(tmp_path / "run")
    for step in range(1, 40):
        for rank in (0, 1) if step < died else (0,):
            write_rows(run, far_apart(step, rank, apart_s=apart_s))
    columns = reader_of(run).run_curve.curve.columns()
    assert columns["step"] == list(range(1, 40))
    assert columns["tokens_per_s"][-1] == 100.0


# Links --------------------------------------------------------------------------------------------------------------


def test_shapes() -> None:
    assert shape_of("edp", served=True, num_workers=3) == "star"
    assert shape_of("allreduce", served=True, num_workers=3) == "wheel"
    assert shape_of("allreduce", served=False, num_workers=3) == "ring"
    assert shape_of("pipeline", served=False, num_workers=3) == "line"
    assert shape_of("single", served=False, num_workers=1) == "alone"


def test_a_workers_link_to_its_server_is_what_it_counted() -> None:
    links = links_of("star", {0: ByteCounts(sent=10, received=3, sent_per_s=1)}, workers=[0], server=1)
    assert [(link.source, link.target, link.bytes, link.inferred) for link in links] == [
        (0, 1, 10, False),
        (1, 0, 3, False),
    ]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=6))
def test_the_links_of_a_pipeline_follow_from_what_its_ranks_counted(moved: list[tuple[int, int]]) -> None:
    """`moved`: down and up, for each link."""
    num = len(moved) + 1
    counts = {
        rank: ByteCounts(
            sent=(moved[rank][0] if rank < num - 1 else 0) + (moved[rank - 1][1] if rank else 0),
            received=(moved[rank][1] if rank < num - 1 else 0) + (moved[rank - 1][0] if rank else 0),
        )
        for rank in range(num)
    }
    links = {(link.source, link.target): link.bytes for link in links_of("line", counts, workers=list(range(num)))}
    for rank, (down, up) in enumerate(moved):
        assert (links[rank, rank + 1], links[rank + 1, rank]) == (down, up)


def test_a_ring_closes_without_those_who_are_gone() -> None:
    links = links_of("ring", {}, workers=[0, 2, 3])
    assert [(link.source, link.target) for link in links] == [(0, 2), (2, 3), (3, 0)]


# States -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "rows", "status", "age_s", "named", "expected"),
    [
        ("", 0, "starting", 0, False, "starting"),
        ("joined", 2, "training", 1, False, "training"),
        ("", 2, "training", 60, False, "silent"),
        ("lost", 2, "training", 1, False, "lost"),
        ("evicted", 2, "training", 1, False, "evicted"),
        ("left", 2, "training", 1, False, "left"),
        ("left", 2, "finished", 1, False, "finished"),
        ("lost", 2, "finished", 1, False, "lost"),
        ("", 2, "failed", 1, True, "lost"),
        ("", 2, "failed", 1, False, "stopped"),
        ("joined", 2, "interrupted", 1, False, "stopped"),
    ],
)
def test_states(member: Any, rows: int, status: str, age_s: float, named: bool, expected: RankState) -> None:
    machine = RankRecord(0, member=member)
    for step in range(1, rows + 1):
        machine.take(row(step), step=step, time=T0 + step)
    assert state_of(machine, status=status, age_s=age_s, named=named) == expected


def test_silence_is_measured_against_the_own_pace_of_a_process(tmp_path: Path) -> None:
    """Steps of 10 s, a row every 10 of them: nobody is silent after a minute and a half, and everybody is after an hour."""
    run = configure(tmp_path / "run", strategy="edp", more="logging:\n  log_interval: 10\n")
    slow = {"step_time_s": 10.0}
    write_rows(run, row(1, 0, **slow), row(1, 1, **slow), row(1, 2, role="server", **slow))
    aged(run, T0 + 1)
    told = snapshot_of(run, now=T0 + 95)
    assert set(states(told).values()) == {"training"}
    assert told["status"] == "training"
    told = snapshot_of(run, now=T0 + 3600)
    assert set(states(told).values()) == {"silent"}


def test_the_word_of_good_bye_is_that_of_the_transport() -> None:
    assert LEFT_REASON == LEFT


def test_bytes_go_on_counting_when_a_process_is_started_again() -> None:
    machine = RankRecord(0)
    for step, sent in enumerate([100, 200, 50, 80], start=1):
        machine.take(row(step, bytes_sent=sent, bytes_received=0), step=step, time=T0 + step)
    assert machine.count().sent == 280
    assert machine.count().sent_per_s == 30  # of the new process: 50 to 80 in a second


# A run directory ----------------------------------------------------------------------------------------------------


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


def states(told: dict[str, Any]) -> dict[str, str]:
    return {machine["name"]: machine["state"] for machine in told["machines"]}


def test_an_elastic_run(elastic: Path) -> None:
    told = snapshot_of(elastic, now=T0 + 7)
    assert told["status"] == "training"
    assert told["shape"] == "star"
    assert states(told) == {"worker 0": "training", "worker 1": "lost", "server": "training"}
    lost = told["machines"][1]
    assert (lost["host"], lost["reason"]) == ("pi5", "the connection was closed")
    assert lost["facts"] == {"device": "cpu", "load": 0.5}
    assert lost["spans"] == [[T0 + 1, T0 + 5]]
    assert [(e["kind"], e.get("rank")) for e in told["events"]] == [
        ("begin", None), ("join", 0), ("join", 1), ("lost", 1), ("warning", 1)
    ]  # fmt: skip
    assert {(link["source"], link["target"]): link["bytes"] for link in told["links"]}[0, 2] == 5000
    assert [link["per_s"] for link in told["links"]] == [1000, 100, 0, 0]  # nothing moves to one who is lost
    numbers = told["numbers"]
    assert (numbers["step"], numbers["steps"], numbers["loss"]) == (5, 100, 1.0)
    assert numbers["wait_s"] == pytest.approx(0.1)
    assert told["machines"][0]["device"] == "cpu"  # the configuration says so
    json.dumps(told, allow_nan=False)


def test_one_who_comes_back_trains_again_and_is_drawn_at_the_step_of_the_run(elastic: Path) -> None:
    append(elastic / "history.jsonl", member("joined", 1, 6))
    write_rows(elastic, row(6, 2, role="server"), row(1, 1, time=T0 + 6.5))  # it counts from one again
    write_rows(elastic, row(7, 2, role="server"))
    told = snapshot_of(elastic, now=T0 + 7)
    assert states(told)["worker 1"] == "training"
    assert told["machines"][1]["losses"] == 1
    assert told["machines"][1]["spans"][1] == [T0 + 6, None]
    assert told["curves"]["rank1"]["columns"]["step"][-1] >= 6


def test_a_row_of_the_server_that_comes_late_moves_no_worker(tmp_path: Path) -> None:
    """A row that waits for its evaluation is written after rows of later steps."""
    run = configure(tmp_path / "run", strategy="edp", workers=1, steps=200)
    for step in range(5, 130, 5):
        if step != 50:
            write_rows(run, row(step, 1, role="server"), row(2 * step, 0, time=T0 + step + 2))
    write_rows(run, row(50, 1, role="server", val_loss=2.0))
    write_rows(run, *(row(2 * step, 0, time=T0 + step) for step in (128, 129)))
    told = snapshot_of(run)
    assert told["curves"]["joined"]["columns"]["step"] == list(range(5, 130, 5))
    columns = told["curves"]["rank0"]["columns"]
    assert columns["step"] == sorted(columns["step"])
    for step, when in zip(columns["step"][1:], columns["time"][1:], strict=True):  # of the first, no pace is known
        assert step == pytest.approx(when - T0)


def test_rows_before_the_second_row_of_the_server_are_drawn_where_the_run_was(tmp_path: Path) -> None:
    """The server logs its steps 1 and 40; four workers log each of their own ten steps in between."""
    run = configure(tmp_path / "run", row(1, 1, role="server", time=T0), strategy="edp", workers=1, steps=200)
    write_rows(run, *(row(own, 0, time=T0 + 4 * own) for own in range(1, 10)))
    early = snapshot_of(run, now=T0 + 37)
    assert early["curves"]["rank0"]["columns"]["step"] == []  # not all of them at step 1
    assert (early["machines"][0]["step"], early["machines"][0]["own_steps"]) == (9, True)
    assert early["machines"][1]["own_steps"] is False
    write_rows(run, row(40, 1, role="server", time=T0 + 39))
    steps = snapshot_of(run, now=T0 + 40)["curves"]["rank0"]["columns"]["step"]
    assert steps == pytest.approx([1 + 4 * own for own in range(1, 10)])


def test_a_killed_worker_is_called_that_and_is_back_after_seconds(elastic: Path) -> None:
    append(
        elastic / "logs" / "launcher-mini.log",
        log("worker 1 died (killed by SIGKILL); restarting it", "WARNING", 5),
    )
    told = snapshot_of(elastic, now=T0 + 5)
    assert told["machines"][1]["reason"] == "killed (SIGKILL)"
    assert "worker 1: killed (SIGKILL)" in [event["text"] for event in told["events"]]
    append(elastic / "history.jsonl", member("joined", 1, 22))
    reader = RunReader(elastic, now=lambda: T0 + 23)
    reader.poll_to_the_end()
    assert reader.events_by_time()[-1].text == "worker 1 is back after 17 s; killed (SIGKILL)"


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1), st.integers(-20, 5)), max_size=60))
def test_the_steps_of_a_worker_follow_the_server_and_never_go_back(rows: list[tuple[float, int, int]]) -> None:
    """The server is at step `time`; some of its rows come late."""
    pace, last = StepTimes(), 0.0
    pace.add(0.0, 0)
    now = 0.0
    for passed, is_server, late in rows:
        now += passed
        if is_server:
            when = max(0.0, now + min(0, late))
            pace.add(when, int(when))
        else:
            step = pace.step_at(now, rank=0, last=1000)
            assert last <= step <= 1000
            last = step


def test_where_the_server_goes_back_its_workers_do_too() -> None:
    pace = StepTimes()
    pace.add(0.0, 0)
    pace.add(10.0, 10)
    assert pace.step_at(15.0, rank=0) == 15
    assert pace.step_at(40.0, rank=0) == 20  # not farther than the row that must come next
    pace.add(50.0, 5)
    assert pace.step_at(51.0, rank=0) == 5


def test_evicted_left_and_a_server_that_came_back(elastic: Path) -> None:
    append(elastic / "history.jsonl", member("evicted", 0, 6, "it is silent"), begin(8, 42))
    told = snapshot_of(elastic, now=T0 + 8)
    assert states(told)["worker 0"] == "evicted"
    assert told["events"][-1]["text"] == "the server is back, at step 41"
    append(elastic / "history.jsonl", member("joined", 0, 9), member("left", 0, 10, LEFT_REASON))
    assert states(snapshot_of(elastic, now=T0 + 8))["worker 0"] == "left"


def test_one_who_is_gone_is_told_of_once(elastic: Path) -> None:
    gone = log("worker 1 (pi5) is gone: the connection was closed", "WARNING", 5, role="server", rank=2)
    append(elastic / "logs" / "server-mini.log", gone | {"logger": "smolcluster.comm.elastic.membership.roster"})
    told = snapshot_of(elastic, now=T0 + 7)
    assert [event["kind"] for event in told["events"] if "is gone" in event["text"]] == ["lost"]
    paused = log("worker 0 (mini) is paused: silent for 2.0 s", "WARNING", 6, role="server", rank=2)
    append(elastic / "logs" / "server-mini.log", paused | {"logger": "smolcluster.comm.elastic.membership.roster"})
    append(elastic / "history.jsonl", member("paused", 0, 6, "silent for 2.0 s"))
    told = snapshot_of(elastic, now=T0 + 7)
    assert [event["text"] for event in told["events"] if "is paused" in event["text"]] == [
        "worker 0 is paused: silent for 2.0 s"
    ]


def test_the_end(elastic: Path) -> None:
    summarize(elastic, status="finished", strategy="edp", tokens_per_s=7.0, finished=T0 + 6, val_loss=math.nan)
    told = snapshot_of(elastic, now=T0 + 9000)
    assert told["status"] == "finished"
    assert states(told) == {"worker 0": "finished", "worker 1": "lost", "server": "finished"}
    assert told["numbers"]["tokens_per_s"] == 7.0
    assert told["numbers"]["elapsed_s"] == 6.0
    assert told["summary"]["val_loss"] == "NaN"
    json.dumps(told, allow_nan=False)


def test_a_loss_is_rounded_once_wherever_it_is_told(tmp_path: Path) -> None:
    loss = 5.01835097  # to six digits, and then to four decimals: 5.0183
    run = configure(tmp_path / "runs" / "one", row(1, loss=loss, val_loss=loss), workers=1)
    summarize(run, status="finished", train_loss=loss, val_loss=loss, finished=T0 + 2)
    (line,), told = RunFolder(run.parent).list(), snapshot_of(run)
    numbers, (machine,), columns = told["numbers"], told["machines"], told["curves"]["val"]["columns"]
    shown = [numbers["loss"], numbers["val_loss"], numbers["best_val_loss"], line["train_loss"], line["val_loss"]]
    shown += [machine["loss"], columns["val_loss"][0], columns["lowest"][0]]
    assert {number(value) for value in shown} == {number(loss)} == {"5.0184"}


def test_time_and_bytes_of_a_run_that_has_ended_are_those_of_its_summary(tmp_path: Path) -> None:
    run = configure(
        tmp_path / "runs" / "one", row(1), row(2), workers=1
    )  # 2000 bytes, and after that a checkpoint is gathered
    summarize(run, status="finished", wall_s=28.4, bytes_sent=2500, finished=T0 + 20)
    (line,), numbers = RunFolder(run.parent).list(), snapshot_of(run)["numbers"]
    assert line["wall_s"] == numbers["elapsed_s"] == 28.4
    assert numbers["bytes"] == 2500


def test_bytes_of_processes_that_were_replaced_count(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1, bytes_sent=3000), row(2, bytes_sent=1000), workers=1)
    summarize(run, status="finished", bytes_sent=1500)
    assert snapshot_of(run)["numbers"]["bytes"] == 4000


def test_a_run_begins_before_its_first_row(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(10), row(11), workers=1)
    aged(run / "metrics.jsonl", T0 + 11)
    aged(run / "config.yaml", T0)
    assert snapshot_of(run, now=T0 + 12)["numbers"]["elapsed_s"] == 12
    aged(run / "config.yaml", T0 + 10.5)  # written anew, to resume
    assert snapshot_of(run, now=T0 + 12)["numbers"]["elapsed_s"] == 2


def test_a_summary_of_an_earlier_attempt_does_not_count(elastic: Path) -> None:
    summarize(elastic, status="interrupted", finished=T0 + 2)
    aged(elastic / "summary.json", T0 + 2)
    assert snapshot_of(elastic, now=T0 + 7)["status"] == "training"


def test_a_copy_of_a_run_that_has_ended_has_ended(tmp_path: Path) -> None:
    """Its files have the times of copying, in any order."""
    run = configure(tmp_path / "runs" / "one", row(1), row(2), workers=1)
    summarize(run, status="finished", finished=T0 + 3)
    for place, name in enumerate(("summary.json", "metrics.jsonl", "config.yaml")):
        aged(run / name, T0 + 5000 + 10 * place)
    assert snapshot_of(run, now=T0 + 6000)["status"] == "finished"
    assert [line["status"] for line in RunFolder(run.parent).list()] == ["finished"]
    write_rows(run, row(3, time=T0 + 5500))  # and then it was resumed
    assert snapshot_of(run, now=T0 + 5501)["status"] == "training"


def test_the_same_end_is_told_once(elastic: Path) -> None:
    """A mirror of a run on other machines writes it anew whenever it was cut off."""
    reader = reader_of(elastic, now=T0 + 8)
    for _ in range(2):
        (elastic / "summary.new").write_text(json.dumps({"status": "finished", "finished": T0 + 7}), encoding="utf-8")
        (elastic / "summary.new").replace(elastic / "summary.json")
        reader.poll()
    assert [event.kind for event in reader.events_by_time()].count("end") == 1


def test_who_was_gone_is_gone_in_a_long_run_too(elastic: Path) -> None:
    """The summary is known when the first part of the history is."""
    append(elastic / "history.jsonl", member("joined", 1, 6), member("left", 1, 7, LEFT_REASON))
    summarize(elastic, status="finished", finished=T0 + 9)
    reader = RunReader(elastic, now=lambda: T0 + 10)
    reader._history._max_bytes = 350  # begin, and two that join
    reader.poll()
    assert reader.behind
    reader.poll_to_the_end()
    spans = {machine["name"]: machine["spans"] for machine in SnapshotStream(reader).snapshot()["machines"]}
    assert spans["worker 0"] == [[T0 + 1, T0 + 9]]
    assert spans["worker 1"] == [[T0 + 1, T0 + 5], [T0 + 6, T0 + 7]]


def test_the_bar_of_a_run_that_is_resumed_goes_on(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1), row(2), workers=1)
    aged(run / "config.yaml", T0)
    summarize(run, status="interrupted", finished=T0 + 3)
    aged(run / "summary.json", T0 + 3)
    reader = reader_of(run)
    assert SnapshotStream(reader).snapshot()["machines"][0]["spans"] == [[T0 + 1, T0 + 3]]
    aged(run / "config.yaml", T0 + 5)
    write_rows(run, row(3, time=T0 + 9))
    reader.poll()
    assert SnapshotStream(reader).snapshot()["machines"][0]["spans"] == [[T0 + 1, None]]


@pytest.mark.parametrize("off_s", [-1e9, -3600.0, -30.0, 30.0, 3600.0])
def test_clocks_of_machines_are_not_compared(tmp_path: Path, off_s: float) -> None:
    """A row has the time of the machine that it tells of; a Pi without a battery may have that of 1970."""
    run = configure(tmp_path / "runs" / "one", strategy="edp")
    append(run / "history.jsonl", begin(0), member("joined", 0, 1), member("joined", 1, 1))

    def train(steps: range, *ranks: int) -> dict[str, Any]:
        for step in steps:
            write_rows(run, *(row(step, rank, time=T0 + step + rank * off_s) for rank in ranks))
            write_rows(run, row(step, 2, role="server"))
        aged(run, T0 + steps[-1])
        return snapshot_of(run, now=T0 + steps[-1] + 1)

    told = train(range(1, 21), 0, 1)
    assert states(told) == {"worker 0": "training", "worker 1": "training", "server": "training"}
    assert told["numbers"]["elapsed_s"] == 21
    (line,) = RunFolder(run.parent, now=lambda: T0 + 21).list()
    assert line["wall_s"] == 21
    assert states(train(range(21, 41), 0))["worker 1"] == "silent"
    assert states(train(range(41, 43), 0, 1))["worker 1"] == "training"
    summarize(run, status="finished", finished=T0 + 43)
    assert snapshot_of(run, now=T0 + 50)["status"] == "finished"


def test_a_clock_that_is_set_back_stops_nothing(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", *(row(step) for step in range(1, 1001)), workers=1)
    write_rows(run, *(row(step, time=T0 + step - 600) for step in range(1001, 1021)))
    aged(run, T0 + 420)
    told = snapshot_of(run, now=T0 + 421)
    assert states(told) == {"worker 0": "training"}
    (machine,) = told["machines"]
    assert (machine["step"], machine["sent_per_s"]) == (1020, 1000)
    assert told["numbers"]["loss"] == pytest.approx(5.0 / 1020)
    for name in ("rank0", "joined"):
        columns = told["curves"][name]["columns"]
        assert columns["step"] == sorted(columns["step"])
        assert columns["step"][-1] == 1020
        assert columns["loss"] == sorted(columns["loss"], reverse=True)
    summarize(run, status="finished", finished=T0 + 421)
    assert snapshot_of(run, now=T0 + 430)["status"] == "finished"


def test_numbers_of_a_long_run_are_those_of_now(tmp_path: Path) -> None:
    """A point of its curves stands for many rows."""
    run = configure(tmp_path / "run", *(row(step) for step in range(1, 5001)), workers=1, steps=10**6)
    slow = {"tokens_per_s": 10.0, "step_time_s": 4.0, "staleness": 3.0}
    write_rows(run, *(row(step, **slow) for step in range(5001, 5011)))
    aged(run / "metrics.jsonl", T0 + 5010)
    told = snapshot_of(run, now=T0 + 5011)
    assert told["curves"]["joined"]["stride"] > 8
    assert {name: told["numbers"][name] for name in slow} == slow


@pytest.mark.parametrize("elastic", [False, True])
def test_time_that_a_machine_was_gone_is_no_pause_of_its(tmp_path: Path, elastic: bool) -> None:
    """Else whatever is killed after it would be waited for as long, and longer."""
    run = configure(tmp_path / "run", workers=1, strategy="edp" if elastic else "single")
    later = T0 + 86_400
    times = [*range(1, 6), *(86_400 + s for s in range(6, 9))]
    rows = (row(step, time=T0 + s, bytes_sent=0, bytes_received=0) for step, s in enumerate(times, start=1))
    write_rows(run, *rows)
    if elastic:
        append(run / "history.jsonl", begin(0), member("joined", 0, 0), member("left", 0, 6, "killed"))
        append(run / "history.jsonl", member("joined", 0, 86_400))
    aged(run, later)
    aged(run / "metrics.jsonl", later + 8)
    if elastic:
        aged(run / "config.yaml", T0)
    assert snapshot_of(run, now=later + 9)["status"] == "training"
    assert snapshot_of(run, now=later + 60)["status"] == "silent"


def test_a_mesh_run_that_failed_names_who_died(tmp_path: Path) -> None:
    run = configure(tmp_path / "mesh")
    for step in range(1, 4):
        write_rows(run, row(step, 0), row(step, 1))
    append(run / "logs" / "worker-rank0-mini.log", log("worker, rank 0, starts as process 9", rank=0))
    summarize(run, status="failed", error="worker rank 1 failed: killed by SIGKILL", finished=T0 + 4)
    told = snapshot_of(run)
    assert states(told) == {"worker 0": "stopped", "worker 1": "lost"}
    assert told["shape"] == "ring"
    assert [event["kind"] for event in told["events"]] == ["join", "error"]


def test_a_machine_that_is_only_expected_is_there(tmp_path: Path) -> None:
    told = snapshot_of(configure(tmp_path / "run", workers=3))
    assert states(told) == {"worker 0": "starting", "worker 1": "starting", "worker 2": "starting"}
    assert told["numbers"]["step"] is None


def test_a_resumed_run_is_read_from_the_beginning(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", *(row(step) for step in range(1, 11)), workers=1)
    reader = reader_of(run)
    stream = SnapshotStream(reader)
    assert (stream.changes() or {})["whole"]
    truncate_metrics(run / "metrics.jsonl", after_step=4)
    write_rows(run, row(5, loss=9.0))
    reader.poll()
    told = stream.changes()
    assert told["whole"]
    assert told["curves"]["rank0"]["columns"]["step"] == [1, 2, 3, 4, 5]
    assert told["numbers"]["loss"] == 9.0


def test_a_loss_that_diverged_is_a_gap_and_an_event(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1), row(2, loss="nan"), row(3, loss="nan"), row(4), workers=1)
    told = snapshot_of(run)
    assert told["curves"]["rank0"]["columns"]["loss"] == [5.0, None, None, 1.25]
    assert [event["text"] for event in told["events"]] == ["the loss of worker 0 is nan at step 2"]


def test_an_evaluation_that_diverged_is_not_hidden_behind_the_one_before(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1, val_loss=2.0), row(2, val_loss="nan"), row(3), workers=1)
    told = snapshot_of(run)
    assert (told["numbers"]["val_loss"], told["numbers"]["best_val_loss"]) == (None, 2.0)
    assert told["curves"]["val"]["columns"]["val_loss"] == [2.0, None]
    assert "loss 1.6667" in drawn(told)


def test_metrics_of_a_task_have_a_number_each(tmp_path: Path) -> None:
    """Also where it has no loss."""
    run = configure(tmp_path / "run", workers=1)
    append(
        run / "metrics.jsonl", row(1, val_f1=0.5, val_wer=2.0), row(2, val_f1=0.75, val_wer="nan", val_ppl=3.0), row(3)
    )
    numbers = snapshot_of(run)["numbers"]
    assert (numbers["metrics"], numbers["val_loss"], numbers["val_ppl"]) == ({"f1": 0.75, "wer": None}, None, 3.0)


def test_metrics_of_a_task_have_a_curve_each_and_stand_in_the_terminal(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1, val_f1=0.5, val_loss=2.0), workers=1)
    reader = RunReader(run, now=lambda: T0 + 3)
    reader.poll()
    stream = SnapshotStream(reader)
    stream.changes()
    write_rows(run, row(2, val_f1=0.75, val_wer=2.0), row(3))
    reader.poll()
    changes = stream.changes()
    assert changes["curves"]["val_f1"] == {"from": 1, "stride": 1, "rows": 2, "columns": columns("val_f1", 2, 0.75)}
    assert changes["curves"]["val_wer"] == {"from": 0, "stride": 1, "rows": 1, "columns": columns("val_wer", 2, 2.0)}
    assert "f1 0.7500  wer 2.0000" in drawn(stream.snapshot())
    write_rows(run, row(4, **{f"val_{n}": 1.0 for n in range(100)}))
    told = snapshot_of(run)
    assert len([name for name in told["curves"] if name.startswith("val_")]) == MAX_METRICS
    text = drawn(told, width=60)
    assert "loss 1.2500" in text
    assert "…" not in text


def columns(field: str, step: int, value: float) -> dict[str, list[float]]:
    return {"step": [step], "time": [T0 + step], **{name: [value] for name in (field, "lowest", "highest")}}


def test_steps_that_were_skipped_are_told(tmp_path: Path) -> None:
    """All ranks skip the same ones."""
    run = configure(tmp_path / "run", *(row(1, rank) for rank in (0, 1)), workers=2)
    assert snapshot_of(run)["numbers"]["skipped"] == 0
    assert "skipped" not in drawn(snapshot_of(run))
    write_rows(run, *(row(2, rank, skipped=3) for rank in (0, 1)))
    assert snapshot_of(run)["numbers"]["skipped"] == 3
    assert "3 skipped" in drawn(snapshot_of(run))


def test_checkpoints(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", workers=1)
    for step, best in ((10, True), (20, False)):
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        manifest = {
            "created": "2026-01-01T00:00:00+00:00", "best": best, "files": {"w": {"size": 7}, "o": {"size": 5}},
            "metrics": {"val_loss": 2.5},
        }  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (run / "checkpoints" / "best").write_text("step-00000010\n", encoding="utf-8")
    told = snapshot_of(run)
    assert [(c["step"], c["bytes"], c["val_loss"], c["best"]) for c in told["checkpoints"]] == [
        (10, 12, 2.5, True),
        (20, 12, 2.5, False),
    ]
    assert [event["text"] for event in told["events"]] == [
        "checkpoint of step 10, the best so far",
        "checkpoint of step 20",
    ]
    (run / "checkpoints" / "step-00000020" / "manifest.json").write_text("{}")  # it does not tell when
    aged(run / "checkpoints" / "step-00000020", T0)
    assert snapshot_of(run)["events"][0]["time"] == T0


def test_who_watched_a_checkpoint_go_sees_what_one_sees_who_comes_later(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", workers=1)
    reader = RunReader(run, now=lambda: T0)
    stream = SnapshotStream(reader)
    state: dict[str, Any] = {}
    for step in range(1, 6):
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"created": f"2026-01-01T00:00:0{step}+00:00"}))
        if step > 2:
            old = run / "checkpoints" / f"step-{step - 2:08d}"
            (old / "manifest.json").unlink()
            old.rmdir()
        aged(run / "checkpoints", T0 + step)
        reader.poll()
        state = apply(state, stream.changes() or {})
        assert state["events"] == snapshot_of(run)["events"]
    assert [event["step"] for event in state["events"]] == [4, 5]


def test_lines_that_are_not_what_they_should_be_are_left_out(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1), workers=1)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "ra\n[]\n\xff\xfe\n"x"\n' + b"[" * 3000 + b"\n")
    broken: list[dict[str, Any]] = [
        {}, {"step": "2"}, {"step": 2, "rank": -1}, {"step": 2, "rank": "0"}, {"step": None, "rank": 0},
        {"step": 3, "rank": 0, "time": "now", "loss": {"a": 1}, "host": ["x"] * 1000, "bytes_sent": "many"},
        {"step": 4, "rank": 0, "time": T0 + 4, "loss": 1.0, "machine": {"device": "x" * 10_000, "load": "high"}},
        *({"step": 1, "rank": rank} for rank in range(5, 3000)),
    ]  # fmt: skip
    write_rows(run, *broken)
    append(run / "history.jsonl", {"kind": "member"}, {"kind": "member", "rank": [1]}, {"kind": "begin", "time": "x"})
    append(run / "logs" / "worker-rank0-a.log", {"level": "ERROR", "message": ["<b>"], "time": 5, "rank": "x"})
    (run / "summary.json").write_text("[1]", encoding="utf-8")
    told = snapshot_of(run)
    assert len(told["machines"]) <= 1024
    text = json.dumps(told, allow_nan=False)
    assert len(text) < 3_000_000
    assert "x" * 200 not in text


ODD: tuple[Any, ...] = (
    *(0, -1, 1.5, 5e-324, 1e100, 1e308, -1e308, -1e18, 2**63, 10**400, float("nan"), float("inf"), True, None),
    *("nan", "-inf", "x", [], {}, [1], {"a": 1}, "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", {"load": 1e308}),
)
FIELDS_OF_A_ROW = (*row(1), "val_loss", "val_accuracy", "val_ppl", "stale_rejected", "machine")


def damaged_run(run: Path, chance: random.Random) -> None:
    """Files of the right kind, with values in them that nothing in a run can have."""

    def odd(*good: Any) -> Any:
        return chance.choice(ODD) if not good or chance.random() < 0.7 else chance.choice(good)

    steps, workers = chance.choice((0, 5, 10**14, 10**500)), odd(2, "\u00b2")
    configure(run, steps=steps, workers=json.dumps(workers), strategy=chance.choice(("edp", "pipeline", "allreduce")))
    for step in range(1, 9):
        good = row(step, chance.choice((0, 1)), role=chance.choice(("server", "worker", "worker")))
        write_rows(run, good | {name: odd() for name in chance.sample(FIELDS_OF_A_ROW, 4)})
    for event in ("joined", "left", "evicted", 1):
        said = {"kind": chance.choice(("begin", "member")), "event": event, "time": odd(T0), "rank": odd(0, 1)}
        append(run / "history.jsonl", said | {"reason": odd(), "next_step": odd(3)})
    append(run / "logs" / "worker-rank0-x.log", {"level": "ERROR", "message": odd(), "time": odd(), "rank": odd(0)})
    saved = run / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    sizes = {"a": {"size": odd()}, "b": {"size": odd()}}
    manifest = {"files": odd(sizes), "metrics": odd({"val_loss": odd()}), "created": odd()}
    (saved / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    names = ("status", "error", "finished", "steps", "train_loss", "val_loss", "tokens_per_s", "workers", "strategy")
    if chance.random() < 0.3:
        summarize(run, **{name: odd() for name in names})


@pytest.mark.parametrize("seed", range(40))
def test_damaged_rows_are_drawn_without_what_cannot_be_drawn(seed: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    damaged_run(run, random.Random(seed))
    told = snapshot_of(run)
    assert json.dumps(told, allow_nan=False)
    assert json.dumps(RunFolder(tmp_path).list(), allow_nan=False)
    assert drawn(told).startswith("run | ")


def test_counts_that_no_machine_can_have_do_not_stop_the_reader(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", *(row(step, bytes_sent=1e308 * (step % 2)) for step in range(1, 7)), workers=1)
    write_rows(run, row(7, loss=10**400), row(8, loss="inf"), row(9, time=1e300), row(10))
    told = snapshot_of(run)
    assert (told["numbers"]["step"], told["numbers"]["loss"]) == (10, 0.5)
    assert told["curves"]["joined"]["columns"]["loss"].count(None) == 2


def test_a_configuration_is_flat_bounded_and_without_secrets() -> None:
    flat = flat_config(b"cluster:\n  token: abc\n  port: 5\n  workers: [a, b]\ntask: null\n")
    assert flat == {"cluster.token": "(hidden)", "cluster.port": "5", "cluster.workers": '["a", "b"]', "task": "null"}
    flat = flat_config(
        b"data:\n  tokenizer: gpt2\n  tokenizer_root: /t\nlogging:\n  wandb_api_key: k\n  loki_url: http://me:pw@loki:3100\n"
        b"hub_token: x\nlist: [tcp://u:p@a:1, tcp://b:2]\ncluster:\n  token: null\n"
    )
    assert flat == {
        "data.tokenizer": "gpt2", "data.tokenizer_root": "/t", "logging.wandb_api_key": "(hidden)",
        "logging.loki_url": "http://loki:3100", "hub_token": "(hidden)", "list": '["tcp://a:1", "tcp://b:2"]',
        "cluster.token": "null",
    }  # fmt: skip
    bomb = b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (99 + i, 99 + i, b",".join([b"*%c" % (97 if i == 0 else 98 + i)] * 8)) for i in range(9)
    )
    assert flat_config(bomb) == {}
    assert flat_config(b"\x00") == flat_config(b"- 1\n") == flat_config(b"a: [") == {}
    assert len(flat_config("\n".join(f"k{i}: {i}" for i in range(5000)).encode())) == 2000


def test_a_poll_of_a_quiet_run_reads_nothing(elastic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(elastic, now=T0 + 7)
    stream = SnapshotStream(reader)
    stream.changes()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert not reader.poll()
    assert stream.changes() is None


# Telling: a snapshot and the changes after it are the later snapshot


def apply(state: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """What static/store.js does."""
    state = copy.deepcopy(state)
    if news.get("whole"):
        return {name: value for name, value in news.items() if name != "whole"}
    for name, curve in news.pop("curves", {}).items():
        old = state["curves"].get(name, {"columns": {}})["columns"]
        columns = {key: old.get(key, [])[: curve["from"]] + values for key, values in curve["columns"].items()}
        state["curves"][name] = {**curve, "from": 0, "columns": columns}
    saved = news.get("checkpoints", state["checkpoints"])
    events = [event for event in state["events"] if event["kind"] != "checkpoint"] + news.pop("events", [])
    events += [{name: c[name] for name in ("time", "text", "step")} | {"kind": "checkpoint"} for c in saved]
    return state | news | {"events": sorted(events, key=lambda event: event["time"])}


def comparable(told: dict[str, Any]) -> dict[str, Any]:
    """Without clocks, and without curves that have no points yet: those are told with their first."""
    kept = {name: value for name, value in told.items() if name not in ("time", "numbers")}
    return kept | {"curves": {name: curve for name, curve in told["curves"].items() if curve["columns"]["step"]}}


@settings(deadline=None, max_examples=8)
@given(st.randoms(use_true_random=False))
def test_changes_lead_to_the_same_picture(tmp_path_factory: pytest.TempPathFactory, chance: random.Random) -> None:
    run = configure(tmp_path_factory.mktemp("run"), strategy="edp")
    reader = RunReader(run, now=lambda: T0 + 50)
    stream = SnapshotStream(reader)
    state: dict[str, Any] | None = None
    step = 0
    for _ in range(25):
        for _ in range(chance.randrange(4)):
            step += 1
            write_rows(run, row(step, chance.randrange(3), loss=chance.random()))
            if chance.random() < 0.2:
                write_rows(run, row(step, 3, role="server", val_loss=chance.random()))
        if chance.random() < 0.3:
            append(
                run / "history.jsonl", member(chance.choice(["joined", "left", "evicted"]), chance.randrange(3), step)
            )
        if chance.random() < 0.1:
            configure(run, strategy="edp", steps=chance.randrange(1, 99))
        if chance.random() < 0.05:
            truncate_metrics(run / "metrics.jsonl", after_step=step // 2)
        for machine in reader.ranks.values():
            machine.curve.limit = 6  # so that thinning is a part of it
        reader.poll()
        news = stream.changes()
        if news is not None:
            state = apply(state or {}, news)
        again = stream.snapshot()
        assert state is not None
        assert comparable(state) == comparable(again)


# Logs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for i in range(300):
        name = ("server-a", "worker-rank0-a", "worker-rank1-b")[i % 3]
        level = ("INFO", "INFO", "WARNING", "DEBUG", "ERROR")[i % 5]
        append(run / "logs" / f"{name}.log", log(f"line {i:03d} ünïcode", level, i))
    with (run / "logs" / "server-a.log").open("ab") as file:
        file.write(b"Fatal Python error: <script>alert(1)</script>\n\n\x1b[31mred\x1b[0m\n")
    return run


def messages(page: dict[str, Any]) -> list[str]:
    return [line["message"] for line in page["lines"]]


def test_logs_of_all_processes_are_one_in_the_order_of_time(logged: Path) -> None:
    page = read_page(logged, limit=10)
    assert messages(page) == [
        *(f"line {i} ünïcode" for i in range(292, 300)),
        "Fatal Python error: <script>alert(1)</script>",
        "red",
    ]
    assert page["processes"] == ["server-a.log", "worker-rank0-a.log", "worker-rank1-b.log"]


@pytest.mark.parametrize("limit", [1, 7, 100, 500])
@pytest.mark.parametrize("max_bytes", [1, 2000, 1 << 20])
def test_pages_have_every_line_once(logged: Path, limit: int, max_bytes: int) -> None:
    found: list[str] = []
    before: dict[str, int] | None = None
    for _ in range(400):
        page = read_page(logged, limit=limit, before=before, max_bytes=max_bytes)
        found = messages(page) + found
        before = page["before"]
        append(logged / "logs" / "server-a.log", log("written meanwhile", when=1000))  # shifts nothing
        append(logged / "logs" / "worker-rank9-new.log", log("a new process", when=1000))
        if before is None:
            break
    lines = [message for message in found if message.startswith("line")]
    assert sorted(lines) == [f"line {i:03d} ünïcode" for i in range(300)]
    if max_bytes > 10_000:
        assert lines == sorted(lines)
    assert not any("meanwhile" in message or "new process" in message for message in found)


def test_search_level_and_process(logged: Path) -> None:
    assert messages(read_page(logged, search="LINE 29")) == [f"line {i} ünïcode" for i in range(290, 300)]
    assert messages(read_page(logged, search="ÜNÏCODE", limit=1)) == ["line 299 ünïcode"]
    assert read_page(logged, search="nowhere")["lines"] == []
    levels = {line["level"] for line in read_page(logged, level="WARNING", limit=500)["lines"]}
    assert levels == {"WARNING", "ERROR", "PRINTED"}
    only = read_page(logged, process="worker-rank1-b.log", limit=500)["lines"]
    assert {line["process"] for line in only} == {"worker-rank1-b.log"}
    assert read_page(logged, process="../../etc/passwd")["lines"] == []


def test_a_search_for_what_is_not_there_ends_soon(tmp_path: Path) -> None:
    append(tmp_path / "logs" / "server-a.log", *(log("x" * 500, when=i) for i in range(2000)))
    page = read_page(tmp_path, search="nowhere", max_bytes=100_000)
    assert page["lines"] == []
    assert page["before"] is not None  # and can be gone on with


def test_a_line_without_end_is_come_past(tmp_path: Path) -> None:
    """A bar of progress, printed for days."""
    append(tmp_path / "logs" / "server-a.log", log("before it"))
    with (tmp_path / "logs" / "server-a.log").open("ab") as file:
        file.write(b"\r 50 %" * 50_000)
    found: list[str] = []
    before: dict[str, int] | None = None
    for _ in range(10):
        page = read_page(tmp_path, before=before, max_bytes=100_000)
        found = messages(page) + found
        before = page["before"]
        if before is None:
            break
    assert found[0] == "before it"
    assert len(found) < 10


@pytest.mark.skipif(sys.platform == "win32", reason="no links to be had")
def test_a_log_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    append(secret, log("secret"))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "server-x.log").symlink_to(secret)
    assert read_page(tmp_path / "run")["lines"] == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").symlink_to(tmp_path)
    assert read_page(tmp_path / "other")["lines"] == []


# RunFolder and their names -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of_runs(tmp_path)


def test_runs_are_listed_the_newest_first(folder: Path) -> None:
    runs = RunFolder(folder)
    assert [(line["name"], line["status"], line["train_loss"]) for line in runs.list()] == [
        ("new", "training", 1.0),
        ("old", "finished", 1.5),
    ]
    assert runs.newest() == "new"
    assert RunFolder(folder / "nowhere").list() == []


@pytest.mark.parametrize("after_s", [1, 300])
@pytest.mark.parametrize("last_bytes", [2000, 1 << 20])
def test_a_run_without_a_summary_is_listed_as_its_own_page_tells_it(
    elastic: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, last_bytes: int
) -> None:
    monkeypatch.setattr(
        "smolcluster.dashboard.runs.LAST_BYTES", last_bytes
    )  # a long run is not read whole for its line
    write_rows(elastic, row(6, 2, role="server", val_loss=2.5, time=T0 + 6))
    aged(elastic / "metrics.jsonl", T0 + 6)
    told = snapshot_of(elastic, now=T0 + 6 + after_s)
    (line,) = RunFolder(elastic.parent, now=lambda: T0 + 6 + after_s).list()
    assert line["status"] == told["status"] == ("training" if after_s == 1 else "silent")
    numbers = told["numbers"]
    assert (line["steps"], line["train_loss"], line["val_loss"]) == (6, numbers["loss"], 2.5)
    assert (line["tokens_per_s"], line["wall_s"]) == (numbers["tokens_per_s"], numbers["elapsed_s"])
    assert line["wall_s"] == (7 if after_s == 1 else 6)
    assert line["workers"] == 2


def test_lines_that_there_is_no_time_for_are_judged_by_their_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.dashboard.runs.WITHIN_S", -1)
    assert [line["status"] for line in RunFolder(folder, now=lambda: T0 + 10).list()] == ["training", "finished"]
    assert [line["status"] for line in RunFolder(folder, now=lambda: T0 + 99).list()] == ["silent", "finished"]


@pytest.mark.parametrize(
    "name",
    [
        *("..", ".", "", "../outside", "new/../../outside", "link", ".hidden", "empty", "new\\x", "C:", "a\0b"),
        *("nowhere", "x" * 300),
    ],
)
def test_names_do_not_lead_out_of_the_folder(folder: Path, name: str) -> None:
    with pytest.raises(NoSuchRun):
        RunFolder(folder).find(name)


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_names_that_people_give(folder: Path) -> None:
    """What an address cannot say is left out: the page could not ask for it, and would fail at the whole list."""
    for name in ("12:30", "a\\b", "ünï 100% #1?", "half\udcff"):
        configure(folder / name)
    found = {line["name"] for line in RunFolder(folder).list()}
    assert found == {"old", "new", "12:30", "a\\b", "ünï 100% #1?"}
    assert all(RunFolder(folder).find(name) == folder / name for name in found)


def test_two_runs_beside_each_other(folder: Path) -> None:
    configure(folder / "old", strategy="edp", workers=1)
    told = compare({name: snapshot_of(folder / name) for name in ("old", "new")})
    assert told["differences"] == [{"key": "strategy.name", "values": {"old": "edp", "new": "allreduce"}}]
    assert told["runs"]["new"]["curves"]["joined"]["columns"]["step"] == [1, 2, 3, 4, 5]


def test_what_the_command_means(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(None, Path("runs")) == (Path("runs"), None)
    assert choose(folder / "new", Path("runs")) == (folder, "new")
    assert choose(folder, Path("runs")) == (folder, None)
    assert choose(folder / "to-come", Path("runs")) == (folder, "to-come")
    with pytest.raises(UserError, match="is a file"):
        choose(folder / "new" / "config.yaml", Path("runs"))


# The terminal -------------------------------------------------------------------------------------------------------


def drawn(told: dict[str, Any], *, width: int = 120, height: int = 40, unicode: bool = True) -> str:
    console = Console(width=width, height=height, highlight=False)
    with console.capture() as capture:
        console.print(frame(told, width=width, height=height, unicode=unicode))
    return capture.get()


def test_a_frame_tells_what_the_page_tells(elastic: Path) -> None:
    text = drawn(snapshot_of(elastic, now=T0 + 7))
    for words in ("one | edp | training | 2 workers + server", "step 5/100", "loss 1.0000", "worker 1", "lost", "pi5"):
        assert words in text
    assert "worker 1 is gone: the connection was closed" in text


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90])
def test_what_does_not_fit_is_left_out_and_nothing_is_cut(elastic: Path, width: int) -> None:
    write_rows(elastic, row(6, 2, role="server", val_loss=2.5, time=T0 + 6, bytes_sent=10**8))
    told = snapshot_of(elastic, now=T0 + 7)
    assert drawn(told, width=200).count("…") == 0
    text = drawn(told | {"name": "a-name-of-some-length-as-people-give-them", "events": []}, width=width, height=24)
    assert "…" not in text
    assert "loss 0.8333  val 2.5000" in text
    assert "a-name-" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_a_frame_fits(elastic: Path, width: int, height: int) -> None:
    text = drawn(snapshot_of(elastic, now=T0 + 7), width=width, height=height)
    if width >= 40:
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "worker 0" in text


def test_names_from_a_run_cannot_steer_the_terminal(elastic: Path) -> None:
    write_rows(elastic, row(6, 0, host="\x1b[2Jevil"))
    append(elastic / "history.jsonl", member("left", 0, 6, "\x1b]0;evil\x07"))
    text = drawn(snapshot_of(elastic, now=T0 + 7))
    assert "evil" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    summarize(elastic, status="\x1b]0;evil\x07", error="\x1b[2Jevil", finished=T0 + 9)
    text = drawn(snapshot_of(elastic, now=T0 + 10))
    assert "evil" in text
    assert "\x1b" not in text


def test_top_once_is_plain_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert top(folder / "new", once=True) == 0
    text = capsys.readouterr().out
    assert text.startswith("new | allreduce | ")
    assert "\x1b" not in text
    monkeypatch.chdir(folder.parent)
    assert top(None) == 0  # a pipe: the newest run in ./runs, once
    assert capsys.readouterr().out.startswith("new | ")
    with pytest.raises(UserError, match="does not exist"):
        top(folder / "nowhere", once=True)


# The machine --------------------------------------------------------------------------------------------------------


def test_what_is_known_of_this_machine_fits_a_row() -> None:
    facts = describe_machine("cpu")
    assert facts["device"] == "cpu"
    assert None not in facts.values()
    assert known_facts(json.loads(json.dumps(facts))).keys() == facts.keys()
    if sys.platform.startswith("linux"):
        assert 0 < facts["memory_used_bytes"] < facts["memory_total_bytes"]


def test_nvidia_smi() -> None:
    assert parse_smi("NVIDIA H200, 1024, 143771, 35\nother\n") == {
        "device_name": "NVIDIA H200", "device_memory_used_bytes": 1 << 30,
        "device_memory_total_bytes": 143771 << 20, "device_temperature_c": 35.0,
    }  # fmt: skip
    assert parse_smi("GPU, [N/A], [N/A], [N/A]") == {"device_name": "GPU"}
    assert parse_smi("No devices were found") == parse_smi("") == {}


def test_a_gpu_is_asked_through_torch_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(_: int) -> int:
        raise ModuleNotFoundError("pynvml")

    cuda = SimpleNamespace(
        mem_get_info=lambda i: (60, 100), get_device_name=lambda i: f"card {i}", temperature=lambda i: 41
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    facts = describe_machine("cuda:1")
    assert (facts["device_name"], facts["device_memory_used_bytes"]) == ("card 1", 40)
    assert facts["device_temperature_c"] == 41
    cuda.temperature = no_library
    assert "device_temperature_c" not in describe_machine("cuda:1")


def test_facts_are_told_now_and_then() -> None:
    now = [0.0]
    facts = MachineFacts("cpu", every_s=5, clock=lambda: now[0])
    told: list[bool] = []
    for now[0] in (0.0, 1.0, 4.9, 5.0, 5.1, 20.0):
        told.append(facts.due() is not None)
    assert told == [True, False, False, True, False, True]


def test_what_a_hostile_run_says_is_bounded(tmp_path: Path) -> None:
    """Brackets without end in the configuration, sizes with thousands of digits, half a character in a name."""
    began = time.monotonic()
    assert flat_config(b"[" * 50_000) == {}
    assert time.monotonic() - began < 20
    huge = int("9" * 4000)
    told = checkpoint_of("step-00000001", {"files": {"a": {"size": huge}, "b": {"size": 5}}})
    assert told["bytes"] == 5
