"""Pairing by a code on a screen: who has not seen it, or stands between, gets nothing."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from smolcluster.cli.join import join
from smolcluster.errors import UserError
from smolcluster.launch.join import discovery, pairing
from smolcluster.launch.join.pairing import PairingFailed, accept, offer

pytest.importorskip("cryptography")
FACTS = {"name": "pi5", "system": "Linux aarch64"}
GIVEN = {"token": "smol1_secret", "server": "10.0.0.1:65432", "rank": 2, "cluster": "home"}


class Screen:
    """What the new machine shows, for whoever looks."""

    def __init__(self) -> None:
        self.code = ""
        self._shown = threading.Event()

    def show(self, code: str) -> None:
        self.code = code
        self._shown.set()

    def read(self, _: Any = None) -> str:
        assert self._shown.wait(300)
        return self.code


def pair(ask: Any, *, screen: Screen | None = None) -> tuple[Any, Any]:
    """What came of it, at the machine and at the cluster."""
    screen = screen or Screen()
    here, there = socket.socketpair()

    def attempt(work: Any, line: socket.socket) -> Any:
        with line:
            try:
                return work()
            except PairingFailed as error:
                return error

    with ThreadPoolExecutor(2) as pool:
        machine = pool.submit(attempt, lambda: offer(here, FACTS, show=screen.show), here)
        cluster = pool.submit(attempt, lambda: accept(there, GIVEN, ask=lambda facts: ask(screen)), there)
        return machine.result(300), cluster.result(300)


def test_a_code_that_is_typed_as_shown() -> None:
    machine, cluster = pair(lambda screen: screen.read())
    assert machine == GIVEN
    assert cluster == FACTS


def test_spaces_and_dashes_do_not_matter() -> None:
    machine, _ = pair(lambda screen: " " + screen.read().replace("-", " ") + "\n")
    assert machine == GIVEN


@pytest.mark.parametrize("place", [0, 9], ids=["the machine notices", "the cluster notices"])
def test_one_wrong_digit_hands_out_nothing(place: int) -> None:
    def wrong(screen: Screen) -> str:
        digits = screen.read().replace("-", "")
        other = str((int(digits[place]) + 1) % 10)
        return digits[:place] + other + digits[place + 1 :]

    machine, cluster = pair(wrong)
    assert isinstance(machine, PairingFailed)
    assert isinstance(cluster, PairingFailed)


def test_a_code_of_another_length_is_told() -> None:
    machine, cluster = pair(lambda screen: screen.read()[:-1])
    assert "ten digits" in str(cluster)
    assert isinstance(machine, PairingFailed)


def test_somebody_between_is_noticed_before_anything_is_handed_out() -> None:
    """He has keys of his own on both sides; the digits that follow from them differ."""
    screen = Screen()
    to_machine, machine_end = socket.socketpair()
    to_cluster, cluster_end = socket.socketpair()
    stolen: list[Any] = []

    def between() -> None:
        try:
            fake = Screen()
            with to_machine, to_cluster:
                stolen.append(offer(to_cluster, FACTS, show=fake.show))
        except PairingFailed:
            pass

    def dial() -> None:
        try:
            accept(to_machine, {"token": "evil"}, ask=lambda facts: screen.read())
        except (PairingFailed, OSError):
            pass

    with ThreadPoolExecutor(4) as pool:
        middle = pool.submit(between)
        other = pool.submit(dial)
        machine = pool.submit(lambda: offer(machine_end, FACTS, show=screen.show))
        with pytest.raises(PairingFailed, match="mistyped, or a man in the middle"):
            accept(cluster_end, GIVEN, ask=lambda facts: screen.read())
        cluster_end.close()
        middle.result(300)
        other.result(300)
        machine_end.close()
        machine.exception(300)
    assert stolen == []


def test_a_key_that_was_not_committed_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing._KeyPair, "commitment", property(lambda self: "0" * 64))
    machine, _ = pair(lambda screen: "0" * 10)
    assert "does not match its commitment" in str(machine)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"hello\n",
        b"[]\n",
        b'{"protocol": "other"}\n',
        b"x" * 70_000,
        b'{"protocol": "smolcluster-pair-1"}\n{"key": 5}\n',
    ],
    ids=["nothing", "no JSON", "no object", "another protocol", "too much", "no key"],
)
def test_strangers_get_nothing(said: bytes) -> None:
    here, there = socket.socketpair()
    shown: list[str] = []
    with here, there, ThreadPoolExecutor(1) as pool:
        machine = pool.submit(offer, here, FACTS, show=shown.append)
        there.sendall(said)
        there.shutdown(socket.SHUT_WR)
        assert isinstance(machine.exception(300), PairingFailed)
    assert shown == []


def test_letters_of_any_kind_are_only_wrong() -> None:
    """Neither a stranger's commitment nor a code in other digits ends more than the attempt."""
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        machine = pool.submit(offer, here, FACTS, show=lambda _: None)
        zeros = b"00" * 32
        there.sendall('{"protocol": "smolcluster-pair-1", "commitment": "\u00fc\\ud800"}\n'.encode())
        there.sendall(b'{"key": "%s", "nonce": "%s"}\n' % (zeros, zeros))
        assert "does not match its commitment" in str(machine.exception(300))
    _, cluster = pair(lambda screen: "\N{ARABIC-INDIC DIGIT ONE}" * 10)
    assert "a code has ten digits" in str(cluster)


def test_one_who_drips_does_not_hold_the_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        machine = pool.submit(pairing._JsonLines(here).receive, 0.3)
        while not wait([machine], timeout=0.005).done:
            there.sendall(b" ")
        assert "no response in 0.3 s" in str(machine.exception(0))


def test_what_travels_is_sealed() -> None:
    agreed = pairing.Agreement(b"s" * 32, b"both")
    sealed = agreed.seal(GIVEN)
    assert json.dumps(GIVEN)[5:20].encode().hex() not in sealed
    assert agreed.open(sealed) == GIVEN
    flipped = sealed[:-1] + ("0" if sealed[-1] != "0" else "1")
    for wrong in (flipped, "", "zz", sealed[:20]):
        with pytest.raises(PairingFailed):
            agreed.open(wrong)
    with pytest.raises(PairingFailed):
        pairing.Agreement(b"t" * 32, b"both").open(sealed)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": "second"}, r"sent an invalid rank \('second'; expected an integer >= 0\)"),
        ({"rank": -1}, r"sent an invalid rank \(-1; expected"),
        ({"rank": None}, r"sent an invalid rank \(None; expected"),
        ({"server": 5}, r"sent an invalid server \(5; expected a string\)"),
        ({"token": ["x"]}, r"sent an invalid token \(\['x'\]; expected a string\)"),
        ({"server": "10.0.0.1"}, "--server '10.0.0.1' is not HOST:PORT"),
    ],
)
def test_join_refuses_what_it_cannot_use_and_keeps_no_token(
    wrong: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ports: queue.Queue[int] = queue.Queue()

    def announced(_name: str, port: int, **_: Any) -> contextlib.AbstractContextManager[None]:
        ports.put(port)
        return contextlib.nullcontext()

    monkeypatch.setattr(discovery, "announced", announced)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    screen = Screen()
    monkeypatch.setattr(
        "smolcluster.launch.join.pairing.offer", lambda line, facts, show: offer(line, facts, show=screen.show)
    )
    with ThreadPoolExecutor(1) as pool:
        machine = pool.submit(join, "pi5", address="127.0.0.1")
        with socket.create_connection(("127.0.0.1", ports.get(timeout=300)), timeout=300) as line:
            accept(line, GIVEN | wrong, ask=screen.read)
        with pytest.raises(UserError, match=words):
            machine.result(300)
    assert list(tmp_path.rglob("token")) == []
