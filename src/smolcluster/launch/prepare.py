"""Turn sources, overrides and flags into a checked run that can start. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from smolcluster.config import Config, Overrides, canonical_strategy, dump, list_overrides, load_config, resolve
from smolcluster.config.load import Override
from smolcluster.config.strategies import ALONE, all_records, check_name, record_of
from smolcluster.data.names import is_text
from smolcluster.engine.run_dir import Resume, RunDir, find_resume, new_run_dir
from smolcluster.errors import UserError, unknown_name

DEFAULT_CONFIG = "default"
BACKENDS = ("gloo", "nccl", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked run that can start."""

    config: Config
    workers: int
    run_dir: RunDir
    resume: Path | None = None
    plane: str = "mesh"
    backend: str | None = None
    fresh: bool = False  # `--resume auto` of a run that had saved nothing: start from step 0

    def opened(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Lock the run directory and write the configuration and tokenizer into it.

        `again`: another launcher has restarted this run.
        """
        config, files = with_tokenizer(self.config, str(self.run_dir.tokenizer.absolute()))
        resume = again or self.resume is not None
        return self.run_dir.opened(dump(config), files, resume=resume, fresh=self.fresh)


def prepare(
    sources: Sequence[str] = (),
    *,
    overrides: Overrides = (),
    run_dir: Path | None = None,
    resume: str | None = None,
    backend: str | None = None,
    lead: bool = True,
    again: bool = False,
) -> Prepared:
    """Read and check the configuration; decide where the run lives and where it starts from.

    Sources are YAML files, built-in names and at most one `file.py:Task`. With none: the configuration of the resumed run, else
    the built-in default. Only the lead rank of a job needs the files of the run. `again`: another launcher has restarted this
    run, so its directory may hold earlier results.
    """
    found: Resume | None = None
    fresh = False
    if resume is not None:
        try:
            found = find_resume(resume, run_dir=run_dir)
            fresh = found is None and lead
        except UserError:
            if lead:
                raise
        resume = None if resume == "auto" else resume
    before = found.run if found is not None else RunDir(run_dir) if fresh and run_dir is not None else None
    if not sources and found is not None and not found.run.config.is_file():
        raise UserError(f"{found.run.path} has no config.yaml; name the configuration to continue with, e.g. gpt")
    config = _load(sources, list_overrides(overrides), before)
    if found is not None:
        _use_recorded_tokenizer(config, found.run)
    config = resolve(config)
    plane = _check(config, backend)
    if run_dir is not None:
        place = RunDir(run_dir)
    elif found is not None:
        place = found.run
    else:
        place = new_run_dir(task_name(config), config.strategy.name)
    if lead:
        place.check_free(resume=found is not None or again or fresh)
    source = found.source if found is not None else resume
    return Prepared(
        config=config,
        workers=config.cluster.num_workers or 1,
        run_dir=place,
        resume=None if source is None else Path(source),
        plane=plane,
        backend=backend,
        fresh=fresh,
    )


def _load(sources: Sequence[str], overrides: list[Override], before: RunDir | None) -> Config:
    """Read the sources. With none: the configuration of the run `before`, or the built-in default."""
    tasks = [s for s in sources if is_task(s)]
    files = [s for s in sources if s not in tasks]
    if len(tasks) > 1:
        raise UserError(f"one task at a time, not {', '.join(tasks)}")
    if not sources:
        files = [str(before.config)] if before is not None and before.config.is_file() else [DEFAULT_CONFIG]
    if tasks:
        overrides.append(("task", absolute_task(tasks[0])))
    given = dict(override for override in overrides if isinstance(override, tuple))
    if not sources and canonical_strategy(given.get("strategy.name") or "") == ALONE:
        overrides.append(("cluster.num_workers", given.get("cluster.num_workers") or 1))  # the default has more
    return load_config(files, overrides=overrides)


def _check(config: Config, backend: str | None) -> str:
    """Check strategy, backend and dataset; store the strategy's canonical name. Return the plane."""
    config.strategy.name = check_name(config.strategy.name)
    plane = choose_plane(config)
    if backend is not None and backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if backend is not None and plane == "elastic":
        raise UserError(
            f"--backend {backend} is for the mesh plane; {config.strategy.name} uses the elastic plane's transport"
        )
    if config.task is None:
        is_text(config.data.name)  # raises for an unknown dataset
    return plane


def _use_recorded_tokenizer(config: Config, run: RunDir) -> None:
    """Use the resumed run's own tokenizer files, unless the user names another tokenizer."""
    if not run.tokenizer.is_dir() or config.task is not None:
        return
    recorded = load_config([run.config]).data.tokenizer if run.config.is_file() else None
    if config.data.tokenizer in (None, recorded):
        config.data.tokenizer = str(run.tokenizer.absolute())


def with_tokenizer(config: Config, place: str) -> tuple[Config, dict[str, bytes]]:
    """If `data.tokenizer` is a path here, return its files and a configuration that names the folder `place` instead."""
    given = config.data.tokenizer
    if config.task is not None or given in (None, "bytes", "chars", "gpt2") or not Path(given).expanduser().exists():
        return config, {}
    from smolcluster.engine.checkpoint.tokenizer_files import tokenizer_at  # numpy; few runs need it

    files = tokenizer_at(given)
    if files:
        config = config.model_copy(deep=True)
        config.data.tokenizer = place
    return config, files


def choose_plane(config: Config) -> str:
    """Return cluster.plane if the strategy supports it, else the strategy's default."""
    record, plane = record_of(config.strategy.name), config.cluster.plane
    if plane is not None and plane not in record.planes:
        able = sorted(name for name, other in all_records().items() if plane in other.planes)
        raise UserError(
            f"strategy {record.name} does not run on the {plane} plane; strategies that do: {', '.join(able)}"
        )
    if plane is not None:
        return plane
    return "elastic" if config.strategy.given().get(record.elastic_option) else record.planes[0]


def task_name(config: Config) -> str:
    if config.task is not None:
        path, _, name = config.task.rpartition(":")
        return (name if path else Path(config.task).stem).lower()
    return "mnist" if config.data.name == "mnist" else config.model.type


def is_task(source: str) -> bool:
    """Return whether a source is a Python file, or a class in one."""
    return source.endswith(".py") or ".py:" in source


def split_task(task: str) -> tuple[str, str]:
    """Split into the file's path and `:Class`, which may be empty."""
    path, colon, name = task.rpartition(":") if ".py:" in task else (task, "", "")
    return path, colon + name


def absolute_task(task: str) -> str:
    """Make the task's path absolute for other processes, without resolving links."""
    path, name = split_task(task)
    return f"{Path(path).absolute()}{name}"
