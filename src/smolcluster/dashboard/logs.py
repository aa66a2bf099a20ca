"""Read the logs of a run in pages from the newest line back, filtered and merged by time.

A page has at most `limit` lines and reads at most `max_bytes`, which bounds a search in gigabytes; it returns a cursor to
continue from. The cursor is a byte offset in every log: new lines do not shift it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.dashboard.follow import lstat, opened, read_at
from smolcluster.dashboard.run_files import log_names
from smolcluster.observe.jsonl import json_object
from smolcluster.observe.text import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_LINES = 500
MAX_BYTES = 16 << 20
_BLOCK_BYTES = 64 << 10
_LONGEST_LINE_BYTES = 64 << 10
_PRINTED = "PRINTED"  # the level of what was printed and not logged, such as a crash


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of one log, and its offset in the file."""

    process: str
    position: int
    text: bytes


@dataclass(slots=True)
class ReadBudget:
    bytes_left: int


def read_page(
    run_dir: Path,
    *,
    search: str = "",
    level: str = "",
    process: str = "",
    before: Mapping[str, int] | None = None,
    limit: int = 200,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """Return `lines`, oldest first; `before`, the cursor of the previous page or None at the beginning; `processes`, the logs.

    `level` is the lowest level shown. Printed lines are treated as errors: most are.
    """
    names = log_names(run_dir)
    lowest = LEVELS.index(level) if level in LEVELS else 0
    limit = max(1, min(limit, MAX_LINES))
    budget = ReadBudget(max_bytes)
    wanted = search.casefold()
    ends = {name: file_size(run_dir / "logs" / name) for name in names if process in ("", name)}
    if before is not None:  # a log that is newer than the cursor has nothing before it
        ends = {name: min(end, before.get(name, 0)) for name, end in ends.items()}
    logs = [_backwards(run_dir / "logs" / name, end, budget) for name, end in ends.items()]

    found: list[dict[str, Any]] = []
    reached = dict(ends)
    for _, _, raw, fields in heapq.merge(*logs, key=lambda item: item[0], reverse=True):
        reached[raw.process] = raw.position
        if fields["rank_of_level"] >= lowest and (not wanted or wanted in _search_text(fields)):
            found.append({name: value for name, value in fields.items() if name != "rank_of_level"})
            if len(found) == limit:
                break
    more = any(reached.values()) and (len(found) == limit or budget.bytes_left <= 0)
    return {"lines": found[::-1], "before": reached if more else None, "processes": names}


def _backwards(path: Path, position: int, budget: ReadBudget) -> Iterator[tuple[str, int, LogLine, dict[str, Any]]]:
    """Yield the lines of one log before `position`, newest first, each with the time to sort it by."""
    newest = "~"  # after every time: for a log that ends with printed lines
    for raw in lines_before(path, position, budget):
        fields = parse(raw)
        # Printed lines have no time, and clocks may be set back: keep the order of the file.
        newest = min(newest, fields["time"] or newest)
        yield newest, raw.position, raw, fields


def file_size(path: Path) -> int:
    found = lstat(path)
    return 0 if found is None else found.st_size


def lines_before(path: Path, end: int, budget: ReadBudget) -> Iterator[LogLine]:
    try:
        with opened(path) as descriptor:
            rest = b""  # the end of a line that begins in the previous block
            found = False
            while end > 0 and budget.bytes_left > 0:
                start = max(0, end - _BLOCK_BYTES)
                block = read_at(descriptor, start, end - start) + rest
                budget.bytes_left -= end - start
                lines = block.split(b"\n")
                rest = lines.pop(0) if start > 0 else b""
                if len(rest) > _LONGEST_LINE_BYTES:
                    rest = rest[:_LONGEST_LINE_BYTES]
                at = start + len(block)
                for text in reversed(lines):
                    at -= len(text)
                    if text.strip():
                        found = True
                        yield LogLine(path.name, at, text)
                    at -= 1
                end = start
            if rest and not found:  # the end of a line longer than the budget, so that paging gets past it
                yield LogLine(path.name, end, rest)
    except OSError:
        return


def parse(raw: LogLine) -> dict[str, Any]:
    """Return a line as plain values. A line that is not JSON was printed."""
    found = json_object(raw.text)
    if found is None or "message" not in found:
        text = printable(raw.text[:_LONGEST_LINE_BYTES].decode(errors="replace"))
        fields = {"time": "", "level": _PRINTED, "logger": "", "message": text}
        return fields | {"process": raw.process, "rank_of_level": LEVELS.index("ERROR")}
    level = str(found.get("level", ""))
    fields = {name: str(found.get(name, ""))[:4000] for name in ("time", "level", "logger", "message")}
    if "exception" in found:
        fields["exception"] = str(found["exception"])[:16_000]
    return fields | {"process": raw.process, "rank_of_level": LEVELS.index(level) if level in LEVELS else 1}


def _search_text(fields: Mapping[str, Any]) -> str:
    return " ".join(str(fields.get(name, "")) for name in ("message", "exception", "logger", "process")).casefold()


def read_cursor(text: str) -> dict[str, int] | None:
    """Parse the `before` of a query; None, the newest page, for anything that is not a cursor."""
    found = json_object(text[:20_000])
    if found is None:
        return None
    return {name: value for name, value in found.items() if isinstance(value, int) and value >= 0}
