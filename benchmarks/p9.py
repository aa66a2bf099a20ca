"""P9: kill -9 one of 4 workers: time to the next step that counts.

Work: a GPT of 0.8 M parameters, 4 samples per worker and step, 4 workers, each in a process with one thread.

Compared: torchrun with DDP (gloo) and a checkpoint every 5 steps, as one agent with 4 workers (no rendezvous between agents)
and as 4 agents with one worker each, as on 4 machines; against elastic allreduce, syncps, edp and fsdp stage 1, each started by
`smolcluster train`, whose launcher restarts the killed worker. Beside them, without a target, what torchrun does done by us:
fsdp stage 3 on the mesh plane with `--elastic`, with and without standby processes. torchrun has the settings with which it
re-forms soonest: it polls its workers every 0.1 s, has local addresses, and does not wait for further agents.

How: when training runs, one worker is killed, another one in each sample, and the clock starts. Ours: the first step in
history.jsonl that was committed without that worker. torchrun: the first step taken after all were restarted, even if it
repeats an earlier one; the time to the first new step is kept beside it. The time until the restarted worker contributes again
is kept too (torchrun: the same as the next step).

Target: at most 1 s, and 1.2 times the transfer of the state over a plain loopback socket.
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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Session, Target, Variant
from benchmarks.harness.processes import descendants, environment_of, free_port, started, train_command, wait_until
from benchmarks.harness.workload import Shape
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
ATTEMPTS = 5
STANDBY_STEPS = 200  # until standby processes have imported what they need
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "syncps": ("syncps", {}),
    "edp": ("edp", {}),
    "fsdp 1": ("fsdp", {"strategy.fsdp_stage": 1}),
}
RESTARTED = {"fsdp 3, restarted": True, "fsdp 3, no standby": False}
PEERS = {"torchrun, 1 agent": 1, "torchrun, 4 agents": WORKERS}


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
    target = Target(limit=limit, of="median")
    torchruns = {name: count for name, count in PEERS.items() if count in agents}
    measured = session.compare(
        Comparison(
            name=f"kill -9 one of {WORKERS} workers: time to the next step that counts",
            variants=[
                *(Variant(name=n, run=_each(restart, count), role="peer") for n, count in torchruns.items()),
                *(Variant(name=n, run=_each(recover, *OURS[n]), target=target) for n in names if n in OURS),
                *(Variant(name=n, run=_each(start_again, RESTARTED[n]), role="extra") for n in names if n in RESTARTED),
            ],
            warmup=0,
        )
    )
    for name, values in measured.beside.items():
        what = "counts again" if name in OURS else "a new step"
        measured.comparison.parameters.setdefault(what, {})[name] = values
        print(f"  {name:<20} {what}: {statistics.median(values):.2f} s", flush=True)
    print(flush=True)


def _each(measure: Callable[..., tuple[float, float]], *arguments: Any) -> Callable[[], tuple[float, float]]:
    """Kill another worker in every sample."""
    victims = itertools.count(1)
    return lambda: measure(*arguments, victim=next(victims) % WORKERS)


def transfer_seconds(nbytes: int) -> float:
    """Return the time of so many bytes over a plain socket on this machine: the median of five."""

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


def _command(strategy: str, run_dir: Path, overrides: dict[str, Any], *options: str) -> list[str]:
    """Return `smolcluster train` with more steps than any sample takes."""
    usual = {
        **SHAPE.overrides(),
        "model.ff_dim": 4 * SHAPE.model_dim,  # the built-in file has another one
        "training.device": "cpu",
        "training.eval_steps": 0,
    }
    common = ("--strategy", strategy, "--workers", str(WORKERS), "--steps", "100000")
    return train_command(run_dir, {**usual, **overrides}, *common, *options)


def recover(strategy: str, overrides: dict[str, Any], victim: int) -> tuple[float, float]:
    """Return the seconds from the kill to a step without the victim, and to one to which it contributes again."""
    overrides = {"training.checkpoint_steps": 0, "cluster.plane": "elastic", **overrides}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with started(_command(strategy, run_dir, overrides)) as process:

            def commits() -> list[dict[str, Any]]:
                return [line for line in history.read(run_dir / "history.jsonl") if line["kind"] == "commit"]

            wait_until(lambda: len(commits()) >= RUN_FIRST, process, what=f"{strategy} to train")
            pid = next(pid for pid in descendants(process.pid) if environment_of(pid).get(WORKER_MARK) == str(victim))
            before = len(commits())
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: _again(commits(), before, victim) is not None, process, what="its return")
            lines = commits()
    again = _again(lines, before, victim)
    assert again is not None
    gone = next(line for line in lines[before:] if line["time"] >= killed and victim not in _ranks(line))
    return gone["time"] - killed, again - killed


def _ranks(commit: dict[str, Any]) -> set[int]:
    return {part["rank"] for part in commit["contributors"]}


def _again(commits: Sequence[dict[str, Any]], before: int, victim: int) -> float | None:
    """Return when a new instance of the victim first counted."""
    former = {part["instance"] for commit in commits[:before] for part in commit["contributors"]}
    for commit in commits[before:]:
        for part in commit["contributors"]:
            if part["rank"] == victim and part["instance"] not in former:
                return float(commit["time"])
    return None


# Ours, as torchrun does it


def start_again(standby: bool, victim: int) -> tuple[float, float]:
    """Return the seconds from the kill to the next step, and to one that had not been done before."""
    overrides = {"training.checkpoint_steps": CHECKPOINT_EVERY, "logging.log_interval": 1, "cluster.standby": standby}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = _command("fsdp", run_dir, overrides, "--elastic", f"1:{WORKERS}", "--max-restarts", "1")
        with started(command) as process:

            def steps() -> list[tuple[float, int]]:
                rows = read_metrics(run_dir / "metrics.jsonl")
                return [(row["time"], row["step"]) for row in rows if row["rank"] == 0]

            def lives(rank: int) -> list[tuple[float, int]]:
                """Return the start time and the id of each process of this rank."""
                (log,) = (run_dir / "logs").glob(f"worker-rank{rank}-*.log")
                found = re.findall(r'"time": "(.*?)Z".*starts as process (\d+)', log.read_text(encoding="utf-8"))
                return [(datetime.fromisoformat(f"{when}+00:00").timestamp(), int(pid)) for when, pid in found]

            first = RUN_FIRST + STANDBY_STEPS * standby
            wait_until(lambda: len(steps()) >= first, process, what="fsdp to train")
            done = max(step for _, step in steps()) + 1  # one may be under way
            killed = time.time()
            os.kill(lives(victim)[-1][1], signal.SIGKILL)
            wait_until(lambda: len(lives(0)) > 1, process, what="the restart")
            again = lives(0)[-1][0]
            wait_until(lambda: any(t > again and s > done for t, s in steps()), process, what="a new step")
            lines = [(t, s) for t, s in steps() if t > again]
    return lines[0][0] - killed, next(t for t, s in lines if s > done) - killed


# The peer


def restart(agents: int, victim: int) -> tuple[float, float]:
    """Measure torchrun. It picks a port long before it binds it: on a busy machine another process may have it by then."""
    attempts = ATTEMPTS
    while True:
        attempts -= 1
        try:
            return _restart(agents, victim)
        except SmolclusterError as error:
            if attempts == 0 or "EADDRINUSE" not in str(error):
                raise


def _restart(agents: int, victim: int) -> tuple[float, float]:
    """Return the seconds from the kill to the next step, and to one that had not been done before."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.1"]
        if agents == 1:
            command += ["--standalone", "--nproc-per-node", str(WORKERS)]
        else:
            command += ["--nnodes", str(agents), "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
            command += ["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]
        command += ["-m", "benchmarks.peers.elastic_ddp", folder, str(CHECKPOINT_EVERY), *SHAPE.arguments()]
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        processes = [stack.enter_context(started(command, environ=environ)) for _ in range(agents)]

        def steps() -> list[tuple[float, int, int]]:
            """Return time, step and process of each."""
            with contextlib.suppress(FileNotFoundError):
                lines = (Path(folder) / "steps.txt").read_text(encoding="ascii").splitlines()
                return [(float(when), int(step), int(pid)) for when, step, pid in map(str.split, lines)]
            return []

        wait_until(lambda: len(steps()) >= RUN_FIRST, processes[0], what="torchrun to train")
        pids = [pid for process in processes for pid in descendants(process.pid)]
        pid = next(pid for pid in pids if environment_of(pid).get("RANK") == str(victim))
        before = steps()
        killed = time.time()
        os.kill(pid, signal.SIGKILL)

        def after() -> list[tuple[float, int, int]]:
            former = {pid for _, _, pid in before}
            return [line for line in steps() if line[2] not in former]

        done = max(step for _, step, _ in before) + 1  # one may have been under way
        wait_until(lambda: any(step > done for _, step, _ in after()), processes[0], what="torchrun's restart")
        lines = after()
    return lines[0][0] - killed, next(when for when, step, _ in lines if step > done) - killed
