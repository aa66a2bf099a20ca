"""Where a server's run starts: its own journal, a checkpoint or step 0; and how many steps are left from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smolcluster.config.schema import TrainingConfig
from smolcluster.durable_files import size_on_disk
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.checks import check_server_disk
from smolcluster.engine.elastic.wal.journal import disk_bound, least_disk
from smolcluster.engine.elastic.wal.recovery import Recovered
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.run_length import last_step, more_of, samples_read
from smolcluster.errors import UserError

log = logging.getLogger(__name__)


def choose_start(
    recovered: Recovered | None,
    *,
    resume: str | None,
    load_checkpoint: Callable[[Path], Snapshot],
    checkpoints: Path,
    coordinates: bool,
) -> tuple[Recovered | None, Snapshot | None]:
    """Return the journal or the checkpoint to start from; neither for a new run. `coordinates`: workers hold the weights."""
    if recovered is not None and recovered.meta is None:
        recovered = None
    if resume is None:
        return recovered, None
    if recovered is None or _prefers_checkpoint(recovered, resume, checkpoints=checkpoints, coordinates=coordinates):
        return None, load_checkpoint(Path(resume))
    return recovered, None


def count_steps(
    recovered: Recovered | None,
    snapshot: Snapshot | None,
    *,
    resume: str | None,
    training: TrainingConfig,
    num_samples: int,
    batch: int,
) -> int:
    """Return the last step of the run. Raises UserError where no step is left to train."""
    step = read = 0
    if recovered is not None and recovered.meta is not None:
        if resume is None and "total_steps" in recovered.meta:
            return int(recovered.meta["total_steps"])  # workers that reconnect hold this number
        step, leases = last_recorded(recovered)
        read = samples_read(leases, with_holes=False)
    elif snapshot is not None:
        step, read = snapshot.step, samples_read(snapshot.state["sampler"], with_holes=False)
    total = last_step(training, samples=num_samples, batch=batch, step=step, read=read)
    more = more_of(training)
    if snapshot is not None and step >= total:
        raise UserError(
            f"the checkpoint is at step {step} and the run ends at {total}: nothing is left to train; {more}"
        )
    if recovered is not None and resume is not None and step > total:
        raise UserError(
            f"this run has committed {step} steps and would end at {total}: nothing is left to train; {more}"
        )
    return total


def last_recorded(recovered: Recovered) -> tuple[int, Mapping[str, Any]]:
    """Return the last step of a journal and the state of its leases."""
    assert recovered.meta is not None
    if not recovered.records:
        return int(recovered.meta["step"]), recovered.meta["leases"]
    line = recovered.records[-1].meta["line"]
    return int(line["step"]), line["data"]


def bound_journal(
    run_dir: RunDir,
    training: TrainingConfig,
    *,
    weights_bytes: int,
    coordinates: bool,
    again: bool,
    warn: Callable[[str], None],
) -> int:
    """Return how many bytes the journal may take on this disk. `again`: a journal exists already."""
    state, record = (0, 0) if coordinates else (3 * weights_bytes, weights_bytes)
    return check_server_disk(
        run_dir.path,
        checkpoint_bytes=3 * weights_bytes if training.checkpoint_steps != 0 else 0,
        keep=training.max_checkpoints_to_keep,
        least_bytes=least_disk(state_bytes=state, record_bytes=record),
        most_bytes=disk_bound(state_bytes=state, record_bytes=record),
        there_bytes=size_on_disk(run_dir.journal) + size_on_disk(run_dir.checkpoints),
        again=again,
        warn=warn,
    )


def _prefers_checkpoint(recovered: Recovered, resume: str, *, checkpoints: Path, coordinates: bool) -> bool:
    """Return whether the checkpoint is newer or the journal cannot be used. Raises UserError where steps would be lost."""
    assert recovered.meta is not None
    if not recovered.state:
        return True
    step, _ = last_recorded(recovered)
    found = CheckpointStore(Path(resume), keep=1).load_latest()
    saved = found[1].step if found is not None else 0
    if saved > step:
        log.warning("the journal ends at step %d: continuing from the checkpoint of step %d", step, saved)
    elif saved < step and coordinates:
        name = recovered.meta.get("strategy", "its own")
        back = f", or resume from that checkpoint with --resume {checkpoints / f'step-{saved:08d}'}" if saved else ""
        raise UserError(
            f"this run has committed {step} steps, and its last checkpoint is of step {saved}: the rest is in the journal "
            f"of a parameter server; continue with --strategy {name}{back}"
        )
    return saved > step or coordinates
