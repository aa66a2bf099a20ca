"""Pages of logs, and the list of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.run_folder import T0, aged, append, configure, log, row, snapshot_of, write_rows

from smolcluster.dashboard.logs import read_page
from smolcluster.dashboard.runs import NoSuchRun, RunFolder, compare
from smolcluster.dashboard.server import choose
from smolcluster.errors import UserError


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
    monkeypatch.setattr("smolcluster.dashboard.runs.OPEN_BUDGET_S", -1)
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
