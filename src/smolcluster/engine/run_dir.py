"""The folder of one run, and how a later command finds it again. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smolcluster.durable_files import Files, atomic_write
from smolcluster.errors import UserError
from smolcluster.observe.jsonl import truncate_metrics

RUNS = Path("runs")


class _Inside:
    """A path inside the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    config = _Inside("config.yaml")
    metrics = _Inside("metrics.jsonl")
    summary = _Inside("summary.json")
    checkpoints = _Inside("checkpoints")
    tokenizer = _Inside("tokenizer")  # copies of its files and the chat template, where it has files
    logs = _Inside("logs")
    journal = _Inside("journal")  # of a server's committed steps; removed when the run finishes
    own = _Inside("own")  # local state of elastic workers, on their machines
    history = _Inside("history.jsonl")
    run_id = _Inside("run-id")
    link = _Inside("link.json")  # the preset that was picked by the measured link
    _lock_file = _Inside(".lock")

    def holds_a_run(self) -> bool:
        return any(p.exists() for p in (self.config, self.metrics, self.summary, self.checkpoints))

    def has_checkpoints(self) -> bool:
        folder = self.checkpoints
        return folder.is_dir() and any(p.name.startswith("step-") for p in folder.iterdir())

    def can_continue(self) -> bool:
        """Return whether there is anything to resume from."""
        return self.has_checkpoints() or any(self.journal.glob("snapshots/step-*"))

    def may_start_fresh(self) -> bool:
        """Return whether the same run may start over: it ended before it saved anything. One that has finished has a result."""
        if self.can_continue():
            return False
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return True
        return not isinstance(summary, dict) or summary.get("status") != "finished"

    def create(self, config_text: str, tokenizer: Mapping[str, bytes] | None = None, *, resume: bool) -> None:
        """Make the folder; write the configuration, and the tokenizer's files unless a resumed run has them."""
        self.check_free(resume=resume)
        with self._refusals():
            self._make()
            self.logs.mkdir(exist_ok=True)
            if not resume:  # a killed import may have left it
                shutil.rmtree(self.tokenizer, ignore_errors=True)
            if tokenizer and not self.tokenizer.exists():
                self.tokenizer.mkdir()
                for name, content in tokenizer.items():
                    (self.tokenizer / name).write_bytes(content)
            self._write_config(config_text.encode())

    @contextlib.contextmanager
    def opened(
        self, config_text: str, tokenizer: Mapping[str, bytes] | None = None, *, resume: bool, fresh: bool = False
    ) -> Iterator[None]:
        """`create`, and lock the folder: two runs in one would mix their rows and checkpoints.

        `fresh`: the same run is started again without a checkpoint (`may_start_fresh`). Its rows are dropped.

        A UserError raised inside undoes all of it: folders that were made here are removed if they hold no run, and the
        earlier configuration is restored.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            with self._lock():
                self.check_free(resume=resume or fresh)
                before = (self.config.read_bytes(), self.config.stat().st_mtime_ns) if self.config.is_file() else None
                had_tokenizer = self.tokenizer.exists() and (resume or fresh)
                try:
                    self.create(config_text, tokenizer, resume=resume or fresh)
                    if fresh:
                        truncate_metrics(self.metrics, after_step=0)
                    yield
                except UserError:
                    if not had_tokenizer:
                        shutil.rmtree(self.tokenizer, ignore_errors=True)
                    self._take_back(before)
                    raise
        except UserError as error:
            if not (self.holds_a_run() or isinstance(error.__cause__, BlockingIOError)):
                with contextlib.suppress(OSError):  # it was never made, or another process has put something there
                    self._lock_file.unlink(missing_ok=True)
                    for folder in made:
                        folder.rmdir()
            raise

    def check_free(self, *, resume: bool) -> None:
        """Refuse a folder that holds a run, unless that never took a step."""
        ours = self.config.is_file() and self.logs.is_dir()
        abandoned = ours and not (self._has_rows() or self.can_continue())
        if self.holds_a_run() and not resume and not abandoned:
            raise UserError(
                f"{self.path} already holds a run; continue it with --resume {self.path}, or choose another --run-dir"
            )

    @contextlib.contextmanager
    def without_journal(self) -> Iterator[None]:
        """Move the journal of an earlier server aside: a server starts from its journal before anything else.

        Restore it when a UserError is raised before the new server has created its own.
        """
        aside = self.journal.with_suffix(".aside")
        if self.journal.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            with self._refusals():
                self.journal.rename(aside)
        try:
            yield
        except UserError:
            if aside.is_dir() and not self.journal.exists():
                aside.rename(self.journal)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _make(self) -> None:
        """Make the folder, for its owner alone: logs and samples may hold what others must not read."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                with self._refusals():
                    self._make()
                    stack.enter_context(Files().lock(self._lock_file))
            except BlockingIOError as error:
                raise UserError(
                    f"another process is training in {self.path}; wait for it, or choose another --run-dir"
                ) from error
            yield

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn file system errors into advice."""
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            raise UserError(
                f"cannot write the run directory {self.path}: {error.strerror or error}; choose another with --run-dir"
            ) from error

    def _write_config(self, text: bytes) -> None:
        with atomic_write(self.config) as file:
            file.write(text)

    def _take_back(self, config_before: tuple[bytes, int] | None) -> None:
        """Restore the earlier configuration with its modification time: a newer time would look like a resumed run."""
        with contextlib.suppress(OSError):
            if config_before is not None:
                text, when = config_before
                self._write_config(text)
                os.utime(self.config, ns=(when, when))
            elif not (self._has_rows() or self.summary.exists() or self.has_checkpoints()):
                for file in (self.config, self.metrics, self.history, self.run_id):
                    file.unlink(missing_ok=True)
                for folder in (self.checkpoints, self.journal, self.logs):
                    shutil.rmtree(folder, ignore_errors=True)

    def _has_rows(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


def new_run_dir(task: str, strategy: str) -> RunDir:
    """`runs/gpt-allreduce-20260131-120000`, with a number appended while that is taken."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{task}-{strategy}-{stamp}"
    path, number = RUNS / name, 2
    while path.exists():
        path, number = RUNS / f"{name}-{number}", number + 1
    return RunDir(path)


@dataclass(frozen=True, slots=True)
class Resume:
    """`source` is a folder of checkpoints (take the latest good one) or one checkpoint; `run` is the run it belongs to.

    An interrupted run of the elastic plane that is resumed by its run directory continues from its journal, which is newer
    than its last checkpoint.
    """

    source: Path
    run: RunDir


def find_resume(resume: str, *, run_dir: Path | None) -> Resume | None:
    """Return what `--resume` names: `latest` (in --run-dir, or of the newest run here), a run directory, or a checkpoint.

    `auto` names the run in --run-dir. None: the run was never started or ended before it saved anything, and starts at step 0.
    """
    if resume == "auto":
        if run_dir is None:
            raise UserError("--resume auto continues the run in --run-dir: give --run-dir as well")
        run = RunDir(run_dir)
        if run.may_start_fresh():
            return None
        if run.can_continue():
            return Resume(run.checkpoints, run)
        raise UserError(
            f"--resume auto: the run in {run_dir} has finished without a checkpoint; choose another --run-dir"
        )
    if resume == "latest":
        newest = RunDir(run_dir) if run_dir is not None else _newest_run()
        if newest is None or not newest.can_continue():
            where = run_dir if run_dir is not None else RUNS
            raise UserError(
                f"--resume latest: there is no checkpoint in {where}; name a run directory, or start without --resume"
            )
        return Resume(newest.checkpoints, newest)
    path = Path(resume)
    if (path / "manifest.json").is_file():
        return Resume(path, RunDir(path.parent.parent))
    if RunDir(path).can_continue():
        return Resume(path / "checkpoints", RunDir(path))
    if path.name == "checkpoints" and RunDir(path.parent).has_checkpoints():
        return Resume(path, RunDir(path.parent))
    found = "holds no checkpoint" if path.exists() else "does not exist"
    raise UserError(f"--resume {resume}: {path} {found}; name a run directory, a checkpoint folder, or latest")


def _newest_run() -> RunDir | None:
    def last_saved(run: RunDir) -> float:
        return max(folder.stat().st_mtime for folder in (run.checkpoints, run.journal) if folder.is_dir())

    runs = [run for run in map(RunDir, RUNS.iterdir()) if run.can_continue()] if RUNS.is_dir() else []
    return max(runs, key=last_saved, default=None)
