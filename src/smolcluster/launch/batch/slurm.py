"""Render an sbatch file for Slurm.

mesh plane       srun starts one task for every rank; each reads its rank from Slurm's variables (launch/environment.py)
elastic plane    the batch script on the first node runs the server; srun starts the workers, also on that node

near the time limit     Slurm sends USR1 to the script: the run saves and ends, and the job is requeued
job cancelled           Slurm sends TERM to every process: the run saves and ends
job requeued            the run resumes from its folder, which all nodes must see
run ended               the job ends with the run's exit status
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.launch.batch.job import BatchJob
from smolcluster.launch.batch.text import mebibytes, slurm_time
from smolcluster.launch.environment import FIRST_PORT, NUM_PORTS
from smolcluster.launch.join.worker import local_override_args

GRACE_S = 120  # before the time limit
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # folders local to each node


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """Slurm's part of the job. Paths are valid on every node."""

    run_dir: Path
    folder: Path  # working directory, also of the output
    python: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    options: tuple[str, ...] = ()  # further options of sbatch
    setup: tuple[str, ...] = ()  # shell lines to run first
    requeue: bool = True
    grace_s: int | None = None
    token_file: Path | None = None
    shared: tuple[Path, ...] = ()  # folders below NODE_LOCAL that all nodes see


def check(job: BatchJob, settings: SlurmSettings, *, resume: bool = False) -> None:
    """Check the run directory, paths and token file on this machine, which shares its files with the nodes."""
    if not resume and RunDir(settings.run_dir).holds_a_run():
        raise UserError(
            f"{settings.run_dir} already holds a run; resume it with --resume, or choose another --name or --run-dir"
        )
    if job.nodes > 1:
        data = job.config.data
        paths = [("CONFIG", source) for source in job.sources if source.startswith("/")]
        paths += [("--run-dir", str(settings.run_dir)), ("--token-file", str(settings.token_file or ""))]
        folders = {"data.root": data.root, "data.tokenizer_root": data.tokenizer_root}
        paths += [(key, str(Path(path).absolute())) for key, path in folders.items() if path]
        for what, path in paths:
            _check_shared(what, path, settings.shared)
    if settings.token_file is not None:
        if job.plane == "mesh":
            raise UserError("--token-file has no effect: the ranks of the mesh plane use no token; remove it")
        from smolcluster.comm.elastic.transport.security import TokenFile

        if not TokenFile(settings.token_file).entries():
            raise UserError(
                f"--token-file {settings.token_file} contains no token; make one with "
                f"(umask 077; smolcluster token new --show-only > {settings.token_file})"
            )


def _check_shared(what: str, path: str, shared: tuple[Path, ...]) -> None:
    def below(folder: str | Path) -> bool:
        return PurePath(path).is_relative_to(folder)

    local = next((folder for folder in NODE_LOCAL if path and below(folder)), None)
    if local is not None and not any(map(below, shared)):
        raise UserError(
            f"{what} {path}: {local} is local to each node; move it to a shared folder, or give --shared "
            f"{PurePath(path).parent} if all nodes see that"
        )


def render(job: BatchJob, settings: SlurmSettings) -> str:
    _check_lines(job, settings)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job, settings)), "", *_opening(job, settings)]
    if job.plane == "elastic":
        lines += ["", *_server_and_workers(job, settings)]
    else:
        lines += ["", *_ranks(job, settings)]
    return "\n".join([*lines, "", *_ending(job, settings), ""])


def _check_lines(job: BatchJob, settings: SlurmSettings) -> None:
    names = {"--partition": settings.partition, "--account": settings.account}
    names |= {"--qos": settings.qos, "--constraint": settings.constraint}
    for option, value in names.items():
        if value is not None and (not value or value.startswith("-") or any(c.isspace() for c in value)):
            raise UserError(f"{option} '{value}' is not a name")
    for option in settings.options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(f"--sbatch '{option}': give one option of sbatch, such as --sbatch=--gres=gpu:a100:2")
    for path in (settings.folder, settings.run_dir):
        if any(c in str(path) for c in "\n%\\'\"") or str(path) != str(path).strip():
            raise UserError(f"'{path}': sbatch does not accept this as a path; choose another")
    grace = settings.grace_s
    if grace is not None and not 0 < grace < (job.time_limit_s or 65536):
        raise UserError(f"--grace {grace}: seconds before the time limit; more than 0, and less than --time")


def _options(job: BatchJob, settings: SlurmSettings) -> Iterator[str]:
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.workers_per_node}"
    if job.cpus_per_worker is not None:
        yield f"--cpus-per-task={job.cpus_per_worker}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if job.memory_bytes is not None:
        yield f"--mem={mebibytes(job.memory_bytes)}M"
    if job.time_limit_s is not None:
        yield f"--time={slurm_time(job.time_limit_s)}"
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(settings, name)) is not None:
            yield f"--{name}={value}"
    yield f"--chdir={shlex.quote(str(settings.folder))}"
    yield f"--output={shlex.quote(f'{settings.folder}/{job.name}-%j.out')}"
    yield "--open-mode=append"
    yield "--requeue" if settings.requeue else "--no-requeue"
    grace = settings.grace_s or max(1, min(GRACE_S, (job.time_limit_s or 2 * GRACE_S) // 2))
    yield f"--signal=B:USR1@{grace}"
    yield from settings.options


def _opening(job: BatchJob, settings: SlurmSettings) -> Iterator[str]:
    yield f"# {job.summary}; written by `smolcluster slurm`."
    yield "# Submit it again to resume a run that was stopped."
    yield ""
    yield from settings.setup  # before `set -euo pipefail`, which site scripts may not survive
    yield "set -euo pipefail"
    yield ""
    yield f"run_dir={shlex.quote(str(settings.run_dir))}"
    yield f"python={shlex.quote(settings.python)}"
    yield 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"'
    yield "# A stopped run resumes from its last checkpoint; without one it starts from step 0."
    yield f'arguments=({_arguments(job)} --run-dir "$run_dir" --resume auto)'


def _arguments(job: BatchJob) -> str:
    """Return the arguments of `train` or `server`: the user's, and the number of workers."""
    args = ["server" if job.plane == "elastic" else "train", *job.sources]
    given = {"--strategy": job.strategy, "--steps": job.steps, "--seed": job.seed, "--backend": job.backend}
    for flag, value in given.items():
        if value is not None:
            args += [flag, str(value)]
    args += ["--workers", str(job.workers)]
    if job.overrides:
        args += ["--override", *job.overrides]
    return shlex.join(args)


_STOPPED = """
# Slurm sends USR1 to this script before the time limit: the run saves, and the job is queued again. When the job is cancelled
# Slurm sends TERM to all its processes: they save, and this script waits for them.
again=
trap 'again=yes; {stop}' USR1
trap : TERM
""".strip()
_STOPPED_FOR_GOOD = """
# Slurm sends USR1 to this script before the time limit, and TERM to all processes when the job is cancelled: the run saves,
# and this script waits for it.
trap '{stop}' USR1
trap : TERM
""".strip()


def _srun(job: BatchJob) -> str:
    """Return the srun command. Ranks exit at different times; that must not end the others."""
    args = ["srun", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
    args += [f"--ntasks={job.workers}", f"--ntasks-per-node={job.workers_per_node}"]
    if job.cpus_per_worker is not None:
        args.append(f"--cpus-per-task={job.cpus_per_worker}")
    return " ".join(args)


def _ranks(job: BatchJob, settings: SlurmSettings) -> Iterator[str]:
    yield f'{_srun(job)} "$python" -m smolcluster "${{arguments[@]}}" &'
    yield "run=$!"
    yield ""
    yield (_STOPPED if settings.requeue else _STOPPED_FOR_GOOD).format(stop='scancel --signal=TERM "$SLURM_JOB_ID"')
    yield 'while kill -0 "$run" 2>/dev/null; do sleep 1 || :; done'  # `sleep` gets the TERM of a cancelled job, too


def _server_and_workers(job: BatchJob, settings: SlurmSettings) -> Iterator[str]:
    yield "# Cluster token: SMOLCLUSTER_TOKEN if exported, else"
    if settings.token_file is not None:
        yield "# the one in this file."
        yield 'if [ -z "${SMOLCLUSTER_TOKEN:-}" ]; then'
        yield f"    export SMOLCLUSTER_TOKEN_FILE={shlex.quote(str(settings.token_file))}"
    else:
        yield "# one made for this job, which only its owner can read."
        yield 'if [ -z "${SMOLCLUSTER_TOKEN:-}" ]; then'
        yield '    export SMOLCLUSTER_TOKEN_FILE="$run_dir-token-$SLURM_JOB_ID"'
        yield '    mkdir -p "$(dirname "$run_dir")"'
        yield '    (umask 077 && "$python" -m smolcluster token new --show-only >"$SMOLCLUSTER_TOKEN_FILE")'
        yield "    trap 'rm -f \"$SMOLCLUSTER_TOKEN_FILE\"' EXIT"
    yield "fi"
    yield ""
    cluster = job.config.cluster
    port = cluster.port if "port" in cluster.model_fields_set else f"$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"
    yield f"port={port}"
    yield '"$python" -m smolcluster "${arguments[@]}" --bind 0.0.0.0 --port "$port" &'
    yield "run=$!"
    worker = ['"$SLURM_PROCID"', '"$SLURMD_NODENAME"', '--server "$1"', '"${@:2}"']
    if job.gpus_per_node:
        worker.insert(-1, f'--device "cuda:$((SLURM_LOCALID % {job.gpus_per_node}))"')
    worker_args = ["--task", job.task] if job.task is not None else []
    worker_args += local_override_args(job.config, same_machine=False)
    yield "# shellcheck disable=SC2016 # the tasks of srun fill these in"
    yield f"{_srun(job)} bash -c 'exec \"$0\" -m smolcluster worker {' '.join(worker)}' \\"
    yield f'    "$python" "$SLURMD_NODENAME:$port"{"".join(f" {shlex.quote(word)}" for word in worker_args)} &'
    yield "workers=$!"
    yield ""
    yield (_STOPPED if settings.requeue else _STOPPED_FOR_GOOD).format(stop='kill -TERM "$run"')
    yield ""
    yield "# Wait until the server exits; stop it when no worker has run for a minute."
    yield "alone=0"
    yield 'while kill -0 "$run" 2>/dev/null; do'
    yield "    sleep 1 || :"
    yield '    if kill -0 "$workers" 2>/dev/null; then continue; fi'
    yield "    alone=$((alone + 1))"
    yield '    if [ "$alone" = 60 ]; then'
    yield '        echo "all workers are gone: the server saves and ends" >&2'
    yield '        kill -TERM "$run"'
    yield "    fi"
    yield "done"


def _ending(job: BatchJob, settings: SlurmSettings) -> Iterator[str]:
    yield "status=0"
    yield 'wait "$run" || status=$?'
    if job.plane == "elastic":
        yield "# Workers exit with the server. Those that never connected are killed when this script exits."
        yield 'if [ "$status" = 0 ] || [ "$status" = 130 ]; then'
        yield '    for _ in {1..30}; do if kill -0 "$workers" 2>/dev/null; then sleep 1 || :; fi; done'
        yield "fi"
    if settings.requeue:
        yield 'if [ "$again" ] && [ "$status" = 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi'
    yield 'exit "$status"'
