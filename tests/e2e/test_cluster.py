"""`up`, `status`, `logs` and `down` against real sshds: a run on machines of their own, whatever happens to them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.command import Smol, eventually
from tests.e2e.sshd import Lab, free_port, lab

FOREVER = 1_000_000


@pytest.fixture
def two(smol: Smol, tmp_path: Path) -> Iterator[Lab]:
    """mini1, which serves and works, and pi5, which works."""
    with lab(smol, tmp_path) as made:
        made.add("mini1")
        made.add("pi5")
        yield made


def cluster(made: Lab, *, steps: int, name: str = "lab", **said: Any) -> Path:
    hosts = {box.name: box.host() for box in made.boxes.values()}
    training = {"batch_size": 4, "device": "cpu", "eval_steps": 0, "steps": steps}
    common = {"hosts": hosts, "server": "mini1", "strategy": "edp", "port": free_port(), "training": training}
    return made.write(name, **(common | said))


def states(made: Lab) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.run("status", "--json").out)
    return found


def step_of(made: Lab) -> int:
    row = states(made).get("row")
    return 0 if row is None else int(row["step"])


def left_running(made: Lab) -> list[str]:
    """Processes whose command line names a folder of this lab, but for its sshds."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(made.home.parent) in line and "sshd" not in line:
            found.append(line)
    return found


def test_a_run_on_two_machines(two: Lab) -> None:
    """To its end, with what they print; on their tmux screens; and `down` leaves nothing."""
    file = cluster(two, steps=20)
    ended = two.run("up", file).ok()
    for text in ("mini1: started server, worker-0", "pi5: started worker-1", "worker-1@pi5 | ", "finished: 20 steps"):
        assert text in ended.out
    found = states(two)
    assert {name: (state["state"], state["host"]) for name, state in found["processes"].items()} == {
        "server": ("finished", "mini1"),
        "worker-0": ("finished", "mini1"),
        "worker-1": ("finished", "pi5"),
    }
    assert "the run is over" in two.boxes["pi5"].panes("lab")
    run = two.boxes["mini1"].folder / "smol" / "clusters" / "lab" / "runs" / found["run"]
    assert json.loads((run / "summary.json").read_text())["steps"] == 20
    assert "the run is over" in two.run("logs", "pi5").ok().out
    two.run("down").ok()
    assert not any(box.has_tmux() for box in two.boxes.values())
    assert left_running(two) == []


def test_a_killed_worker_returns_and_the_controller_may_go_away(two: Lab) -> None:
    file = cluster(two, steps=FOREVER)
    two.run("up", file, "--detach").ok()
    eventually(lambda: step_of(two) >= 3, what="the run to train", within_s=60)
    before = states(two)["processes"]["worker-1"]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: states(two)["processes"]["worker-1"]["restarts"] == 1, what="the worker to return", within_s=30)
    assert states(two)["processes"]["worker-1"]["pid"] != before["pid"]
    again = two.run("up", file, "--detach").ok()
    assert "already running: server, worker-0, worker-1; nothing was started" in again.out
    ended = two.run("down").ok()
    assert "mini1: asking server to save and end" in ended.out
    found = states(two)
    assert found["summary"]["status"] == "interrupted"
    assert found["summary"]["members_lost"] >= 1
    assert left_running(two) == []


def test_the_mesh_plane_over_ssh(two: Lab) -> None:
    file = cluster(two, steps=10, strategy="allreduce")
    ended = two.run("up", file).ok()
    assert "finished: 10 steps" in ended.out
    assert "worker-0@mini1 | step 10/10" in ended.out
