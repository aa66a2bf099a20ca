"""What the doctor finds: the layer that fails, and a remedy for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools.reference import troubleshooting

from smolcluster.cli.doctor import parse_place
from smolcluster.comm.elastic.transport.api import Handler, Head, Link, Message
from smolcluster.comm.elastic.transport.security import Keyring, new_token
from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.engine.identity import new_peer
from smolcluster.launch.cluster.agent.base import run_briefly
from smolcluster.launch.cluster.agent.machine import layer_of
from smolcluster.launch.cluster.host import HostError
from smolcluster.launch.cluster.links import NetworkPath, Route
from smolcluster.launch.doctor import cluster, machine
from smolcluster.launch.doctor import server as remote
from smolcluster.launch.doctor.layers import TROUBLES, Finding, Layer, Verdict

ROOT = Path(__file__).parents[3]


def verdicts(found: list[Finding]) -> dict[Layer, Verdict]:
    return {finding.layer: finding.verdict for finding in found}


def test_every_layer_has_a_remedy_and_the_page_is_current() -> None:
    assert set(TROUBLES) == set(Layer)
    assert all(trouble.remedy for troubles in TROUBLES.values() for trouble in troubles)
    assert (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8") == troubleshooting()


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SMOLCLUSTER_TOKEN_FILE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SMOLCLUSTER_TOKEN", raising=False)
    found = verdicts(list(machine.examine()))
    assert found[Layer.PYTHON] == found[Layer.TORCH] == Verdict.GOOD
    assert found[Layer.TOKEN] == Verdict.WARNING
    assert set(found) >= {Layer.DISK, Layer.NAME, Layer.GPU, Layer.MDNS}


TORCH_WITHOUT_GPU = 'print(\'{"version": "2", "built_for": "12", "cuda": [], "mps": false}\')'


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tool of this machine, whose script a test writes."""
    tool = tmp_path / "nvidia-smi"
    tool.touch(mode=0o755)
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(tool) if name == "nvidia-smi" else None)
    monkeypatch.setattr(machine, "_ASK_TORCH", TORCH_WITHOUT_GPU)
    return tool


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    gpu = next(finding for finding in machine._torch_and_gpu() if finding.layer is Layer.GPU)
    assert gpu.verdict is Verdict.BAD
    assert "version mismatch" in gpu.what
    monkeypatch.setattr(machine, "_ASK_TORCH", "raise ImportError('libcudnn.so.9: not found')")
    (torch,) = machine._torch_and_gpu()
    assert (torch.layer, torch.verdict) == (Layer.TORCH, Verdict.BAD)
    assert "libcudnn" in torch.what


def test_a_driver_that_is_stuck_does_not_hold_up_the_doctor(monkeypatch: pytest.MonkeyPatch, nvidia_smi: Path) -> None:
    def stuck(program: str, *arguments: str, **_: float) -> Any:
        return None if program in stuck_programs else run_briefly(program, *arguments, timeout_s=120)

    monkeypatch.setattr(machine, "run_briefly", stuck)
    stuck_programs = [sys.executable]
    (gpu,) = machine._torch_and_gpu()
    assert (gpu.layer, gpu.verdict) == (Layer.GPU, Verdict.BAD)
    stuck_programs = [str(nvidia_smi)]
    gpu = next(finding for finding in machine._torch_and_gpu() if finding.layer is Layer.GPU)
    assert gpu.verdict is Verdict.BAD
    assert "nvidia-smi fails: no response" in gpu.what
    assert run_briefly(sys.executable, "-c", "import time; time.sleep(600)", timeout_s=0.1) is None


@pytest.mark.parametrize(
    ("error", "layer"),
    [
        (socket.gaierror(-2, "unknown"), Layer.NAME),
        (ConnectionRefusedError(111, "refused"), Layer.PORT),
        (TimeoutError(), Layer.FIREWALL),
        (OSError(113, "No route to host"), Layer.ROUTE),
        (OSError(101, "Network is unreachable"), Layer.ROUTE),
    ],
)
def test_how_a_connection_fails_names_the_layer(error: OSError, layer: Layer) -> None:
    assert Layer(layer_of(error)) is layer


def test_a_server_that_is_not_there() -> None:
    found = list(remote.examine("no-such-machine.invalid", 1))
    assert verdicts(found) == {Layer.NAME: Verdict.BAD}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = list(remote.examine("127.0.0.1", free.getsockname()[1]))
    assert verdicts(found) == {Layer.NAME: Verdict.GOOD, Layer.PORT: Verdict.BAD}
    assert found[-1].remedy


# Who is there


class Nobody(Handler):
    """Whoever gets through the handshake is of no interest; the doctor does not."""

    def __init__(self) -> None:
        self.came: list[str] = []

    def linked(self, link: Link) -> None:
        self.came.append("linked")

    def refused(self, address: str, reason: str) -> None:
        self.came.append(reason)

    def unlinked(self, link: Link, reason: str) -> None: ...
    def received(self, link: Link, message: Message) -> None: ...
    def place(self, link: Link, head: Head) -> None: ...


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Gives this machine a token, or takes it away."""
    monkeypatch.delenv("SMOLCLUSTER_TOKEN_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return lambda tokens: monkeypatch.setenv("SMOLCLUSTER_TOKEN", tokens)


@contextlib.contextmanager
def server(*tokens: str) -> Iterator[int]:
    """One as `smolcluster server` opens it; its port. It must not take the doctor for a member, or for a broken one."""
    handler = Nobody()
    transport = TcpTransport(new_peer(role="server", rank=1, host="mini1"), keyring=Keyring(tokens) if tokens else None)
    try:
        yield int(transport.listen("127.0.0.1", 0, handler).rpartition(":")[2])
    finally:
        transport.close()
    assert handler.came == []


MINE, OTHER = new_token(), new_token()


@pytest.mark.parametrize(
    ("theirs", "mine", "verdict", "said"),
    [
        ([MINE], MINE, Verdict.GOOD, "both have"),
        ([MINE], f"{OTHER} {MINE}", Verdict.GOOD, "both have"),
        ([OTHER], MINE, Verdict.BAD, "not among this machine's"),
        ([MINE], "", Verdict.BAD, "requires a token, and this machine has none"),
        ([], "", Verdict.GOOD, "none is required"),
        ([], MINE, Verdict.BAD, "has no token"),
        ([MINE], "smol1_short", Verdict.BAD, "instead of"),
    ],
    ids=["the same", "the second", "another", "only there", "none", "only here", "cannot be read"],
)
def test_tokens_are_compared(
    token: Callable[[str], None], theirs: list[str], mine: str, verdict: Verdict, said: str
) -> None:
    pytest.importorskip("cryptography")
    token(mine)
    with server(*theirs) as port:
        found = {finding.layer: finding for finding in remote.examine("127.0.0.1", port)}
    assert found[Layer.SERVER].what == f"a smolcluster server with{'' if theirs else 'out'} a token"
    assert found[Layer.TOKEN].verdict is verdict
    assert said in found[Layer.TOKEN].what


@pytest.mark.parametrize("theirs", [[], [MINE]], ids=["open", "token"])
def test_another_version_of_the_protocol(
    monkeypatch: pytest.MonkeyPatch, token: Callable[[str], None], theirs: list[str]
) -> None:
    pytest.importorskip("cryptography")
    token(" ".join(theirs))
    with server(*theirs) as port:
        monkeypatch.setattr(remote, "VERSION", 7)
        last = list(remote.examine("127.0.0.1", port))[-1]
    assert (last.layer, last.verdict) == (Layer.SERVER, Verdict.BAD)
    assert last.what == "the server speaks protocol version 1, this machine version 7"
    assert "install the same version" in last.remedy


@pytest.mark.parametrize(
    ("says", "told"),
    [(b"SSH-2.0-OpenSSH_9.2\r\n", "it sent 'SSH-2.0-OpenSSH_9.2'"), (b"", "it does not respond")],
    ids=["ssh", "silent"],
)
@pytest.mark.parametrize("mine", ["", MINE], ids=["open", "token"])
def test_another_program_is_told_from_a_server(token: Callable[[str], None], mine: str, says: bytes, told: str) -> None:
    token(mine)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            for _ in range(2):  # is somebody there; who is it
                with door.accept()[0] as line, contextlib.suppress(OSError):
                    line.sendall(says)
                    line.recv(1 << 16)

        program = threading.Thread(target=serve, daemon=True)
        program.start()
        last = list(remote.examine("127.0.0.1", door.getsockname()[1]))[-1]
        program.join(10)
    assert (last.layer, last.verdict, last.what) == (
        Layer.SERVER,
        Verdict.BAD,
        f"not a smolcluster server: {told}",
    )


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("mini1", ("mini1", 65432)),
        ("127.0.0.1", ("127.0.0.1", 65432)),
        ("mini1:5000", ("mini1", 5000)),
        ("::1", ("::1", 65432)),
        ("[::1]", ("::1", 65432)),
        ("[::1]:5000", ("::1", 5000)),
    ],
)
def test_a_port_may_be_left_out(said: str, place: tuple[str, int]) -> None:
    assert parse_place(said) == place


@pytest.mark.parametrize(
    ("error", "layer", "mend"),
    [
        (HostError("pi5", "no reply to 'inspect': killed", layer="route"), Layer.ROUTE, "check that it is on"),
        (HostError("pi5", "Permission denied (/root)"), Layer.SSH, ""),
        (HostError("pi5", "the host key has CHANGED", "ssh-keygen -R pi5"), Layer.SSH, "ssh-keygen"),
    ],
)
def test_a_machine_gets_the_remedy_for_what_it_has(error: HostError, layer: Layer, mend: str) -> None:
    found = cluster._problem(error)
    assert found.layer is layer
    assert mend in found.remedy
    assert ("ssh-keygen" in found.remedy) == ("CHANGED" in error.what)


def test_the_command_says_what_and_how_to_mend_it(capsys: pytest.CaptureFixture[str]) -> None:
    from smolcluster.cli.doctor import report

    found = [
        Finding(layer=Layer.PYTHON, verdict=Verdict.GOOD, what="Python 3.12", host="pi5"),
        Finding(layer=Layer.CLOCK, verdict=Verdict.BAD, what="an hour ahead", remedy="set it", host="pi5"),
    ]
    assert report(found, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pi5  Python  ok   Python 3.12"
    assert lines[2].endswith("-> set it")
    assert report(found[:1], as_json=True) == 0
    said: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert said[0]["layer"] == "Python"


@pytest.mark.parametrize(
    ("probe", "layer", "mend"),
    [
        ({"layer": "firewall", "problem": "no response in 5 s"}, Layer.FIREWALL, "ip route add"),
        ({"layer": "route", "problem": "unreachable"}, Layer.ROUTE, "ip route add"),
        ({"layer": "port", "problem": "Connection refused"}, Layer.PORT, "--bind"),
        (HostError("pi4", "no Python there", "install one", layer="Python"), Layer.PYTHON, "install one"),
    ],
)
def test_routes_are_for_those_who_do_not_arrive(probe: Any, layer: Layer, mend: str) -> None:
    """One who is refused has come all the way, through the machine between."""

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        @contextlib.asynccontextmanager
        async def agent(self) -> AsyncIterator[Fake]:
            yield self

        async def stream_call(self, op: str, **said: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"listening": True}

        async def call(self, op: str, **said: Any) -> Any:
            if isinstance(probe, Exception):
                raise probe
            return probe

    route = Route("pi4", "10.10.0.0/24", "192.168.51.2")
    layout: Any = SimpleNamespace(
        lead=SimpleNamespace(host="mini1"),
        listens=("0.0.0.0", 65432),
        addresses={"pi4": "10.10.0.1"},
        paths=[NetworkPath("pi4", "mini1", "10.10.0.1", through=("mini3",), routes=(route,))],
    )
    hosts: Any = {name: Fake(name) for name in ("mini1", "pi4")}
    (found,) = asyncio.run(cluster._paths(layout, hosts))
    assert (found.layer, found.verdict, found.host) == (layer, Verdict.BAD, "pi4")
    assert mend in found.remedy


def test_one_link_that_carries_multicast_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a way out has no multicast there, and may have it on the cable to its neighbour."""
    pytest.importorskip("zeroconf")
    asked: list[str] = []

    def join(self: socket.socket, level: int, name: int, value: Any) -> None:
        if name == socket.IP_ADD_MEMBERSHIP and level == socket.IPPROTO_IP:
            asked.append(socket.inet_ntoa(value[4:8]))
            if asked[-1] != "192.168.50.2":
                raise OSError(19, "No such device")

    monkeypatch.setattr(socket.socket, "setsockopt", join)
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    monkeypatch.setattr(machine, "own_addresses", lambda: ["10.0.0.1", "192.168.50.2"])
    assert machine._mdns().verdict is Verdict.GOOD
    assert asked == ["10.0.0.1", "192.168.50.2"]
    monkeypatch.setattr(machine, "own_addresses", lambda: ["10.0.0.1"])
    assert "No such device" in machine._mdns().what
