"""What the containers of a job do, without containers: their commands, in their environments, as processes on loopback.

There is no cluster here. `Pod` does what Kubernetes would: it fills in variables, hands the files of the ConfigMap over and
gives a pod its index. Paths of a container become paths of the test, names of hosts 127.0.0.1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.command import GATED_GPT, TINY, Process, Smol, children, last_step, read_summary
from tests.places import eventually, free_ports

from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.engine.elastic.history import check, read

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc"),
]
PATIENCE_S = 120.0
STEPS = 20
SIZE = (*TINY, "training.eval_steps=0", "training.checkpoint_steps=5", "cluster.standby=false")


class Pods:
    """Processes in the place of containers, each in a group of its own, which ends as a container does: all at once."""

    def __init__(self, folder: Path, cache: Path, stack: ExitStack) -> None:
        self.folder, self._cache, self._stack = folder, cache, stack
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "smolcluster").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m smolcluster "$@"\n')
        (bin_folder / "smolcluster").chmod(0o755)
        self._path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        first = free_ports(3)
        self._names = {port: str(first + n) for n, port in enumerate(("29500", "65432", "29400"))}

    def here(self, word: str) -> str:
        """A word of a container's command, in the terms of this machine."""
        word = re.sub(r"(?<![\w.])/(?=data\b|etc/smolcluster\b)", f"{self.folder}/", word)
        word = re.sub(r"^[a-z][a-z0-9.-]*(?=:\d+$)", "127.0.0.1", word)  # the address of a server
        for port, free in self._names.items():
            word = re.sub(rf"(?<=:){port}$|^{port}$", free, word)
        return word

    def start(self, words: list[str], env: dict[str, str], *, name: str) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SMOLCLUSTER_", "SLURM_"))}
        given = kept | {k: self.here(v) for k, v in env.items()} | {"PATH": self._path, "CUDA_VISIBLE_DEVICES": ""}
        given |= {"SMOLCLUSTER_CACHE": str(self._cache), "GO": str(self.folder / "go")}
        command = [self.here(word) for word in words]
        if "--master-addr" in command:
            command[command.index("--master-addr") + 1] = "127.0.0.1"
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=given, stdout=log, stderr=log, start_new_session=True)
        self._stack.callback(self.kill, process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """All of its processes are gone at once: also those that its children have started in groups of their own."""
        if process.poll() is None:
            below = descendants(process.pid)
            process.kill()
            for each in below:
                each.kill()
        process.wait()

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in self.folder.glob("*.log"))


def descendants(pid: int) -> list[Process]:
    return [each for child in children(pid) for each in (*descendants(child.pid), child)]


@pytest.fixture
def pods(tmp_path: Path, cache: Path) -> Iterator[Pods]:
    with ExitStack() as stack:
        (tmp_path / "data").mkdir()
        yield Pods(tmp_path, cache, stack)


class Kubernetes:
    def __init__(self, pods: Pods, stream: str, *, token: str = "") -> None:
        self._pods, self._token = pods, token
        self.documents = list(yaml.safe_load_all(stream))
        for document in self.documents:
            if document["kind"] == "ConfigMap":
                folder = pods.folder / "etc/smolcluster"
                folder.mkdir(parents=True)
                for name, text in document["data"].items():
                    (folder / name).write_text(text, encoding="utf-8")

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {d["metadata"]["name"]: d["spec"] for d in self.documents if d["kind"] == "Job"}

    def start(self, job: str, index: int = 0) -> subprocess.Popen[bytes]:
        spec = self.jobs()[job]
        (container,) = spec["template"]["spec"]["containers"]
        env = {"JOB_COMPLETION_INDEX": str(index)} if spec.get("completionMode") == "Indexed" else {}
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            value = self._token if "secretKeyRef" in source else "node-1" if source else variable["value"]
            env[variable["name"]] = value

        def filled(word: str) -> str:
            return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)

        words = [filled(word) for word in (*container["command"], *container["args"])]
        return self._pods.start(words, env, name=f"{job}-{index}")


def ended(processes: list[subprocess.Popen[bytes]], pods: Pods) -> list[int]:
    def statuses() -> list[int] | None:
        found = [process.poll() for process in processes]
        return None if None in found else [int(status or 0) for status in found]

    try:
        return eventually(lambda: [statuses()] if statuses() else None, timeout_s=PATIENCE_S, what="the end")[0] or []
    except AssertionError:
        raise AssertionError(pods.logs()) from None


def written(smol: Smol, folder: Path, *words: str) -> str:
    return smol.run(*words, "--steps", str(STEPS), "--override", *SIZE, cwd=folder).ok().out


def test_pods_of_ranks(smol: Smol, pods: Pods) -> None:
    kubernetes = Kubernetes(pods, written(smol, pods.folder, "k8s", "gpt", "--strategy", "allreduce", "--nodes", "2"))
    run_dir = pods.folder / "data/runs/gpt-allreduce"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()  # a pod that came to nothing was here before
    (run_dir / "metrics.jsonl").write_text('{"step": 7000, "rank": 0}\n')
    ranks = [kubernetes.start("gpt-allreduce", index) for index in (0, 1)]
    assert ended(ranks, pods) == [0, 0], pods.logs()
    summary = read_summary(run_dir)
    assert (summary["status"], summary["world_size"], summary["steps"]) == ("finished", 2, STEPS)
    assert last_step(run_dir) == STEPS


@pytest.mark.slow
def test_a_server_that_is_lost_with_its_pod(smol: Smol, pods: Pods) -> None:
    """Its workers wait for the next one, which goes on from the journal."""
    (pods.folder / "tasks.py").write_text(GATED_GPT, encoding="utf-8")
    task = f"{pods.folder}/tasks.py:Gated"  # a path of the image, as far as the command can know
    stream = written(smol, pods.folder, "k8s", task, "--strategy", "syncps", "--nodes", "2")
    kubernetes = Kubernetes(pods, stream, token=new_token())
    run_dir = pods.folder / "data/runs/gated-syncps"
    server, *workers = [kubernetes.start("gated-syncps-server")] + [
        kubernetes.start("gated-syncps-worker", index) for index in (0, 1)
    ]
    eventually(lambda: last_step(run_dir) >= 2, timeout_s=PATIENCE_S, what="two steps")
    pods.kill(server)
    reached = last_step(run_dir)
    assert reached < STEPS
    assert [worker.poll() for worker in workers] == [None, None]
    (pods.folder / "go").touch()
    server = kubernetes.start("gated-syncps-server")
    assert ended([server, *workers], pods) == [0, 0, 0], pods.logs()
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert check(read(run_dir / "history.jsonl")) == []
    assert re.search(rf"{STEPS} steps from \d+", pods.logs())


@pytest.mark.slow
def test_pods_with_several_workers(smol: Smol, pods: Pods) -> None:
    words = ("k8s", "gpt", "--strategy", "fsdp", "--nodes", "1", "--workers-per-node", "2")
    stream = written(smol, pods.folder, *words).replace("gpt-fsdp-0.gpt-fsdp", "127.0.0.1")
    pod = Kubernetes(pods, stream).start("gpt-fsdp")
    assert ended([pod], pods) == [0], pods.logs()
    assert read_summary(pods.folder / "data/runs/gpt-fsdp")["world_size"] == 2


def test_containers_of_a_compose_file(smol: Smol, pods: Pods) -> None:
    text = written(smol, pods.folder, "compose", "gpt", "--strategy", "edp", "--workers", "2")
    found = yaml.safe_load(text.replace("$$", "$"))
    (pods.folder / "etc/smolcluster").mkdir(parents=True)  # in the memory of a container
    token = pods.folder / "token"
    token.touch(mode=0o600)
    token.write_text(new_token())
    started = []
    for name, service in found["services"].items():
        env = service["environment"] | {"SMOLCLUSTER_TOKEN_FILE": str(token)}
        started.append(pods.start([*service["entrypoint"], *service["command"]], env, name=name))
    assert ended(started, pods) == [0, 0, 0], pods.logs()
    summary = read_summary(pods.folder / "data/runs/gpt-edp")
    assert (summary["status"], summary["strategy"], summary["steps"]) == ("finished", "edp", STEPS)
