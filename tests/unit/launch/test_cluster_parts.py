"""The pure parts of a cluster: who runs what where, which way leads there, what is sent; and a keeper with a process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.command import run_here
from tests.places import eventually

from smolcluster.cli.cluster import _given
from smolcluster.cli.down import down
from smolcluster.cli.logs import logs
from smolcluster.cli.status import status, table
from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.config import load_config, resolve
from smolcluster.config.schema import LinkConfig
from smolcluster.errors import UserError
from smolcluster.launch.cluster import control, inventory, keeper
from smolcluster.launch.cluster.archive import PackedFiles, pack_package, pack_user_files, requirements
from smolcluster.launch.cluster.control import Deployment, problems_of
from smolcluster.launch.cluster.host import HostError
from smolcluster.launch.cluster.inventory import find_machines, hosts_of_ssh, machines_of_ssh, write_file
from smolcluster.launch.cluster.layout import (
    ClusterLayout,
    ClusterMachine,
    as_record,
    describe,
    from_record,
    plan_layout,
    with_run,
)
from smolcluster.launch.cluster.links import find_path
from smolcluster.launch.cluster.mirror import mirrored
from smolcluster.launch.cluster.record import load_record, save_record, state_folder
from smolcluster.launch.cluster.request import UpArguments, known_cluster, read_cluster, requirements_of, token_for

ROOT = Path(__file__).parents[3]
KEEPER = Path(keeper.__file__)


def laid_out(text: str, folder: Path, *, name: str = "lab") -> ClusterLayout:
    path = folder / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    return plan_layout(resolve(load_config([path])), name=name, run="r1")


# Who runs what where


def test_the_elastic_plane(tmp_path: Path) -> None:
    layout = laid_out(
        "hosts:\n  mini1: {address: 10.0.0.1, workers: 0}\n  pi5: 10.0.0.5\n"
        "  win: {address: 10.0.0.9, workers: 2, device: cuda, batch_size: 8}\n"
        "server: mini1\nstrategy: edp\nport: 7000\n",
        tmp_path,
    )
    assert [(process.name, process.host, process.restart) for process in layout.processes] == [
        ("server", "mini1", True),
        ("worker-0", "pi5", True),
        ("worker-1", "win", True),
        ("worker-2", "win", True),
    ]
    assert " ".join(layout.lead.arguments) == "server config.yaml --bind 10.0.0.1 --port 7000 --run-dir runs/r1"
    assert layout.lead.again == (*layout.lead.arguments, "--resume", "auto")
    assert layout.processes[2].arguments[:5] == ("worker", "1", "win", "--server", "10.0.0.1:7000")
    assert layout.processes[2].arguments[-2:] == ("--device", "cuda")
    places = [
        (dict(s.environment)["LOCAL_RANK"], dict(s.environment)["LOCAL_WORLD_SIZE"]) for s in layout.processes[1:]
    ]
    assert places == [("0", "1"), ("0", "2"), ("1", "2")]  # each has a GPU of its own, if there are two
    assert layout.needs_token
    assert layout.config.cluster.workers == ["pi5", "win", "win"]
    assert layout.config.cluster.batch_size == {"win": 8}
    assert layout.config.cluster.hosts == {}


def test_stages_of_one_machine_share_out_its_gpus(tmp_path: Path) -> None:
    text = "hosts: {a: {address: 10.0.0.1, workers: 2}, b: 10.0.0.2}\nserver: b\nrun: {serve: some-model}\n"
    stages = [process for process in laid_out(text, tmp_path).processes if process.arguments[0] == "stage"]
    numbers = [process.arguments[-2:] for process in stages if "--local-rank" in process.arguments]
    assert [process.host for process in stages] == ["a", "a", "b"]
    assert numbers == [("--local-rank", "0"), ("--local-rank", "1")]


def test_without_a_strategy_several_workers_are_several(tmp_path: Path) -> None:
    for hosts in ("{a: 10.0.0.1, b: 10.0.0.2}", "{a: {address: 10.0.0.1, workers: 2}}"):
        assert laid_out(f"hosts: {hosts}\n", tmp_path).config.strategy.name == "allreduce"
    assert laid_out("hosts: {a: 10.0.0.1}\n", tmp_path).config.strategy.name == "single"
    with pytest.raises(UserError, match="strategy single has one worker, not 2; remove it"):
        laid_out("hosts: {a: 10.0.0.1, b: 10.0.0.2}\nstrategy: single\n", tmp_path)


def test_this_machine_is_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a and b are both this machine"):
        laid_out("hosts: {a: {address: local}, b: {address: local}}\n", tmp_path)


def test_the_mesh_plane(tmp_path: Path) -> None:
    text = "hosts: {a: {address: 10.0.0.1, workers: 2}, b: 10.0.0.2}\nstrategy: fsdp\n"
    layout = laid_out(text, tmp_path)
    assert [process.arguments[3:6] for process in layout.processes] == [("3", "--rank", str(rank)) for rank in range(3)]
    assert {process.arguments[process.arguments.index("--master-addr") + 1] for process in layout.processes} == {
        "10.0.0.1"
    }
    assert [dict(process.environment)["LOCAL_RANK"] for process in layout.processes] == ["0", "1", "0"]
    assert not any(process.restart for process in layout.processes)
    assert not layout.needs_token
    again = laid_out(text + "run: {elastic: '2:3'}\n", tmp_path)
    assert [(process.name, process.host) for process in again.processes] == [("launcher-0", "a"), ("launcher-1", "b")]
    assert "--rdzv-endpoint" in again.processes[1].arguments
    assert all("10.0.0.1:29500" in process.arguments for process in again.processes)
    assert again.needs_token  # the launchers know each other by it


def test_the_files_of_the_documents(tmp_path: Path) -> None:
    layout = plan_layout(resolve(load_config(["cluster_config_edp"])), name="edp", run="r")
    assert [(process.name, process.host) for process in layout.processes] == [
        *(("server", "mini1"), ("worker-0", "pi5"), ("worker-1", "win"), ("worker-2", "macbook")),
    ]
    assert layout.listens == ("0.0.0.0", 65432)
    found = {process.host: process.arguments[4] for process in layout.processes[1:]}
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
        ("strategy: edp\n", "this file has no hosts; add them"),
        ("hosts: {a: {workers: 0}}\nstrategy: edp\n", "no host has a worker"),
        (
            "hosts: {a: local, b: 10.0.0.2}\nserver: a\nstrategy: edp\n",
            "which b cannot reach: set hosts.b.server_address",
        ),
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


def test_a_model_beside_the_cluster_file_is_found_where_this_machine_leads(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    hosts = "hosts: {here: {address: local}, pi5: {address: 10.0.0.2, server_address: 10.0.0.1}}\n"
    found = {}
    for model in ("runs/demo", "runs/gone", "smollm2"):
        for lead in ("here", "pi5"):
            file.write_text(f"{hosts}server: {lead}\nrun: {{serve: {model}}}\n")
            found[model, lead] = read_cluster(file).config.run.serve
    assert found.pop(("runs/demo", "here")) == str(tmp_path / "runs" / "demo")
    assert all(serve == model for (model, _), serve in found.items())


def test_another_run_keeps_everything_else(tmp_path: Path) -> None:
    layout = laid_out("hosts: {a: 10.0.0.1, b: 10.0.0.2}\nstrategy: edp\n", tmp_path)
    other = with_run(layout, "r0")
    assert other.lead.arguments[-4:] == ("--run-dir", "runs/r0", "--resume", "auto")
    assert other.processes[1].arguments[-2:] == ("--log-dir", "logs/r0")
    assert other.processes[1].arguments[:-2] == layout.processes[1].arguments[:-2]


def test_a_record_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no cluster was started"):
        load_record(None)
    layout = laid_out(
        "hosts: {a: 10.0.0.1, b: {address: 10.0.0.2, environment: {SECRET: x}}}\nstrategy: edp\n", tmp_path
    )
    save_record(as_record(layout))
    assert "SECRET" not in (state_folder() / "lab.json").read_text()
    known = from_record(load_record(None))
    assert known.hosts == {"server": "a", "worker-0": "a", "worker-1": "b"}
    assert known.machines["b"].address == "10.0.0.2"
    with pytest.raises(UserError, match="unknown cluster 'lob'; did you mean 'lab'"):
        load_record("lob")
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
    direct = find_path(known, "mini3", "mini1")
    assert (direct.address, direct.through, direct.commands()) == ("10.10.0.1", (), [])
    around = find_path(known, "pi4", "mini1")
    assert (around.address, around.through) == ("10.10.0.1", ("mini3",))
    assert around.commands() == [
        "on pi4: sudo ip route add 10.10.0.1/32 via 192.168.51.2",
        "on mini1: sudo ip route add 192.168.51.4/32 via 10.10.0.3",
        "on mini3: sudo sysctl -w net.ipv4.ip_forward=1",
    ]
    assert find_path(known, "pi4", "pi9") is None
    assert find_path(known, "pi4", "pi4") is None


def test_every_machine_on_a_long_way_learns_both_ends() -> None:
    known = links(
        one={"a": "10.1.0.1", "b": "10.1.0.2"},
        two={"b": "10.2.0.2", "c": "10.2.0.3"},
        three={"c": "10.3.0.3", "d": "10.3.0.4"},
    )
    way = find_path(known, "a", "d")
    assert way.commands() == [
        "on a: sudo ip route add 10.3.0.4/32 via 10.1.0.2",
        "on b: sudo ip route add 10.3.0.4/32 via 10.2.0.3",
        "on d: sudo ip route add 10.1.0.1/32 via 10.3.0.3",
        "on c: sudo ip route add 10.1.0.1/32 via 10.2.0.2",
        "on b, c: sudo sysctl -w net.ipv4.ip_forward=1",
    ]


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
    assert "  on mini1: sudo ip route add 192.168.51.0/24 via 10.10.0.2" in describe(layout)


# What is looked at before anything is changed


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, ""),
        ({"disk_free": 600 << 20}, ""),
        (
            {"disk_free": 600 << 20, "lacks_environment": True},
            "600 MiB of disk are free, 2048 MiB are needed to make an environment with torch",
        ),
        ({"disk_free": 1 << 20}, "1 MiB of disk are free, 500 MiB are needed;"),
        ({"time": 1000.0 - 3700}, "its clock is 1 h 1 min behind this machine's"),
        ({"writable": False}, "is not writable"),
        ({"port_problem": "Address already in use"}, "cannot be used: Address already in use"),
        ({"port_problem": "in use", "processes": {"server": {"alive": True}}}, ""),
    ],
)
def test_what_would_go_wrong_is_said_before(tmp_path: Path, facts: dict[str, Any], said: str) -> None:
    layout = laid_out("hosts: {a: 10.0.0.1, b: 10.0.0.2}\nstrategy: edp\n", tmp_path)
    good = {
        "requested_at": 999.9,
        "replied_at": 1000.1,
        "time": 1000.0,
        "writable": True,
        "disk_free": 9 << 30,
        "processes": {},
    }
    found = [str(problem) for problem in problems_of(layout, "a", good | facts)]
    assert len(found) == bool(said)
    assert said in "".join(found)


# What is sent


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getnames()


def test_the_package_is_whole_and_always_the_same() -> None:
    one, two = pack_package(), pack_package()
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
    config = load_config([], overrides={"task": f"{tmp_path / 'tasks/mine.py'}:Mine", "run.files": ["book.txt"]})
    packed = pack_user_files(config, tmp_path)
    assert sorted(names(packed.data)) == ["book.txt", "config.yaml", "tasks/mine.py", "tasks/parts/net.py"]
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as archive:
        file = archive.extractfile("config.yaml")
        assert yaml.safe_load(file.read())["task"] == "tasks/mine.py:Mine"
    for wrong, said in ((["../x"], "is not below"), (["gone"], "no such file")):
        with pytest.raises(UserError, match=said):
            pack_user_files(load_config([], overrides={"run.files": wrong}), tmp_path)


def test_what_the_package_needs() -> None:
    core = requirements(extras=[])
    assert any(text.startswith("torch") for text in core)
    assert not any("cryptography" in text for text in core)
    assert any(text.startswith("cryptography") for text in requirements(extras=["cluster"]))


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ("", []),
        ("logging: {prometheus_port: 9464}\n", ["prometheus-client"]),
        ("logging: {tensorboard: true, wandb: true}\n", ["tensorboard", "wandb"]),
        ("data: {name: wikitext-2}\n", ["tiktoken"]),
        ("data: {name: 'hf:some/data', tokenizer: bytes}\n", ["tiktoken"]),
        ("data: {tokenizer: chars}\n", []),
    ],
)
def test_machines_get_the_packages_that_the_configuration_needs(
    settings: str, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = {"prometheus": "prometheus-client", "tensorboard": "tensorboard", "wandb": "wandb", "data": "tiktoken"}
    packages = ["torch", *(f'{package}; extra == "{extra}"' for extra, package in extras.items())]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: packages)
    layout = laid_out(f"strategy: allreduce\ncluster:\n  hosts:\n    a: local\n{settings}", tmp_path)
    assert requirements_of(layout) == ["torch", *extra]


def test_another_device_or_environment_is_not_the_same_cluster(tmp_path: Path) -> None:
    """What runs would keep the old one in silence. Another run is the same cluster."""

    def key(host: str, run: str = "r1") -> str:
        layout = with_run(laid_out(f"hosts: {{a: 10.0.0.1, b: {host}}}\nstrategy: edp\n", tmp_path), run)
        nothing = PackedFiles(b"")
        return Deployment(layout=layout, package=nothing, files=nothing, requirements=[]).fingerprint

    same = key("{address: 10.0.0.2}")
    assert key("10.0.0.2", run="r2") == same
    others = ("device: cpu", "environment: {A: b}", "python: python3.13", "workers: 2")
    keys = {key(f"{{address: 10.0.0.2, {other}}}") for other in others}
    assert len(keys - {same}) == len(others)


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


def test_a_process_that_ends_well_is_let_go(tmp_path: Path) -> None:
    assert keep(tmp_path / "p", "import os; print(os.environ['COLOUR'])").wait(300) == 0
    assert state(tmp_path / "p")["state"] == "finished"
    assert (tmp_path / "p" / "output.log").read_text() == "blue\n"


@pytest.mark.parametrize(("status", "expected"), [(2, "failed"), (130, "stopped")])
def test_a_mistake_and_an_interrupt_are_not_repeated(tmp_path: Path, status: int, expected: str) -> None:
    assert keep(tmp_path / "p", f"raise SystemExit({status})").wait(300) == status
    assert (state(tmp_path / "p")["state"], state(tmp_path / "p")["restarts"]) == (expected, 0)


def test_one_that_dies_is_started_again_as_it_was_told(tmp_path: Path) -> None:
    running = keep(tmp_path / "p", "import os; os.kill(os.getpid(), 9)", again="print('again')")
    assert running.wait(300) == 0
    assert state(tmp_path / "p")["restarts"] == 1
    assert (tmp_path / "p" / "output.log").read_text().endswith("again\n")
    once = keep(tmp_path / "q", "raise SystemExit(1)", restart=False)
    assert once.wait(300) == 1
    assert state(tmp_path / "q")["state"] == "failed"


def test_the_wish_to_stop_reaches_the_process_and_one_that_ignores_it_is_killed(tmp_path: Path) -> None:
    waits = "import signal, time\n{}\nprint('up', flush=True)\ntime.sleep(600)"
    polite = keep(tmp_path / "p", waits.format("signal.signal(2, lambda *_: (_ for _ in ()).throw(SystemExit(130)))"))
    stubborn = keep(tmp_path / "q", waits.format("signal.signal(2, signal.SIG_IGN)"))
    for folder in ("p", "q"):
        eventually(lambda folder=folder: "up" in _text(tmp_path / folder / "output.log"))
    assert keeper.lock_file(tmp_path / "p" / "lock") is None, "its keeper lives"
    (tmp_path / "p" / "stop").write_text("")
    (tmp_path / "q" / "stop").write_text("now")
    assert polite.wait(300) == 130
    stubborn.wait(300)
    assert [state(tmp_path / name)["state"] for name in ("p", "q")] == ["stopped", "stopped"]
    lock = keeper.lock_file(tmp_path / "p" / "lock")
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


SSH = """\
Host mini1 m1
  HostName 10.10.0.1
  User me
  Port=2222
  IdentityFile "~/.ssh/two words"
host pi5
  HostName %h.local
  ProxyJump mini1
Host far
  ProxyJump someone@bastion.example.org
Host odd
  HostName 10.9.9.9
  ProxyCommand nc %h %p
Host *.lan !x ??
  User nobody
Match user root
  Port 99
Host * !pi5
  User you
# Host no
"""


def test_hosts_of_an_ssh_configuration_are_written_as_what_is_meant() -> None:
    assert hosts_of_ssh(SSH) == ["mini1", "m1", "pi5", "far", "odd"]
    found = machines_of_ssh(SSH)
    mini1 = ClusterMachine(name="mini1", address="10.10.0.1", port=2222, user="me", key="~/.ssh/two words")
    assert found["mini1"] == mini1
    assert found["m1"] == replace(mini1, name="m1")
    assert found["pi5"] == ClusterMachine(name="pi5", address="pi5.local", via="mini1")
    # Only ssh knows how to get there.
    assert found["far"] == ClusterMachine(name="far", address="far")
    assert found["odd"] == ClusterMachine(name="odd", address="odd")


def test_a_jump_that_leads_nowhere_is_left_to_ssh() -> None:
    circle = machines_of_ssh("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    assert {name: machine.via for name, machine in circle.items()} == {"a": None, "b": None}
    assert machines_of_ssh("Host a b\n HostName x\n ProxyJump a\n")["a"] == ClusterMachine(name="a", address="x")


def found_by(answers: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What init writes for an ssh configuration of which these hosts have these problems."""
    facts = {"system": "Linux", "machine": "x86_64", "cpus": 4, "memory": 8 * 10**9, "gpus": []}

    async def ask(machines: dict[str, ClusterMachine], *, accept_new: bool) -> dict[str, tuple[dict[str, Any], str]]:
        assert accept_new
        return {name: ({} if answers.get(name) else facts, answers.get(name, "")) for name in machines}

    monkeypatch.setattr(inventory, "_probe", ask)
    monkeypatch.setattr(inventory, "_offers", lambda: [])
    monkeypatch.setattr(
        inventory, "local_address_towards", lambda address: {"10.10.0.1:2222": "10.10.0.9"}.get(address, "192.168.1.9")
    )
    monkeypatch.setattr("socket.gethostname", lambda: "desk.example.org")
    path = tmp_path / "config"
    path.write_text(SSH)
    told: list[str] = []
    text = write_file(find_machines(path, accept_new=True, report=told.append))
    assert told[0] == "probing 5 machine(s)"
    return text


def test_a_file_that_init_writes_is_one_that_up_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = found_by({"far": "it is not in known_hosts; use --accept-new"}, monkeypatch, tmp_path)
    layout = laid_out(text, tmp_path)
    assert [(process.name, process.host) for process in layout.processes] == [
        *(("server", "desk"), ("worker-0", "desk"), ("worker-1", "mini1"), ("worker-2", "pi5"), ("worker-3", "odd")),
    ]
    assert layout.machines["desk"].local
    assert layout.machines["mini1"] == ClusterMachine(
        name="mini1", address="10.10.0.1", port=2222, user="me", key="~/.ssh/two words"
    )
    assert layout.machines["pi5"].via == "mini1"
    # Each finds this machine where this machine finds it, or the one before it.
    assert layout.addresses == {"desk": "127.0.0.1", "mini1": "10.10.0.9", "pi5": "10.10.0.9", "odd": "192.168.1.9"}
    assert "  # far: {server_address: 192.168.1.9}  # it is not in known_hosts; use --accept-new\n" in text
    assert re.search("^  # m1: .*  # the same machine as mini1$", text, re.M)
    other = laid_out(re.sub(", server_address: [0-9.]+", "", text).replace("server: desk", "server: mini1"), tmp_path)
    assert other.addresses["pi5"] == "10.10.0.1"


def test_this_machine_alone_needs_no_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = found_by(dict.fromkeys(("mini1", "pi5", "far", "odd"), "gone"), monkeypatch, tmp_path)
    assert laid_out(alone, tmp_path).listens[0] == "127.0.0.1"


def test_init_says_what_it_cannot_read_or_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(*words: str) -> str:
        ended = run_here(capsys, "cluster", "init", *words)
        assert ended.status == 2
        return ended.err

    monkeypatch.chdir(tmp_path)
    assert "--ssh-config gone: no such file" in init("--ssh-config", "gone")
    assert "no folder gone; choose another" in init("--out", "gone/cluster.yaml")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inventory, "find_machines", lambda *_, **__: [])
    monkeypatch.setattr(Path, "write_text", full)
    assert "cannot write cluster.yaml: No space left on device; choose another with --out" in init()


# What the commands say


def status_of(**said: Any) -> list[str]:
    processes = said.pop("processes", {"server": {"state": "stopped", "host": "a", "alive": False}})
    whole = {"name": "lab", "run": "r1", "run_directory": "a:~/r1", "processes": processes, "unreachable": {}, **said}
    return table(whole)


def test_status_says_what_is_known_and_no_more() -> None:
    row = {"step": 7, "loss": 5.336422759208601, "tokens_per_s": 1411.2, "rank": 2, "role": "server"}
    assert status_of(row=row)[-1] == "step 7, loss 5.3364, 1411 tokens/s"
    assert status_of(row=row | {"role": "worker"})[-1] == "step 7, loss 5.3364, 1411 tokens/s of rank 2"
    assert status_of(row=row | {"tokens_per_s": 0.0})[-1] == "step 7, loss 5.3364"
    summary = {"status": "interrupted", "steps": 314, "val_loss": 5.336422759208601}
    assert status_of(row=row, summary=summary)[-1] == "interrupted: 314 steps, val loss 5.3364"
    assert status_of(summary=summary | {"val_loss": None})[-1] == "interrupted: 314 steps"
    running = {"server": {"state": "running", "host": "a", "alive": True, "started": time.time()}}
    assert status_of(processes=running, row=row, summary=summary)[-1].startswith("step 7, ")


def test_a_model_that_is_served_is_no_run() -> None:
    processes = {"front": {"state": "running", "host": "a", "alive": True}}
    assert [line.split()[0] for line in status_of(processes=processes)] == ["lab", "process", "front"]


def test_status_says_where_the_run_is(known: None) -> None:
    place = known_cluster(None).run_place
    assert place == "mini1:~/.smolcluster/clusters/lab/runs/r1"
    assert status_of(run_directory=place)[1] == f"run directory: {place}"


def test_a_stopped_process_advises_what_was_typed_here() -> None:
    last = "smolcluster: interrupted; continue with: smolcluster server --resume runs/gpt-edp-20260101-000000"
    lines = status_of(processes={"server": {"state": "stopped", "host": "a", "alive": False, "last": last}})
    assert lines[-1].endswith("  smolcluster: interrupted; continue with: smolcluster up --resume")
    long = status_of(processes={"server": {"state": "running", "host": "a", "alive": True, "last": "x" * 81}})
    assert long[-1].endswith("x" * 77 + "...")


def dry(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    ended = run_here(capsys, "up", "--dry-run", *words)
    return ended.out if ended.status == 0 else ended.err


def test_to_go_on_nothing_need_be_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the options of `up --local`, which are in no file, nor the folder where it was said."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.yaml").write_text("training: {steps: 7}\n")
    monkeypatch.chdir(tmp_path)
    assert "no cluster was started from this machine" in dry("--resume", capsys=capsys)
    assert "no run of local was started from this machine" in dry("--local", "--resume", capsys=capsys)
    overrides = ["cluster.name=lab", "cluster.token=abc", "cluster.port=7001"]
    said = UpArguments(
        file=None, folder=str(tmp_path), train=["mine.yaml"], overrides=overrides, strategy="edp", workers=3
    )
    first = said.read()
    assert (first.config.training.steps, first.name) == (7, "lab")
    save_record({**as_record(plan_layout(first.config, name="lab", run="r1")), "said": said.record()})
    assert "abc" not in (state_folder() / "lab.json").read_text()

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert dry("--resume", capsys=capsys).endswith(": server, worker-0, worker-1, worker-2\n")
    before = UpArguments.recorded("lab")
    assert before is not None
    now = UpArguments(file=None, folder=str(Path.cwd()), overrides=["cluster.port=7002"], steps=9).merged_over(before)
    config = now.read().config
    assert (config.training.steps, config.cluster.port, config.strategy.name) == (9, 7002, "edp")


def test_workers_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab.yaml").write_text("hosts: {mini1: 10.0.0.1, pi5: 10.0.0.2}\nstrategy: edp\n")
    said = dry(str(tmp_path / "lab.yaml"), "--workers", "4", capsys=capsys)
    assert "--workers is for --local" in said
    assert "hosts.NAME.workers" in said


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that was brought up before: mini1 with the server and a worker, pi5 with another. Nothing is contacted."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    @contextlib.asynccontextmanager
    async def connected(machines: Any, **_: Any) -> AsyncIterator[tuple[dict[str, None], dict[str, HostError]]]:
        yield dict.fromkeys(machines), {}

    monkeypatch.setattr(control, "connected", connected)
    save_record(as_record(laid_out("hosts: {mini1: 10.0.0.1, pi5: 10.0.0.2}\nstrategy: edp\n", tmp_path)))


def test_down_names_all_that_ended_with_it(
    known: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alive = {"server": "mini1", "worker-1": "pi5"}

    async def states(*_: Any) -> dict[str, Any]:
        return {name: {"host": host, "alive": True} for name, host in alive.items()}

    async def end(*_: Any, **__: Any) -> dict[str, list[str]]:
        return {"mini1": ["server"] if alive else [], "pi5": []}  # the worker had ended before it was asked

    monkeypatch.setattr(control, "states", states)
    monkeypatch.setattr(control, "down", end)
    assert down(None) == 0
    assert capsys.readouterr().out == "mini1: ended server\npi5: ended worker-1\n"
    alive.clear()
    assert down(None) == 0
    assert capsys.readouterr().out == "mini1: nothing was running\npi5: nothing was running\n"


class Written:
    """A machine on which a run has written these files."""

    def __init__(self, **files: str) -> None:
        self.machine, self.files = ClusterMachine(name="mini1", address="10.0.0.1"), files

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[Any]:
        yield self

    async def call(self, op: str, *, place: str) -> str | list[str] | None:
        text = self.files.get(Path(place).stem)
        return (text or "").splitlines() if op == "tail" else text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_training_that_has_diverged_is_told_and_is_no_crash(
    known: None, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({"step": 7, "rank": 2, "role": "server", "host": "inf", "loss": value, "tokens_per_s": value})
    summary = json.dumps({"status": "finished", "steps": 9, "val_loss": value})
    host: Any = Written(metrics=row, summary=summary)

    async def states(*_: Any) -> dict[str, Any]:
        return {}

    @contextlib.asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield {"mini1": host}, {}

    monkeypatch.setattr(control, "states", states)
    monkeypatch.setattr(control, "connected", connected)
    assert status(None) == 0
    assert f"finished: 9 steps, val loss {value}\n" in capsys.readouterr().out
    del host.files["summary"]
    assert status(None) == 0
    assert f"step 7, loss {value}, {value} tokens/s\n" in capsys.readouterr().out
    assert status(None, as_json=True) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (told["row"]["loss"], told["row"]["host"]) == (value, "inf")


def test_the_row_of_all_workers_is_told_before_that_of_one(known: None) -> None:
    def rows(*roles: str) -> str:
        return "\n".join(json.dumps({"step": n, "rank": n, "role": role}) for n, role in enumerate(roles))

    def told(*roles: str) -> Any:
        host: Any = Written(metrics=rows(*roles))
        return asyncio.run(control.progress(known_cluster(None), {"mini1": host})).get("row", {}).get("step")

    assert told("worker", "server", "worker") == 1
    assert told("worker", "worker") == 1
    assert told() is None


@pytest.mark.parametrize("said", ["lab", "my.cluster.yaml", None])
def test_a_machine_is_taken_into_the_cluster_of_this_name_or_file(
    known: None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file says what the cluster is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOLCLUSTER_TOKEN", new_token())
    Path("my.cluster.yaml").write_text("cluster: {name: lab}\nhosts: {mini1: 10.0.0.1, pi5: 10.0.0.2}\nstrategy: edp\n")
    given = [_given("10.0.0.1:7000", said, None) if said else _given(None, None, None) for _ in range(2)]
    assert [(each["cluster"], each["rank"]) for each in given] == [("lab", 2), ("lab", 3)]


def test_logs_of_the_others_are_shown_when_a_machine_is_away(
    known: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def follow(*_: Any, chosen: list[str], show: Any, **__: Any) -> None:
        for name in chosen:
            if name == "mini1":
                raise HostError("mini1", "10.0.0.1 did not respond within 10 s")
            show(name, "worker-1", "step 3")

    monkeypatch.setattr(control, "follow", follow)
    assert logs(lines=20) == 1
    said = capsys.readouterr()
    assert said.out == "worker-1@pi5 | step 3\n"
    assert said.err == "smolcluster: mini1: 10.0.0.1 did not respond within 10 s\n"
    assert logs("pi5", lines=20) == 0


def test_a_cluster_is_checked_for_what_will_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a file of the documents: the strategy decides who listens where."""
    path = tmp_path / "lab.yaml"
    path.write_text("host_ip: {mini1: 10.0.0.1, pi5: 10.0.0.1}\nserver: mini1\nworkers: [pi5]\n")
    seen: list[ClusterLayout] = []

    async def examine(layout: ClusterLayout, **_: Any) -> list[Any]:
        seen.append(layout)
        return []

    monkeypatch.setattr("smolcluster.launch.doctor.cluster.examine", examine)
    for words in (["gpt", "--strategy", "edp"], ["--strategy", "edp", "--override", "cluster.port=7000"], []):
        run_here(capsys, "cluster", "check", path, *words).ok()
    places = [(layout.lead.host, layout.listens[1]) for layout in seen]
    assert places == [("mini1", 65432), ("mini1", 7000), ("pi5", 29500)]


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("SMOLCLUSTER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    layout = laid_out("hosts: {mini1: 10.0.0.1, pi5: 10.0.0.2}\nstrategy: edp\n", tmp_path)
    said = "cannot write .*Not a directory; set XDG_STATE_HOME to a writable folder"
    with pytest.raises(UserError, match=said):
        save_record(as_record(layout))
    with pytest.raises(UserError, match=said):
        token_for(layout)
    with pytest.raises(UserError, match=said), mirrored(from_record(as_record(layout))):
        pass
