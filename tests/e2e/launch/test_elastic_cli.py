"""The elastic plane from the command line: `train`, `server` and `worker`; members that die, servers that come back."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.e2e.command import TINY, Beside, Ended, Process, Running, Smol, children, read_rows, read_summary
from tests.places import at_most, eventually, free_port

from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.launch.cluster import keeper

T = TypeVar("T")
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc"),
]

STEPS = 8
PATIENCE_S = 120.0  # five processes that import torch at once, beside other tests, on two cores
SCRIPTS = Path(__file__).parents[3] / "scripts"
# Workers that count as one: the same weights, however often they were interrupted.
EXACT = (*TINY, "training.checkpoint_steps=4", "training.eval_steps=4", "strategy.worker_update_interval=1")
ALONE = "cluster.standby=false"  # saves a process where nobody kills the server
# Slow until somebody says go, so that a test can do what it likes in the middle of a run.
TASKS = """
import os, time
import torch
from torch import nn
from smolcluster import Task


class Gated(Task):
    def model(self):
        return nn.Linear(4, 1)

    def train_data(self):
        return (torch.randn(4096, 4, generator=torch.Generator().manual_seed(1)),)

    def loss(self, model, batch):
        if not os.path.exists(os.environ["GO"]):
            time.sleep(0.2)
        return model(batch[0]).square().mean()


class Doomed(Gated):
    def model(self):
        if not os.path.exists(os.environ["DOOMED"]):  # the server and its launcher die before anything is saved
            open(os.environ["DOOMED"], "w").close()
            os.kill(os.getppid(), 9)
            os.kill(os.getpid(), 9)
        return super().model()
"""
GATED = ("training.device=cpu", "training.batch_size=4", "logging.log_interval=1", "training.eval_steps=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elastic")
    (path / "tasks.py").write_text(TASKS, encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def beside(smol: Smol, folder: Path, request: pytest.FixtureRequest) -> Iterator[Beside]:
    jobs: dict[str, Callable[[], Any]] = {
        "test_members_that_die_come_back_and_the_run_ends_well": lambda: deaths(smol, folder),
        "test_edp_ends_well": lambda: run(smol, folder, "edp", "--strategy", "edp", "--override", *TINY, ALONE),
    }
    with Beside(request, jobs) as running:
        yield running


@dataclass(frozen=True)
class Run:
    path: Path
    ended: Ended

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path)

    @property
    def sha256(self) -> str:
        return str(read_summary(self.path)["weights_sha256"])


def run(smol: Smol, folder: Path, name: str, *arguments: str, **options: Any) -> Run:
    command = ("train", "--workers", "2", "--steps", str(STEPS), "--run-dir", f"runs/{name}", *arguments)
    return Run(folder / "runs" / name, smol.run(*command, cwd=folder, timeout_s=PATIENCE_S, **options).ok())


@pytest.fixture(scope="module")
def base(smol: Smol, folder: Path, guard: dict[str, str]) -> Run:
    """Eight steps of syncps on two workers, by our launcher, which may not import torch."""
    return run(smol, folder, "base", "--strategy", "syncps", "--override", *EXACT, ALONE, env=guard)


def server_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir) if row["role"] == "server"]


def last_step(run_dir: Path, *, rank: int | None = None) -> int:
    """Of the server, or of a worker."""
    rows = server_rows(run_dir) if rank is None else [row for row in read_rows(run_dir) if row["rank"] == rank]
    return int(max((row["step"] for row in rows), default=0))


def process_of(run_dir: Path, seat: str) -> Process | None:
    """The process that was last started for `server` or `worker-rank0`, as its log says, if it is alive."""
    for log in (run_dir / "logs").glob(f"{seat}-*.log"):
        pids = re.findall(r"starts as process (\d+)", log.read_text(encoding="utf-8"))
        found = (
            [p for parent in _parents(int(pids[-1])) for p in children(parent) if p.pid == int(pids[-1])]
            if pids
            else []
        )
        return found[0] if found else None
    return None


def _parents(pid: int) -> list[int]:
    try:
        return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])]
    except FileNotFoundError:
        return []


def wait(running: Running, question: Callable[[], T | None], *, what: str) -> T:
    return running.until(question, what=what, timeout_s=PATIENCE_S)


# One command


def test_the_run_directory_is_complete(base: Run) -> None:
    host = socket.gethostname()
    assert {path.name for path in base.path.iterdir() if not path.name.startswith(".")} == {
        *("config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "logs", "history.jsonl", "run-id"),
    }
    assert {path.name for path in (base.path / "logs").iterdir()} == {
        *(f"server-{host}.log", f"worker-rank0-{host}.log", f"worker-rank1-{host}.log"),
    }
    assert sorted(p.name for p in (base.path / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000008"]


def test_every_step_has_a_row_of_the_server_and_of_each_worker(base: Run) -> None:
    steps = list(range(1, STEPS + 1))
    for rank, role in ((0, "worker"), (1, "worker"), (2, "server")):
        rows = [row for row in base.rows if row["rank"] == rank]
        assert sorted(row["step"] for row in rows) == steps
        assert {row["role"] for row in rows} == {role}
    assert {row["step"] for row in base.rows if "val_loss" in row} == {4, 8}
    for step in steps:
        losses = {row["role"]: row["loss"] for row in base.rows if row["step"] == step and row["rank"] != 1}
        other = next(row["loss"] for row in base.rows if row["step"] == step and row["rank"] == 1)
        assert losses["server"] == pytest.approx((losses["worker"] + other) / 2)


def test_the_summary_is_that_of_the_run(base: Run) -> None:
    summary = read_summary(base.path)
    expected = {"status": "finished", "strategy": "syncps", "workers": 2, "world_size": 3, "steps": STEPS}
    expected |= {"samples": 64, "tokens": 64 * 32, "restarts": 0, "members_lost": 0, "members_joined": 2}
    assert {key: summary[key] for key in expected} == expected
    assert summary["train_loss"] == pytest.approx(server_rows(base.path)[-1]["loss"])


def test_the_console_shows_the_server_and_no_worker(base: Run) -> None:
    lines = base.ended.out.splitlines()
    assert "gpt | syncps | 2 workers + server on cpu | 22.0k parameters | 8 steps" in lines
    shown = sorted(int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step "))
    assert shown == list(range(1, STEPS + 1))
    assert not any("warning" in line for line in lines)
    assert base.ended.err == ""


def test_edp_ends_well(beside: Beside) -> None:
    edp = beside["test_edp_ends_well"]
    assert [row["step"] for row in server_rows(edp.path)] == sorted(range(1, STEPS + 1))
    summary = read_summary(edp.path)
    assert (summary["status"], summary["members_lost"]) == ("finished", 0)
    lines = [json.loads(line) for line in (edp.path / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    commits = [[part["samples"] for part in line["contributors"]] for line in lines if line["kind"] == "commit"]
    assert summary["samples"] == sum(map(sum, commits))
    assert all(4 <= sum(samples) <= 16 for samples in commits), commits  # 8, but while shares change
    assert "gpt | edp | 2 workers + server on cpu" in edp.ended.out


# By hand


def test_roles_by_hand_give_the_same_run(smol: Smol, folder: Path, base: Run) -> None:
    """A worker that is there before the server waits for it, and says so."""
    port, run_dir = free_port(), folder / "runs" / "by-hand"
    join = ("--server", f"127.0.0.1:{port}", "--log-dir", run_dir / "logs")
    early = smol.start("worker", "1", "beta", *join, cwd=folder)
    waiting = f"waiting for the server at 127.0.0.1:{port}: Connection refused"
    wait(early, lambda: waiting in early.output, what="the worker to say that it waits")
    serve = ("server", "--strategy", "SyncPS", "--workers", "2", "--steps", str(STEPS), "--port", str(port))
    server = smol.start(*serve, "--run-dir", run_dir, "--override", *EXACT, ALONE, cwd=folder)
    other = smol.start("worker", "0", "alpha", *join, cwd=folder)
    ended = [command.end(timeout_s=PATIENCE_S).ok() for command in (server, other, early)]
    assert f"    smolcluster worker 0 HOSTNAME --server 127.0.0.1:{port}\n" in ended[0].out
    for rank, out in enumerate(each.out for each in ended[1:]):
        assert f"gpt | syncps | worker {rank} of 2 on cpu | 22.0k parameters | 8 steps\n" in out
        assert f"step {STEPS}/{STEPS}  loss " in out

    assert read_summary(run_dir)["weights_sha256"] == base.sha256
    names = {path.name for path in run_dir.iterdir()}
    assert names == {path.name for path in base.path.iterdir()}
    logs = {path.name.split("-")[-1] if "worker" in path.name else "" for path in (run_dir / "logs").iterdir()}
    assert logs == {"alpha.log", "beta.log", ""}
    # A row that waits for its evaluation may come after the next.
    by_hand, at_once = (sorted((r["step"], r["rank"], r["loss"]) for r in server_rows(p)) for p in (run_dir, base.path))
    assert by_hand == at_once


def test_a_server_does_not_choose_the_files_that_a_worker_reads(smol: Smol, folder: Path) -> None:
    """A worker by hand reads a folder that its owner names, and no other."""
    port, text = free_port(), "the quick brown fox jumps over the lazy dog. " * 200
    for name in ("theirs.txt", "mine.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    data = ("data.name=text", f"data.root={folder / 'theirs.txt'}", "data.tokenizer=bytes")
    serve = ("server", "--strategy", "edp", "--workers", "1", "--steps", "2", "--port", str(port))
    server = smol.start(*serve, "--run-dir", folder / "runs" / "doors", "--override", *TINY, *data, ALONE, cwd=folder)
    join = ("worker", "0", "pi5", "--server", f"127.0.0.1:{port}")
    refused = smol.run(*join, cwd=folder, timeout_s=PATIENCE_S)
    assert (refused.status, refused.err.count("\n")) == (2, 1), refused
    assert "start this worker with --data-root FOLDER" in refused.err
    smol.run(*join, "--data-root", "mine.txt", cwd=folder, timeout_s=PATIENCE_S).ok()
    server.end(timeout_s=PATIENCE_S).ok()


def test_a_cluster_file_says_where_the_server_is(smol: Smol, folder: Path) -> None:
    """The file of the documents, the same on every machine; how many steps, only at the server."""
    port = free_port()
    lines = ["server: mini1", "workers: [pi5]", "host_ip: {mini1: 127.0.0.2, pi5: 127.0.0.2}", f"port: {port}"]
    (folder / "cluster_config_edp.yaml").write_text("\n".join([*lines, "num_workers: 1", ""]))
    files = ("cluster_config_edp.yaml", "--override", *TINY)
    server = smol.start("server", *files, ALONE, "--steps", "4", "--run-dir", folder / "runs" / "file", cwd=folder)
    worker = smol.start("worker", "0", "pi5", *files, cwd=folder)
    ended = [command.end(timeout_s=PATIENCE_S).ok() for command in (server, worker)]
    assert f"listening on 127.0.0.2:{port}" in ended[0].out
    assert "worker 0 (pi5) joined\n" in ended[0].out
    assert f"the run is over; its results are on the server at 127.0.0.2:{port}\n" in ended[1].out


def test_another_strategy_does_not_lose_what_is_only_in_the_journal(smol: Smol, folder: Path) -> None:
    """A parameter server's run, killed as a whole between two checkpoints, and continued by something else."""
    run_dir = folder / "runs" / "changed"
    go = {"GO": str(folder / "never")}
    serve = ("train", "tasks.py:Gated", "--strategy", "syncps", "--workers", "1", "--steps", "1000000")
    keys = (*GATED, "training.checkpoint_steps=0", ALONE)
    first = smol.start(*serve, "--run-dir", run_dir, "--override", *keys, cwd=folder, env=go)
    wait(first, lambda: last_step(run_dir) >= 3, what="step 3")
    processes = [process_of(run_dir, seat) for seat in ("server", "worker-rank0")]
    first.process.kill()
    for process in processes:
        process.kill()
    first.end(timeout_s=PATIENCE_S)
    other = ("--strategy", "allreduce", "--plane", "elastic", "--steps", "1000000")
    refused = smol.run("train", "--resume", run_dir, *other, cwd=folder, env=go)
    assert refused.status == 2, refused
    said = re.search(r"this run has committed (\d+) steps, and its last checkpoint is of step 0", refused.err)
    assert said is not None, refused.err
    assert "--strategy syncps" in refused.err
    mesh = smol.run("train", "--resume", run_dir, "--strategy", "allreduce", "--plane", "mesh", cwd=folder, env=go)
    assert mesh.status == 2
    assert f"this run has committed {said[1]} steps on the elastic plane" in mesh.err
    short = smol.run("train", "--resume", run_dir, "--strategy", "syncps", "--steps", "1", cwd=folder, env=go)
    assert short.status == 2
    assert f"this run has committed {said[1]} steps and would end at 1: nothing is left to train" in short.err
    steps = int(said[1]) + 3
    go["GO"] = str(folder)
    again = ("--strategy", "syncps", "--steps", str(steps))
    smol.run("train", "--resume", run_dir, *again, cwd=folder, env=go).ok()
    assert last_step(run_dir) == steps


def test_who_may_not_join_is_told_why_and_nobody_else_is_disturbed(smol: Smol, folder: Path) -> None:
    port, run_dir, token = free_port(), folder / "runs" / "guarded", new_token()
    go = {"GO": str(folder / "never"), "SMOLCLUSTER_TOKEN": token}
    hosts = ("cluster.workers=[alpha, beta]", "cluster.num_workers=2")
    serve = ("server", "tasks.py:Gated", "--strategy", "edp", "--steps", "1000000", "--port", str(port))
    server = smol.start(*serve, "--run-dir", run_dir, "--override", *GATED, *hosts, ALONE, cwd=folder, env=go)
    join = ("--server", f"127.0.0.1:{port}", "--task", "tasks.py:Gated")
    members = [smol.start("worker", str(r), h, *join, cwd=folder, env=go) for r, h in enumerate(("alpha", "beta"))]
    wait(server, lambda: last_step(run_dir) >= 3, what="step 3")

    refused = {
        r"rank 1 is taken by worker 1 \(beta\); give this worker another rank": ("1", "beta", *join),
        r"runs the strategy edp and this worker was started for syncps": ("2", "beta", *join, "--strategy", "syncps"),
        r"code is not sent: .*--task FILE.py:Class": ("2", "beta", *join[:2]),
    }
    tries = [(message, smol.start("worker", *words, cwd=folder, env=go)) for message, words in refused.items()]
    foreign = go | {"SMOLCLUSTER_TOKEN": new_token()}
    tries.append(("token", smol.start("worker", "2", "beta", *join, cwd=folder, env=foreign)))
    for message, command in tries:
        ended = command.end(timeout_s=PATIENCE_S)
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended
        assert re.search(message, ended.err), ended.err
    wait(server, lambda: "in the TLS handshake" in server.output, what="the server to tell of the wrong token")

    # One leaves; the other goes on. Then the server is stopped, and everybody goes home.
    members[1].process.send_signal(signal.SIGINT)
    left = members[1].end(timeout_s=PATIENCE_S)
    assert (left.status, left.err) == (130, "smolcluster: interrupted; the run continues without this worker\n")
    step = last_step(run_dir)
    wait(server, lambda: last_step(run_dir) > step + 2, what="training to go on")
    other = smol.run("worker", "1", "gamma", *join, cwd=folder, env=go)  # its number is free, and is not gamma's
    assert other.status == 2
    assert "host 'gamma' is not in cluster.workers; known: alpha, beta" in other.err
    server.process.send_signal(signal.SIGTERM)
    stopped = server.end(timeout_s=PATIENCE_S)
    assert stopped.status == 130
    assert stopped.err == f"smolcluster: interrupted; continue with: smolcluster server --resume {run_dir}\n"
    assert members[0].end(timeout_s=PATIENCE_S).status == 0
    assert read_summary(run_dir)["members_lost"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--strategy", "edp", "--override", "cluster.bind=0.0.0.0"), "listening on '0.0.0.0' accepts connections"),
        (("server", "--strategy", "syncps", "--bind", "0.0.0.0"), "there is no cluster token"),
        (("server", "--strategy", "single"), "strategy single does not run on the elastic plane"),
        (("train", "--strategy", "edp", "--plane", "mesh"), "strategy edp does not run on the mesh plane"),
        (("train", "--strategy", "edp", "--rank", "0", "--world-size", "2"), "start its server with `smolcluster server`"),
        (("worker", "0", "pi5"), "give --server HOST:PORT"),
    ],
)  # fmt: skip
def test_mistakes_cost_one_line(
    smol: Smol, tmp_path: Path, guard: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    empty = {"SMOLCLUSTER_TOKEN_FILE": "", "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    ended = smol.run(*arguments, cwd=tmp_path, env=guard | empty)
    assert (ended.status, ended.out) == (2, "")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# Death


def deaths(smol: Smol, folder: Path) -> Run:
    """kill -9 the server, then a worker; both come back, and the run ends well."""
    run_dir, go = folder / "runs" / "deaths", folder / "go"
    command = ("train", "tasks.py:Gated", "--strategy", "edp", "--workers", "2", "--steps", "400", "--run-dir", run_dir)
    running = smol.start(*command, "--override", *GATED, cwd=folder, env={"GO": str(go)})
    wait(running, lambda: last_step(run_dir) >= 10, what="step 10")

    server = wait(running, lambda: process_of(run_dir, "server"), what="the server's process")
    step = last_step(run_dir)
    server.kill()
    wait(running, lambda: last_step(run_dir) > step + 3, what="training to go on with another server")

    worker = wait(running, lambda: process_of(run_dir, "worker-rank1"), what="the worker's process")
    worker.kill()
    wait(running, lambda: "worker 1 died (killed by SIGKILL); restarting it" in running.output, what="the notice")
    step = last_step(run_dir, rank=1)
    mine = lambda: [row for row in read_rows(run_dir) if row["rank"] == 1 and row["step"] == 1]  # noqa: E731
    wait(running, lambda: len(mine()) > 1 or last_step(run_dir, rank=1) > step, what="the worker to be back")
    go.touch()
    return Run(run_dir, running.end(timeout_s=PATIENCE_S).ok())


def test_members_that_die_come_back_and_the_run_ends_well(beside: Beside) -> None:
    run = beside["test_members_that_die_come_back_and_the_run_ends_well"]
    summary = read_summary(run.path)
    assert (summary["status"], summary["steps"]) == ("finished", 400)
    assert (summary["members_lost"], summary["restarts"]) == (1, 2)
    assert "warning: the server died (killed by SIGKILL); restarting it\n" in run.ended.out
    assert re.search(r"warning: the server is back, at step \d+\n", run.ended.out)
    assert "1 worker lost   2 restarts" in run.ended.out
    steps = [row["step"] for row in server_rows(run.path)]
    assert len(steps) == len(set(steps)) >= 399  # at most the row of the last committed step went with the server
    assert not (run.path / "journal").exists()


@pytest.mark.slow
def test_a_run_that_is_cut_off_and_interrupted_ends_bitwise_as_if_nothing_had_happened(
    smol: Smol, folder: Path
) -> None:
    """Launcher and server are killed at once: the workers leave, and the run goes on from the server's journal. Then Ctrl-C."""
    settings = ("--strategy", "syncps", "--workers", "2", "--steps", "300", "--override", *GATED)
    exact = ("strategy.worker_update_interval=1", "training.checkpoint_steps=250", ALONE)
    go = folder / "exact-go"
    go.touch()
    undisturbed = smol.start(
        "train", "tasks.py:Gated", *settings, *exact, "--run-dir", "runs/whole", cwd=folder, env={"GO": str(go)}
    )
    run_dir, never = folder / "runs" / "cut-off", {"GO": str(folder / "never")}
    running = smol.start("train", "tasks.py:Gated", *settings, *exact, "--run-dir", run_dir, cwd=folder, env=never)
    wait(running, lambda: last_step(run_dir) >= 5, what="step 5")
    left = children(running.process.pid)
    server = wait(running, lambda: process_of(run_dir, "server"), what="the server's process")
    running.process.kill()
    server.kill()
    running.process.wait()
    eventually(lambda: not any(process.alive() for process in left), timeout_s=at_most(20), what="the workers to leave")
    assert not list((run_dir / "checkpoints").glob("step-*"))

    running = smol.start("train", "--resume", run_dir, cwd=folder, env=never)
    match = wait(running, lambda: re.search(r"the server is back, at step (\d+)", running.output), what="the server")
    assert int(match[1]) >= 5
    wait(running, lambda: last_step(run_dir) >= int(match[1]) + 5, what="five more steps")
    running.process.send_signal(signal.SIGINT)
    ended = running.end(timeout_s=PATIENCE_S)
    assert (ended.status, ended.err) == (
        130,
        f"smolcluster: interrupted; continue with: smolcluster train --resume {run_dir}\n",
    )
    assert read_summary(run_dir)["status"] == "interrupted"
    smol.run("train", "--resume", run_dir, cwd=folder, timeout_s=PATIENCE_S, env={"GO": str(go)}).ok()
    undisturbed.end(timeout_s=PATIENCE_S).ok()
    steps = [row["step"] for row in server_rows(run_dir)]
    assert sorted(set(steps)) == steps
    assert last_step(run_dir) == 300
    assert read_summary(run_dir)["weights_sha256"] == read_summary(folder / "runs" / "whole")["weights_sha256"]


def test_a_server_that_dies_before_its_first_snapshot_begins_anew(smol: Smol, folder: Path) -> None:
    port = free_port()
    serve = ["server", "tasks.py:Doomed", "--strategy", "syncps", "--workers", "1", "--steps", "3", "--port", str(port)]
    serve = [sys.executable, "-m", "smolcluster", *serve, "--run-dir", "runs/doomed", "--override", *GATED, ALONE]
    order = {
        "argv": serve,
        "again": [*serve, "--resume", "auto"],
        "restart": True,
        "cwd": str(folder),
        "grace_s": 5.0,
        "environment": {"DOOMED": str(folder / "doomed"), "GO": str(folder)},
    }
    place = folder / "keeper"
    place.mkdir()
    (place / "order.json").write_text(json.dumps(order))
    with subprocess.Popen([sys.executable, keeper.__file__, place], env=smol.env, stdout=subprocess.DEVNULL) as kept:
        try:
            join = ("worker", "0", "anyhost", "--server", f"127.0.0.1:{port}", "--task", "tasks.py:Doomed")
            smol.run(*join, cwd=folder, timeout_s=PATIENCE_S, env=order["environment"]).ok()
            assert kept.wait(PATIENCE_S) == 0, (place / "output.log").read_text()
        finally:
            (place / "stop").write_text("now")
    state = json.loads((place / "state.json").read_text())
    assert (state["state"], state["restarts"]) == ("finished", 1)
    summary = read_summary(folder / "runs" / "doomed")
    assert (summary["status"], summary["steps"]) == ("finished", 3)


# The scripts


@pytest.mark.parametrize("algorithm", ["edp", "syncps", "dp", "fsdp"])
@pytest.mark.parametrize("model", ["gpt", "mnist"])
def test_a_script_is_the_command_with_three_workers(algorithm: str, model: str) -> None:
    script = SCRIPTS / f"launch_{algorithm}_train_{model}.sh"
    assert os.access(script, os.X_OK)
    environ = {**os.environ, "SMOLCLUSTER": "echo"}
    said = subprocess.run(["bash", script, "--steps", "a b"], env=environ, capture_output=True, text=True, check=True)
    strategy = "allreduce" if algorithm == "dp" else algorithm
    assert said.stdout == f"train {model} --strategy {strategy} --workers 3 --steps a b\n"


def test_a_script_finds_the_command(smol: Smol, tmp_path: Path) -> None:
    """Without an environment of the project: the one on the path."""
    (tmp_path / "scripts").mkdir()
    for name in ("smolcluster.sh", "launch_edp_train_gpt.sh"):
        (tmp_path / "scripts" / name).write_bytes((SCRIPTS / name).read_bytes())
        (tmp_path / "scripts" / name).chmod(0o755)
    command = tmp_path / "bin" / "smolcluster"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m smolcluster "$@"\n')
    command.chmod(0o755)
    environ = smol.env | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", tmp_path / "scripts" / "launch_edp_train_gpt.sh", "--dry-run", "--override", *TINY]
    said = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "# strategy edp on 3 worker(s) and a server, device cpu, listening on 127.0.0.1\n" in said
    assert re.findall(r"#   (.*)\n", said) == [
        *(f"rank {rank}: worker on worker-{rank}, 4 samples at a time" for rank in range(3)),
        "server",
    ]
    assert not (tmp_path / "runs").exists()
