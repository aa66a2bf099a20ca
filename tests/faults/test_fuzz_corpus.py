"""Replay of the fuzzer's corpus, and a short form of `make abuse`.

`make fuzz` searches further, `make abuse` is the long form. A file that begins with failed- was an error once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import fuzz
from tools.abuse import outside, serving, training
from tools.fuzz import TARGETS, Kind, Message, Peers, Switchboard, View, ViewMember

from smolcluster.comm.elastic.membership import roster
from smolcluster.comm.elastic.membership.roster import MAX_NAMES, RANK_JOINS, JoinLimit, MemberGone
from smolcluster.comm.elastic.transport.frames import CODECS
from smolcluster.engine.elastic.admission import FIRST_ROWS, ROW_BYTES, RowQuota
from smolcluster.observe.events import StepLogged, to_json


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # refusals are logged
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    paths = sorted((fuzz.CORPUS / name).iterdir())
    assert 5 <= len(paths) <= fuzz.MAX_INPUTS
    outcomes = set()
    for path in paths:
        data = path.read_bytes()
        assert len(data) <= fuzz.MAX_BYTES
        try:
            outcomes.add(fuzz.timed(TARGETS[name], data))
        except Exception as error:
            raise AssertionError(f"python -m tools.fuzz {name} --replay {path}") from error
    assert len(outcomes) >= min(5, len(paths) // 2), "these inputs do not get anywhere any more"


def test_a_search_finds_what_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its silence would prove nothing."""

    def target(data: bytes) -> str:
        fuzz.insist(b"{{" not in data, "two brackets")
        return str(len(data) // 10)

    monkeypatch.setitem(TARGETS, "meta", target)  # type: ignore[arg-type]
    data, error = next(fuzz.search("meta", [b"{a", b"b{"], seconds=30.0, seed=1))
    assert b"{{" in data
    assert "two brackets" in str(error)


def test_checksums_are_made_to_fit() -> None:
    message = Message(kind=Kind.PUSH, meta={"a": 1}, payload=torch.arange(6, dtype=torch.int16))
    data = bytearray(fuzz.to_bytes(message) * 2)
    data[40] ^= 1  # the channel
    data[130] ^= 2  # the name of the field
    data[145] ^= 4  # the payload
    fuzz.refit(data)
    (first, second), end = fuzz._parse(data, fuzz.OPEN, lambda: 7)
    assert (end, first.channel, second.channel) == ("", 1, 0)
    assert first.meta != second.meta


# Found by fuzzing


def test_an_event_of_brackets_does_not_end_the_server() -> None:
    server = fuzz._RosterServer()
    server.say(0, Message(kind=Kind.EVENT, meta={"event": "[" * 100_000}))


def test_little_is_kept_for_one_that_is_no_member_and_nothing_after_it() -> None:
    network = Switchboard()
    worker = network.transport(fuzz._peer("worker", 0))
    peers = Peers(worker)
    address = peers.listen("here", 0)
    fuzz._formed(peers, View(5, 0, (ViewMember(0, worker.me.instance, "h", address),)), network)
    stranger = fuzz._Party(network.transport(fuzz._peer("worker", 7)))
    stranger.transport.dial(address, stranger)
    network.advance(0.05)
    for number in range(50):
        for message in (
            Message(kind=Kind.CHUNK, epoch=99, step=number, payload=torch.zeros(2**17)),
            Message(kind=Kind.STATE, meta={"count": 0, "meta": {}}),
        ):
            if stranger.link is not None:
                stranger.link.send(message)
            network.advance(0.01)
    assert peers._links._kept_bytes <= 17 << 20
    assert peers._states.qsize() <= 4
    stranger.transport.close()
    network.advance(0.1)
    assert peers._links._kept_bytes == 0


# Members that want more than is theirs


def test_an_instance_that_others_can_read_is_not_enough_to_take_a_seat() -> None:
    """Every worker knows the instance and the rank of every other, from views."""
    server = fuzz._RosterServer()
    thief = fuzz._Party(server.network.transport(server.parties[0].transport.me))

    def join(secret: object) -> None:
        thief.transport.dial(server.address, thief)
        server.network.advance(0.05)
        thief.link.send(Message(kind=Kind.JOIN, meta=fuzz.JOIN | {"secret": secret}))
        server.listen()

    for secret in (None, "", 7, "a guess"):
        join(secret)
        assert server.roster.newcomers == []
        assert server.roster.members[0].link.open
    assert server.roster.refused.total() == 4
    join(server.secrets[0])  # it was the process itself, over another link
    assert [member.rank for member in server.roster.newcomers] == [0]
    assert "secret" not in server.roster.newcomers[0].said


@pytest.mark.parametrize("size", [True, 0, -1, 4.0, "4", None, fuzz.SAMPLES + 1])
def test_a_batch_size_is_a_number_of_samples(size: object) -> None:
    """JSON's `true` is an int to Python, and no position in the data to a server that reads its own record."""
    server = fuzz._RosterServer()
    server.say(1, Message(kind=Kind.JOIN, meta=fuzz.JOIN | {"batch_size": size}))
    assert server.roster.newcomers == []
    assert server.roster.refused.total() == 1


@pytest.mark.parametrize(("step", "taken"), [(7, 7), (True, 0), (-1, 0), (2**64 - 1, 0), ("7", 0), (None, 0)])
def test_a_member_goes_on_with_a_step_that_there_can_be(step: object, taken: int) -> None:
    server = fuzz._RosterServer()
    server.say(1, Message(kind=Kind.JOIN, meta=fuzz.JOIN | {"step": step}))
    (newcomer,) = server.roster.newcomers
    assert (newcomer.step, type(newcomer.step)) == (taken, int)


def test_a_reason_that_quotes_a_member_is_one_short_line() -> None:
    server = fuzz._RosterServer()
    server.roster.evict(server.roster.members[0], "it sent \x1b[2J" + "x" * 10**6)
    gone = server.roster.get(0)
    assert isinstance(gone, MemberGone)
    assert len(gone.reason) <= 500
    assert gone.reason.isprintable()


def row(**fields: Any) -> Message:
    counts = dict.fromkeys(("samples", "tokens", "bytes_sent", "bytes_received"), 1)
    rates = dict.fromkeys(
        ("time", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "step_time_s", "compute_s", "comm_s"), 1.0
    )
    said = {"step": 1, "rank": 0, "role": "worker", "host": "host0", "staleness": 0.0, **counts, **rates} | fields
    return Message(kind=Kind.EVENT, meta={"event": to_json(StepLogged(**said))})


def test_a_row_of_another_role_or_rank_is_dropped_and_its_host_is_the_members() -> None:
    server = fuzz._RosterServer()
    for said in ({"rank": 1}, {"role": "server"}, {"rank": 8, "role": "server"}, {"step": -1}, {"step": 1 << 60}):
        server.say(0, row(**said))
    assert server.rows == []
    server.say(0, row(host="the server's"))
    assert [(told.rank, told.role, told.host) for told in server.rows] == [(0, "worker", "host0")]


def test_rows_of_a_member_are_bounded_by_the_progress_of_the_run() -> None:
    rows = RowQuota(tensors=2)
    assert not rows.admits(0, "x" * (ROW_BYTES + 1000), samples=10**9)
    assert sum(rows.admits(0, "row", samples=50) for _ in range(FIRST_ROWS + 100)) == FIRST_ROWS + 50
    assert rows.admits(1, "row", samples=50)
    assert rows.admits(0, "row", samples=51)
    assert [rows.first_refusal(rank) for rank in (0, 0, 1)] == [True, False, True]
    server = fuzz._RosterServer()
    for _ in range(FIRST_ROWS + 3):
        server.say(0, row())
    assert len(server.rows) == FIRST_ROWS, "a server does not ask"


def test_a_member_cannot_join_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0.0, MAX_NAMES + 200
    monkeypatch.setattr(roster, "ALL_JOINS", (most, 20.0))
    joins = JoinLimit(clock=lambda: now)
    assert sum(joins.admits(0) for _ in range(1000)) == RANK_JOINS[0]
    assert joins.admits(1)
    assert not joins.admits(0)
    now = 1 / RANK_JOINS[1]
    assert [joins.admits(0), joins.admits(0)] == [True, False]
    assert sum(joins.admits(rank) for rank in range(10, 10_000)) < most + 100
    now = 1e6
    assert joins.admits(20_000)
    assert len(joins._buckets) < 10


def test_joining_again_and_again_leaves_others_undisturbed() -> None:
    server = fuzz._RosterServer()
    for _ in range(4 * RANK_JOINS[0]):  # every other one ends the link that it has
        server.say(1, Message(kind=Kind.JOIN, meta=dict(fuzz.JOIN)))
        server.welcome()
    assert server.roster.joined <= RANK_JOINS[0] + 2
    assert 0 in server.roster.members


def test_a_report_is_numbers_and_short_texts() -> None:
    server = fuzz._RosterServer()
    said = {"step": 3, "loss": None, "weights_sha256": "a" * 64, "long": "x" * 5000, "deep": [[1]] * 1000}
    server.say(0, Message(kind=Kind.REPORT, meta=said | {f"n{n}": n for n in range(1000)}))
    report = server.roster.members[0].report
    assert report.items() >= {"step": 3, "loss": None, "weights_sha256": "a" * 64}.items()
    assert len(report) <= 64
    assert not {"long", "deep"} & set(report)


def test_of_a_rank_that_leaves_again_and_again_the_last_report_is_kept() -> None:
    server = fuzz._RosterServer()
    for step in range(3):
        server.say(1, Message(kind=Kind.JOIN, meta=dict(fuzz.JOIN)))
        server.welcome()
        server.say(1, Message(kind=Kind.REPORT, meta={"last": step}))
        server.parties[1].link.close("done")
        server.listen()
    assert server.roster.reports == [{"last": 2}]


# A run


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at other processes in /proc")
def test_a_run_bears_abuse(tmp_path: Path) -> None:
    report = training.attack(
        "syncps", tmp_path, attacks=("flood", "bombs", "impostors"), frames_each=300, seed=2, quiet_s=0.2, patient=True
    )
    assert [(r.attack, r.count) for r in report.results] == [
        ("flood", 300),
        ("bombs", 12 * len(CODECS)),
        ("impostors", 5),
    ]
    assert [sentence for result in report.results for sentence in result.wrong] == []
    assert report.wrong == []
    assert report.steps > 20
    json.dumps(report.growth_mb)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at other processes in /proc")
def test_a_model_that_is_served_bears_abuse(tmp_path: Path) -> None:
    """In short: damaged and forged frames at the front's port and those of stages, and all sorts of HTTP requests."""
    pytest.importorskip("starlette")
    attacks = ("flood", "forge", "impostors", "requests", "origins")
    report = serving.attack("serve", tmp_path, attacks=attacks, frames_each=100, seed=2, quiet_s=0.05)
    counts = {(r.attack, r.door): r.count for r in report.results}
    assert [counts["flood", door] for door in ("front", "stage", "by-hand")] == [100] * 3
    assert (counts["requests", "http"], counts["origins", "http"]) == (10, 100)
    assert report.violations == []
    assert report.steps > 6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at other processes in /proc")
def test_a_model_that_is_served_behind_a_token_bears_abuse(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("cryptography")
    report = serving.attack(
        "serve-token", tmp_path, attacks=("flood", "impostors"), frames_each=20, seed=2, quiet_s=0.05
    )
    counts = {(r.attack, r.door): r.count for r in report.results}
    assert counts["impostors", "front"] == counts["impostors", "by-hand"] == 6
    assert counts["impostors", "http"] == 104
    assert report.violations == []


def test_nothing_on_the_wire_is_decompressed() -> None:
    assert outside.unpacks_nothing() == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="abuse runs on Linux")
def test_without_a_token_nobody_listens_beyond_loopback(tmp_path: Path) -> None:
    assert outside.opens_without_a_token(tmp_path) == []
