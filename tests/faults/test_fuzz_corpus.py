"""What the fuzzer has found interesting, played again, and a short form of the abuse that a run must bear.

`make fuzz` searches further, `make abuse` is the long form. A file that begins with failed- was an error once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tools import fuzz
from tools.abuse import outside, serving, training
from tools.fuzz import TARGETS, Kind, Message, Peers, Seated, Switchboard, View


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # refusals are logged
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    paths = sorted((fuzz.CORPUS / name).iterdir())
    assert 5 <= len(paths) <= fuzz.MOST_INPUTS
    outcomes = set()
    for path in paths:
        data = path.read_bytes()
        assert len(data) <= fuzz.MOST_BYTES
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
    office = fuzz._Office()
    office.say(0, Message(kind=Kind.EVENT, meta={"event": "[" * 100_000}))


def test_little_is_kept_for_one_that_is_no_member_and_nothing_after_it() -> None:
    network = Switchboard(manual=True)
    worker = network.transport(fuzz._peer("worker", 0))
    peers = Peers(worker)
    address = peers.listen("here", 0)
    fuzz._formed(peers, View(5, 0, (Seated(0, worker.me.instance, "h", address),)), network)
    stranger = fuzz._Party(network.transport(fuzz._peer("worker", 7)))
    stranger.transport.dial(address, stranger)
    network.advance(0.05)
    for number in range(50):
        for message in (
            Message(kind=Kind.CHUNK, epoch=99, step=number, payload=torch.zeros(2**17)),
            Message(kind=Kind.STATE, meta={"tensors": [], "meta": {}}),
        ):
            if stranger.link is not None:
                stranger.link.send(message)
            network.advance(0.01)
    assert peers._wires._kept_bytes <= 17 << 20
    assert peers._states.qsize() <= 4
    stranger.transport.close()
    network.advance(0.1)
    assert peers._wires._kept_bytes == 0


# A run


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at other processes in /proc")
def test_a_run_bears_abuse(tmp_path: Path) -> None:
    report = training.attack(
        "syncps", tmp_path, attacks=("flood", "bombs", "impostors"), frames_each=300, seed=2, quiet_s=0.2
    )
    assert [(r.attack, r.count) for r in report.results] == [("flood", 300), ("bombs", 84), ("impostors", 5)]
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
