"""The real command in temporary folders, and ways to wait for what it does.

Nothing here sleeps and hopes: `eventually` asks until the answer is yes, and gives up loudly at a deadline. Every process
that a test starts is ended with it, by its id.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.places import eventually

from smolcluster.cli import main

T = TypeVar("T")

# A GPT of 22 thousand parameters on the embedded text: a step takes milliseconds.
TINY = (
    *("model.model_dim=32", "model.num_layers=1", "model.num_heads=2", "model.max_seq_len=32"),
    *("training.batch_size=4", "training.eval_samples=8", "training.device=cpu", "logging.log_interval=1"),
    "logging.sample_tokens=8",
)
# The small GPT; slow until the file GO exists, so that a test can act in the middle of a run.
GATED_GPT = """
import os, time
from smolcluster.tasks.gpt import GPTTask


class Gated(GPTTask):
    def loss(self, model, batch):
        if not os.path.exists(os.environ["GO"]):
            time.sleep(0.2)
        return super().loss(model, batch)
"""
# What would change how the command behaves, left over from whoever runs the tests.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SMOLCLUSTER_TOKEN"),
    *("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "TERM", "COLUMNS"),
    "LINES",
)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str

    def ok(self) -> Ended:
        assert self.status == 0, f"exit status {self.status}\n{self.out}\n{self.err}"
        return self


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Ended:
    """The command in this process, without the time that importing takes."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, out, err)


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same id by when it started. Linux only."""

    pid: int
    started: str

    def alive(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat[19] == self.started and stat[0] != "Z"

    def state(self) -> str | None:
        stat = _stat(self.pid)
        return stat[0] if stat is not None and stat[19] == self.started else None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.alive():
            os.kill(self.pid, number)


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat after the name: state, parent, ...; the start time is number 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def children(pid: int) -> list[Process]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := _stat(int(folder.name))) is not None and stat[1] == str(pid):
            found.append(Process(int(folder.name), stat[19]))
    return [process for process in found if process.alive()]


class Running:
    """A command under way. Its output goes to files, so that no pipe can fill up."""

    def __init__(
        self, arguments: list[str], *, cwd: Path, env: dict[str, str], output: Path, group: bool = False
    ) -> None:
        self._out, self._err = output.with_suffix(".out"), output.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                arguments, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=group
            )
        self._workers: dict[int, Process] = {}

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    def workers(self, count: int) -> list[Process]:
        """Its `count` worker processes, in rank order: the launcher starts them so."""

        def all_there() -> list[Process] | None:
            assert self.process.poll() is None, f"the command has ended: {self.end()}"
            for child in children(self.process.pid):
                self._workers[child.pid] = child
            return list(self._workers.values()) if len(self._workers) >= count else None

        found = eventually(all_there, what=f"{count} workers")
        return sorted(found, key=lambda process: (int(process.started), process.pid))

    def until(self, question: Callable[[], T | None], *, what: str, timeout_s: float = 120.0) -> T:
        """Like `eventually`, but a command that ends in the meantime is an error at once."""

        def ask() -> T | None:
            answer = question()
            assert answer or self.process.poll() is None, f"{what}: the command has ended: {self.end()}"
            return answer

        return eventually(ask, timeout_s=timeout_s, what=what)

    def end(self, *, timeout_s: float = 120.0) -> Ended:
        status = self.process.wait(timeout_s)
        out, err = (p.read_text(encoding="utf-8", errors="replace") for p in (self._out, self._err))
        return Ended(status, out, err)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Smol:
    """`python -m smolcluster ...`, as a user would type it."""

    def __init__(self, cache: Path, output: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        self.env = kept | {
            "OMP_NUM_THREADS": "1",
            "SMOLCLUSTER_CACHE": str(cache),
            "PYTHONIOENCODING": "utf-8",
            "CUDA_VISIBLE_DEVICES": "",  # what is expected here is expected of processors
        }
        self._output = output
        self._count = itertools.count()
        self._stack = contextlib.ExitStack()

    def start(
        self,
        *arguments: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        python: tuple[str, ...] = ("-m", "smolcluster"),
        group: bool = False,
        inside: str | None = None,
    ) -> Running:
        """`python` is what the interpreter is given; `group`: in a process group of its own, like a job in a terminal;
        `inside`: a network namespace."""
        command = [sys.executable, *python, *map(str, arguments)]
        command = command if inside is None else ["ip", "netns", "exec", inside, *command]
        output = self._output / f"command-{next(self._count)}"
        running = Running(command, cwd=cwd, env=self.env | dict(env or {}), output=output, group=group)
        self._stack.callback(running.close)
        return running

    def run(self, *arguments: str | Path, cwd: Path, timeout_s: float = 180.0, **options: Any) -> Ended:
        running = self.start(*arguments, cwd=cwd, **options)
        try:
            return running.end(timeout_s=timeout_s)
        finally:
            running.close()

    def close(self) -> None:
        self._stack.close()


class Beside:
    """Jobs done one after the other beside the tests that wait for them: what needs one core leaves the others free.

    A job is named after the test that asks for it, and is done only when that test was selected.
    """

    def __init__(self, request: pytest.FixtureRequest, jobs: Mapping[str, Callable[[], Any]]) -> None:
        selected = {getattr(item, "originalname", item.name) for item in request.session.items}
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._results = {name: self._pool.submit(job) for name, job in jobs.items() if name in selected}

    def __getitem__(self, name: str) -> Any:
        return self._results[name].result()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The whole rows of metrics.jsonl so far."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run_dir / "metrics.jsonl").read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def last_step(run_dir: Path) -> int:
    return max((row["step"] for row in read_rows(run_dir)), default=0)


def read_summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary
