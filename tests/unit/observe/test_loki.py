"""The Loki pusher, against a server built from Loki's documented API that forgives nothing (strict_loki.py).

Whatever faults are injected, at the end every line of the file is stored exactly once and in order.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.places import eventually
from tests.unit import samples
from tests.unit.strict_loki import Scripted, StrictLoki, every_line_once, record

from smolcluster.config import dump, load_config, public_dict, resolve
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import UserError
from smolcluster.launch.join.worker import _LogPusher
from smolcluster.observe.events import Event, Notice, RunStarted
from smolcluster.observe.log_queue import PRINTED, LogPosition, entries_in
from smolcluster.observe.logs import reset_logging, setup_logging
from smolcluster.observe.loki import (
    LokiClient,
    LokiTiming,
    Pusher,
    PushResult,
    endpoint_of,
    push_after_run,
    push_unsent,
    result_of,
    start_pushing,
)

QUICK = LokiTiming(poll_s=0.01, retry_s=0.01, max_retry_s=0.05, slow_s=0.05, request_s=5.0, patience_s=0.2, close_s=3.0)
HOST = "worker-rank0-mini2"
NEEDS_TLS = "Client sent an HTTP request to an HTTPS server."  # so speaks a Loki, and any server written in Go

log = logging.getLogger("smolcluster.test")


@pytest.fixture
def loki() -> Iterator[StrictLoki]:
    with StrictLoki() as server:
        yield server
    assert server.violations == []


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The log of this process."""
    path = tmp_path / "logs" / f"{HOST}.log"
    setup_logging(path, level="INFO", role="worker", rank=0, host="mini2")
    yield path
    reset_logging()


def push(path: Path, url: str, timing: LokiTiming = QUICK) -> Pusher:
    return start_pushing(path, url=url, role="worker", rank=0, host="mini2", timing=timing)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# What is sent


def test_lines_arrive_with_their_labels_and_times(loki: StrictLoki, path: Path) -> None:
    pusher = push(path, loki.url)
    log.info("step %d", 1)
    log.warning("a warning, with ümläuts and a\nline break")
    with path.open("ab") as file:
        file.write(b"Fatal Python error: \xff\r\n\n   \nRAW\n")
    pusher.close()
    every_line_once(loki, text_of_replacing(path), HOST)
    common = {"job": "smolcluster-worker", "component": "worker", "host": HOST, "rank": "0"}
    assert [dict(labels) for labels in loki.streams] == [
        common | {"level": level} for level in ("INFO", "WARNING", PRINTED)
    ]
    (info_ns, info), (warned_ns, warning) = (loki.streams[labels][0] for labels in list(loki.streams)[:2])
    assert json.loads(info)["message"] == "step 1"
    for time_ns, line in ((info_ns, info), (warned_ns, warning)):
        told = datetime.fromisoformat(json.loads(line)["time"])
        assert told.tzinfo == UTC
        assert 0 <= time_ns - int(told.timestamp() * 1000) * 10**6 < 10**6
    (first_ns, first), (second_ns, second) = loki.streams[list(loki.streams)[2]]
    assert (first, second) == ("Fatal Python error: \N{REPLACEMENT CHARACTER}", "RAW")
    assert (first_ns, second_ns) == (warned_ns + 1, warned_ns + 2), "the time of the line before"
    assert loki.statuses
    assert set(loki.statuses) == {204}


def text_of_replacing(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_a_server_has_labels_of_its_own(loki: StrictLoki, tmp_path: Path) -> None:
    path = tmp_path / "server-mini1.log"
    setup_logging(path, level="INFO", role="server", rank=2, host="mini1")
    log.info("here")
    start_pushing(path, url=loki.url, role="server", rank=2, host="mini1", timing=QUICK).close()
    reset_logging()
    (labels,) = loki.streams
    who = {"job": "smolcluster-server", "component": "server", "host": "server-mini1", "rank": "2"}
    assert dict(labels) == who | {"level": "INFO"}


def test_many_lines_go_in_few_batches(loki: StrictLoki, path: Path) -> None:
    for number in range(5000):
        log.info("line %d %s", number, "x" * 200)
    push(path, loki.url).close()
    every_line_once(loki, text_of(path), HOST)
    assert path.stat().st_size / 2**19 <= len(loki.times) <= path.stat().st_size / 2**19 + 3
    assert loki.duplicates == 0


def test_the_last_half_of_a_line_waits_for_the_other(loki: StrictLoki, path: Path) -> None:
    pusher = push(path, loki.url)
    log.info("whole")
    with path.open("ab", buffering=0) as file:
        file.write(b"half ")
        loki.wait_for(1)
        file.write(b"a line\n")
    pusher.close()
    assert loki.lines(level=PRINTED) == ["half a line"]


# Outages

OUTAGES: dict[str, list[Scripted]] = {
    "errors": [500, 503, 502],
    "too many requests": [429, (429, 0.05), 429],
    "responses that are lost, of batches that were stored": ["lose the answer"] * 4,
    "connections that are cut": ["hang up", "hang up", "lose the answer", "hang up"],
    "everything at once": [500, "lose the answer", 429, "hang up", "lose the answer", 503],
}


@pytest.mark.parametrize("name", OUTAGES)
def test_every_line_arrives_once_over(name: str, loki: StrictLoki, path: Path) -> None:
    script = OUTAGES[name]
    pusher = push(path, loki.url)
    for number in range(60):
        log.info("before %d", number)
        if number % 6 == 0:
            loki.plan += script[: 1 + number // 12]
            loki.wait_for_requests(len(loki.times) + 1)
    eventually(lambda: not loki.plan)
    pusher.close()
    every_line_once(loki, text_of(path), HOST)
    assert set(loki.statuses) - {204}, "the faults were played"
    if any(step == "lose the answer" for step in script):
        assert loki.duplicates > 0, "lines were sent again, as they were"


def test_a_loki_that_is_not_there_yet_gets_everything_when_it_comes(path: Path, tmp_path: Path) -> None:
    with StrictLoki() as loki:
        loki.stop()
        pusher = push(path, loki.url)
        log.info("nobody listens")
        eventually(lambda: "cannot be reached" in text_of(path))
        for number in range(2000):
            log.info("kept %d", number)
        loki.start()
        loki.wait_for(2000)
        eventually(lambda: "is reachable again" in text_of(path))
        loki.stop()
        for number in range(100):
            log.info("kept again %d", number)
        eventually(lambda: text_of(path).count("cannot be reached") == 2)
        loki.start()
        eventually(lambda: text_of(path).count("is reachable again") == 2)
        pusher.close()
        every_line_once(loki, text_of(path), HOST)
        assert loki.violations == []
    assert text_of(path).count("cannot be reached") == 2, "an outage is told once"


def test_retry_after_is_honoured(loki: StrictLoki, path: Path) -> None:
    loki.plan += [(429, 1.0)]
    pusher = push(path, loki.url)
    log.info("please")
    loki.wait_for(1)
    assert loki.times[1] - loki.times[0] >= 1.0
    pusher.close()


def test_what_answers_mean() -> None:
    assert result_of(204, None, "") == PushResult("stored")
    assert result_of(429, "7", "").retry_after_s == 7.0
    assert result_of(503, "Wed, 21 Oct 2015 07:28:00 GMT", "").retry_after_s == 0.0
    assert result_of(503, "soon", "") == PushResult("retry", "responds with status 503")
    assert result_of(429, "999999", "").retry_after_s == 300.0
    for reason in ("entry for stream '{}' has timestamp too old: 1", "entry too far behind, entry timestamp is: 1"):
        assert (result_of(400, None, reason).kind, result_of(400, None, reason).refused) == ("stored", 1)
    ignored = "entry with timestamp 1 ignored, reason: 'entry out of order',\n"
    assert result_of(400, None, ignored * 10 + "user 'x', total ignored: 70 out of 90 for stream: {}").refused == 70
    assert result_of(400, None, f"{ignored}reason: 'Per stream rate limit exceeded'").kind == "retry"
    for status, text in ((400, NEEDS_TLS), (413, ""), (400, "<html>plain HTTP was sent to an HTTPS port</html>")):
        assert result_of(status, None, text).kind == "misconfigured"
    for status in (301, 302, 260, 401, 403, 404, 405):
        assert result_of(status, None, "").kind == "misconfigured"
    assert "SMOLCLUSTER_LOKI_AUTH" in result_of(401, None, "").reason


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_address_is_told_once_and_costs_no_line(status: int, loki: StrictLoki, path: Path) -> None:
    loki.always = status
    pusher = push(path, loki.url)
    log.info("first")
    loki.wait_for_requests(4)
    log.info("second")
    loki.always = None
    eventually(lambda: "is reachable again" in text_of(path))
    pusher.close()
    every_line_once(loki, text_of(path), HOST)
    assert text_of(path).count(f"responds with status {status}") == 1


# Lines that Loki never takes


def test_only_the_bad_lines_of_a_batch_are_left_out(path: Path) -> None:
    with StrictLoki(longest=5000) as loki:
        for number in range(200):
            log.info("line %d %s", number, "z" * 6000 if number in (0, 77, 199) else "")
        push(path, loki.url).close()
        arrived = [json.loads(line) for line in loki.lines()]
        numbers = [int(fields["message"].split()[1]) for fields in arrived if fields["logger"] == log.name]
        assert numbers == [number for number in range(200) if number not in (0, 77, 199)]
        (note,) = [fields for fields in arrived if fields["level"] == "ERROR"]
        assert "refused 3 of 200 lines" in note["message"]
        assert "Max entry size" in note["message"]
        assert loki.violations == []
        assert len(loki.times) <= 3, "the batch is not split"
        assert push_unsent(path, loki.url).lines == 0, "and they are not tried again"
        path.with_name(path.name + ".sent").unlink()
        assert push_unsent(path, loki.url).refused == 3


def test_a_loki_that_takes_nothing_is_no_endless_loop(path: Path) -> None:
    """Neither are the errors about it, which it refuses as well."""
    with StrictLoki(oldest_ns=2 * 10**18) as loki:
        for number in range(20):
            log.info("old %d", number)
        pusher = push(path, loki.url)
        eventually(lambda: pusher.unsent_bytes == 0)
        pusher.close()
        assert loki.lines() == []
        assert text_of(path).count("refused 20 of 20 lines") == 1
        assert len(loki.times) <= 3


def test_a_wrong_scheme_is_told_once_and_costs_no_line(loki: StrictLoki, path: Path) -> None:
    loki.always = (400, NEEDS_TLS)
    for number in range(50):
        log.info("line %d", number)
    rest = push_unsent(path, loki.url, timing=QUICK)
    assert (rest.lines, rest.refused, rest.unsent) == (0, 0, (path,))
    assert "HTTPS server" in rest.reason
    assert "write https:// in logging.loki_url" in rest.reason
    assert len(loki.times) < 20, "a few tries, not one for each line"
    loki.always = None
    assert push_unsent(path, loki.url, timing=QUICK).lines == 50
    every_line_once(loki, text_of(path), HOST)


@pytest.mark.parametrize("begins_well", [True, False])
def test_an_address_that_is_no_loki_for_a_while_costs_no_line(begins_well: bool, path: Path) -> None:
    """Whenever it is mended: also between the tries for a single batch."""
    with StrictLoki() as loki:
        pusher = push(path, loki.url)
        if begins_well:
            log.info("taken")
            loki.wait_for(1)
        for answers in range(1, 10):
            loki.plan += [(400, "no such service")] * answers
            log.info("line %d", answers)
            log.info("another line %d", answers)
            eventually(lambda: pusher.unsent_bytes == 0 and not loki.plan)
        pusher.close()
        every_line_once(loki, text_of(path), HOST)
        told = text_of(path).count("is logging.loki_url the address of a Loki?")
        assert 0 < told == text_of(path).count("is reachable again"), "once for each time"


def test_a_time_from_a_clock_that_was_wrong_by_years_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    path = tmp_path / f"{HOST}.log"
    path.write_bytes(record(1.0) + record(2.0).replace(b"2026", b"2126") + record(3.0))
    with StrictLoki() as loki:
        loki.newest_ns = time.time_ns() + 10**18
        rest = push_unsent(path, loki.url, timing=QUICK)
        assert (rest.lines, rest.refused, rest.unsent) == (2, 1, ())


# Never in the way


def test_a_loki_that_does_not_answer_holds_up_nobody(loki: StrictLoki, path: Path) -> None:
    loki.always = "say nothing"
    pusher = push(path, loki.url, LokiTiming(poll_s=0.01, close_s=0.5))
    log.info("first")
    loki.wait_for_requests(1)
    started = time.perf_counter()
    for number in range(1000):
        log.info("line %d", number)
    wrote_s = time.perf_counter() - started
    pusher.close()
    assert wrote_s < 10
    assert time.perf_counter() - started - wrote_s < 10
    assert pusher.unsent_bytes > 0
    assert loki.lines() == []


def test_one_process_at_a_time_sends_a_file(loki: StrictLoki, path: Path) -> None:
    first = push(path, loki.url)
    log.info("one")
    loki.wait_for(1)
    second = push(path, loki.url)
    assert push_unsent(path, loki.url).busy == (path,)
    first.close()
    log.info("two")
    loki.wait_for(2)
    second.close()
    every_line_once(loki, text_of(path), HOST)
    assert loki.duplicates == 0


# Ends and new beginnings

CHILD = """
import logging, sys, time
from pathlib import Path
from smolcluster.observe.logs import setup_logging
from smolcluster.observe.loki import LokiTiming, start_pushing

path, url, life, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
setup_logging(path, level="INFO", role="worker", rank=0, host="mini2")
timing = LokiTiming(poll_s=0.005, retry_s=0.005, max_retry_s=0.02, slow_s=0.02)
pusher = start_pushing(path, url=url, role="worker", rank=0, host="mini2", timing=timing)
log = logging.getLogger("child")
for number in range(count):
    log.log(logging.INFO if number % 3 else logging.WARNING, "life %d, line %d", life, number)
    if number % 10 == 0:
        print(f"printed in life {life} after {number}", file=sys.stderr, flush=True)
    time.sleep(0.0005)
pusher.close()
"""


def child(path: Path, url: str, *, life: int, count: int) -> subprocess.Popen[bytes]:
    with path.open("ab") as stderr:
        arguments = [sys.executable, "-c", CHILD, str(path), url, str(life), str(count)]
        return subprocess.Popen(arguments, stderr=stderr)


def test_a_process_that_is_killed_again_and_again_loses_and_doubles_nothing(loki: StrictLoki, tmp_path: Path) -> None:
    path = tmp_path / f"{HOST}.log"
    faults = itertools.cycle([500, "lose the answer", None, "hang up", None, (429, 0.01), "lose the answer"])
    for life in range(6):
        process = child(path, loki.url, life=life, count=100_000)
        try:
            loki.wait_for_requests(len(loki.times) + 1)
            loki.plan += [fault for fault in itertools.islice(faults, 7) if fault is not None]
            loki.wait_for_requests(len(loki.times) + 7 + 3 * life)  # each dies at another point
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
    loki.plan.clear()
    assert child(path, loki.url, life=6, count=200).wait(300) == 0
    text = text_of(path)
    assert all(f"life {life}, line 0" in text for life in range(7))
    assert "printed in life 3" in text
    every_line_once(loki, text, HOST)
    assert loki.duplicates > 0, "the window between storing and noting it was hit"


@pytest.mark.parametrize("damage", [None, b"", b"{", b'{"offset": -5, "time_ns": 0, "head": ""}', b"[]", b"\xff"])
def test_a_note_that_is_lost_or_damaged_is_no_note(damage: bytes | None, loki: StrictLoki, path: Path) -> None:
    """Then everything is sent again, exactly as it was."""
    for number in range(50):
        log.info("line %d", number)
    push(path, loki.url).close()
    note = path.with_name(path.name + ".sent")
    note.unlink() if damage is None else note.write_bytes(damage)
    log.info("more")
    push(path, loki.url).close()
    every_line_once(loki, text_of(path), HOST)
    assert loki.duplicates == 50


def test_another_file_with_the_same_name_begins_anew(loki: StrictLoki, path: Path) -> None:
    log.info("of the first run")
    push(path, loki.url).close()
    first = text_of(path)
    reset_logging()
    path.unlink()
    setup_logging(path, level="INFO", role="worker", rank=0, host="mini2")
    for number in range(5):
        log.info("of the second run, %d", number)
    push(path, loki.url).close()
    every_line_once(loki, first + text_of(path), HOST)


@pytest.mark.parametrize("lines", [1, 50, 300])
def test_a_log_that_is_emptied_in_place_goes_on_with_what_is_new(lines: int, loki: StrictLoki, path: Path) -> None:
    """As logrotate does with copytruncate; it may have grown beyond where it was before anybody looks."""
    pusher, written = push(path, loki.url), ""
    for life in range(3):
        for number in range(lines + life if life else 100):
            log.info("life %d, line %d", life, number)
        eventually(lambda: pusher.unsent_bytes == 0)
        written += text_of(path)
        os.truncate(path, 0)
    pusher.close()
    every_line_once(loki, written, HOST)
    assert loki.duplicates == 0


def test_the_rest_of_a_run_that_is_over(loki: StrictLoki, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    server, worker = logs / "server-mini1.log", logs / f"{HOST}.log"
    server.write_bytes(record(1.0) + b'{"time": "2026-03-01T12:00:02Z", "level": "ERROR", "rank": 4}\n')
    worker.write_bytes(record(1.0) + b"Segmentation fa")
    (logs / "notes.log").write_bytes(b"not of a process\n")
    loki.plan += [500, "lose the answer"]
    rest = push_unsent(tmp_path / "run", loki.url, timing=QUICK)
    assert (rest.lines, rest.unsent, rest.busy) == (4, (), ())
    assert {dict(labels)["rank"] for labels in loki.streams} == {"4", "0"}
    every_line_once(loki, text_of(worker), HOST)
    every_line_once(loki, text_of(server), "server-mini1")
    assert push_unsent(tmp_path / "run", loki.url, timing=QUICK).lines == 0
    with worker.open("ab") as file:  # the run goes on: the process writes behind what its last life left
        file.write(b"\n" + record(3.0, "back"))
    assert push_unsent(tmp_path / "run", loki.url, timing=QUICK).lines == 1
    assert len(loki.lines()) == 5


def test_the_rest_is_not_waited_for_for_ever(path: Path) -> None:
    with StrictLoki() as loki:
        loki.stop()
        log.info("line")
        rest = push_unsent(path, loki.url, timeout_s=0.2, timing=QUICK)
        assert (rest.lines, rest.unsent) == (0, (path,))
        assert "cannot be reached" in rest.reason
        loki.start()
        loki.always = 404
        assert "responds with status 404" in push_unsent(path, loki.url, timing=QUICK).reason
        loki.stop()
        said = push_after_run(path.parent, loki.url, timeout_s=0.1)
        assert "cannot be reached" in said
        assert f"smolcluster logs push {path.parent}" in said
        assert push_after_run(path.parent / "nowhere", loki.url) == ""
        loki.start()
        loki.always = None
        assert push_after_run(path.parent, loki.url) == ""
        every_line_once(loki, text_of(path), HOST)
    with pytest.raises(UserError, match="no logs in"):
        push_unsent(path.parent / "nowhere", loki.url)


# Addresses, logins and secrets


def test_where_the_parts_of_a_url_go(path: Path) -> None:
    auth = "Basic bWU6cEA6L3c="  # me:p@:/w
    with StrictLoki(auth=auth) as loki:
        log.info("line")
        push(path, loki.url.replace("//", "//me:p%40%3A%2Fw@") + "/?tenant=home").close()
        every_line_once(loki, text_of(path), HOST)
        assert loki.tenants == {"home"}
    environ = {"SMOLCLUSTER_LOKI_AUTH": "me:p@:/w", "SMOLCLUSTER_LOKI_TENANT": "lab"}
    headers = endpoint_of("https://logs.example/proxy/", environ=environ).headers
    assert (headers["Authorization"], headers["X-Scope-OrgID"]) == (auth, "lab")
    end = endpoint_of("https://logs.example/proxy/", environ={})
    assert (end.secure, end.host, end.port, end.path) == (True, "logs.example", 443, "/proxy/loki/api/v1/push")
    assert endpoint_of("http://h:3100/loki/api/v1/push", environ={}).path == "/loki/api/v1/push"
    assert endpoint_of("http://[::1]:3100", environ={}).host == "::1"


BAD = [
    *("h:3100", "me:topsecret@h:3100", "ftp://me:topsecret@h", "http://", "http://me:top/secret@h", "http://h?x=1"),
    *("http://me:topsecret@h:x", "http://me:topsecret@h/#x", "http://me:topsecret@[h", "http://h?tenant=a%0db"),
    "http://me:topsecret?@h",
]


@pytest.mark.parametrize("url", BAD)
def test_a_url_that_is_none_is_explained_without_its_password(url: str) -> None:
    with pytest.raises(UserError, match=r"logging\.loki_url .* write it as http://") as caught:
        endpoint_of(url)
    error = caught.value
    assert "secret" not in f"{error!r} {error.__cause__!r} {error.__context__ if error.__cause__ else ''}"


def test_a_password_is_in_no_log_and_no_file(path: Path, loki: StrictLoki) -> None:
    loki.always = 401
    url = loki.url.replace("//", "//me:topsecret@")
    pusher = push(path, url)
    log.info("line")
    eventually(lambda: "responds with status 401" in text_of(path))
    pusher.close()
    for file in path.parent.iterdir():
        assert "topsecret" not in file.read_text()
    assert "topsecret" not in repr(endpoint_of(url))
    config = resolve(load_config([], overrides={"logging.loki_url": url}))
    assert public_dict(config)["logging"]["loki_url"] == loki.url
    assert "topsecret" not in dump(config)
    assert "SMOLCLUSTER_LOKI_AUTH" in dump(config)


# A worker by hand


class Told(list[str]):
    """A screen."""

    def handle(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.append(event.message)

    def close(self) -> None:
        """It stays on."""


def joined(*, server: str = "127.0.0.1:65432", **overrides: Any) -> WorkerSpec:
    said = {f"logging.{key}": value for key, value in overrides.items()}
    return samples.spec_of(host="mini2", plane="elastic", server=server, overrides=said)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    reset_logging()


def test_a_worker_by_hand_sends_nothing_to_the_loki_of_its_server(loki: StrictLoki, temporary: Path) -> None:
    """Its lines, and the login in its environment, go where its owner says."""
    screen = Told()
    pushing = _LogPusher(joined(), None, [screen])
    log.info("before anything is known")
    pushing.handle(started(loki.url))
    log.info("after")
    pushing.close()
    assert loki.times == []
    assert list(temporary.iterdir()) == []
    assert screen == []


def started(url: str | None) -> RunStarted:
    return samples.started(config={"logging": {"loki_url": url}})


def test_a_worker_by_hand_without_loki_leaves_no_file_but_the_log_it_was_asked_for(temporary: Path) -> None:
    for log_dir in (None, temporary / "mine"):
        pushing = _LogPusher(joined(), log_dir, [])
        log.info("line")
        pushing.handle(started(None))
        pushing.close()
    assert [path.relative_to(temporary).as_posix() for path in temporary.rglob("*.log")] == [f"mine/{HOST}.log"]


def test_a_worker_by_hand_without_room_for_a_log_has_none(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, loki: StrictLoki
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "nowhere"))
    pushing = _LogPusher(joined(), None, [])
    log.info("line")
    pushing.handle(started(loki.url))
    pushing.close()
    assert loki.times == []
    with pytest.raises(UserError, match="give --log-dir"):
        _LogPusher(joined(loki_url=loki.url), None, [])
    with pytest.raises(UserError, match="write it as http://"):
        _LogPusher(joined(loki_url="nonsense"), temporary, [])
    assert list(temporary.iterdir()) == []


def test_a_worker_by_hand_that_cannot_send_says_where_its_lines_are(temporary: Path) -> None:
    screen = Told()
    with StrictLoki() as loki:
        loki.stop()
        pushing = _LogPusher(joined(loki_url=loki.url), None, [screen])
        log.info("line")
        pushing.close()
        (folder,) = temporary.iterdir()
        assert screen == [f"not all lines of this worker reached Loki; send the rest: smolcluster logs push {folder}"]
        loki.start()
        push_unsent(folder, loki.url, timing=QUICK)
        every_line_once(loki, text_of(folder / f"{HOST}.log"), HOST)


# The server itself is to be trusted, and there may be another


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/loki/api/v1/pushes", {}, None),
        ("/loki/api/v1/push", {"Content-Type": "text/plain"}, None),
        ("/loki/api/v1/push", {"Content-Encoding": "gzip"}, None),
        ("/loki/api/v1/push", {}, {"streams": []}),
        ("/loki/api/v1/push", {}, {"streams": [{"stream": {"a": "b"}, "values": []}]}),
        ("/loki/api/v1/push", {}, {"streams": [{"stream": {"a": 1}, "values": [["1700000000000000001", "x"]]}]}),
        ("/loki/api/v1/push", {}, {"streams": [{"stream": {"a": "b"}, "values": [[1700000000000000001, "x"]]}]}),
        ("/loki/api/v1/push", {}, {"streams": [{"stream": {"a": "b"}, "values": [["1700000000", "x"]]}]}),
        ("/loki/api/v1/push", {}, {"streams": [{"stream": {"a": "b"}, "values": [["1600000000000000001", "old"]]}]}),
    ],
)
def test_the_strict_server_is_strict(path: str, headers: dict[str, str], body: dict[str, Any] | None) -> None:
    good = {"streams": [{"stream": {"a": "b"}, "values": [["1700000000000000001", "x"]]}]}
    with StrictLoki() as loki:

        def post(path: str, headers: dict[str, str], body: object) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", loki.port, timeout=300)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | headers)
            status = connection.getresponse().status
            connection.close()
            return status

        assert post("/loki/api/v1/push", {}, good) == 204
        assert post("/loki/api/v1/push", {}, good) == 204
        assert loki.duplicates == 1
        assert not loki.violations
        assert post(path, headers, good if body is None else body) == 400
        assert len(loki.violations) == 1


@pytest.mark.skipif("SMOLCLUSTER_TEST_LOKI" not in os.environ, reason="SMOLCLUSTER_TEST_LOKI names no Loki")
def test_a_real_loki_has_every_line_once(path: Path, tmp_path: Path) -> None:
    """`SMOLCLUSTER_TEST_LOKI=http://127.0.0.1:3100 pytest tests/unit/observe/test_loki.py`: any server with Loki's API."""
    url, host = os.environ["SMOLCLUSTER_TEST_LOKI"], f"test{time.time_ns()}"
    path = tmp_path / f"worker-rank0-{host}.log"
    setup_logging(path, level="INFO", role="worker", rank=0, host=host)
    for number in range(500):
        log.info("line %d", number)
    for _ in range(2):  # the second time all of it again
        path.with_name(path.name + ".sent").unlink(missing_ok=True)
        start_pushing(path, url=url, role="worker", rank=0, host=host).close()
    assert " refused " not in text_of(path)
    end = endpoint_of(url)
    base = f"{'https' if end.secure else 'http'}://{end.host}:{end.port}{end.path.removesuffix('/push')}"
    asked = urllib.parse.urlencode({"query": f'{{host="{path.stem}"}}', "limit": 5000, "direction": "forward"})
    headers = {name: value for name, value in end.headers.items() if name in ("Authorization", "X-Scope-OrgID")}

    def arrived() -> list[str]:
        with urllib.request.urlopen(
            urllib.request.Request(f"{base}/query_range?{asked}", headers=headers), timeout=300
        ) as reply:
            streams = json.load(reply)["data"]["result"]
        return [
            text for _, text in sorted((int(time_ns), text) for stream in streams for time_ns, text in stream["values"])
        ]

    eventually(lambda: len(arrived()) >= 500)
    assert arrived() == text_of(path).splitlines()


def test_a_server_that_drips_is_cut_off() -> None:
    """A byte a moment would keep every single read from timing out, and a run from ending."""
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool:
        done = threading.Event()

        def drip() -> None:
            line, _ = door.accept()
            with line, contextlib.suppress(OSError):
                line.sendall(b"HTTP/1.1 204 No Content\r\nX: ")
                while not done.wait(0.02):
                    line.sendall(b" ")

        dripping = pool.submit(drip)
        pushed = LokiClient(endpoint_of(f"http://127.0.0.1:{door.getsockname()[1]}"))
        began = time.monotonic()
        try:
            result = pushed.push({"job": "x"}, list(entries_in(record(1.0), LogPosition(0, 0))), timeout_s=0.5)
            assert result.kind == "retry"
            assert time.monotonic() - began < 10
        finally:
            done.set()
            pushed.close()
            dripping.result(300)
