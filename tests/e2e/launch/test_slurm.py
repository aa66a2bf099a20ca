"""Job files in a real Slurm: two nodes on this machine, daemons of our own, everything on loopback.

The nodes are called 127.0.0.1 and 127.0.0.2: names that, as on any cluster, lead to the node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.command import GATED_GPT, TINY, Smol, last_step, read_rows, read_summary
from tests.places import eventually, free_ports

from smolcluster.engine.elastic.history import check, read

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Slurm runs on Linux"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(not MISSING and os.getuid() != 0, reason="slurmd must be root to start jobs"),
]

PATIENCE_S = 120.0
STEPS = 20
NODES = "127.0.0.[1-2]"
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SIGNALING", "STAGE_OUT")
CONFIG = """
ClusterName=smolcluster-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    env: dict[str, str]
    folder: Path

    def call(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", "--oneliner", number)))

    def until(self, number: str, *states: str) -> dict[str, str]:
        """Until the job is in one of these; one that ends otherwise is an error at once."""

        def ask() -> dict[str, str] | None:
            job = self.job(number)
            ended = job["JobState"] not in (*UNDER_WAY, *states)
            assert not ended, f"{job['JobState']}, exit {job['ExitCode']}\n{self.output(job)}"
            return job if job["JobState"] in states else None

        return eventually(ask, timeout_s=PATIENCE_S, what=f"job {number} {' or '.join(states)}")

    def output(self, job: dict[str, str]) -> str:
        file = Path(job["StdOut"])
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    port = free_ports(3)
    first, last = port + 1, port + 2
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, port=port, folder=folder, nodes=NODES, first=first, last=last))
    version = subprocess.run(
        ["sbatch", "-V"], env={**os.environ, "SLURM_CONF": str(config)}, capture_output=True, text=True
    )
    found = re.search(r"(\d+)\.(\d+)", version.stdout)
    if found is not None and (int(found[1]), int(found[2])) >= (23, 11):  # or it would ask systemd for a control group
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    env = {
        "SLURM_CONF": str(config),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
        "GO": str(folder / "go"),
        "SMOLCLUSTER_CACHE": str(cache),
        "CUDA_VISIBLE_DEVICES": "",
    }
    munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    cluster = Cluster(env, folder)
    (folder / "tasks.py").write_text(GATED_GPT, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemon(folder, env, "munged", *munge))
        eventually((folder / "munge.socket").exists, what="munged")
        stack.enter_context(daemon(folder, env, "slurmctld", "-D", "-c"))
        for number in (1, 2):
            stack.enter_context(daemon(folder, env, "slurmd", "-D", "-N", f"127.0.0.{number}"))
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        eventually(lambda: cluster.call(*idle, check=False).strip() == "2", what="two idle nodes")
        stack.callback(empty, cluster)
        yield cluster


@contextlib.contextmanager
def daemon(folder: Path, env: dict[str, str], *words: str) -> Iterator[None]:
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def empty(cluster: Cluster) -> None:
    """No process of a job outlives the tests."""
    cluster.call("scancel", "--user=root", check=False)
    with contextlib.suppress(AssertionError):
        eventually(lambda: not cluster.call("squeue", "--noheader").strip(), timeout_s=20, what="an empty queue")
    cluster.call("scancel", "--user=root", "--signal=KILL", "--full", check=False)


def submit(smol: Smol, slurm: Cluster, name: str, strategy: str) -> str:
    """The number of a job that trains the small GPT on both nodes."""
    ended = smol.run(
        *("slurm", "tasks.py:Gated", "--strategy", strategy, "--nodes", "2", "--name", name, "--steps", str(STEPS)),
        *("--shared", slurm.folder, "--override", *TINY, "cluster.standby=false", "training.eval_steps=0"),
        *("training.checkpoint_steps=1000", "--submit"),
        cwd=slurm.folder,
        env=slurm.env,
    ).ok()
    number = re.search(r"Submitted batch job (\d+)", ended.out)
    return number[1]


def gate(slurm: Cluster, *, open: bool) -> None:
    go = Path(slurm.env["GO"])
    go.touch() if open else go.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def finished(smol: Smol, slurm: Cluster) -> Path:
    """A run of allreduce that nobody disturbs."""
    gate(slurm, open=True)
    number = submit(smol, slurm, "base", "allreduce")
    job = slurm.until(number, "COMPLETED")
    assert job["ExitCode"] == "0:0"
    assert "finished: allreduce, 2 workers" in slurm.output(job)
    return slurm.folder / "runs/base"


def test_allreduce_on_two_nodes(finished: Path) -> None:
    summary = read_summary(finished)
    assert (summary["status"], summary["strategy"], summary["world_size"]) == ("finished", "allreduce", 2)
    assert summary["steps"] == STEPS
    assert {row["rank"] for row in read_rows(finished)} == {0, 1}


@pytest.mark.slow
def test_a_cancelled_job_saves_and_is_submitted_again(smol: Smol, slurm: Cluster, finished: Path) -> None:
    gate(slurm, open=False)
    run_dir = slurm.folder / "runs/cancelled"
    number = submit(smol, slurm, "cancelled", "allreduce")
    eventually(lambda: last_step(run_dir) >= 2, timeout_s=PATIENCE_S, what="two steps")
    slurm.call("scancel", number)
    job = slurm.until(number, "CANCELLED")
    eventually((run_dir / "summary.json").exists, what="a summary")
    summary = read_summary(run_dir)
    assert summary["status"] == "interrupted", slurm.output(job)
    saved = summary["steps"]
    assert 2 <= saved < STEPS
    assert (run_dir / f"checkpoints/step-{saved:08}/manifest.json").is_file()

    gate(slurm, open=True)
    again = slurm.call("sbatch", "--parsable", str(slurm.folder / "cancelled.sbatch")).strip()
    job = slurm.until(again, "COMPLETED")
    assert f"resumed at step {saved}" in slurm.output(job)
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["weights_sha256"] == read_summary(finished)["weights_sha256"]  # as if nobody had cancelled it


def test_edp_saves_before_its_time_limit_and_is_queued_again(smol: Smol, slurm: Cluster) -> None:
    gate(slurm, open=False)
    run_dir = slurm.folder / "runs/limited"
    number = submit(smol, slurm, "limited", "edp")
    eventually(lambda: last_step(run_dir) >= 2, timeout_s=PATIENCE_S, what="two steps")
    token = run_dir.parent / f"limited-token-{number}"
    assert token.stat().st_mode & 0o777 == 0o600
    slurm.call("scancel", "--batch", "--signal=USR1", number)  # as Slurm warns of the time limit
    eventually(lambda: slurm.job(number)["Restarts"] == "1", timeout_s=PATIENCE_S, what="the job in the queue again")
    assert read_summary(run_dir)["status"] == "interrupted"
    saved = read_summary(run_dir)["steps"]
    assert 2 <= saved < STEPS

    gate(slurm, open=True)
    slurm.until(number, "PENDING")
    # Slurm would wait for two minutes. In the second in which it ended, nodes take the job for the one that was ended.
    slurm.call("scontrol", "update", f"jobid={number}", "StartTime=now+3")
    job = slurm.until(number, "COMPLETED")
    assert job["ExitCode"] == "0:0"
    summary = read_summary(run_dir)
    assert (summary["status"], summary["strategy"], summary["steps"]) == ("finished", "edp", STEPS)
    assert f"{STEPS} steps from {saved}" in slurm.output(job)
    assert check(read(run_dir / "history.jsonl")) == []
    assert not token.exists()
