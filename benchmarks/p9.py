"""P9: kill -9 one of 4 workers: time to the next step that counts.

Work: a GPT of 0.8 M parameters, 4 samples per worker and step, 4 workers, each in a process with one thread.

Compared: torchrun with DDP (gloo) and a checkpoint every 5 steps, as one agent with 4 workers (no agent has to find the others
again) and as 4 agents with one worker each, as on 4 machines; against elastic allreduce, syncps, edp and fsdp stage 1, each
started by `smolcluster train`, whose launcher starts the killed worker again. Beside them, without a target, what torchrun does
done by us: fsdp stage 3 on the mesh plane with `--elastic`, with and without processes that stand by. torchrun has the settings
that let it re-form soonest: a look at its workers every 0.1 s, local addresses, all agents known to come back.

How: when training runs, one worker is killed, in turn another one, and the clock starts. Ours: the first step in history.jsonl
that was committed without that worker. torchrun: the first step taken after all were started again, although it may be one
that was done before; how long until a step that is new is kept beside it. How long until the worker that was started again
counts is also kept (torchrun: the same as the next step).

Target: at most 1 s, and 1.2 times what the state takes over a plain loopback socket.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Measured, Session, Target, Variant
from benchmarks.harness.processes import descendants, environment_of, started
from benchmarks.harness.workload import Shape
from benchmarks.p13 import smolcluster_command
from smolcluster.engine.elastic import history
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.local.processes import WORKER_MARK
from smolcluster.observe.jsonl import read_metrics

EXAMPLE = "python -m benchmarks p9 --only syncps edp"
SHAPE = Shape("0.8m", 128, 4, 4, 64, 4)
WORKERS = 4
STATE_BYTES = 3 * 4 * 834_304  # weights and two moments
CHECKPOINT_EVERY = 5
RUN_FIRST = 12  # steps before the kill
WAIT_S = 240.0
ATTEMPTS = 5
STANDBY_STEPS = 200  # until processes that stand by have imported what they need
POLL_S = 0.1  # what is waited for has its time in a file
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "syncps": ("syncps", {}),
    "edp": ("edp", {}),
    "fsdp 1": ("fsdp", {"strategy.fsdp_stage": 1}),
}
RESTARTED = {"fsdp 3, restarted": True, "fsdp 3, no standby": False}
PEERS = {"torchrun, 1 agent": 1, "torchrun, 4 agents": WORKERS}

Figures = dict[str, dict[str, list[float]]]  # what is kept beside the samples -> variant -> samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=[*OURS, *RESTARTED], nargs="+", help="of ours (default: all; quick: syncps)")
    parser.add_argument(
        "--agents", type=int, choices=[1, WORKERS], nargs="+", help="of torchrun (default: both; quick: 1)"
    )


def run(session: Session, arguments: argparse.Namespace) -> None:
    if not Path("/proc/self/environ").is_file():
        raise UserError("p9 finds the processes of a run in /proc; it needs Linux")
    names = arguments.only or (["syncps"] if session.quick else [*OURS, *RESTARTED])
    agents = arguments.agents or ([1] if session.quick else list(PEERS.values()))
    transfer_s = transfer_seconds(STATE_BYTES)
    limit = 1.0 + 1.2 * transfer_s
    session.parameters = {**SHAPE.overrides(), "workers": WORKERS, "state_bytes": STATE_BYTES, "transfer_s": transfer_s}
    kept: Figures = {"counts again": {}, "a new step": {}}
    measured = session.compare(
        Comparison(
            name=f"kill -9 one of {WORKERS} workers: time to the next step that counts",
            variants=[
                *(
                    Variant(name=n, run=_torchrun(n, kept), role="peer")
                    for n, count in PEERS.items()
                    if count in agents
                ),
                *(
                    Variant(name=n, run=_ours(n, kept), target=Target(limit=limit, of="median"))
                    for n in names
                    if n in OURS
                ),
                *(Variant(name=n, run=_restarted(n, kept), role="extra") for n in names if n in RESTARTED),
            ],
            warmup=0,
        )
    )
    _add_figures(measured, kept)


def _add_figures(measured: Measured, kept: Figures) -> None:
    measured.comparison.parameters.update(kept)
    for what, samples in kept.items():
        for name, values in samples.items():
            print(f"  {name:<20} {what}: {statistics.median(values):.2f} s", flush=True)
    print(flush=True)


def transfer_seconds(nbytes: int) -> float:
    """So many bytes over a plain socket on this machine: the median of five."""

    def send(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.sendall(bytes(nbytes))

    seconds = []
    buffer = memoryview(bytearray(1 << 20))
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = threading.Thread(target=send, args=(listener,))
            sender.start()
            started = time.perf_counter()
            with socket.create_connection(listener.getsockname()) as connection:
                while connection.recv_into(buffer):
                    pass
            seconds.append(time.perf_counter() - started)
            sender.join()
    return statistics.median(seconds)


# Ours


def _ours(name: str, kept: Figures) -> Callable[[], float]:
    turns = itertools.count(1)

    def sample() -> float:
        next_s, again_s = recover(*OURS[name], victim=next(turns) % WORKERS)
        kept["counts again"].setdefault(name, []).append(again_s)
        return next_s

    return sample


def train_command(strategy: str, run_dir: Path, overrides: dict[str, Any], *more: str) -> list[str]:
    """`smolcluster train` for longer than anybody waits."""
    overrides = {
        **{key: value for key, value in SHAPE.overrides().items() if value is not None},
        "model.ff_dim": 4 * SHAPE.model_dim,  # the built-in file names another
        "training.device": "cpu",
        "training.eval_steps": 0,
        **overrides,
    }
    command = [*smolcluster_command(), "train", "gpt", "--strategy", strategy, "--workers", str(WORKERS), *more]
    command += ["--steps", "100000", "--run-dir", str(run_dir)]
    return [*command, "--override", *(f"{key}={value}" for key, value in overrides.items())]


def recover(strategy: str, overrides: dict[str, Any], *, victim: int) -> tuple[float, float]:
    """Seconds from the kill to a step without the victim, and to one that it contributes to again."""
    overrides = {"training.checkpoint_steps": 0, "cluster.plane": "elastic", **overrides}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with started(train_command(strategy, run_dir, overrides)) as process:

            def commits() -> list[dict[str, Any]]:
                return [line for line in history.read(run_dir / "history.jsonl") if line["kind"] == "commit"]

            wait_until(lambda: len(commits()) >= RUN_FIRST, what=f"{strategy} to train", process=process)
            pid = next(pid for pid in descendants(process.pid) if environment_of(pid).get(WORKER_MARK) == str(victim))
            before = len(commits())
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: _again(commits(), before, victim) is not None, what="its return", process=process)
            lines = commits()
    again = _again(lines, before, victim)
    assert again is not None
    gone = next(line for line in lines[before:] if line["time"] >= killed and victim not in _ranks(line))
    return gone["time"] - killed, again - killed


def _ranks(commit: dict[str, Any]) -> set[int]:
    return {part["rank"] for part in commit["contributors"]}


def _again(commits: Sequence[dict[str, Any]], before: int, victim: int) -> float | None:
    """When a new instance of the victim first counted."""
    former = {part["instance"] for commit in commits[:before] for part in commit["contributors"]}
    for commit in commits[before:]:
        for part in commit["contributors"]:
            if part["rank"] == victim and part["instance"] not in former:
                return float(commit["time"])
    return None


# Ours, as torchrun does it


def _restarted(name: str, kept: Figures) -> Callable[[], float]:
    turns = itertools.count(1)

    def sample() -> float:
        next_s, new_s = start_again(standby=RESTARTED[name], victim=next(turns) % WORKERS)
        kept["a new step"].setdefault(name, []).append(new_s)
        return next_s

    return sample


def start_again(*, standby: bool, victim: int) -> tuple[float, float]:
    """Seconds from the kill to the next step, and to one that was not done before."""
    overrides = {"training.checkpoint_steps": CHECKPOINT_EVERY, "logging.log_interval": 1, "cluster.standby": standby}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = train_command("fsdp", run_dir, overrides, "--elastic", f"1:{WORKERS}", "--max-restarts", "1")
        with started(command) as process:

            def steps() -> list[tuple[float, int]]:
                rows = read_metrics(run_dir / "metrics.jsonl")
                return [(row["time"], row["step"]) for row in rows if row["rank"] == 0]

            def lives(rank: int) -> list[tuple[float, int]]:
                """When each process of this rank began, and its id."""
                (log,) = (run_dir / "logs").glob(f"worker-rank{rank}-*.log")
                found = re.findall(r'"time": "(.*?)Z".*starts as process (\d+)', log.read_text(encoding="utf-8"))
                return [(datetime.fromisoformat(f"{when}+00:00").timestamp(), int(pid)) for when, pid in found]

            wait_until(
                lambda: len(steps()) >= RUN_FIRST + STANDBY_STEPS * standby, what="fsdp to train", process=process
            )
            done = max(step for _, step in steps()) + 1  # one may be under way
            killed = time.time()
            os.kill(lives(victim)[-1][1], signal.SIGKILL)
            wait_until(lambda: len(lives(0)) > 1, what="the restart", process=process)
            again = lives(0)[-1][0]
            wait_until(lambda: any(t > again and s > done for t, s in steps()), what="a new step", process=process)
            lines = [(t, s) for t, s in steps() if t > again]
    return lines[0][0] - killed, next(t for t, s in lines if s > done) - killed


# The peer


def _torchrun(name: str, kept: Figures) -> Callable[[], float]:
    turns = itertools.count(1)

    def sample() -> float:
        victim = next(turns) % WORKERS
        for attempt in itertools.count(1):
            try:
                next_s, new_s = restart(agents=PEERS[name], victim=victim)
                break
            except SmolclusterError as error:
                # It picks a port long before it binds it; on a busy machine another process may have it by then.
                if attempt == ATTEMPTS or "EADDRINUSE" not in str(error):
                    raise
        kept["a new step"].setdefault(name, []).append(new_s)
        return next_s

    return sample


def restart(*, agents: int, victim: int) -> tuple[float, float]:
    """Seconds from the kill to the next step, and to one that was not done before."""
    numbers = (SHAPE.model_dim, SHAPE.num_layers, SHAPE.num_heads, SHAPE.max_seq_len, SHAPE.batch_size)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.1"]
        if agents == 1:
            command += ["--standalone", "--nproc-per-node", str(WORKERS)]
        else:
            command += ["--nnodes", str(agents), "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
            command += ["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]
        command += ["-m", "benchmarks.peers.elastic_ddp", folder, str(CHECKPOINT_EVERY), *map(str, numbers)]
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        processes = [stack.enter_context(started(command, environ=environ)) for _ in range(agents)]

        def steps() -> list[tuple[float, int, int]]:
            """Time, step and process of each."""
            with contextlib.suppress(FileNotFoundError):
                lines = (Path(folder) / "steps.txt").read_text(encoding="ascii").splitlines()
                return [(float(when), int(step), int(pid)) for when, step, pid in map(str.split, lines)]
            return []

        wait_until(lambda: len(steps()) >= RUN_FIRST, what="torchrun to train", process=processes[0])
        everybody = [pid for process in processes for pid in descendants(process.pid)]
        pid = next(pid for pid in everybody if environment_of(pid).get("RANK") == str(victim))
        before = steps()
        killed = time.time()
        os.kill(pid, signal.SIGKILL)

        def after() -> list[tuple[float, int, int]]:
            former = {pid for _, _, pid in before}
            return [line for line in steps() if line[2] not in former]

        done = max(step for _, step, _ in before) + 1  # one may have been under way
        wait_until(lambda: any(step > done for _, step, _ in after()), what="torchrun's restart", process=processes[0])
        lines = after()
    return lines[0][0] - killed, next(when for when, step, _ in lines if step > done) - killed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until(question: Callable[[], bool], *, what: str, process: subprocess.Popen[bytes]) -> None:
    """Files are all there is to look at."""
    deadline = time.monotonic() + WAIT_S
    while not question():
        if process.poll() is not None:
            raise SmolclusterError(f"waited for {what}, and it ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise SmolclusterError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(POLL_S)
