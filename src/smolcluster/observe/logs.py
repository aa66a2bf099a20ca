"""Logs: the standard logging module, one JSON object per line, one file per process.

    {"time": "2026-03-01T12:00:00.123Z", "level": "INFO", "logger": "smolcluster.engine.loop", "message": "...",
     "role": "worker", "rank": 1, "host": "pi5"}

Each logged step is a line too, with step and loss as fields. An exception adds the field `exception`. The launcher appends the
process's stderr to the same file, so the file may also have lines of plain text (a crash in the interpreter or C++); `tail`
reads both.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smolcluster.observe.events import CheckpointSaved, Event, Notice, StepLogged, plain
from smolcluster.observe.jsonl import json_object, lines_backwards
from smolcluster.observe.observer import Sink
from smolcluster.observe.run_state import rate
from smolcluster.observe.text import number, printable

log = logging.getLogger(__name__)

_OURS = "smolcluster"  # the name of our handlers on the root logger


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def __init__(self, *, role: str, rank: int | None, host: str) -> None:
        super().__init__()
        self._who = {"role": role, "rank": rank, "host": host}

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(self, record) | self._who | getattr(record, "fields", {})
        return json.dumps(fields, ensure_ascii=False)


class LogSink(Sink):
    """Logs the rows and the checkpoints of this process."""

    def handle(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            parts = [f"step {event.step}: loss {number(event.loss)}"]
            parts += [] if event.val_loss is None else [f"val {number(event.val_loss)}"]
            numbers = {name: getattr(event, name) for name in ("step", "loss", "val_loss", "lr", "grad_norm")}
            fields = {name: plain(value) for name, value in numbers.items() if value is not None}
            log.info("%s", ", ".join([*parts, *rate(event)]), extra={"fields": fields})
        elif isinstance(event, CheckpointSaved):
            log.info("checkpoint of step %d: %s", event.step, event.path)


class LauncherLogSink(Sink):
    """Writes the launcher's warnings to `logs/launcher-<host>.log`: which process died, and how."""

    def __init__(self, run_dir: str | Path, *, host: str) -> None:
        self._path = log_path(run_dir, "launcher", None, host)
        self._formatter = JsonFormatter(role="launcher", rank=None, host=host)

    def handle(self, event: Event) -> None:
        if isinstance(event, Notice) and event.level == "WARNING" and event.rank is None:
            record = logging.LogRecord("launcher", logging.WARNING, "", 0, "%s", (event.message,), None)
            with (
                contextlib.suppress(OSError),
                self._path.open("a", encoding="utf-8", errors="backslashreplace") as file,
            ):
                file.write(self._formatter.format(record) + "\n")


class LineFormatter(logging.Formatter):
    """A record as readable text."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(_render(_fields(self, record)))


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    parts += [record.stack_info] if record.stack_info else []
    return fields | ({"exception": "\n".join(parts)} if parts else {})


def log_path(run_dir: str | Path, role: str, rank: int | None, host: str) -> Path:
    """`logs/server-<host>.log` or `logs/worker-rank<R>-<host>.log` inside the run directory."""
    process = role if role == "server" or rank is None else f"{role}-rank{rank}"
    return Path(run_dir) / "logs" / re.sub(r"[^\w.-]", "_", f"{process}-{host}.log", flags=re.ASCII)


def setup_logging(path: Path | None, *, level: str | int, role: str, rank: int | None, host: str) -> None:
    """Write all log records of this process, and all warnings, to the file.

    A second call replaces the first. Other handlers (of a notebook, a test) stay.
    """
    reset_logging()
    handler: logging.Handler = logging.NullHandler()  # with no handler at all, Python would print warnings
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lone surrogate becomes \udcXX, as in JSON.
        handler = logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(JsonFormatter(role=role, rank=rank, host=host))
    root = logging.getLogger()
    root.setLevel(level)
    handler.set_name(_OURS)
    root.addHandler(handler)
    logging.captureWarnings(True)


def reset_logging() -> None:
    """Undo `setup_logging`: close its files and restore warnings."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.get_name() == _OURS]:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)


def log_to_terminal(level: int = logging.INFO) -> None:
    """Log to standard error, for commands that run until they are stopped and keep no file."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger("smolcluster")
    logger.addHandler(handler)
    logger.setLevel(level)


def tail(path: str | Path, lines: int = 20) -> list[str]:
    """Return the last `lines` lines of a log as readable text; an empty list if there is no file."""
    path, found = Path(path), []
    with contextlib.suppress(FileNotFoundError):
        newest_first = (raw for _, raw in lines_backwards(path, path.stat().st_size) if raw.strip())
        found = list(itertools.islice(newest_first, lines))[::-1]
    rendered: list[str] = []
    for raw in found:
        fields = json_object(raw)
        text = printable(raw.decode("utf-8", "replace").rstrip("\r\n"))
        rendered += _render(fields) if fields is not None and "message" in fields else [text]
    return rendered[-lines:] if lines > 0 else []


def _render(fields: dict[str, Any]) -> list[str]:
    """`12:00:00 WARNING worker 1 on pi5 | smolcluster.comm.tcp: message`, then the exception, indented."""
    role, rank, host = fields.get("role"), fields.get("rank"), fields.get("host")
    who = f"{role}{'' if rank is None else f' {rank}'} on {host} | " if role else ""
    time = str(fields.get("time", ""))[11:19]
    first, *rest = str(fields["message"]).splitlines() or [""]
    rest += str(fields.get("exception", "")).splitlines()
    head = f"{time} {fields.get('level', '')} {who}{fields.get('logger', '')}: {first}"
    return [printable(head.strip())] + ["    " + printable(line) for line in rest]
