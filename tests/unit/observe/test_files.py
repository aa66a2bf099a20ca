"""The sinks that write files: metrics.jsonl, pipes, logs."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.samples import logged

from smolcluster.observe.events import (
    CheckpointSaved,
    Notice,
    Phase,
    Progress,
    from_json,
)
from smolcluster.observe.jsonl import MetricsFile, read_metrics, truncate_metrics
from smolcluster.observe.logs import LogSink, log_path, reset_logging, setup_logging, tail
from smolcluster.observe.observer import Observer
from smolcluster.observe.pipe import PipeSink

# metrics.jsonl ------------------------------------------------------------------------------------------------------

APPENDER = """
import sys
from smolcluster.observe.events import StepLogged
from smolcluster.observe.jsonl import MetricsFile
path, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sink = MetricsFile(path)
print("ready", flush=True)
sys.stdin.readline()
for step in range(count):
    sink.handle(StepLogged(
        step=step, rank=rank, role="worker", host="h", time=0.0, loss=1.0, lr=0.1, grad_norm=1.0, samples=1, tokens=1,
        tokens_per_s=1.0, samples_per_s=1.0, step_time_s=1.0, compute_s=1.0, comm_s=0.0, bytes_sent=0,
        bytes_received=0, staleness=0.0, gradient_norms={f"layer{i}.weight": i + rank / 7 for i in range(20)}))
sink.close()
assert "torch" not in sys.modules
"""


def test_rows_of_several_processes_never_mix(tmp_path: Path) -> None:
    path, num_processes, num_rows = tmp_path / "metrics.jsonl", 4, 1000
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(path), str(rank), str(num_rows)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(num_processes)
    ]  # fmt: skip
    try:
        # All start writing at once.
        assert [process.stdout.readline() for process in processes if process.stdout] == ["ready\n"] * num_processes
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(300) for process in processes] == [0] * num_processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    rows = [json.loads(line) for line in lines]
    assert sorted((row["rank"], row["step"]) for row in rows) == [
        (rank, step) for rank in range(num_processes) for step in range(num_rows)
    ]
    assert all(len(row["gradient_norms"]) == 20 for row in rows)


def test_a_row_has_the_promised_fields_and_nan_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    sink = MetricsFile(path)
    sink.handle(Notice(level="INFO", message="not a row"))
    sink.handle(logged(1, loss=math.nan, grad_norm=math.inf, host="nan", gradient_norms={"w": -math.inf}))
    sink.handle(logged(2, val_loss=2.0))
    sink.close()
    sink.handle(logged(3))
    raw = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert (raw[0]["loss"], raw[0]["grad_norm"], raw[0]["gradient_norms"]) == ("nan", "inf", {"w": "-inf"})
    assert raw[0].keys() >= {
        "step", "rank", "role", "host", "time", "loss", "lr", "grad_norm", "samples", "tokens", "tokens_per_s",
        "step_time_s", "compute_s", "comm_s", "bytes_sent", "bytes_received", "staleness",
    }  # fmt: skip
    assert "val_loss" not in raw[0]
    assert raw[1]["val_loss"] == 2.0
    rows = read_metrics(path)
    assert math.isnan(rows[0]["loss"])
    assert rows[0]["host"] == "nan"
    assert (rows[0]["grad_norm"], rows[0]["gradient_norms"]) == (math.inf, {"w": -math.inf})


def test_a_short_write_costs_a_fragment_and_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, shortened = os.write, list[bytes]()

    def short_once(fd: int, data: bytes) -> int:
        if not shortened and len(data) > 10:
            shortened.append(data)
            return real(fd, data[:10])
        return real(fd, data)

    sink = MetricsFile(tmp_path / "m.jsonl")
    sink.handle(logged(1))
    monkeypatch.setattr(os, "write", short_once)
    sink.handle(logged(2))
    sink.handle(logged(3))
    sink.close()
    assert shortened
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3]


def test_a_full_disk_costs_the_rows_of_that_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, told, room = tmp_path / "m.jsonl", os.write, list[str](), [0, 5, 5, 2, 0]

    def nearly_full(fd: int, data: bytes) -> int:
        left = room.pop(0) if room else len(data)
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:left])

    observer = Observer([MetricsFile(path, warn=told.append)])
    observer.emit(logged(1))
    monkeypatch.setattr(os, "write", nearly_full)
    for step in (2, 3, 4, 5):  # nothing fits; five bytes, and five again; two bytes and no more; all
        observer.emit(logged(step))
    assert room == []
    observer.emit(logged(6))
    observer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 5, 6]
    assert told == [
        f"{path}: the row of step 2 is lost: No space left on device; is the disk full? "
        "Training continues, and rows are written again when there is room"
    ]


def test_a_torn_last_line_is_skipped_and_not_joined_by_the_next_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(b'{"step": 1, "rank": 0}\n{"step": 2, "ra')
    assert [row["step"] for row in read_metrics(path)] == [1]
    assert not caplog.records
    sink = MetricsFile(path)
    sink.handle(logged(2))
    sink.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert "1 lines" in caplog.text


def test_truncating_drops_later_steps_and_fragments(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert truncate_metrics(path, after_step=3) == 0
    assert not path.exists()
    sink = MetricsFile(path)
    for step in range(1, 6):
        for rank in range(2):
            sink.handle(logged(step, rank))
    sink.close()
    before = path.read_bytes()
    assert truncate_metrics(path, after_step=5) == 0
    assert path.read_bytes() == before
    with path.open("ab") as file:
        file.write(b'{"step": 1, "ra')
    assert truncate_metrics(path, after_step=3) == 5
    assert [(row["step"], row["rank"]) for row in read_metrics(path)] == [(s, r) for s in (1, 2, 3) for r in (0, 1)]
    assert before.startswith(path.read_bytes())
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


# Pipe ---------------------------------------------------------------------------------------------------------------


def test_a_pipe_carries_one_event_per_line() -> None:
    stream = io.BytesIO()
    sink = PipeSink(stream)
    sink.handle(Notice(level="INFO", message="zwei\nZeilen, größer"))
    sink.handle(Progress(name="x", done=1, total=None))
    back = [from_json(line.decode()) for line in stream.getvalue().splitlines()]
    assert back == [Notice(level="INFO", message="zwei\nZeilen, größer"), Progress(name="x", done=1, total=None)]
    sink.close()
    assert not stream.closed


def test_threads_share_a_pipe_without_mixing_lines() -> None:
    class Slow(io.RawIOBase):
        """Takes seven bytes at a time, and in the middle of the first line gives the other thread every chance."""

        def __init__(self) -> None:
            self.data = bytearray()
            self.writers: list[int] = []
            self.second_came = threading.Event()

        def write(self, data: Any) -> int:
            self.writers.append(threading.get_ident())
            if len(set(self.writers)) == 2:
                self.second_came.set()
            elif len(self.writers) == 2:
                other.start()
                self.second_came.wait(0.3)
            self.data += bytes(data[:7])
            return len(data[:7])

    stream: Any = Slow()
    sink = PipeSink(stream)
    other = threading.Thread(target=lambda: sink.handle(logged(2)))
    sink.handle(logged(1))
    other.join()
    assert [from_json(line.decode()) for line in bytes(stream.data).splitlines()] == [logged(1), logged(2)]


def test_a_broken_pipe_is_silent_and_other_errors_are_not() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as stream:
        sink = PipeSink(stream)
        sink.handle(logged(1))
        sink.handle(logged(2))
    sink.handle(logged(3))  # closed by its owner: silent too

    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    full: Any = Full()
    with pytest.raises(OSError, match="No space"):
        PipeSink(full).handle(logged(1))


# Logs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_logging() -> Iterator[None]:
    level = logging.getLogger().level
    reset_logging()
    yield
    reset_logging()
    logging.getLogger().setLevel(level)


@pytest.mark.parametrize(
    ("role", "rank", "host", "name"),
    [("server", 0, "mini", "server-mini.log"), ("server", None, "mini", "server-mini.log"),
     ("worker", 3, "pi5.local", "worker-rank3-pi5.local.log"), ("worker", 0, "../x y", "worker-rank0-.._x_y.log")],
)  # fmt: skip
def test_log_path(role: str, rank: int | None, host: str, name: str) -> None:
    assert log_path("runs/a", role, rank, host) == Path("runs/a/logs") / name


def test_logs_are_json_lines_with_who_and_when(
    tmp_path: Path, clean_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_path(tmp_path, "worker", 1, "pi5")
    setup_logging(path, level="INFO", role="worker", rank=1, host="pi5")
    logger = logging.getLogger("smolcluster.test")
    logger.debug("too fine")
    logger.info("größe %d \udcff", 3)
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("it broke")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    reset_logging()
    logger.info("after")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [r["level"] for r in records] == ["INFO", "ERROR", "WARNING"]
    first = records[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "INFO", "logger": "smolcluster.test", "message": "größe 3 \udcff", "role": "worker", "rank": 1,
        "host": "pi5",
    }  # fmt: skip
    assert "ValueError: boom" in records[1]["exception"]
    assert "careful" in records[2]["message"]
    assert records[2]["logger"] == "py.warnings"
    assert capsys.readouterr().err == ""


def test_rows_and_checkpoints_are_in_the_log(tmp_path: Path, clean_logging: None) -> None:
    path = tmp_path / "a.log"
    setup_logging(path, level="INFO", role="worker", rank=1, host="pi5")
    sink = LogSink()
    sink.handle(logged(10, rank=1))
    sink.handle(logged(20, rank=1, loss=math.nan, val_loss=3.25, tokens_per_s=0.0))
    sink.handle(CheckpointSaved(step=20, path="c/step-20", stall_s=0.0, write_s=0.1, size_bytes=9, best=False))
    sink.handle(logged(30, rank=1, samples=0, tokens_per_s=0.0, samples_per_s=0.0))  # another rank of its group reads
    sink.handle(Phase(rank=1, name="finished"))
    reset_logging()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=no_constant) for line in lines]
    assert [record["message"] for record in records] == [
        "step 10: loss 2.5000, 100 tok/s",
        "step 20: loss nan, val 3.2500, 50 samples/s",
        "checkpoint of step 20: c/step-20",
        "step 30: loss 2.5000",
    ]
    assert [(r.get("step"), r.get("loss"), r.get("val_loss")) for r in records] == [
        (10, 2.5, None),
        (20, "nan", 3.25),
        (None, None, None),
        (30, 2.5, None),
    ]
    assert records[0]["rank"] == 1


def test_setting_up_again_replaces_the_file(
    tmp_path: Path, clean_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    others = list(logging.getLogger().handlers)
    setup_logging(tmp_path / "a.log", level="INFO", role="server", rank=None, host="h")
    setup_logging(tmp_path / "b.log", level="WARNING", role="server", rank=None, host="h")
    logging.getLogger("x").warning("once")
    reset_logging()
    assert (tmp_path / "a.log").read_text(encoding="utf-8") == ""
    assert json.loads((tmp_path / "b.log").read_text(encoding="utf-8"))["rank"] is None
    assert capsys.readouterr().err == ""
    assert logging.getLogger().handlers == others


def test_without_a_file_nothing_is_printed(clean_logging: None, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None, level="INFO", role="launcher", rank=None, host="h")
    logging.getLogger("x").error("quiet")
    assert capsys.readouterr() == ("", "")


def test_tail_renders_json_and_passes_crash_output_through(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    assert tail(path) == []
    record = {"time": "2026-03-01T12:00:00.123Z", "level": "ERROR", "logger": "a.b", "message": "two\nlines",
              "role": "worker", "rank": 1, "host": "pi5",
              "exception": "Traceback\n  x\nValueError: \x1b[31mboom"}  # fmt: skip
    raw = ["{broken json", "terminate called after throwing \x1b[2J an exception", '"a string"', "\xff"]
    path.write_bytes("\n".join([json.dumps(record), *raw]).encode("latin-1") + b"\n\n")
    rendered = [
        "12:00:00 ERROR worker 1 on pi5 | a.b: two", "    lines", "    Traceback", "      x", "    ValueError: boom",
        "{broken json", "terminate called after throwing  an exception", '"a string"', "\ufffd",
    ]  # fmt: skip
    assert tail(path) == rendered
    assert tail(path, lines=3) == rendered[-3:]
    assert tail(path, lines=6) == rendered[-6:]
    assert tail(path, lines=0) == []


def test_tail_of_a_long_log_reads_its_end(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    path.write_text("".join(f"line {i} {'x' * 1000}\n" for i in range(500)), encoding="utf-8")
    assert [line.split()[1] for line in tail(path, lines=100)] == [str(i) for i in range(400, 500)]
