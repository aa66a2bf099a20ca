"""The curves of a run, the links between its machines and their states; files that grow."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.run_folder import T0, aged, configure, reader_of, row, snapshot_of, states, write_rows

from smolcluster.comm.elastic.transport.api import LEFT
from smolcluster.dashboard.downsample import Curve, limit_for
from smolcluster.dashboard.follow import LineFollower
from smolcluster.dashboard.links import ByteCounts, links_of, shape_of
from smolcluster.dashboard.ranks import LEFT_REASON, RankRecord, RankState, state_of
from smolcluster.dashboard.run_curve import RunCurve
from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.observe.run_state import loss_curve

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
