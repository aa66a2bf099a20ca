"""A run directory, read while the run trains, after it has ended, and again when it is resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.run_folder import (
    T0,
    aged,
    append,
    begin,
    configure,
    drawn,
    log,
    member,
    reader_of,
    row,
    snapshot_of,
    states,
    summarize,
    write_rows,
)

from smolcluster.dashboard.ranks import LEFT_REASON
from smolcluster.dashboard.run_curve import MAX_METRICS
from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.runs import RunFolder
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.dashboard.step_times import StepTimes
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.text import number


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
    assert reader.has_more
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
    sizes = f'{{"files": {{"a": {{"size": {"9" * 4000}}}, "b": {{"size": 5}}}}}}'  # a damaged one
    (run / "checkpoints" / "step-00000020" / "manifest.json").write_text(sizes)  # it does not tell when
    aged(run / "checkpoints" / "step-00000020", T0)
    told = snapshot_of(run)
    assert (told["events"][0]["time"], told["checkpoints"][1]["bytes"]) == (T0, 5)
