"""From what the user said to a run that can start. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.config import Config, canonical_strategy, dump, load_config, resolve
from smolcluster.config.strategies import ALONE, all_records, check_name, record_of
from smolcluster.data.names import is_text
from smolcluster.engine.run_dir import Resume, RunDir, find_resume, new_run_dir
from smolcluster.errors import UserError, unknown_name

DEFAULT_CONFIG = "default"
BACKENDS = ("gloo", "nccl", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that can start."""

    config: Config
    workers: int
    run_dir: RunDir
    resume: Path | None = None
    plane: str = "mesh"
    backend: str | None = None
    anew: bool = False  # the same run, started again: it had saved nothing

    def opened(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Hold the run directory. Its configuration and tokenizer are written there: it can be moved, and needs no original.

        `again`: the same run, started again.
        """
        config, files = with_tokenizer(self.config, str(self.run_dir.tokenizer.absolute()))
        resume = again or self.resume is not None
        return self.run_dir.opened(dump(config), files, resume=resume, anew=self.anew)


def prepare(
    sources: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    sets: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
    resume: str | None = None,
    backend: str | None = None,
    lead: bool = True,
    again: bool = False,
) -> Prepared:
    """Read and check the configuration; decide where the run lives and where it starts from.

    Sources are YAML files, built-in names and at most one `file.py:Task`. With none: the built-in default, or the
    configuration of the run that is resumed. Only the lead rank of a job needs the files of the run: it hands them on. `again`:
    this is the same run, started again, so that its directory may hold what it did before.
    """
    found: Resume | None = None
    anew = False
    if resume is not None:
        try:
            found = find_resume(resume, run_dir=run_dir)
            anew = found is None and lead
        except UserError:
            if lead:
                raise
        resume = None if resume == "auto" else resume
    before = found.run if found is not None else RunDir(run_dir) if anew and run_dir is not None else None
    if not sources and found is not None and not found.run.config.is_file():
        raise UserError(f"{found.run.path} has no config.yaml; name the configuration to continue with, e.g. gpt")
    config = _load(sources, overrides=overrides, sets=sets or {}, before=before)
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
        place.check_free(resume=found is not None or again or anew)
    source = found.source if found is not None else resume
    return Prepared(
        config=config,
        workers=config.cluster.num_workers or 1,
        run_dir=place,
        resume=None if source is None else Path(source),
        plane=plane,
        backend=backend,
        anew=anew,
    )


def _load(
    sources: Sequence[str], *, overrides: Sequence[str], sets: Mapping[str, Any], before: RunDir | None
) -> Config:
    """Read the sources. With none: the configuration of the run `before`, or the built-in default."""
    tasks = [s for s in sources if is_task(s)]
    files = [s for s in sources if s not in tasks]
    if len(tasks) > 1:
        raise UserError(f"one task at a time, not {', '.join(tasks)}")
    if not sources:
        files = [str(before.config)] if before is not None and before.config.is_file() else [DEFAULT_CONFIG]
    sets = dict(sets)
    if tasks:
        sets["task"] = absolute_task(tasks[0])
    if not sources and canonical_strategy(sets.get("strategy.name") or "") == ALONE:
        sets["cluster.num_workers"] = sets.get("cluster.num_workers") or 1  # more workers were not the user's wish
    return load_config(files, overrides=overrides, sets=sets)


def _check(config: Config, backend: str | None) -> str:
    """Refuse what is known to be wrong before anything starts. Return the plane; the strategy gets its canonical name."""
    config.strategy.name = check_name(config.strategy.name)
    plane = choose_plane(config)
    if backend is not None and backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if backend is not None and plane == "elastic":
        raise UserError(f"--backend {backend} is for the mesh plane; {config.strategy.name} has a transport of its own")
    if config.task is None:
        is_text(config.data.name)  # an unknown dataset
    return plane


def sets_of(
    *,
    strategy: str | None = None,
    workers: int | None = None,
    plane: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return what the arguments that most commands take set, by dotted name."""
    return {
        "strategy.name": strategy,
        "cluster.num_workers": workers,
        "cluster.plane": plane,
        "training.steps": steps,
        "training.seed": seed,
    }


def _use_recorded_tokenizer(config: Config, run: RunDir) -> None:
    """Read text with the tokenizer that the resumed run was imported with, unless the user names another one."""
    if not run.tokenizer.is_dir() or config.task is not None:
        return
    recorded = load_config([run.config]).data.tokenizer if run.config.is_file() else None
    if config.data.tokenizer in (None, recorded):
        config.data.tokenizer = str(run.tokenizer.absolute())


def with_tokenizer(config: Config, place: str) -> tuple[Config, dict[str, bytes]]:
    """Return the files of the tokenizer, and the configuration that finds them in the folder `place`.

    Nothing changes, and there are no files, where `data.tokenizer` is not the path of some on this machine.
    """
    said = config.data.tokenizer
    if config.task is not None or said in (None, "bytes", "chars", "gpt2") or not Path(said).expanduser().exists():
        return config, {}
    from smolcluster.engine.checkpoint.tokenizer_files import tokenizer_at  # numpy; few runs need it

    files = tokenizer_at(said)
    if files:
        config = config.model_copy(deep=True)
        config.data.tokenizer = place
    return config, files


def choose_plane(config: Config) -> str:
    """Where the strategy runs: as cluster.plane says, if it can."""
    record, said = record_of(config.strategy.name), config.cluster.plane
    if said is not None and said not in record.planes:
        there = sorted(name for name, other in all_records().items() if said in other.planes)
        raise UserError(f"strategy {record.name} does not run on the {said} plane; those that do: {', '.join(there)}")
    if said is not None:
        return said
    return "elastic" if config.strategy.said().get(record.elastic_option) else record.planes[0]


def task_name(config: Config) -> str:
    if config.task is not None:
        path, _, name = config.task.rpartition(":")
        return (name if path else Path(config.task).stem).lower()
    return "mnist" if config.data.name == "mnist" else config.model.type


def is_task(source: str) -> bool:
    """Whether a source is a Python file, or a class in one, instead of a configuration."""
    return source.endswith(".py") or ".py:" in source


def split_task(task: str) -> tuple[str, str]:
    """Return the path of the file, and `:Class`, or nothing where no class is named."""
    path, colon, name = task.rpartition(":") if ".py:" in task else (task, "", "")
    return path, colon + name


def absolute_task(task: str) -> str:
    """Workers may run elsewhere: the path must hold there too. What is a link here may be none there, so it stays one."""
    path, name = split_task(task)
    return f"{Path(path).absolute()}{name}"
