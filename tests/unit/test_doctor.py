"""What the doctor finds: the layer that fails, and a remedy for each."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from smolcluster.launch.doctor import here, there
from smolcluster.launch.doctor.layers import TROUBLES, Finding, Layer, Verdict, markdown
from smolcluster.launch.doctor.there import classify

ROOT = Path(__file__).parents[2]


def verdicts(found: list[Finding]) -> dict[Layer, Verdict]:
    return {finding.layer: finding.verdict for finding in found}


def test_every_layer_has_a_remedy_and_the_page_is_current() -> None:
    assert set(TROUBLES) == set(Layer)
    assert all(trouble.remedy for troubles in TROUBLES.values() for trouble in troubles)
    assert (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8") == markdown()


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SMOLCLUSTER_TOKEN_FILE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SMOLCLUSTER_TOKEN", raising=False)
    found = verdicts(list(here.examine()))
    assert found[Layer.PYTHON] == found[Layer.TORCH] == Verdict.GOOD
    assert found[Layer.TOKEN] == Verdict.WARNING
    assert set(found) >= {Layer.DISK, Layer.NAME, Layer.GPU, Layer.MDNS}


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setattr(here.shutil, "which", lambda name: str(tool) if name == "nvidia-smi" else None)
    monkeypatch.setattr(here, "_ASK_TORCH", 'print(\'{"version": "2", "built_for": "12", "cuda": [], "mps": false}\')')
    gpu = next(finding for finding in here._torch_and_gpu() if finding.layer is Layer.GPU)
    assert gpu.verdict is Verdict.BAD
    assert "version mismatch" in gpu.what
    monkeypatch.setattr(here, "_ASK_TORCH", "raise ImportError('libcudnn.so.9: not found')")
    (torch,) = here._torch_and_gpu()
    assert (torch.layer, torch.verdict) == (Layer.TORCH, Verdict.BAD)
    assert "libcudnn" in torch.what


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
    assert classify(error) is layer


def test_a_server_that_is_not_there() -> None:
    found = list(there.examine("no-such-machine.invalid", 1))
    assert verdicts(found) == {Layer.NAME: Verdict.BAD}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = list(there.examine("127.0.0.1", free.getsockname()[1]))
    assert verdicts(found) == {Layer.NAME: Verdict.GOOD, Layer.PORT: Verdict.BAD}
    assert found[-1].remedy


@pytest.mark.parametrize("same", [True, False])
def test_tokens_are_compared(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    pytest.importorskip("cryptography")
    from smolcluster.comm.elastic.security import Keyring, new_token

    mine = new_token()
    theirs = Keyring([mine if same else new_token()])
    monkeypatch.setenv("SMOLCLUSTER_TOKEN", mine)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            line, _ = door.accept()
            try:
                with theirs.server_context().wrap_socket(line, server_side=True) as secure:
                    secure.recv(1)
            except OSError:
                line.close()

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        found = list(there.examine("127.0.0.1", door.getsockname()[1]))
        server.join(10)
    assert verdicts(found)[Layer.TOKEN] == (Verdict.GOOD if same else Verdict.BAD)


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
