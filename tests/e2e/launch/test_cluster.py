"""`up`, `status`, `logs` and `down` against real sshds: a run on machines of their own, whatever happens to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.network import check_possible, hosts
from tests.e2e.command import TINY, Smol, read_rows
from tests.e2e.launch.sshd import Box, Lab, lab, make_key
from tests.places import eventually, free_port, small_disk

from smolcluster.errors import UserError

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
    common["standby"] = False  # a process more that imports torch
    return made.write(name, **(common | said))


def states(made: Lab) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.run("status", "--json").out)
    return found


# To wait for a run, its machines' folders are read: asking for its status again and again would be most of what goes on.


def step_of(made: Lab) -> int:
    rows = [row for run in made.home.parent.glob("*/smol/clusters/lab/runs/*") for row in read_rows(run)]
    return max((int(row["step"]) for row in rows), default=0)


def restarts(made: Lab, name: str) -> int:
    (path,) = made.home.parent.glob(f"*/smol/clusters/lab/processes/{name}/state.json")
    return int(json.loads(path.read_text())["restarts"])


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


def assert_nothing_is_left(made: Lab) -> None:
    """A tmux server ends by itself, a moment after its last window."""
    eventually(lambda: left_running(made) == [], timeout_s=10.0, what="nothing to be left")


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
    two.boxes["mini1"].stop()
    others = two.run("logs")
    assert others.status == 1
    assert "the run is over" in others.out
    assert re.fullmatch("smolcluster: mini1: .*refuses connections.*\n", others.err)
    two.boxes["mini1"].start(two.authorized)
    shown = two.run("top", "--cluster", "lab", "--once").ok().out
    assert "finished" in shown
    assert "20/20" in shown
    (mirror,) = two.home.rglob("mirrors/lab/*")
    assert {path.name for path in (mirror / "logs").iterdir()} == {
        "server-mini1.log",
        "worker-rank0-mini1.log",
        "worker-rank1-pi5.log",
    }
    two.run("down").ok()
    assert not any(box.has_tmux() for box in two.boxes.values())
    assert_nothing_is_left(two)


@pytest.mark.slow
def test_a_killed_worker_returns_and_the_controller_may_go_away(two: Lab) -> None:
    file = cluster(two, steps=FOREVER)
    two.run("up", file, "--detach").ok()
    eventually(lambda: step_of(two) >= 3, what="the run to train")
    before = states(two)["processes"]["worker-1"]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: restarts(two, "worker-1") == 1, what="the worker to return")
    assert states(two)["processes"]["worker-1"]["restarts"] == 1
    assert states(two)["processes"]["worker-1"]["pid"] != before["pid"]
    again = two.run("up", file, "--detach").ok()
    assert "already running: server, worker-0, worker-1; nothing was started" in again.out
    config = two.boxes["pi5"].folder / "smol" / "clusters" / "lab" / "config.yaml"
    was = config.read_text()
    other = two.run("up", file, "--detach", "--override", "training.learning_rate=0.01")
    assert other.status == 2
    assert "already run, with another configuration or other code; `smolcluster down` first" in other.err
    assert config.read_text() == was

    server = states(two)["processes"]["server"]["pid"]  # the command itself, not the process it has started
    os.kill(server, signal.SIGKILL)
    eventually(lambda: restarts(two, "server") == 1, what="the server to return")
    reached = step_of(two)
    eventually(lambda: step_of(two) > reached + 3, what="the run to go on")
    assert all(state["state"] == "running" for state in states(two)["processes"].values())
    ended = two.run("down").ok()
    assert "mini1: asking server to save and exit" in ended.out
    found = states(two)
    assert found["summary"]["status"] == "interrupted"
    assert found["summary"]["members_lost"] >= 1
    assert_nothing_is_left(two)


def test_the_mesh_plane_over_ssh(two: Lab) -> None:
    """The second machine is reached through the first, and its key is taken, as asked for."""
    known = two.home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines()
    known.write_text(lines[0] + "\n")
    hosts = {"mini1": two.boxes["mini1"].host(), "pi5": two.boxes["pi5"].host(via="mini1")}
    file = cluster(two, steps=10, strategy="allreduce", hosts=hosts)
    ended = two.run("up", file, "--accept-new").ok()
    assert "finished: 10 steps" in ended.out
    assert "worker-0@mini1 | step 10/10" in ended.out
    assert [line.split()[:3] for line in known.read_text().splitlines()] == [line.split()[:3] for line in lines]


@pytest.mark.slow
def test_a_machine_that_is_cut_off(smol: Smol, tmp_path: Path) -> None:
    """With a token, over a network of their own: the others go on, and take it back when the network is mended."""
    try:
        check_possible()
    except UserError as error:
        pytest.skip(str(error))
    with hosts(3, rate=None) as network, lab(smol, tmp_path, inside=network.namespace(0)) as made:
        for number, name in enumerate(("mini1", "pi5"), start=1):
            made.add(name, address=network.address(number), inside=network.namespace(number), port=2222)
        file = cluster(made, steps=FOREVER, strategy="syncps")
        made.run("up", file, "--detach").ok()
        eventually(lambda: step_of(made) >= 2, what="the run to train")
        network.cut(2)
        history = (
            made.boxes["mini1"].folder / "smol" / "clusters" / "lab" / "runs" / states(made)["run"] / "history.jsonl"
        )
        eventually(lambda: '"left"' in history.read_text(), what="a loss to be noted")
        before = history.read_text().count('"commit"')
        eventually(lambda: history.read_text().count('"commit"') > before, what="the others to go on")
        ended = made.run("status")
        assert ended.status == 1
        assert "worker-1  pi5    unreachable" in ended.out
        network.mend(2)
        eventually(lambda: history.read_text().count('"joined"') >= 3, what="it to be taken back")
        made.run("down").ok()
        assert_nothing_is_left(made)


@pytest.mark.slow
def test_a_fresh_environment(smol: Smol, tmp_path: Path) -> None:
    """Made from a folder of wheels, so that nothing is fetched that is here already."""
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None or not wheels or not list(Path(wheels).glob("torch-*.whl")):
        pytest.skip("needs uv, and a torch wheel in PIP_FIND_LINKS")
    with lab(smol, tmp_path) as made:
        box = made.add("mini1", environment={"PATH": f"{Path(uv).parent}:{os.environ['PATH']}"})
        bare = getattr(sys, "_base_executable", sys.executable)
        network = {name: value for name, value in os.environ.items() if re.match("UV_|SSL_CERT|.*_proxy", name, re.I)}
        host = box.host(python=bare, environment={**network, "UV_FIND_LINKS": wheels})
        ended = made.run("up", cluster(made, steps=2, hosts={"mini1": host}), timeout_s=300).ok()
        assert "mini1:  + torch==" in ended.out
        assert "mini1: environment made in" in ended.out
        assert "finished: 2 steps" in ended.out
        again = made.run("up", cluster(made, steps=2, hosts={"mini1": host})).ok()
        assert "environment made" not in again.out


def test_on_this_machine_alone(smol: Smol, tmp_path: Path) -> None:
    """One pane for each process, in one window."""
    with lab(smol, tmp_path) as made:
        environment = {"TMUX_TMPDIR": str(tmp_path)}
        said = (
            *("--strategy", "edp", "--workers", "2", "--steps", "5"),
            "--override",
            f"cluster.port={free_port()}",
            *TINY,
        )
        ended = smol.run("up", "--local", "gpt", *said, cwd=tmp_path, env=made.environment | environment).ok()
        assert "finished: 5 steps" in ended.out
        here = Box("here", tmp_path)
        assert "the run is over" in here.panes("local")
        assert here.windows("local") == 1
        smol.run("down", "local", cwd=tmp_path, env=made.environment | environment).ok()
        assert not here.has_tmux()


# What is wrong with a machine is named, with the remedy; the others are left as they were


def refused(made: Lab, *says: str, **pi5: Any) -> None:
    hosts = {"mini1": made.boxes["mini1"].host(), "pi5": made.boxes["pi5"].host(**pi5)}
    ended = made.run("up", cluster(made, steps=5, hosts=hosts))
    assert ended.status == 2, ended
    assert "Traceback" not in ended.err
    for text in ("pi5: ", *says):
        assert text in ended.err
    assert ended.err.startswith("smolcluster: ")
    assert "mini1: " not in ended.err
    assert not (made.boxes["mini1"].folder / "smol").exists()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_machines_that_cannot_be_used(two: Lab, tmp_path: Path) -> None:
    """All in one set of machines, since each attempt must change nothing."""
    refused(two, "refuses connections", "start an ssh server there", port=free_port())
    refused(two, "the name nowhere.invalid does not resolve", "give its address", address="nowhere.invalid")
    refused(two, "there is no Python", "no-such-python", "install Python 3.11", python="/no-such-python")
    old = script(tmp_path / "old-python", "echo 3 9 2 50922224; cat > /dev/null")
    refused(two, f"{old} is Python 3.9.2 there, and 3.11 or newer is needed", python=str(old))
    refused(two, "the key /no/key does not exist", key="/no/key")
    (tmp_path / "not-a-key").write_text("hello")
    refused(two, "is no private key", key=str(tmp_path / "not-a-key"))
    refused(two, "does not accept your key", "ssh-copy-id", key=str(other_key(tmp_path)))
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time\n_now = time.time\ntime.time = lambda: _now() + 3700\n")
    wrapper = script(tmp_path / "late-python", f'PYTHONPATH={late} exec {sys.executable} "$@"')
    refused(two, "its clock is 1 h 1 min ahead of this machine's", "timedatectl set-ntp", python=str(wrapper))
    if os.geteuid() != 0:
        refused(two, "is not writable", "hosts.pi5.folder", folder="/proc/nowhere")


def other_key(folder: Path) -> Path:
    return make_key(folder / "other_key")


def test_the_doctor_looks_at_every_machine_and_the_ways_between(two: Lab) -> None:
    hosts = {"mini1": two.boxes["mini1"].host(), "pi5": two.boxes["pi5"].host(server_address="127.0.0.1")}
    file = cluster(two, steps=2, hosts=hosts)
    good = two.run("cluster", "check", file, "--json").ok()
    found = {(finding["host"], finding["layer"]): finding for finding in json.loads(good.out)}
    assert {finding["verdict"] for finding in found.values()} == {"ok"}
    for layer in ("ssh", "Python", "torch", "disk", "clock"):
        assert ("mini1", layer) in found
    assert "reaches mini1 at 127.0.0.1:" in found["pi5", "route"]["what"]
    assert not (two.boxes["mini1"].folder / "smol").exists()
    hosts["pi5"]["server_address"] = "127.0.0.9"  # nobody listens there
    bad = two.run("doctor", cluster(two, steps=2, hosts=hosts))
    assert bad.status == 1
    assert re.search(r"pi5 +port +bad +cannot reach mini1 at 127.0.0.9:\d+: Connection refused", bad.out)
    two.boxes["pi5"].stop()
    gone = two.run("doctor", file)
    assert gone.status == 1
    assert re.search(r"pi5 +port +bad .*refuses connections", gone.out)


def test_init_writes_a_file_of_what_answers(two: Lab) -> None:
    box = two.boxes["pi5"]
    lines = f"Host pi5\n  HostName {box.address}\n  Port {box.port}\nHost gone\n  HostName 127.0.0.1\n  Port {free_port()}\n"
    (two.home / ".ssh" / "config").write_text(lines)
    ended = two.run("cluster", "init", "--out", "made.yaml").ok()
    text = (two.home.parent / "made.yaml").read_text()
    meant = rf"address: 127.0.0.1, port: {box.port}, server_address: 127.0.0.1"
    assert re.search(rf"^  pi5: \{{{meant}\}}  # Linux", text, re.M)
    assert re.search(r"^  # gone: .*  # .*refuses connections.*start an ssh server", text, re.M)
    assert "smolcluster cluster check made.yaml" in ended.out
    again = two.run("cluster", "init", "--out", "made.yaml")
    assert (again.status, "already exists" in again.err) == (2, True)
    port = ("--override", f"cluster.port={free_port()}")
    checked = two.run("cluster", "check", "made.yaml", *port).ok()
    assert "reaches" in checked.out
    planned = two.run("up", "made.yaml", "--dry-run", *port).ok()
    assert "pi5 (127.0.0.1 port" in planned.out


def test_init_takes_machines_that_ssh_has_not_seen_if_it_is_told_to(two: Lab) -> None:
    box, known = two.boxes["pi5"], two.home / ".ssh" / "known_hosts"
    (two.home / ".ssh" / "config").write_text(f"Host pi5\n  HostName {box.address}\n  Port {box.port}\n")
    known.unlink()
    ended = two.run("cluster", "init", "--out", "not.yaml").ok()
    assert re.search("pi5: .*is not in .*; connect once by hand .*, or use --accept-new", ended.out)
    two.run("cluster", "init", "--out", "made.yaml", "--accept-new").ok()
    assert re.search("^  pi5: ", (two.home.parent / "made.yaml").read_text(), re.M)
    assert f":{box.port} " in known.read_text()


def test_host_keys_are_checked(two: Lab) -> None:
    known = two.home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines()
    known.write_text(lines[0] + "\n")
    refused(two, "is not in", "its key is SHA256:", "--accept-new")
    name, kind, _ = lines[1].split()
    known.write_text(f"{lines[0]}\n{name} {kind} {lines[0].split()[2]}\n")
    refused(two, "the host key of 127.0.0.1 port", "has CHANGED", "ssh-keygen -R")
    known.write_text(lines[0] + "\n")
    two.run("up", cluster(two, steps=2), "--accept-new", "--dry-run").ok()
    assert known.read_text().splitlines() == lines[:1]


def test_a_port_that_is_taken_and_a_file_that_is_wrong(two: Lab) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = two.run("up", cluster(two, steps=2, port=taken.getsockname()[1]))
    assert ended.status == 2
    assert "mini1: port" in ended.err
    assert "cannot be used: Address already in use" in ended.err
    assert "nothing was changed on any machine" in ended.err
    assert not any((box.folder / "smol").exists() for box in two.boxes.values())
    file = cluster(two, steps=2)
    file.write_text("hosts:\n\tmini1: {}\n")
    wrong = two.run("up", file)
    assert wrong.status == 2
    assert "tab" in wrong.err.lower()
    file.write_text("hosts: {mini1: 10.0.0.1, mini1: 10.0.0.2}\n")
    twice = two.run("up", file)
    assert twice.status == 2
    assert "mini1" in twice.err


def test_a_full_disk_is_named(two: Lab, tmp_path: Path) -> None:
    with small_disk(tmp_path, kilobytes=512) as disk:
        refused(two, "0 MiB of disk are free", "hosts.pi5.folder", folder=str(disk / "smol"))


@pytest.mark.slow
def test_without_tmux_processes_run_all_the_same(smol: Smol, tmp_path: Path) -> None:
    with lab(smol, tmp_path) as made:
        (tmp_path / "bin").mkdir()
        made.add("mini1", environment={"PATH": str(tmp_path / "bin")})
        file = cluster(made, steps=FOREVER)
        made.run("up", file, "--detach").ok()
        eventually(lambda: step_of(made) >= 2, what="the run to train")
        assert not made.boxes["mini1"].has_tmux()
        made.run("down").ok()
        assert_nothing_is_left(made)


def test_one_that_cannot_start_takes_the_others_back(two: Lab) -> None:
    """Also those of its own round; and the run that was there before can still be resumed."""
    file = cluster(two, steps=FOREVER)
    processes = two.boxes["pi5"].folder / "smol" / "clusters" / "lab" / "processes"
    processes.parent.mkdir(parents=True)
    processes.write_text("in the way")
    ended = two.run("up", file, "--detach")
    assert ended.status == 2
    assert "pi5" in ended.err
    assert_nothing_is_left(two)
    assert "no cluster was started from this machine" in two.run("status").err


def test_a_model_is_served_from_the_machines(two: Lab, smol: Smol, tmp_path: Path) -> None:
    """A run of a tiny GPT: its layers on both, the page on one; a killed stage comes back."""
    two_layers = [word.replace("num_layers=1", "num_layers=2") for word in TINY]
    train = ("train", "gpt", "--workers", "1", "--steps", "2", "--run-dir", "run", "--override", *two_layers)
    smol.run(*train, cwd=tmp_path).ok()
    page = free_port()
    run = {"serve": str(tmp_path / "run"), "page_port": page}
    assert "its page: `smolcluster logs front`" in two.run("up", cluster(two, steps=1, run=run), "--detach").ok().out

    def answer() -> str | None:
        body = json.dumps({"prompt": "The ", "max_tokens": 8, "temperature": 0}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{page}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=20) as said:
            return str(json.load(said)["choices"][0]["text"])
        return None

    first = eventually(answer, what="an answer")
    found = states(two)["processes"]
    assert {name: state["host"] for name, state in found.items()} == {
        "front": "mini1",
        "stage-0": "mini1",
        "stage-1": "pi5",
    }
    os.kill(found["stage-1"]["pid"], signal.SIGKILL)
    eventually(lambda: restarts(two, "stage-1") == 1, what="the stage to return")
    assert eventually(answer, what="an answer again") == first
    assert "asking front to exit" in two.run("down").ok().out
    assert_nothing_is_left(two)
