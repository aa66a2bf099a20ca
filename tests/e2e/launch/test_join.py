"""A machine offers itself, the cluster takes it by the code on its screen, and it works: over a network of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.command import TINY, Smol
from tests.places import eventually, free_port, separate_hosts


def test_a_machine_joins_by_its_code(smol: Smol, tmp_path: Path) -> None:
    pytest.importorskip("zeroconf")
    pytest.importorskip("cryptography")
    homes = [tmp_path / name for name in ("mini1", "pi5")]
    for home in homes:
        home.mkdir()
    with separate_hosts(2) as network:
        places = [network.namespace(0), network.namespace(1)]
        where = [
            {"cwd": home, "env": {"HOME": str(home), "XDG_CONFIG_HOME": ""}, "inside": place}
            for home, place in zip(homes, places, strict=True)
        ]
        server, port = f"{network.address(0)}", free_port()
        smol.run("token", "new", **where[0]).ok()
        command = f"server gpt --strategy edp --workers 1 --bind {server} --port {port} --steps 5".split()
        serving = smol.start(*command, "--override", *TINY, "cluster.workers=[mini9]", **where[0])  # pi5 is a newcomer
        refused = smol.run("cluster", "accept", "--address", "127.0.0.1:9", "--server", f"{server}:{port}", **where[0])
        assert refused.status == 2
        assert "give an unused one with --rank N" in refused.err
        joining = smol.start("join", "pi5", "--address", network.address(1), "--device", "cpu", **where[1])
        joining.until(lambda: "pi5 is listening on" in joining.output, what="the offer")
        accept = f"smolcluster cluster accept pi5 --server {server}:{port} --rank 1"
        accepting = subprocess.Popen(
            [*f"ip netns exec {places[0]} {sys.executable} -m".split(), *accept.split()],
            cwd=homes[0],
            env=smol.env | where[0]["env"],  # type: ignore[operator]
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            code = eventually(lambda: re.search(r"\d{5}-\d{5}", joining.output), what="the code").group()
            said, _ = accepting.communicate(code + "\n", timeout=300)
        finally:
            accepting.kill()
            accepting.communicate()
        assert "pi5 has the token, and joins as worker 1" in said
        assert serving.end().status == 0
        ended = joining.end()
        assert ended.status == 0, ended
        assert f"accepted by the cluster; its server is at {server}:{port}" in ended.out
        kept = homes[1] / ".config" / "smolcluster" / "token"
        assert kept.read_text().split()[0] == (homes[0] / ".config" / "smolcluster" / "token").read_text().split()[0]
        assert kept.stat().st_mode & 0o077 == 0
