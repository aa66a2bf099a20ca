"""What a person sees: the state behind the console, plain lines, the live picture and the summary."""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.unit import samples

from smolcluster.launch.join.worker import _ShowWaiting
from smolcluster.observe.console import ConsoleSink
from smolcluster.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Failed,
    Notice,
    Phase,
    Progress,
    RunFinished,
    RunStarted,
    SampleText,
    StepLogged,
    to_dict,
)
from smolcluster.observe.live import LiveScreen
from smolcluster.observe.observer import Observer
from smolcluster.observe.plot import loss_plot
from smolcluster.observe.run_state import RunState, loss_curve
from smolcluster.observe.summary import render_summary


def started(rank: int, **fields: Any) -> RunStarted:
    shown: dict[str, Any] = {"host": f"host{rank}", "strategy": "allreduce", "algorithm": "ClassicDP"}
    return samples.started(rank=rank, **(shown | {"parameters": 4_830_000, "steps": 300} | fields))


def logged(rank: int, step: int, **fields: Any) -> StepLogged:
    shown = {
        "host": f"host{rank}",
        "time": 1000.0 + step / 5,
        "loss": 2.0 + rank,
        "tokens_per_s": 6150.0,
        "comm_s": 0.008,
    }
    shown |= {"step_time_s": 0.16, "compute_s": 0.15, "bytes_sent": 1, "bytes_received": 1}
    return samples.logged(step, rank, **(shown | fields))


def plain(events: list[Event], *, close: bool = True) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    for event in events:
        sink.handle(event)
    if close:
        sink.close()
        sink.close()
    output = stream.getvalue()
    assert "\x1b" not in output
    assert "\r" not in output
    return output.splitlines()


BOTH = [started(0), started(1)]
HEADER = "gpt | allreduce | 2 workers on 2 x cpu | 4.83M parameters | 300 steps"


# The state and plain lines ------------------------------------------------------------------------------------------


def test_one_line_per_step_not_per_rank() -> None:
    events = [*BOTH, logged(0, 50), logged(1, 50, val_loss=2.4), logged(1, 100), logged(0, 100)]
    assert plain(events, close=False) == [
        HEADER,
        "step 50/300  loss 2.5000  val 2.4000  12.3k tok/s  eta 0:40",
        "step 100/300  loss 2.5000  12.3k tok/s  eta 0:40",
    ]


@given(st.permutations([logged(rank, 10, loss=float(rank)) for rank in range(4)]))
def test_a_step_closes_with_its_last_rank_in_any_order(rows: list[StepLogged]) -> None:
    state = RunState()
    for rank in range(4):
        state.apply(started(rank, world_size=4))
    assert [state.apply(row) for row in rows[:3]] == [[], [], []]
    (line,) = state.apply(rows[3])
    assert (line.step, line.loss, line.tokens_per_s) == (10, 1.5, 4 * 6150.0)


def test_a_later_step_closes_the_earlier_one_with_the_ranks_seen_so_far() -> None:
    lines = plain([*BOTH, logged(0, 10, loss=3.0), logged(0, 20), logged(1, 10), logged(1, 20)], close=False)
    assert [line[:26] for line in lines[1:]] == ["step 10/300  loss 3.0000  ", "step 20/300  loss 2.5000  "]


def test_a_rank_that_has_not_started_is_waited_for() -> None:
    """The start of rank 1 may be read after the first row of rank 0: the step must not close without it."""
    lines = plain([started(0), logged(0, 10, loss=1.0), started(1), logged(1, 10, loss=2.0)], close=False)
    assert [line.split("  ")[1] for line in lines if line.startswith("step")] == ["loss 1.5000"]


def test_loss_is_weighted_by_the_samples_of_the_step() -> None:
    state = RunState()
    for event in BOTH:
        state.apply(event)
    state.apply(logged(0, 10, loss=1.0, samples=300))
    (first,) = state.apply(logged(1, 10, loss=2.0, samples=100))
    assert first.loss == pytest.approx(1.25)
    # What counts is the growth since the last row: 100 each.
    state.apply(logged(0, 20, loss=1.0, samples=400))
    (second,) = state.apply(logged(1, 20, loss=2.0, samples=200))
    assert second.loss == pytest.approx(1.5)


def test_a_diverged_rank_shows() -> None:
    lines = plain([*BOTH, logged(0, 10, loss=math.nan), logged(1, 10)])
    assert lines[1].startswith("step 10/300  loss nan  ")


def test_the_last_step_is_shown_at_the_end_even_if_a_rank_is_missing() -> None:
    for last in ([RunFinished(summary={})], []):
        lines = plain([*BOTH, logged(0, 300), *last])
        assert [line.split("  ")[0] for line in lines] == [HEADER, "step 300/300"]


SERVED = [started(3, role="server", world_size=3, strategy="edp"), started(0, strategy="edp", world_size=3)]


def test_the_header_says_how_many_steps_are_exchanged_together() -> None:
    """Until then there may be no line."""
    config = {"strategy": {"name": "diloco", "inner_steps": 30}}
    (header,) = plain([started(0, strategy="diloco", world_size=1, first_step=60, steps=90, config=config)])
    assert header.endswith("| 90 steps from 60, exchanged every 30")


def test_where_there_is_a_server_its_rows_are_the_run() -> None:
    """Workers count steps of their own, and come and go."""
    events = [
        *SERVED, logged(3, 10, role="server", loss=1.0), logged(0, 17, loss=99.0), logged(1, 18, loss=99.0),
        logged(3, 20, role="server", loss=0.5, val_loss=0.7), started(1, strategy="edp"), logged(1, 1, loss=99.0),
    ]  # fmt: skip
    assert plain(events) == [
        "gpt | edp | 3 workers + server on cpu | 4.83M parameters | 300 steps",
        "step 10/300  loss 1.0000  6.15k tok/s  eta 0:46",
        "step 20/300  loss 0.5000  val 0.7000  6.15k tok/s  eta 0:56",
    ]
    state = RunState()
    for event in events:
        state.apply(event)
    assert [(status.rank, status.last and status.last.step) for status in state.workers] == [(0, 17), (1, 1)]


def test_a_server_that_comes_back_goes_on_where_it_was() -> None:
    back = started(3, role="server", world_size=3, strategy="edp", first_step=21)
    events = [
        *SERVED, logged(3, 20, role="server"), Notice(level="WARNING", message="the server is back"),
        back, logged(3, 30, role="server"), logged(3, 20, role="server", val_loss=1.0), logged(3, 40, role="server"),
    ]  # fmt: skip
    shown = [re.sub(r"  loss.*?(val \S+)?  6.15.*", r" \1", line) for line in plain(events)[1:]]
    late = "step 20/300 val 1.0000"
    assert shown == ["step 20/300 ", "warning: the server is back", "step 30/300 ", late, "step 40/300 "]


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [
        (
            "allreduce",
            ["step 10/300  loss 3.0000  6.15k tok/s  eta 0:46", "step 20/300  loss 3.0000  6.15k tok/s  eta 0:56"],
        ),
        # Its own steps, not those of the run: without a total, which they may pass, and without a time left.
        ("edp", ["own step 10  loss 3.0000  6.15k tok/s", "own step 20  loss 3.0000  6.15k tok/s"]),
    ],
)
def test_one_worker_of_many_by_itself(strategy: str, shown: list[str]) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, alone=True)
    for event in (started(1, world_size=3, device="mps", strategy=strategy), logged(1, 10), logged(1, 20)):
        sink.handle(event)
    first, *rest = stream.getvalue().splitlines()
    assert first.startswith(f"gpt | {strategy} | worker 1 of 3 on mps | 4.83M parameter")
    assert rest == shown


def test_an_evaluation_is_shown_once_whoever_made_it_and_however_late() -> None:
    """By all workers, or by one whose row came after the step was closed."""
    events: list[Event] = [
        *BOTH, logged(0, 10, val_loss=5.0), logged(1, 10, val_loss=5.0),
        logged(0, 20), logged(0, 30), logged(1, 20, val_loss=4.0), logged(1, 30), logged(0, 40), logged(1, 40),
    ]  # fmt: skip
    shown = [re.sub(r"  loss.*?(val \S+)?  12.*", r" \1", line) for line in plain(events)[1:]]
    assert shown == ["step 10/300 val 5.0000", "step 20/300 ", "step 30/300 val 4.0000", "step 40/300 "]


def test_a_dead_worker_is_not_waited_for_and_its_speed_does_not_count() -> None:
    state = RunState()
    for event in [*BOTH, logged(0, 10), logged(1, 10), Failed(rank=1, kind="error", message="killed")]:
        state.apply(event)
    (line,) = state.apply(logged(0, 20))
    assert (line.step, line.tokens_per_s) == (20, 6150.0)
    # It comes back.
    state.apply(started(1, first_step=20))
    assert state.apply(logged(0, 30)) == []
    (line,) = state.apply(logged(1, 30))
    assert (line.step, line.tokens_per_s) == (30, 12300.0)


def test_a_finished_rank_still_counts_in_the_last_step() -> None:
    state = RunState()
    for rank in range(3):
        state.apply(started(rank, world_size=3))
    assert state.apply(logged(0, 300)) == []
    assert state.apply(Phase(rank=0, name="finished")) == []
    assert state.apply(logged(1, 300)) == []
    (line,) = state.apply(logged(2, 300))
    assert (line.loss, line.tokens_per_s) == (3.0, 3 * 6150.0)


def test_after_a_restart_of_all_workers_repeated_steps_are_shown_again() -> None:
    events: list[Event] = [*BOTH, *(logged(rank, step) for step in (10, 20, 30) for rank in (0, 1))]
    events += [started(0, first_step=10), started(1, first_step=10), logged(0, 20), logged(1, 20)]
    steps = [line.split("  ")[0] for line in plain(events)[1:]]
    assert steps == ["step 10/300", "step 20/300", "step 30/300", "step 20/300"]


def test_eta_follows_the_slowest_rank_by_its_own_clock() -> None:
    state = RunState()
    state.apply(started(0))
    state.apply(started(1))
    rows = [logged(0, 100, time=0.0), logged(1, 100, time=5000.0), logged(0, 200, time=100.0)]
    assert [line.eta_s for row in rows for line in state.apply(row)] == [200 * 0.16]  # one row each: its step time
    (line,) = state.apply(logged(1, 200, time=5300.0))
    assert line.eta_s == 300.0  # 100 steps left at 3 s


def test_data_without_tokens_is_counted_in_samples() -> None:
    row = {"tokens_per_s": 0.0, "samples_per_s": 750.0, "val_loss": 0.1, "val_accuracy": 0.9712}
    lines = plain([started(0, world_size=1), logged(0, 10, **row)])
    assert "val 0.1000  acc 97.1%  750 samples/s" in lines[1]


def test_messages_have_their_own_lines_and_cannot_steer_the_terminal() -> None:
    events: list[Event] = [
        Progress(name="download mnist", done=0, total=9_900_000),
        Progress(name="download mnist", done=5_000_000, total=9_900_000),
        Progress(name="download mnist", done=9_900_000, total=9_900_000),
        Progress(name="tokens", done=10, total=None, unit="tokens"),
        Notice(level="WARNING", message="slow \x1b[31mlink\x1b]0;title\x07", rank=1),
        Notice(level="INFO", message="hello"),
        CheckpointSaved(step=9, path="runs/a/9", stall_s=0.1, write_s=1.0, size_bytes=12_345_678, best=True),
        CheckpointFailed(step=10, reason="disk full"),
        Failed(rank=0, kind="user", message="the launcher says this"),
        SampleText(prompt="a", text="b"),
        Phase(rank=0, name="connected"),
    ]
    assert plain(events) == [
        "download mnist: 9.90 MB",
        "download mnist: done, 9.90 MB",
        "tokens: ...",
        "warning: rank 1: slow link]0;title",
        "hello",
        "checkpoint of step 9 saved (12.3 MB, the best so far): runs/a/9",
        "error: the checkpoint of step 10 could not be saved: disk full",
    ]


def test_a_warning_that_all_ranks_begin_with_is_printed_once() -> None:
    same = [Notice(level="WARNING", message="track_gradients has no effect", rank=rank) for rank in range(3)]
    other = Notice(level="WARNING", message="no GPU here", rank=1)
    assert plain([*same, other]) == ["warning: rank 0: track_gradients has no effect", "warning: rank 1: no GPU here"]
    lines = plain([logged(0, 1), *same])  # in training each may have its own reason
    assert len([line for line in lines if "no effect" in line]) == 3


def test_a_stream_that_cannot_encode_a_letter_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    sink = ConsoleSink(stream)
    sink.handle(Notice(level="INFO", message="größer"))
    assert raw.getvalue().split() == [b"gr??er"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "escapes"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_a_terminal_is_live_unless_told_otherwise(
    environment: dict[str, str], escapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    sink = ConsoleSink(stream)
    for event in [*BOTH, logged(0, 10), logged(1, 10)]:
        sink.handle(event)
    sink.close()
    assert ("\x1b[" in stream.getvalue()) == escapes
    assert "10/300" in stream.getvalue()


# The live picture ---------------------------------------------------------------------------------------------------


def live(events: list[Event], *, width: int = 90, height: int = 24, encoding: str = "utf-8") -> tuple[str, str]:
    """The final frame and everything that went to the terminal."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(file=stream, force_terminal=True, record=True, width=width, height=height, legacy_windows=False)
    state, ticks = RunState(), itertools.count()
    screen = LiveScreen(console, state, now=lambda: float(next(ticks) // 1000))
    for event in events:
        for line in state.apply(event):
            screen.step(line)
        screen.show(event)
    screen.close()
    sent = raw.getvalue().decode(encoding)
    return re.sub(r"\x1b\[[?0-9;]*[mhl]", "", sent.rpartition("\x1b[2K")[2]), sent


def test_the_picture_shows_the_run_and_every_worker() -> None:
    events: list[Event] = [
        *BOTH, logged(0, 50, loss=2.3, staleness=1.5), logged(1, 50, loss=2.32, val_loss=2.4),
        Notice(level="WARNING", message="slow \x1b[5mlink [bold]", rank=1),
    ]  # fmt: skip
    frame, sent = live(events)
    lines = frame.splitlines()
    assert lines[0] == HEADER
    assert re.fullmatch(r"step 50/300 [━╸╺]+ 17%", lines[1])
    assert re.fullmatch(r"loss 2\.3100  val 2\.4000  12\.3k tok/s  elapsed \d:\d\d  eta \d:\d\d", lines[2])
    assert lines[3].split() == ["rank", "host", "device", "step", "loss", "step", "time", "comm", "staleness"]
    assert lines[4].split() == ["0", "host0", "cpu", "50", "2.3000", "160", "ms", "5%", "1.5"]
    assert lines[5].split() == ["1", "host1", "cpu", "50", "2.3200", "160", "ms", "5%", "0"]
    assert max(map(len, lines)) <= 90
    assert "warning: rank 1: slow link [bold]" in sent
    assert "\x1b[5m" not in sent


def test_val_loss_stays_in_the_picture_until_the_next_one() -> None:
    rows = [logged(rank, step, val_loss=2.4 if step == 10 else None) for step in (10, 20) for rank in (0, 1)]
    frame, _ = live([*BOTH, *rows])
    assert "step 20/300" in frame
    assert "val 2.4000" in frame


def test_the_eta_counts_down_between_steps_and_stops_at_zero() -> None:
    stream, state, now = io.StringIO(), RunState(), [0.0]
    console = Console(file=stream, force_terminal=True, width=90, height=24)
    screen = LiveScreen(console, state, now=lambda: now[0])
    shown: list[tuple[str, str]] = []
    for event in [*BOTH, logged(0, 50), logged(1, 50)]:
        for line in state.apply(event):
            screen.step(line)
        screen.show(event)
    for now[0] in (0.0, 15.0, 600.0):
        screen.show(Notice(level="INFO", message="time goes by"))
        frame = "".join(segment.text for segment in console.render(screen._frame))
        shown += re.findall(r"elapsed (\S+)  eta (\S+)", frame)
    screen.close()
    assert shown == [("0:00", "0:40"), ("0:15", "0:25"), ("10:00", "0:00")]


def test_work_before_training_has_bars() -> None:
    under_way = Progress(name="download mnist", done=3_000_000, total=9_900_000)
    old = (Progress(name="old", done=5, total=total) for total in (None, 5))
    frame, _ = live([under_way, Progress(name="tokens", done=1200, total=None, unit="tokens"), *old])
    lines = frame.splitlines()
    assert re.fullmatch(r"download mnist [━╸╺]+ 3\.00 MB of 9\.90 MB", lines[0])
    assert re.fullmatch(r"tokens [━╸╺]+ 1\.20k tokens", lines[1])
    assert lines[2].startswith("starting")
    assert "old" not in frame
    frame, _ = live([Progress(name="tokens", done=1, total=None), *BOTH, logged(0, 1), logged(1, 1)])
    assert "tokens" not in frame


def test_a_failed_worker_is_marked() -> None:
    frame, _ = live([*BOTH, logged(0, 10), logged(1, 10), Failed(rank=1, kind="error", message="x")])
    assert frame.splitlines()[5].split()[3] == "failed"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp437"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (8, 2), (20, 5), (40, 8), (60, 10), (300, 100)])
def test_any_terminal_is_big_enough(width: int, height: int, encoding: str) -> None:
    ranks = range(12)
    events: list[Event] = [Progress(name="größer", done=1, total=3)]
    events += [started(rank, world_size=12, host="höst-with-a-long-name") for rank in ranks]
    events += [logged(rank, 10, host="höst-with-a-long-name") for rank in ranks]
    frame, sent = live(events, width=width, height=height, encoding=encoding)
    lines = frame.splitlines()
    assert len(lines) < max(height, 4)  # the last frame is not cropped: three lines are always there
    assert all(len(line) <= width for line in lines)
    assert sent.endswith("\x1b[?25h")  # the cursor is back
    assert sent.count("\x1b[?25l") == 1
    if (width, height) == (40, 8):
        assert lines[-2].split()[0] == "1"
        assert lines[-1] == "and 10 more workers"


def test_an_interrupt_gives_the_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    sink = ConsoleSink(stream)

    def interrupted() -> None:
        with Observer([sink]) as observer:
            observer.emit(started(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "\x1b[?25l" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[?25h")
    sink.handle(started(1))  # too late: nothing happens
    assert stream.getvalue().endswith("\x1b[?25h")


def test_the_encoding_of_stdout_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, ascii_only in (("ascii", True), ("cp1252", True), ("utf-8", False)):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert loss_plot([1, 2], [1.0, 2.0]).isascii() == ascii_only
        assert render_summary({"status": "done"}, [to_dict(logged(0, s)) for s in (1, 2)], None).isascii() == ascii_only


# The summary --------------------------------------------------------------------------------------------------------

SUMMARY = {
    "status": "done", "strategy": "allreduce", "workers": 2, "world_size": 2, "steps": 300, "samples": 19200,
    "tokens": 640_000, "wall_s": 52.3, "tokens_per_s": 12_300.0, "train_loss": 2.31, "val_loss": 2.4,
    "val_accuracy": None, "bytes_sent": 12_000_000, "bytes_received": 12_000_000, "staleness_mean": 0.0,
    "staleness_max": 0, "stale_rejected": 0, "restarts": 0, "peak_memory_bytes": 850_000_000,
    "checkpoint": "runs/a/checkpoints/step-00000300", "run_dir": "runs/a",
}  # fmt: skip


def test_the_summary_says_how_it_went_and_where_everything_is() -> None:
    rows = [to_dict(logged(r, s, loss=4 / s, val_loss=0.3 if s == 30 else None)) for s in (10, 20, 30) for r in (0, 1)]
    sample = SampleText(prompt="def f", text="(x):\n    return \x1b[31mx\x07")
    lines = render_summary(SUMMARY, rows, sample, unicode=True).splitlines()
    assert lines[:4] == [
        "done: allreduce, 2 workers, 300 steps in 0:52, 12.3k tokens/s",
        "",
        "train loss 2.3100   val loss 2.4000",
        "12.0 MB sent, 12.0 MB received   850 MB peak memory",
    ]
    assert lines[5].startswith("   0.4 ┤")
    assert lines[-6:-2] == ["sample", "  def f(x):", "      return x", ""]
    assert lines[-2:] == ["checkpoint runs/a/checkpoints/step-00000300", "run        runs/a"]


def test_the_summary_of_a_run_that_came_to_nothing() -> None:
    assert render_summary({"status": "failed", "run_dir": "runs/a"}, [], None) == "failed\n\nrun        runs/a"
    diverged = render_summary({"status": "done", "strategy": "edp", "train_loss": "nan", "workers": 1,
                               "staleness_max": 7, "staleness_mean": 1.25, "stale_rejected": 3}, [], None)  # fmt: skip
    assert diverged == ("done: edp, 1 worker\n\ntrain loss nan\nstaleness 1.25 mean, 7 max   3 stale gradients refused")


def test_the_curve_is_the_loss_of_the_global_batch() -> None:
    rows = [
        to_dict(logged(0, 10, loss=1.0, samples=300)),
        to_dict(logged(1, 10, loss=2.0, samples=100)),
        to_dict(logged(0, 20, loss=5.0, samples=600)),
        to_dict(logged(0, 20, loss=1.0, samples=600)),  # repeated after a restart: the last one holds
    ]
    assert loss_curve(rows) == ([10, 20], [1.25, 1.0])
    # A server tells it itself.
    assert loss_curve([*rows, to_dict(logged(2, 7, loss=1.5, role="server"))]) == ([7], [1.5])


def test_a_missing_worker_is_not_called_the_server() -> None:
    shown = _ShowWaiting("10.8.0.1:65432")
    text = {}
    for address in ("10.8.0.1:65432", "10.8.0.3:41929"):
        line = logging.LogRecord("x", logging.INFO, "", 0, "waiting for a peer at %s: %s", (address, "refused"), None)
        assert shown.filter(line)
        text[line.getMessage()] = line.levelno
    assert text == {
        "waiting for the server at 10.8.0.1:65432: refused": logging.WARNING,
        "waiting for a peer at 10.8.0.3:41929: refused": logging.INFO,
    }
