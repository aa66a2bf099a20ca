"""`train --elastic`: workers are killed, machines leave and come, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.network import Network
from safetensors.torch import load_file
from tests.e2e.command import TINY, Smol, children, read_rows, read_summary
from tests.places import eventually, separate_hosts
from tests.world import TASKS, run_world

from smolcluster.comm.elastic.transport.security import new_token

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc"),
]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


# One machine


def test_a_killed_worker_changes_no_bit(smol: Smol, folder: Path) -> None:
    overrides: dict[str, Any] = {
        **{"model.model_dim": 32, "model.num_layers": 2, "model.num_heads": 2, "model.max_seq_len": 32},
        **{"model.dropout": 0.1, "training.eval_steps": 0, "training.eval_samples": 8, "training.checkpoint_steps": 5},
        **{"training.steps": 40, "training.batch_size": 4, "training.device": "cpu", "logging.log_interval": 1},
    }
    calm = run_world(2, folder / "calm", overrides, task="SlowDoubleGPT", strategy="fsdp", environ={"SLOW_UNTIL": "/"})

    run_dir, free = folder / "runs" / "killed", folder / "free"
    command = ["train", f"{TASKS}:SlowDoubleGPT", "--strategy", "fsdp", "--workers", "2", "--elastic", "1:2"]
    command += ["--run-dir", "runs/killed", "--override", "cluster.standby=false"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    running = smol.start(*command, cwd=folder, env={"SLOW_UNTIL": str(free)})
    running.until(lambda: "checkpoint of step 5 saved" in running.output, what="a checkpoint", timeout_s=240)
    host = os.uname().nodename
    log = (run_dir / "logs" / f"worker-rank1-{host}.log").read_text(encoding="utf-8")
    os.kill(int(re.findall(r"starts as process (\d+)", log)[-1]), signal.SIGKILL)
    free.touch()
    ended = running.end(timeout_s=240).ok()

    assert ended.err == ""
    assert f"warning: rank 1 on {host} died: killed by SIGKILL; restarting all workers\n" in ended.out
    assert "rank 0: resumed at step " in ended.out
    summary = read_summary(run_dir)
    assert (summary["status"], summary["restarts"], summary["world_size"]) == ("finished", 1, 2)
    assert summary["weights_sha256"] == calm.summary["weights_sha256"]
    rows = Counter((row["rank"], row["step"]) for row in read_rows(run_dir))
    assert max(rows.values()) == 1
    assert [step for step in range(1, 41) if (0, step) not in rows] == []


# Several machines


@pytest.fixture
def network() -> Iterator[Network]:
    with separate_hosts(3) as network:
        yield network


class Cluster:
    """Launchers on hosts of their own. Each has a folder; only the first one's has the run."""

    def __init__(self, network: Network, folder: Path, env: dict[str, str]) -> None:
        self.network, self.folder, self.env = network, folder, env
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int, *command: str) -> None:
        place = self.folder / f"host-{host}"
        place.mkdir(exist_ok=True)
        with (place / "out").open("ab") as out:
            # In a group of its own: what is killed there is all of that machine.
            self.processes[host] = self.network.popen(
                host,
                [sys.executable, *command],
                env=self.env,
                cwd=place,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def output(self, host: int = 0) -> str:
        return (self.folder / f"host-{host}" / "out").read_text(encoding="utf-8", errors="replace")

    def until(self, text: str, host: int = 0, *, timeout_s: float = 240.0) -> None:
        def there() -> bool:
            assert self.processes[host].poll() is None or text in self.output(host), self.output(host)
            return text in self.output(host)

        eventually(there, timeout_s=timeout_s, what=f"{text!r} on host {host}")

    def lose(self, host: int) -> None:
        """The machine is gone, with all that ran on it."""
        pid = self.processes[host].pid
        workers = children(pid)
        os.kill(pid, signal.SIGKILL)
        for worker in workers:
            worker.kill()
        self.processes[host].wait()

    def close(self) -> None:
        for host, process in self.processes.items():
            if process.poll() is None:
                self.lose(host)


@pytest.fixture
def cluster(network: Network, smol: Smol, tmp_path: Path) -> Iterator[Cluster]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    cluster = Cluster(
        network,
        tmp_path,
        {**smol.env, "PYTHONPATH": path, "SLOW_UNTIL": str(tmp_path / "free"), "SMOLCLUSTER_TOKEN": new_token()},
    )
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_machines_leave_and_come_and_the_curve_stays(cluster: Cluster, tmp_path: Path) -> None:
    """Three machines, two, three again. Every step reads the same samples: in fp64 only the order of sums differs."""
    overrides = {
        **{"model.model_dim": 32, "model.num_layers": 2, "model.num_heads": 2, "model.max_seq_len": 32},
        **{"model.ff_dim": 64, "training.eval_steps": 0, "training.checkpoint_steps": 2, "training.steps": 60},
        **{"training.device": "cpu", "training.eval_samples": 8, "logging.log_interval": 1},
    }
    where = f"{cluster.network.address(0)}:29400"
    command = ["-m", "smolcluster", "train", f"{TASKS}:SlowDoubleGPT", "--strategy", "fsdp", "--elastic", "2:3"]
    command += ["--rdzv-endpoint", where, "--run-dir", "run", "--override", "cluster.standby=false"]
    command += [f"{key}={value}" for key, value in overrides.items()] + ["training.batch_size=2"]
    for host in range(3):
        cluster.start(host, *command)
    cluster.until("checkpoint of step 2 saved")
    cluster.lose(2)
    cluster.until("is gone; restarting all workers")
    cluster.until("resumed at step")
    cluster.start(2, *command)
    cluster.until("more workers have joined; restarting all workers")
    (tmp_path / "free").touch()
    for host in range(3):
        assert cluster.processes[host].wait(240) == 0, cluster.output(host)

    run_dir = tmp_path / "host-0" / "run"
    summary = read_summary(run_dir)
    assert (summary["status"], summary["restarts"], summary["world_size"]) == ("finished", 2, 3)
    alone = run_world(
        1, tmp_path / "alone", overrides | {"training.batch_size": 6}, task="DoubleGPT", strategy="single"
    )
    for host in range(3):
        rows = Counter((row["rank"], row["step"]) for row in read_rows(tmp_path / f"host-{host}" / "run"))
        assert max(rows.values()) == 1, f"host {host} has rows twice"
    expected = load_file(Path(alone.summary["checkpoint"]) / "weights.safetensors")
    found = load_file(tmp_path / "host-0" / summary["checkpoint"] / "weights.safetensors")
    assert all((found[name] - tensor).abs().max() < 1e-9 for name, tensor in expected.items())


def scripted(cluster: Cluster, host: int, run_dir: Path, size: str, where: str) -> None:
    cluster.start(host, "-m", "tests.unit.scripted_launcher", str(run_dir), size, "1", where, "2")


@pytest.fixture
def script(cluster: Cluster, tmp_path: Path) -> Path:
    """Workers that log a step and wait."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    lives = {"worker-0": [["listen", "row 1", "hang"]], "worker-1": [["row 1", "note up", "hang"]]}
    (run_dir / "script.json").write_text(json.dumps(lives))
    cluster.env["SCRIPT_FOLDER"] = str(tmp_path)
    return run_dir


def test_a_machine_that_is_stopped_leaves_and_the_others_go_on(cluster: Cluster, script: Path) -> None:
    where = f"{cluster.network.address(0)}:29400"
    goes_on = [["listen", "row 1", "await left", "leave"], ["listen", "row 2", "finish"]]
    leaves = [["row 1", "note up", "stop?", "note left", "leave"]]
    (script / "script.json").write_text(json.dumps({"worker-0": goes_on, "worker-1": leaves}))
    for host in (0, 1):
        scripted(cluster, host, script, "1:2", where)
    eventually((script / "up").exists, what="both to work")
    cluster.processes[1].send_signal(signal.SIGINT)
    assert cluster.processes[1].wait(300) == 130
    assert "smolcluster: interrupted; this machine has left" in cluster.output(1)
    assert cluster.processes[0].wait(300) == 0
    assert "has left; restarting all workers" in cluster.output(0)
    assert read_summary(script)["restarts"] == 1


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_without_the_machine_that_leads_the_others_end(cluster: Cluster, script: Path, how: str) -> None:
    where = f"{cluster.network.address(0)}:29400"
    for host in (0, 1):
        scripted(cluster, host, script, "2:2", where)
    eventually((script / "up").exists, what="both to work")
    cluster.network.cut(0) if how == "cut" else cluster.lose(0)
    assert cluster.processes[1].wait(300) == 1
    words = "sent no heartbeat for 2 s" if how == "cut" else "closed its connection"
    assert f"smolcluster: the leader at --rdzv-endpoint {words}; the run has ended\n" in cluster.output(1)
    if how == "cut":
        # The one that leads waits for others; it can be stopped.
        cluster.processes[0].send_signal(signal.SIGINT)
        assert cluster.processes[0].wait(300) == 130


# Under torchrun


def test_ranks_that_torchrun_starts_again_go_on_by_themselves(smol: Smol, folder: Path) -> None:
    overrides = (*TINY, "training.eval_steps=0", "training.checkpoint_steps=5")
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = ("train", "--run-dir", "runs/torchrun", "--override", *overrides)
    smol.run(*command, "--steps", "10", cwd=folder, env=place).ok()
    again = smol.run(*command, "--steps", "12", cwd=folder, env=place)
    assert again.status == 2
    assert "already holds a run" in again.err
    again = smol.run(*command, "--steps", "12", cwd=folder, env=place | {"TORCHELASTIC_RESTART_COUNT": "1"}).ok()
    assert "resumed at step 10" in again.out
    assert read_summary(folder / "runs" / "torchrun")["steps"] == 12
