"""The folder of one run, and how a later command finds it again. Nothing here imports torch."""

from __future__ import annotations

import datetime
import shutil
from dataclasses import dataclass
from pathlib import Path

from smolcluster.errors import UserError

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def holds_a_run(self) -> bool:
        return any(p.exists() for p in (self.config, self.metrics, self.summary, self.checkpoints))

    def create(self, config_text: str, *, resume: bool) -> bool:
        """Make the folder and write the configuration. Returns whether the folder is new, and so may be taken back."""
        if self.holds_a_run() and not resume:
            raise UserError(
                f"{self.path} already holds a run; continue it with --resume {self.path}, or choose another --run-dir"
            )
        new = not self.path.exists()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            temporary = self.config.with_suffix(".yaml.tmp")
            temporary.write_text(config_text, encoding="utf-8")
            temporary.replace(self.config)
        except OSError as error:
            if new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise UserError(
                f"cannot write the run directory {self.path}: {error.strerror or error}; choose another with --run-dir"
            ) from error
        return new

    def discard_if_empty(self) -> None:
        """Take back a folder in which nothing happened."""
        if not (self.metrics.exists() or self.checkpoints.exists() or self.summary.exists()):
            shutil.rmtree(self.path, ignore_errors=True)


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
    """`source` is a folder of checkpoints (take the latest good one) or one checkpoint; `run` is the run it belongs to."""

    source: Path
    run: RunDir


def find_resume(resume: str, *, run_dir: Path | None) -> Resume:
    """What `--resume` means: `latest` (in --run-dir, or of the newest run here), a run directory, or a checkpoint."""
    if resume == "latest":
        run = RunDir(run_dir) if run_dir is not None else _newest_run()
        if run is None or not _has_checkpoints(run.checkpoints):
            where = run_dir if run_dir is not None else RUNS
            raise UserError(
                f"--resume latest: there is no checkpoint in {where}; name a run directory, or start anew without --resume"
            )
        return Resume(run.checkpoints, run)
    path = Path(resume)
    if (path / "manifest.json").is_file():
        return Resume(path, RunDir(path.parent.parent))
    if _has_checkpoints(path / "checkpoints"):
        return Resume(path / "checkpoints", RunDir(path))
    if path.name == "checkpoints" and _has_checkpoints(path):
        return Resume(path, RunDir(path.parent))
    found = "holds no checkpoint" if path.exists() else "does not exist"
    raise UserError(f"--resume {resume}: {path} {found}; name a run directory, a checkpoint folder, or latest")


def _has_checkpoints(folder: Path) -> bool:
    return folder.is_dir() and any(p.name.startswith("step-") for p in folder.iterdir())


def _newest_run() -> RunDir | None:
    runs = [p for p in RUNS.iterdir() if _has_checkpoints(p / "checkpoints")] if RUNS.is_dir() else []
    return RunDir(max(runs, key=lambda p: (p / "checkpoints").stat().st_mtime)) if runs else None
