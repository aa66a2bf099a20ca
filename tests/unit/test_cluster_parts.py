"""The pure parts of a cluster: who runs what where, which way leads there, what is sent; and a keeper with a process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from smolcluster.config import load_config, resolve
from smolcluster.config.schema import LinkConfig
from smolcluster.errors import UserError
from smolcluster.launch.cluster import keeper
from smolcluster.launch.cluster.control import problems_of
from smolcluster.launch.cluster.finding import Found, hosts_of_ssh, write_file
from smolcluster.launch.cluster.layout import Layout, as_record, describe, from_record, lay_out, with_run
from smolcluster.launch.cluster.links import find_way
from smolcluster.launch.cluster.parcel import package_parcel, requirements, user_parcel
from smolcluster.launch.cluster.record import recall, remember

ROOT = Path(__file__).parents[2]
KEEPER = Path(keeper.__file__)


def laid_out(text: str, folder: Path, *, name: str = "lab") -> Layout:
    path = folder / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    return lay_out(resolve(load_config([path])), name=name, run="r1")


# Who runs what where


def test_the_elastic_plane(tmp_path: Path) -> None:
    layout = laid_out(
        "hosts:\n  mini1: {address: 10.0.0.1, workers: 0}\n  pi5: 10.0.0.5\n"
        "  win: {address: 10.0.0.9, workers: 2, device: cuda, batch_size: 8}\n"
        "server: mini1\nstrategy: edp\nport: 7000\n",
        tmp_path,
    )
    assert [(seat.name, seat.host, seat.restart) for seat in layout.seats] == [
        ("server", "mini1", True),
        ("worker-0", "pi5", True),
        ("worker-1", "win", True),
        ("worker-2", "win", True),
    ]
    assert layout.lead.arguments == (
        "server",
        "config.yaml",
        "--bind",
        "10.0.0.1",
        "--port",
        "7000",
        "--run-dir",
        "runs/r1",
    )
    assert layout.lead.again[-2:] == ("--resume", "runs/r1")
    assert layout.seats[2].arguments[:5] == ("worker", "1", "win", "--server", "10.0.0.1:7000")
    assert layout.seats[2].arguments[-2:] == ("--device", "cuda")
    assert layout.needs_token
    assert layout.config.cluster.workers == ["pi5", "win", "win"]
    assert layout.config.cluster.batch_size == {"win": 8}
    assert layout.config.cluster.hosts == {}


def test_the_mesh_plane(tmp_path: Path) -> None:
    text = "hosts: {a: {address: 10.0.0.1, workers: 2}, b: 10.0.0.2}\nstrategy: fsdp\n"
    layout = laid_out(text, tmp_path)
    assert [seat.arguments[3:6] for seat in layout.seats] == [("3", "--rank", str(rank)) for rank in range(3)]
    assert {seat.arguments[seat.arguments.index("--master-addr") + 1] for seat in layout.seats} == {"10.0.0.1"}
    assert [dict(seat.environment)["LOCAL_RANK"] for seat in layout.seats] == ["0", "1", "0"]
    assert not any(seat.restart for seat in layout.seats)
    assert not layout.needs_token
    again = laid_out(text + "run: {elastic: '2:3'}\n", tmp_path)
    assert [(seat.name, seat.host) for seat in again.seats] == [("launcher-0", "a"), ("launcher-1", "b")]
    assert "--rdzv-endpoint" in again.seats[1].arguments
    assert all("10.0.0.1:29500" in seat.arguments for seat in again.seats)


def test_the_files_of_the_documents(tmp_path: Path) -> None:
    layout = lay_out(resolve(load_config(["cluster_config_edp"])), name="edp", run="r")
    assert [(seat.name, seat.host) for seat in layout.seats] == [
        *(("server", "mini1"), ("worker-0", "pi5"), ("worker-1", "win"), ("worker-2", "macbook")),
    ]
    assert layout.listens == ("0.0.0.0", 65432)
    found = {seat.host: seat.arguments[4] for seat in layout.seats[1:]}
    assert found == {"pi5": "192.168.50.1:65432", "win": "10.10.0.1:65432", "macbook": "10.10.0.1:65432"}
    assert layout.machines["pi5"].address == "pi5"


def test_on_loopback_nothing_is_opened_to_others(tmp_path: Path) -> None:
    layout = laid_out(
        "hosts: {a: {address: 127.0.0.1, port: 22}, b: {address: 127.0.0.1, port: 23}}\nstrategy: edp\n", tmp_path
    )
    assert layout.listens[0] == "127.0.0.1"
    assert not layout.needs_token


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("strategy: edp\n", "there are no machines in this file"),
        ("hosts: {a: {workers: 0}}\nstrategy: edp\n", "no host has a worker"),
        ("hosts: {a: local, b: 10.0.0.2}\nserver: a\nstrategy: edp\n", "say where b finds it"),
        ("hosts: {a: 10.0.0.1}\nserver: b\n", "lab.yaml:2: cluster.server 'b' is not in hosts; known: a"),
        ("hosts: {a: {via: c}}\n", "cluster.hosts.a.via 'c' is not in hosts"),
        ("hosts: {a: {via: b}, b: {via: a}}\n", "leads back to itself"),
        ("hosts: {a: 10.0.0.1, b: 10.0.0.1}\n", "'a' and 'b' have one address, 10.0.0.1"),
        ("hosts: {'a b': 10.0.0.1}\n", "'a b' is no name for a host"),
        (
            "hosts: {a: 10.0.0.1}\nlinks: {x: {subnet: 10.0.0.0/24, hosts: {a: 10.1.0.1}}}\n",
            "10.1.0.1 of a is not in 10.0.0.0/24",
        ),
        ("hosts: {a: 10.0.0.1}\nlinks: {x: {hosts: {b: 10.1.0.1}}}\n", "'b' is not in hosts"),
        ("hosts: {a: 10.0.0.1}\nlinks: {x: {subnet: all}}\n", "'all' is no subnet"),
        ("hosts: {a: {adress: 10.0.0.1}}\n", "unknown key; did you mean 'address'?"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        laid_out(text, tmp_path)
    assert said in str(error.value)


def test_another_run_keeps_everything_else(tmp_path: Path) -> None:
    layout = laid_out("hosts: {a: 10.0.0.1, b: 10.0.0.2}\nstrategy: edp\n", tmp_path)
    other = with_run(layout, "r0")
    assert other.lead.arguments[-4:] == ("--run-dir", "runs/r0", "--resume", "runs/r0")
    assert other.seats[1] == layout.seats[1]


def test_a_record_is_read_again(tmp_path: Path) -> None:
    layout = laid_out(
        "hosts: {a: 10.0.0.1, b: {address: 10.0.0.2, environment: {SECRET: x}}}\nstrategy: edp\n", tmp_path
    )
    remember(as_record(layout), tmp_path / "state")
    assert "SECRET" not in (tmp_path / "state" / "lab.json").read_text()
    known = from_record(recall(None, tmp_path / "state"))
    assert known.hosts == {"server": "a", "worker-0": "a", "worker-1": "b"}
    assert known.machines["b"].address == "10.0.0.2"
    with pytest.raises(UserError, match="unknown cluster 'lob'; did you mean 'lab'"):
        recall("lob", tmp_path / "state")
    with pytest.raises(UserError, match="no cluster was started"):
        recall(None, tmp_path / "none")
    for wrong in ({}, {"name": "x", "run": "r", "machines": 5, "seats": []}):
        with pytest.raises(ValueError, match="not the record"):
            from_record(wrong)


# Ways


def links(**said: dict[str, str]) -> dict[str, LinkConfig]:
    return {name: LinkConfig.model_validate({"hosts": hosts}) for name, hosts in said.items()}


def test_a_common_link_is_taken_and_a_gateway_is_named() -> None:
    known = links(
        bridge={"mini1": "10.10.0.1", "mini3": "10.10.0.3"},
        edge={"mini3": "192.168.51.2", "pi4": "192.168.51.4"},
    )
    direct = find_way(known, "mini3", "mini1")
    assert direct is not None
    assert (direct.address, direct.through, direct.commands()) == ("10.10.0.1", (), [])
    around = find_way(known, "pi4", "mini1")
    assert around is not None
    assert (around.address, around.through, around.hop) == ("10.10.0.1", ("mini3",), "192.168.51.2")
    assert around.commands()[0] == "on pi4: sudo ip route add 10.10.0.1/32 via 192.168.51.2"
    assert find_way(known, "pi4", "pi9") is None
    assert find_way(known, "pi4", "pi4") is None


def test_the_server_is_reached_over_the_link_that_both_have(tmp_path: Path) -> None:
    layout = laid_out(
        "hosts: {mini1: {address: 192.168.1.10, workers: 0}, mini2: 192.168.1.11, pi4: 192.168.1.12}\n"
        "server: mini1\nstrategy: edp\n"
        "links:\n  bridge: {subnet: 10.10.0.0/24, hosts: {mini1: 10.10.0.1, mini2: 10.10.0.2}}\n"
        "  edge: {subnet: 192.168.51.0/24, hosts: {mini2: 192.168.51.2, pi4: 192.168.51.4}}\n",
        tmp_path,
    )
    assert layout.addresses == {"mini1": "127.0.0.1", "mini2": "10.10.0.1", "pi4": "10.10.0.1"}
    assert layout.listens[0] == "10.10.0.1"
    assert "  on pi4: sudo ip route add 10.10.0.0/24 via 192.168.51.2" in describe(layout)


# What is looked at before anything is changed


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, ""),
        ({"disk_free": 600 << 20}, ""),
        (
            {"disk_free": 600 << 20, "lacks_environment": True},
            "only 600 MiB of disk are free, and an environment with torch",
        ),
        ({"disk_free": 1 << 20}, "only 1 MiB of disk are free;"),
        ({"time": 1000.0 - 3700}, "its clock is 1 h 1 min behind this machine's"),
        ({"writable": False}, "cannot be written"),
        ({"port_problem": "Address already in use"}, "cannot be used: Address already in use"),
        ({"port_problem": "in use", "processes": {"server": {"alive": True}}}, ""),
    ],
)
def test_what_would_go_wrong_is_said_before(tmp_path: Path, facts: dict[str, Any], said: str) -> None:
    layout = laid_out("hosts: {a: 10.0.0.1, b: 10.0.0.2}\nstrategy: edp\n", tmp_path)
    good = {"asked": 999.9, "answered": 1000.1, "time": 1000.0, "writable": True, "disk_free": 9 << 30, "processes": {}}
    found = [str(problem) for problem in problems_of(layout, "a", good | facts)]
    assert len(found) == bool(said)
    assert said in "".join(found)


# What is sent


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getnames()


def test_the_package_is_whole_and_always_the_same() -> None:
    one, two = package_parcel(), package_parcel()
    assert one.key == two.key
    found = names(one.data)
    assert {"smolcluster/__init__.py", "smolcluster/configs/gpt.yaml", "smolcluster/launch/cluster/keeper.py"} <= set(
        found
    )
    assert not any("__pycache__" in name for name in found)


def test_the_users_files_go_along(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "parts").mkdir(parents=True)
    for name in ("tasks/mine.py", "tasks/parts/net.py", "tasks/notes.txt", "tasks/.secret.py", "book.txt"):
        (tmp_path / name).write_text("x = 1\n")
    config = load_config([], sets={"task": f"{tmp_path / 'tasks/mine.py'}:Mine", "run.files": ["book.txt"]})
    parcel = user_parcel(config, tmp_path)
    assert sorted(names(parcel.data)) == ["book.txt", "config.yaml", "tasks/mine.py", "tasks/parts/net.py"]
    with tarfile.open(fileobj=io.BytesIO(parcel.data)) as archive:
        file = archive.extractfile("config.yaml")
        assert file is not None
        assert yaml.safe_load(file.read())["task"] == "tasks/mine.py:Mine"
    for wrong, said in ((["../x"], "is not below"), (["gone"], "there is no such file")):
        with pytest.raises(UserError, match=said):
            user_parcel(load_config([], sets={"run.files": wrong}), tmp_path)


def test_what_the_package_needs() -> None:
    core = requirements(extras=[])
    assert any(text.startswith("torch") for text in core)
    assert not any("cryptography" in text for text in core)
    assert any(text.startswith("cryptography") for text in requirements(extras=["cluster"]))


# A keeper


def keep(folder: Path, script: str, *, restart: bool = True, again: str | None = None) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    order: dict[str, Any] = {
        "argv": [sys.executable, "-c", script],
        "again": None if again is None else [sys.executable, "-c", again],
        "restart": restart,
        "cwd": str(folder),
        "grace_s": 5.0,
        "environment": {"COLOUR": "blue"},
    }
    (folder / "order.json").write_text(json.dumps(order))
    return subprocess.Popen([sys.executable, KEEPER, folder], stdout=subprocess.DEVNULL)


def state(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def until(question: Any, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_ends_well_is_let_go(tmp_path: Path) -> None:
    assert keep(tmp_path / "p", "import os; print(os.environ['COLOUR'])").wait(20) == 0
    assert state(tmp_path / "p")["state"] == "finished"
    assert (tmp_path / "p" / "output.log").read_text() == "blue\n"


@pytest.mark.parametrize(("status", "expected"), [(2, "failed"), (130, "stopped")])
def test_a_mistake_and_an_interrupt_are_not_repeated(tmp_path: Path, status: int, expected: str) -> None:
    assert keep(tmp_path / "p", f"raise SystemExit({status})").wait(20) == status
    assert (state(tmp_path / "p")["state"], state(tmp_path / "p")["restarts"]) == (expected, 0)


def test_one_that_dies_is_started_again_as_it_was_told(tmp_path: Path) -> None:
    running = keep(tmp_path / "p", "import os; os.kill(os.getpid(), 9)", again="print('again')")
    assert running.wait(20) == 0
    assert state(tmp_path / "p")["restarts"] == 1
    assert (tmp_path / "p" / "output.log").read_text().endswith("again\n")
    once = keep(tmp_path / "q", "raise SystemExit(1)", restart=False)
    assert once.wait(20) == 1
    assert state(tmp_path / "q")["state"] == "failed"


def test_the_wish_to_stop_reaches_the_process_and_one_that_ignores_it_is_killed(tmp_path: Path) -> None:
    waits = "import signal, time\n{}\nprint('up', flush=True)\ntime.sleep(600)"
    polite = keep(tmp_path / "p", waits.format("signal.signal(2, lambda *_: (_ for _ in ()).throw(SystemExit(130)))"))
    stubborn = keep(tmp_path / "q", waits.format("signal.signal(2, signal.SIG_IGN)"))
    for folder in ("p", "q"):
        until(lambda folder=folder: "up" in _text(tmp_path / folder / "output.log"))
    assert keeper.hold(tmp_path / "p" / "lock") is None, "its keeper lives"
    (tmp_path / "p" / "stop").write_text("")
    (tmp_path / "q" / "stop").write_text("now")
    assert polite.wait(20) == 130
    stubborn.wait(20)
    assert [state(tmp_path / name)["state"] for name in ("p", "q")] == ["stopped", "stopped"]
    lock = keeper.hold(tmp_path / "p" / "lock")
    assert lock is not None
    lock.close()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_log_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "order.json").write_text("{}")
    monkeypatch.setattr(keeper, "LOG_BYTES", 1000)
    kept = keeper.Keeper(folder)
    for number in range(100):
        kept._write(b"line %03d of the log\n" % number)
    kept.log.close()
    whole = (folder / "output.log.1").read_text() + (folder / "output.log").read_text()
    assert whole.endswith("line 099 of the log\n")
    assert (folder / "output.log").stat().st_size <= 1000


# What init finds


def test_hosts_of_an_ssh_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("Host mini1 mini2\n  User me\nhost=pi5\nHost *.lan !x ??\n# Host no\n")
    assert hosts_of_ssh(path) == ["mini1", "mini2", "pi5"]
    assert hosts_of_ssh(tmp_path / "none") == []


def test_a_file_that_init_writes_is_one_that_up_reads(tmp_path: Path) -> None:
    facts = {"system": "Linux", "machine": "x86_64", "cpus": 4, "memory": 8 * 10**9, "gpus": []}
    text = write_file([Found("mini1", None, facts), Found("pi5", None, {}, "does not answer in 10 s")])
    assert [seat.name for seat in laid_out(text, tmp_path).seats] == ["server", "worker-0"]
    assert "# pi5: {}  # does not answer in 10 s" in text
