"""Machines for tests: each a real sshd on a port of its own, on loopback or in a network namespace, with a folder of its own.

What a machine has and lacks is set by its options: which Python it finds, whether it has tmux, where it keeps things.
Everything is ended by its process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.command import Ended, Running, Smol
from tests.places import eventually, free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
TINY = {
    "model": {"model_dim": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32},
    "training": {"batch_size": 4, "device": "cpu", "eval_steps": 0},
    "logging": {"log_interval": 1},
}


def skip_without_sshd() -> None:
    for tool, package in ((SSHD, "openssh-server"), ("ssh-keygen", "openssh-client"), ("tmux", "tmux")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: {package})")
    pytest.importorskip("asyncssh")


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@dataclass
class Box:
    """A machine: an sshd, and what it gives to those who log in."""

    name: str
    folder: Path
    address: str = "127.0.0.1"
    port: int = 0
    inside: str | None = None  # a network namespace
    process: subprocess.Popen[bytes] | None = None

    def start(self, authorized: Path, *, environment: Mapping[str, str] | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        key = self.folder / "host_key"
        if not key.exists():
            make_key(key)
        # tmux keeps its socket there; each machine has its own.
        given = {"TMUX_TMPDIR": str(self.folder), "SMOLCLUSTER_CACHE": os.environ.get("SMOLCLUSTER_CACHE", "")}
        given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        values = " ".join(f'"{name}={value}"' for name, value in given.items())
        config = self.folder / "sshd_config"
        config.write_text(
            f"ListenAddress {self.address}:{self.port}\nHostKey {key}\nAuthorizedKeysFile {authorized}\n"
            f"PidFile {self.folder / 'pid'}\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nSetEnv {values}\n",
            encoding="utf-8",
        )
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        command = [SSHD, "-D", "-f", str(config), "-E", str(self.folder / "sshd.log")]
        if self.inside is not None:
            command = ["ip", "netns", "exec", self.inside, *command]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if self.inside is None:
            eventually(self._answers, what=f"sshd on port {self.port}")
        else:
            log = self.folder / "sshd.log"
            eventually(lambda: log.exists() and "listening" in log.read_text(), what="sshd in the namespace")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    @property
    def known(self) -> str:
        """Its line in known_hosts."""
        public = (self.folder / "host_key.pub").read_text().split()
        return f"[{self.address}]:{self.port} {public[0]} {public[1]}"

    def host(self, **said: Any) -> dict[str, Any]:
        """As it stands in a cluster file."""
        python = {"python": sys.executable}
        return {"address": self.address, "port": self.port, "folder": str(self.folder / "smol")} | python | said

    def tmux(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TMUX_TMPDIR": str(self.folder)}
        return subprocess.run(["tmux", *words], env=environment, capture_output=True, text=True, check=False)

    def panes(self, cluster: str) -> str:
        """What is on the screens of its tmux session."""
        panes = self.tmux("list-panes", "-s", "-t", f"smolcluster-{cluster}", "-F", "#{pane_id}").stdout.split()
        return "".join(self.tmux("capture-pane", "-p", "-J", "-S", "-200", "-t", pane).stdout for pane in panes)

    def windows(self, cluster: str) -> int:
        return len(self.tmux("list-windows", "-t", f"smolcluster-{cluster}").stdout.splitlines())

    def has_tmux(self) -> bool:
        return self.tmux("ls").returncode == 0


@dataclass
class Lab:
    """A few machines, and the one in front of which the user sits."""

    smol: Smol
    home: Path
    inside: str | None = None  # the network namespace that the user's machine is in
    boxes: dict[str, Box] = field(default_factory=dict)

    @property
    def authorized(self) -> Path:
        return self.home / ".ssh" / "id_ed25519.pub"

    def add(self, name: str, **options: Any) -> Box:
        environment = options.pop("environment", None)
        box = Box(name, self.home.parent / name, **options)
        box.start(self.authorized, environment=environment)
        self.boxes[name] = box
        self.trust(box)
        return box

    def trust(self, box: Box) -> None:
        with (self.home / ".ssh" / "known_hosts").open("a", encoding="utf-8") as file:
            file.write(box.known + "\n")

    def write(self, name: str = "lab", **said: Any) -> Path:
        path = self.home.parent / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**TINY, **said}), encoding="utf-8")
        return path

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "XDG_STATE_HOME": "", "XDG_CONFIG_HOME": "", "SSH_AUTH_SOCK": ""}

    def run(self, *arguments: str | Path, **options: Any) -> Ended:
        where = {"cwd": self.home.parent, "env": self.environment, "inside": self.inside}
        return self.smol.run(*arguments, **where, **options)

    def start(self, *arguments: str | Path) -> Running:
        return self.smol.start(*arguments, cwd=self.home.parent, env=self.environment, inside=self.inside)

    def close(self) -> None:
        """Whatever a test has left, by its process id: keepers first, so that they start nothing again."""
        for box in self.boxes.values():
            box.stop()
        found = [json.loads(path.read_text()) for path in self.home.parent.glob("*/**/processes/*/state.json")]
        for key in ("keeper", "pid"):
            for pid in (state.get(key) for state in found):
                if pid and str(self.home.parent) in _cmdline_and_folder(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        for box in self.boxes.values():  # screens stay when their processes have ended
            box.tmux("kill-server")


def _cmdline_and_folder(pid: int) -> str:
    """Is it one of ours, or another that has the number now?"""
    try:
        return f"{Path(f'/proc/{pid}/cmdline').read_bytes()!r} {Path(f'/proc/{pid}/cwd').readlink()}"
    except OSError:
        return ""


@contextlib.contextmanager
def lab(smol: Smol, folder: Path, *, inside: str | None = None) -> Iterator[Lab]:
    skip_without_sshd()
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    make_key(home / ".ssh" / "id_ed25519")
    made = Lab(smol, home, inside)
    try:
        yield made
    finally:
        made.close()
