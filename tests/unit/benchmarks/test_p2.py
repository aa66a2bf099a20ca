"""P2: runs over the link itself, their time and their end."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks import p2
from benchmarks.harness import Session
from benchmarks.harness.methods import DDP


class Rows:
    """A program with given rows. `taken`: the number of rows read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows, self.taken = rows, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            self.taken += 1
            yield row


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """hivemind's peers: a step every 10 s, and 3 s for an evaluation at every second one."""
    rows = []
    for step in range(1, 9):
        paused = 3.0 * (step // 2)
        row = {"step": step, "time": 100.0 + 10.0 * step + paused, "paused_s": paused}
        rows.append(row | ({"val_loss_now": 5.0 - step / 2} if step % 2 == 0 else {}))
    rows.append({"time": 500.0, "val_loss": 1.0})
    made, orders = Rows(rows), []

    @contextlib.contextmanager
    def hosts(count: int, *, rate: str) -> Iterator[str]:
        yield f"{count} hosts at {rate}"

    @contextlib.contextmanager
    def peers(config: Any, **order: Any) -> Iterator[Rows]:
        orders.append(order)
        yield made

    monkeypatch.setattr(p2, "hosts", hosts)
    monkeypatch.setattr(p2, "hivemind_peers", peers)
    made.orders = orders
    return made


def test_hivemind_runs_until_the_loss_and_evaluating_takes_no_time(program: Rows) -> None:
    curve = p2.hivemind_over("1mbit", size=2, steps=8, limit_s=1000.0, loss=2.0)
    assert curve == [(10.0, 4.0), (30.0, 3.0), (50.0, 2.0)]
    assert program.taken == 6
    (order,) = program.orders
    assert (order["network"], order["size"], order["lockstep"]) == ("2 hosts at 1mbit", 2, True)
    assert order["timeout_s"] == 1000.0, "an average may take as long as the run"


def test_hivemind_ends_at_the_limit_and_its_curve_is_what_it_reached(
    program: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    assert p2.hivemind_over("1mbit", size=2, steps=8, limit_s=25.0, loss=0.0) == [(10.0, 4.0), (30.0, 3.0)]
    assert program.taken == 4
    assert "loss 3.000 after 30 s at 1mbit" in capsys.readouterr().out
    assert p2.hivemind_over("1mbit", size=2, steps=8, limit_s=1000.0, loss=0.0)[-1] == (70.0, 1.0)


@pytest.mark.parametrize("installed", [True, False])
def test_hivemind_is_measured_over_every_link_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "benchmarks.harness.peer_programs.missing", lambda package: None if installed else f"{package} is missing"
    )
    monkeypatch.setattr(p2, "curve_of", lambda name, size, steps: [(30.0, 3.0), (60.0, 2.0)])
    monkeypatch.setattr(p2, "paces_of", lambda *order: [2.0])
    monkeypatch.setattr(p2, "hivemind_over", lambda link, **how: [(20.0, 3.0), (40.0, 2.0)] if link == "1mbit" else [])
    wanted = {"workers": 2, "links": ["1mbit", "10mbit"], "steps": 60, "loss": 2.0, "only": [p2.HIVEMIND]}
    session = Session("p2", repeats=1)
    p2.run(session, argparse.Namespace(**wanted, jobs=1, keep=None, limit_s=None, draw=False))
    tables = list(session.parameters["tables"].values())
    assert [[row["method"] for row in rows] for rows in tables] == [[DDP, p2.HIVEMIND][: 1 + installed]] * 2
    assert ("hivemind is missing: left out" in capsys.readouterr().out) is not installed
    if installed:
        first, second = (rows[1] for rows in tables)
        assert (first["seconds"], first["sooner"]) == (40.0, 3.0)
        assert second["verdict"] == "not reached"
        assert "target" not in first, "a peer"
