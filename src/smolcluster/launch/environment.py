"""Run one rank that another launcher started: torchrun, Slurm, or a user on each machine.

    torchrun             RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment; at a restart also
                         TORCHELASTIC_RESTART_COUNT: the run in --run-dir resumes from its last checkpoint
    srun                 a step of several tasks: SLURM_PROCID is the rank, SLURM_STEP_NUM_TASKS the world size, rank 0 is on
                         the first host of SLURM_STEP_NODELIST; SLURM_RESTART_COUNT of a requeued job: as above
    by hand              --world-size --rank --master-addr --master-port

Flags take precedence over the environment, torchrun's variables over Slurm's. Nothing here imports torch until the rank runs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from smolcluster.engine.spec import ENVIRONMENT
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted, Outcome
from smolcluster.launch.local.processes import make_spec
from smolcluster.launch.prepare import Prepared
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.observer import Sink

# Master ports of Slurm jobs, one per job: below the ephemeral range.
FIRST_PORT, NUM_PORTS = 20000, 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedRank:
    """The rank that another launcher assigned to this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    restarts: int = 0  # by torchrun or Slurm


def assigned_rank(
    *,
    world_size: int | None,
    rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    srun: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> AssignedRank | None:
    """Return this process's rank in a job that another launcher started; None when this process starts the ranks itself.

    `srun` False: ignore Slurm's variables, for `train --elastic`, which starts ranks inside an srun task.
    """
    if rank is None and not environ.get("RANK"):
        by_srun = slurm_rank(environ) if srun else None
        if by_srun is not None:
            return _with_flags(by_srun, world_size=world_size, master_addr=master_addr, master_port=master_port)
        if master_addr is not None or master_port is not None:
            raise UserError("--master-addr and --master-port need --rank, this process's rank in the job")
        return None
    rank = rank if rank is not None else _number("RANK", environ)
    if world_size is None:
        if "WORLD_SIZE" not in environ:
            raise UserError(f"--rank {rank} needs --world-size, the number of ranks in the job")
        world_size = _number("WORLD_SIZE", environ)
    if not 0 <= rank < world_size:
        raise UserError(f"--rank {rank} is out of range: a world of {world_size} has ranks 0 to {world_size - 1}")
    port = master_port or _port(environ, default=29500)
    by_torchrun = "LOCAL_RANK" in environ
    return AssignedRank(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", environ) if by_torchrun else 0,
        local_world_size=_number("LOCAL_WORLD_SIZE", environ, default=1) if by_torchrun else 1,
        master_addr=master_addr or environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        restarts=_number("TORCHELASTIC_RESTART_COUNT", environ, default=0) if by_torchrun else 0,
    )


def slurm_rank(environ: Mapping[str, str]) -> AssignedRank | None:
    """Return the rank of a task of srun; None in the batch script, in a shell and in a step of one task."""
    if not environ.get("SLURM_STEP_ID"):
        return None
    world_size = _number("SLURM_STEP_NUM_TASKS", environ, default=_number("SLURM_NTASKS", environ, default=1))
    if world_size < 2:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job, step = _number("SLURM_JOB_ID", environ, default=0), _number("SLURM_STEP_ID", environ)
    return AssignedRank(
        rank=_number("SLURM_PROCID", environ),
        world_size=world_size,
        local_rank=_number("SLURM_LOCALID", environ),
        local_world_size=_tasks_here(environ),
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=_port(environ, default=FIRST_PORT + (job + step) % NUM_PORTS),
        restarts=_number("SLURM_RESTART_COUNT", environ, default=0),
    )


def local_rank_of(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return local rank and local world size from torchrun's or Slurm's variables; without them 0 and 1."""
    if environ.get("LOCAL_RANK"):
        return _number("LOCAL_RANK", environ), _number("LOCAL_WORLD_SIZE", environ, default=1)
    if environ.get("SLURM_STEP_ID"):
        return _number("SLURM_LOCALID", environ, default=0), _tasks_here(environ)
    return 0, 1


def _tasks_here(environ: Mapping[str, str]) -> int:
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    return tasks_on_node(tasks, _number("SLURM_NODEID", environ, default=0))


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gpu08` of `gpu[08-11,20],login1`."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
    if not host:
        raise UserError("in a Slurm step with an empty SLURM_STEP_NODELIST: give --master-addr, the host of rank 0")
    return host


def tasks_on_node(tasks: str, node: int) -> int:
    """Return one node's count from a Slurm list: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _with_flags(
    place: AssignedRank, *, world_size: int | None, master_addr: str | None, master_port: int | None
) -> AssignedRank:
    if world_size not in (None, place.world_size):
        raise UserError(
            f"--world-size {world_size}, but srun has started {place.world_size} tasks, one for each rank; remove the flag"
        )
    return replace(place, master_addr=master_addr or place.master_addr, master_port=master_port or place.master_port)


def _port(environ: Mapping[str, str], *, default: int) -> int:
    port = _number("MASTER_PORT", environ, default=default)
    if not 0 < port < 65536:
        raise UserError(f"port {port} (MASTER_PORT) is not between 1 and 65535")
    return port


def _number(name: str, environ: Mapping[str, str], *, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment variable {name}={text!r} is not a number") from None


def run_rank(run: Prepared, place: AssignedRank, *, sinks: list[Sink], tell: Callable[[SmolclusterError], int]) -> int:
    """Run that rank in this process; rank 0 chooses the run directory. Return 0, or raise as `run_local` does.

    `tell` prints an error that cannot be raised: a thread ends the process while its main thread waits for a lost rank.
    """
    os.environ.update(ENVIRONMENT | os.environ)
    outcome = Outcome()
    lead = place.rank == 0
    again = place.restarts > 0
    with run.opened(again=again) if lead else contextlib.nullcontext():
        if again and run.resume is None and place.local_rank == 0:
            truncate_metrics(run.run_dir.metrics, after_step=0)  # nothing was saved: restart from step 0
        from smolcluster.engine.channel import SignalChannel
        from smolcluster.engine.process.main import leave, run_worker

        assigned = {name: value for name, value in asdict(place).items() if name != "restarts"}
        spec = make_spec(run, resume=run.resume, watched=False, again=again, **assigned)
        if not lead:
            spec = replace(spec, run_dir="")  # rank 0 sends it

        def cut_off() -> None:
            leave(tell(_error(run, place, outcome)))

        status = run_worker(spec, SignalChannel(), [outcome, *sinks], cut_off=cut_off)
        if status == 0:
            return 0
        raise _error(run, place, outcome)


def _error(run: Prepared, place: AssignedRank, outcome: Outcome) -> SmolclusterError:
    """Return why this rank did not finish. Rank 0 also writes a summary."""
    failed, lead = outcome.failed, place.rank == 0
    if failed is not None and failed.kind == "user":
        return UserError(failed.message)
    if failed is None:
        error: SmolclusterError = outcome.interrupted(run.run_dir) if lead else Interrupted("interrupted")
        end: dict[str, Any] = {"status": "interrupted", "members_lost": 0}
    else:
        reason = f"lost another rank: {failed.message}" if failed.kind == "peer" else failed.message
        error = WorkerFailed(f"rank {place.rank} failed: {reason}\n{failed.traceback}".rstrip())
        end = {"error": reason}
    if lead and outcome.summary is None:
        outcome.write_summary(run.run_dir, run.config, world_size=place.world_size, **end)
    return error
