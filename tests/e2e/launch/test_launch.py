"""Launching and dying: whatever ends a run, it ends quickly, says why, leaves no process behind, and can go on later."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.command import TINY, Beside, Process, Running, Smol, children, read_rows, read_summary
from tests.places import at_most, eventually, free_port

from smolcluster.comm.addresses import connect_tcp

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc")

STEPS = 120
TASKS = '''
import torch
import torch.distributed as dist
from torch import nn
from smolcluster import Task


class Endless(Task):
    def model(self):
        return nn.Linear(4, 1)

    def train_data(self):
        return (torch.randn(4096, 4),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


class Cursed(Endless):
    """Rank 1 fails in its third step."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            raise ValueError("the third batch is cursed")
        return super().loss(model, batch)
'''
FOREVER = ("--steps", "1000000", "--override", "logging.log_interval=1", "training.device=cpu", "training.batch_size=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch")
    (path / "tasks.py").write_text(TASKS, encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def beside(smol: Smol, folder: Path, request: pytest.FixtureRequest) -> Iterator[Beside]:
    jobs = {
        "test_one_worker_through_a_hard_life_ends_bitwise_the_same": lambda: hard_life(
            smol, folder, workers=1, number=signal.SIGTERM
        ),
        "test_an_interrupt_before_the_first_step_is_heard": lambda: interrupt_early(smol, folder),
    }
    with Beside(request, jobs) as running:
        yield running


def train_gpt(name: str, *, workers: int) -> list[str]:
    """A run of `STEPS` steps with dropout, which saves every five."""
    settings = ["model.dropout=0.1", "training.checkpoint_steps=5", "training.eval_steps=50"]
    where = ["--run-dir", f"runs/{name}", "--workers", str(workers), "--steps", str(STEPS)]
    return ["train", *where, "--override", *TINY, *settings]


def wait_for_step(running: Running, run_dir: Path, step: int, *, ranks: int = 1) -> None:
    """Until every rank has logged a step as late as this one."""

    def reached() -> bool:
        last = {row["rank"]: row["step"] for row in read_rows(run_dir)}
        return len(last) == ranks and min(last.values()) >= step

    running.until(reached, what=f"step {step}")


def all_gone(processes: list[Process], *, timeout_s: float) -> None:
    eventually(lambda: not any(p.alive() for p in processes), timeout_s=timeout_s, what="every worker to leave")


# A worker dies


def test_a_killed_worker_ends_the_run_with_one_message(smol: Smol, folder: Path) -> None:
    run_dir = folder / "runs" / "killed-worker"
    running = smol.start("train", "tasks.py:Endless", "--workers", "3", "--run-dir", run_dir, *FOREVER, cwd=folder)
    workers = running.workers(3)
    wait_for_step(running, run_dir, 5, ranks=3)
    rank = random.randrange(3)
    workers[rank].kill()
    ended = running.end(timeout_s=at_most(60))

    assert ended.status == 1
    assert f"worker rank {rank} failed: killed by SIGKILL" in ended.err
    assert ended.err.count("failed") == 1
    last_lines = rf"  \| .*rank {rank}, starts as process {workers[rank].pid}\n"
    assert re.search(last_lines, ended.err)
    assert "Traceback" not in ended.err
    all_gone(workers, timeout_s=100)
    summary = read_summary(run_dir)
    assert (summary["status"], summary["members_lost"], summary["world_size"]) == ("failed", 1, 3)
    assert summary["steps"] >= 5
    assert f"rank {rank}" in summary["error"]


def test_a_task_that_raises_is_quoted(smol: Smol, folder: Path) -> None:
    run_dir = folder / "runs" / "cursed"
    ended = smol.run("train", "tasks.py:Cursed", "--workers", "2", "--run-dir", run_dir, *FOREVER, cwd=folder)
    assert ended.status == 1
    assert ended.err.startswith("smolcluster: worker rank 1 failed: ValueError: the third batch is cursed\n")
    assert re.search(r'  \|   File ".*tasks\.py", line \d+, in loss\n', ended.err)
    assert '  |     raise ValueError("the third batch is cursed")\n' in ended.err
    assert "smolcluster/" not in ended.err.split("full log")[0], "frames of this package help nobody"
    assert re.search(r"\nfull log: .*worker-rank1-.*\.log\n$", ended.err)
    assert read_summary(run_dir)["status"] == "failed"


# The launcher is stopped or dies


def test_a_worker_that_is_stopped_is_named_and_goes_on_to_save_when_the_run_ends(smol: Smol, folder: Path) -> None:
    run_dir = folder / "runs" / "stopped"
    running = smol.start("train", "tasks.py:Endless", "--workers", "2", "--run-dir", run_dir, *FOREVER, cwd=folder)
    workers = running.workers(2)
    wait_for_step(running, run_dir, 3, ranks=2)
    workers[1].kill(signal.SIGSTOP)
    told = f"worker rank 1 is stopped and the others wait for it; resume it: kill -CONT {workers[1].pid}"
    running.until(lambda: told in running.output, what="a word of the worker that is stopped")
    running.process.send_signal(signal.SIGINT)
    ended = running.end(timeout_s=at_most(20))
    assert ended.status == 130
    assert running.output.count("is stopped") == 1
    assert list((run_dir / "checkpoints").glob("step-*"))


def test_two_signals_at_once_are_one(smol: Smol, folder: Path) -> None:
    """As `timeout` sends them: to the process, and to its group."""
    run_dir = folder / "runs" / "timeout"
    running = smol.start("train", "tasks.py:Endless", "--workers", "1", "--run-dir", run_dir, *FOREVER, cwd=folder)
    wait_for_step(running, run_dir, 3)
    for _ in range(2):
        running.process.send_signal(signal.SIGTERM)
    ended = running.end(timeout_s=at_most(20))
    assert "nothing was saved" not in ended.err
    assert list((run_dir / "checkpoints").glob("step-*"))


def drain(terminal: int) -> None:
    """Read what is shown there, until it is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def titles(pid: int) -> dict[str, Process]:
    """The processes of a launcher that have work, by what `ps` shows for them, without the run."""
    shown = {Path(f"/proc/{child.pid}/cmdline").read_bytes().decode(): child for child in children(pid)}
    return {title.partition(" of ")[0]: child for title, child in shown.items() if title.startswith("smolcluster ")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--workers", "2"), {"smolcluster worker rank 0", "smolcluster worker rank 1"}),
        (("--strategy", "edp", "--workers", "1"), {"smolcluster worker rank 0", "smolcluster server rank 1"}),
        (("--world-size", "1", "--rank", "0"), set()),
    ],
    ids=["mesh", "elastic", "by hand"],
)
def test_a_terminal_that_is_closed_ends_the_run_in_order(
    smol: Smol, folder: Path, options: tuple[str, ...], expected: set[str]
) -> None:
    """SIGHUP, and from then on nothing can be written there. A worker that gets it leaves it to its launcher.
    Until then `ps` says who is who."""
    run_dir = folder / "runs" / f"hangup{options[0]}"
    ours, theirs = os.openpty()
    command = ("train", "--run-dir", run_dir, *options, "--steps", "1000000", "--override", *TINY)
    running = subprocess.Popen(
        [sys.executable, "-m", "smolcluster", *map(str, command)],
        **{"cwd": folder, "env": smol.env | {"MASTER_PORT": str(free_port())}},
        **{"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    os.close(theirs)
    threading.Thread(target=drain, args=(ours,), daemon=True).start()
    try:
        eventually(lambda: read_rows(run_dir), what="the first step")
        eventually(lambda: titles(running.pid).keys() == expected, what="their names")
        workers, rows = titles(running.pid).values(), len(read_rows(run_dir))
        for worker in workers:
            worker.kill(signal.SIGHUP)
        eventually(lambda: len(read_rows(run_dir)) > rows + 10, what="more steps")
        assert all(worker.alive() for worker in workers)
        os.close(ours)
        running.send_signal(signal.SIGHUP)
        assert running.wait(300) == 130
    finally:
        running.kill()
        running.wait()
    assert read_summary(run_dir)["status"] == "interrupted"
    assert list((run_dir / "checkpoints").glob("step-*"))


def test_workers_leave_when_the_launcher_is_killed(smol: Smol, folder: Path) -> None:
    run_dir = folder / "runs" / "orphans"
    running = smol.start("train", "tasks.py:Endless", "--workers", "2", "--run-dir", run_dir, *FOREVER, cwd=folder)
    workers = running.workers(2)
    wait_for_step(running, run_dir, 5, ranks=2)
    running.process.kill()
    all_gone(workers, timeout_s=at_most(30))
    # They saved before they left, so nothing is lost.
    assert list((run_dir / "checkpoints").glob("step-*"))


# One rank by hand


def by_hand(smol: Smol, folder: Path, name: str, rank: int, port: int) -> Running:
    place = ("--rank", str(rank), "--world-size", "2", "--master-port", str(port), "--run-dir", f"runs/{name}")
    return smol.start("train", "tasks.py:Endless", *place, *FOREVER, cwd=folder)


def test_a_rank_that_waits_for_the_others_can_be_interrupted(smol: Smol, folder: Path) -> None:
    port = free_port()
    running = by_hand(smol, folder, "lonely", 0, port)

    def listens() -> bool:
        with contextlib.suppress(OSError), connect_tcp("127.0.0.1", port, timeout_s=1):
            return True
        return False

    running.until(listens, what="rank 0 to listen")
    running.process.send_signal(signal.SIGINT)  # enough until it waits in the backend; then a second one is needed

    def answered() -> bool:
        return "press Ctrl-C again to exit at once" in running.output or running.process.poll() is not None

    eventually(answered, what="the answer to the first interrupt")
    running.process.send_signal(signal.SIGINT)
    assert running.end(timeout_s=at_most(60)).status == 130


def test_a_rank_that_waits_for_rank_0_says_so_and_can_be_interrupted(smol: Smol, folder: Path) -> None:
    running = by_hand(smol, folder, "nobody", 1, free_port())
    running.until(lambda: "waiting for rank 0 at 127.0.0.1:" in running.output, what="a word of what it waits for")
    running.process.send_signal(signal.SIGINT)
    ended = running.end(timeout_s=at_most(60))
    assert ended.status == 130
    assert "Traceback" not in ended.err
    assert "c10d" not in ended.err


def test_two_ranks_of_one_number_are_told(smol: Smol, folder: Path) -> None:
    port = free_port()
    twins = [by_hand(smol, folder, f"twins-{number}", 1, port) for number in range(2)]
    for twin in twins:
        twin.until(lambda twin=twin: "waiting for rank 0" in twin.output, what="it to wait")
    first = by_hand(smol, folder, "twins", 0, port)
    ended = eventually(lambda: [t for t in twins if t.process.poll() is not None], what="one of them to leave")[0].end()
    assert ended.status == 2
    assert "rank 1 was started twice" in ended.err
    first.process.send_signal(signal.SIGINT)
    assert first.end(timeout_s=at_most(20)).status == 130


def test_a_rank_whose_peer_is_killed_says_so(smol: Smol, folder: Path) -> None:
    port = free_port()
    ranks = [by_hand(smol, folder, "widow", rank, port) for rank in (0, 1)]
    run_dir = folder / "runs" / "widow"
    wait_for_step(ranks[0], run_dir, 3, ranks=2)
    ranks[1].process.kill()
    ended = ranks[0].end(timeout_s=at_most(30))
    assert ended.status == 1
    assert ended.err.startswith("smolcluster: rank 0 failed: lost another rank: ")
    assert ended.err.count("\n") == 1
    summary = read_summary(run_dir)
    assert summary["status"] == "failed"
    assert summary["steps"] >= 3


# Interrupted, killed, damaged: the run goes on to the same weights as one that was left alone


def undisturbed(smol: Smol, folder: Path, *, workers: int) -> str:
    """The hash of the weights after a run that nothing happens to."""
    smol.run(*train_gpt(f"undisturbed-{workers}", workers=workers), cwd=folder).ok()
    return str(read_summary(folder / "runs" / f"undisturbed-{workers}")["weights_sha256"])


def check_whole(run_dir: Path, *, workers: int) -> dict[str, Any]:
    """Every step is there once, and the summary is that of a finished run."""
    steps: dict[int, list[int]] = {}
    for row in read_rows(run_dir):
        steps.setdefault(row["rank"], []).append(row["step"])
    assert steps[0] == list(range(1, STEPS + 1))
    for rank in range(1, workers):
        # Its row of the checkpoint's own step may have been lost with it.
        assert len(set(steps[rank])) == len(steps[rank]) >= STEPS - 1
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"], summary["workers"]) == ("finished", STEPS, workers)
    return summary


def resumed(output: str) -> int:
    match = re.search(r"resumed at step (\d+)", output)
    assert match is not None, output
    return int(match[1])


def interrupt(running: Running, run_dir: Path, number: int, *, workers: int) -> int:
    """After 20 steps or more. Returns the step at which all ranks left, with their state saved."""
    processes = running.workers(workers)
    wait_for_step(running, run_dir, 20, ranks=workers)
    running.process.send_signal(number)
    ended = running.end()
    assert ended.status == 130
    assert ended.err == f"smolcluster: interrupted; continue with: smolcluster train --resume runs/{run_dir.name}\n"
    all_gone(processes, timeout_s=100)
    summary = read_summary(run_dir)
    assert summary["status"] == "interrupted"
    assert 20 <= summary["steps"] < 70
    assert summary["checkpoint"].endswith(f"step-{summary['steps']:08d}")
    return int(summary["steps"])


def kill_everything(running: Running, run_dir: Path, *, workers: int, after: int) -> None:
    """At a random step, launcher and workers at once, when a checkpoint later than step `after` is complete."""
    processes = running.workers(workers)
    wait_for_step(running, run_dir, random.randrange(71, STEPS - 40), ranks=workers)
    running.until(lambda: newest_step(run_dir) > after, what=f"a checkpoint after step {after}")
    os.kill(running.process.pid, signal.SIGKILL)
    for process in processes:
        process.kill()
    running.process.wait()
    all_gone(processes, timeout_s=at_most(30))


def newest_step(run_dir: Path) -> int:
    return max(int(folder.name.removeprefix("step-")) for folder in (run_dir / "checkpoints").glob("step-*"))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def hard_life(smol: Smol, folder: Path, *, workers: int, number: int) -> None:
    """Interrupted; resumed; killed with everything; resumed. With one worker also with its newest checkpoint damaged."""
    sha256 = undisturbed(smol, folder, workers=workers)
    run_dir = folder / "runs" / f"hard-life-{workers}"
    running = smol.start(*train_gpt(run_dir.name, workers=workers), cwd=folder)
    step = interrupt(running, run_dir, number, workers=workers)

    running = smol.start("train", "--resume", f"runs/{run_dir.name}", cwd=folder)
    kill_everything(running, run_dir, workers=workers, after=step)
    assert resumed(running.output) == step
    damaged_dir = folder / "runs" / "damaged"
    if workers == 1:
        shutil.copytree(run_dir, damaged_dir)

    ended = smol.run("train", "--resume", "latest", "--run-dir", f"runs/{run_dir.name}", cwd=folder).ok()
    assert step < resumed(ended.out) < STEPS
    assert check_whole(run_dir, workers=workers)["weights_sha256"] == sha256

    if workers == 1:
        *_, before, newest = sorted((damaged_dir / "checkpoints").glob("step-*"))
        flip_a_bit(newest / "weights.safetensors")
        ended = smol.run("train", "--resume", "runs/damaged", cwd=folder).ok()
        assert resumed(ended.out) == int(before.name.removeprefix("step-"))
        error = next(line for line in ended.out.splitlines() if "is damaged" in line)
        assert error.startswith("error: rank 0: ")
        assert f"{newest.name}/weights.safetensors" in error
        assert check_whole(damaged_dir, workers=1)["weights_sha256"] == sha256


@pytest.mark.slow
def test_two_workers_through_a_hard_life_end_bitwise_the_same(smol: Smol, folder: Path) -> None:
    hard_life(smol, folder, workers=2, number=signal.SIGINT)


def test_one_worker_through_a_hard_life_ends_bitwise_the_same(beside: Beside) -> None:
    beside["test_one_worker_through_a_hard_life_ends_bitwise_the_same"]


def test_an_interrupt_before_the_first_step_is_heard(beside: Beside) -> None:
    beside["test_an_interrupt_before_the_first_step_is_heard"]


def interrupt_early(smol: Smol, folder: Path) -> None:
    """Ctrl-C reaches everything in a terminal's process group, and workers that still import torch must not die of it."""
    run_dir = folder / "runs" / "early"
    command = ("train", "tasks.py:Endless", "--workers", "1", "--run-dir", run_dir, *FOREVER)
    running = smol.start(*command, cwd=folder, group=True)
    workers = running.workers(1)
    os.killpg(running.process.pid, signal.SIGINT)
    ended = running.end(timeout_s=at_most(30))
    assert ended.status == 130
    assert "continue with: smolcluster train --resume" in ended.err
    all_gone(workers, timeout_s=100)
    assert read_summary(run_dir)["status"] == "interrupted"
    assert {row["step"] for row in read_rows(run_dir)} == {1}
