"""Checks before a run starts and at its end; each error says what to change."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolcluster.config import public_dict
from smolcluster.config.options import Options, RoundOptions
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.text import size

if TYPE_CHECKING:  # imported by launchers, without torch
    from smolcluster.parallel.placement import Cost


def batch_size_of(config: Config, rank: int) -> int:
    """Return the micro-batch size of a rank: its host's, where the cluster file has one."""
    workers = config.cluster.workers
    return batch_size_on(config, workers[rank] if rank < len(workers) else "")


def batch_size_on(config: Config, host: str) -> int:
    """Return the micro-batch size of a worker on this host; `auto` starts with the common size."""
    sizes = config.cluster.batch_size
    own = sizes if isinstance(sizes, str) else sizes.get(host, "auto")
    return own if isinstance(own, int) else config.training.batch_size or 1


def is_automatic(config: Config, host: str, *, otherwise: bool) -> bool:
    """Return whether the batch size of this host is automatic; `otherwise`: the answer for a host that is not configured."""
    sizes = config.cluster.batch_size
    own = sizes if isinstance(sizes, str) else sizes.get(host)
    return otherwise if own is None else own == "auto"


def check_balance(config: Config, options: Options) -> None:
    """Raise UserError if both the steps and the batch of a machine would depend on its speed."""
    said = config.cluster.batch_size
    equal_time = isinstance(options, RoundOptions) and options.equal_time
    if equal_time and "auto" in ([said] if isinstance(said, str) else said.values()):
        raise UserError(
            "strategy.inner_steps auto and cluster.batch_size auto both divide the work by speed; leave cluster.batch_size "
            "out, or set strategy.inner_steps to a number"
        )


def check_finite(broken: str | None, *, step: int) -> None:
    """Raise UserError for a weight or buffer with NaN or infinite values (`broken`) at the end of a run."""
    if broken is not None:
        raise SmolclusterError(
            f"the run ended at step {step} with NaN or infinite values in {broken}; go back to an earlier checkpoint with "
            "--resume, check the data, or lower training.learning_rate"
        )


def check_enough_samples(num_samples: int, counts: list[int]) -> None:
    if num_samples == 0:
        raise UserError("the training data is empty; see data.name and data.root, or train_data() of your task")
    if len(counts) > num_samples:
        raise UserError(
            f"{len(counts)} workers but only {num_samples} training sample{'s' * (num_samples != 1)}; "
            f"use at most --workers {num_samples}"
        )
    if sum(counts) > num_samples:
        raise UserError(
            f"one step reads {sum(counts)} samples on {len(counts)} workers and there are only {num_samples} to train on; "
            f"use training.batch_size={max(1, num_samples // len(counts))} or less, or more data"
        )


OWN_TO_A_HOST = {
    *("training.device", "data.root", "data.cache_dir", "data.tokenizer_root"),
    *("logging.loki_url", "logging.prometheus_port", "logging.prometheus_host"),
}


def check_same_config(
    first: dict[str, Any],
    mine: dict[str, Any],
    *,
    rank: int,
    own: Collection[str] = OWN_TO_A_HOST,
    first_is: str = "rank 0",
) -> None:
    """Raise UserError for the first key in which ranks started by hand differ. `own` keys and sections may differ."""
    for name, theirs, ours in differences(first, mine, own=own):
        raise UserError(
            f"{name} is {ours} on rank {rank} and {theirs} on {first_is}; start all ranks with the same settings"
        )


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, own: Collection[str] = (), path: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield the name and both values, as text, of each key of `first` that differs in `second`."""
    for key, value in first.items():
        name, other = f"{path}{key}", second.get(key)
        if name in own:
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            yield from differences(value, other, own=own, path=f"{name}.")
        elif value != other:
            one, two = ("not set" if each is None else f"{each!r:.200}" for each in (value, other))
            yield name, one, two


def describe_resume(step: int, *, info: Mapping[str, Any], config: Config, dropped_rows: int) -> str:
    """Return the log line of a resumed run: its step, and the settings that differ from those of the checkpoint.

    `info`: of the checkpoint; older versions wrote no settings.
    """
    extra = f"; {dropped_rows} rows logged after it are dropped" if dropped_rows else ""
    saved, now = info.get("settings", {}), settings_of(config)
    if saved.get("strategy", {}).get("name") != now["strategy"]["name"]:  # two strategies have different options
        saved = saved and {**saved, "strategy": {"name": saved["strategy"]["name"]}}
    if changes := [f"{name} {value} (was {was})" for name, was, value in differences(saved, now)]:
        extra += f"; not as in the checkpoint: {', '.join(changes)}"
    return f"resumed at step {step}{extra}"


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a step does, for a checkpoint."""
    public = public_dict(config)
    return {section: public[section] for section in ("training", "strategy")}


def identify_task(spec: str | None, *, name: str) -> dict[str, str | None]:
    """Return a description of the task `name` that all ranks must share; the folder of its file may differ."""
    if spec is None:
        return {"task": None, "name": name, "file": None, "sha256": None}
    path = Path(spec.rpartition(":")[0] if ".py:" in spec else spec)
    text = path.read_bytes().replace(b"\r\n", b"\n")  # as Git may write it on Windows
    return {"task": spec, "name": name, "file": path.name, "sha256": hashlib.sha256(text).hexdigest()}


def check_same_task(first: dict[str, Any], mine: dict[str, Any], *, rank: int) -> None:
    """Raise UserError where two results of `identify_task` differ."""
    if any(first[key] != mine[key] for key in ("name", "file")):
        raise UserError(
            f"task is {mine['task']!r} on rank {rank} and {first['task']!r} on rank 0; start all ranks alike"
        )
    if first["sha256"] != mine["sha256"]:
        raise UserError(
            f"the task is in {mine['task']} on rank {rank} and in {first['task']} on rank 0, and these files differ; "
            "copy one over the other"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    total: int
    free: int


def check_memory(
    costs: Sequence[Cost], *, rank: int, machine: Room, gpu: Room | None, sharers: int = 1, warn: Callable[[str], None]
) -> None:
    """Check that weights, gradients and optimizer state fit; activations are not counted.

    `costs`: of the ranks of this machine. `rank`: the index of this process among them. `sharers`: the ranks on its GPU.
    """
    mine = costs[rank]
    if gpu is not None and not mine.offloaded:
        need, room, where = mine.states_bytes * sharers, gpu, "its GPU"
        whose = f"rank {rank} of this machine" if sharers == 1 else f"each of {sharers} ranks on one GPU"
    else:
        need, room, where = sum(cost.states_bytes for cost in costs), machine, "this machine"
        whose = "the run" if len(costs) == 1 else f"{len(costs)} ranks on this machine together"
    if need <= room.free:
        return
    offload = (
        "strategy.cpu_offload keeps them in the memory of the machine; turn it off, use" if mine.offloaded else "use"
    )
    there = size(room.total) if need > room.total else f"{size(room.free)} free"
    text = (
        f"{whose} must hold {size(need)} of weights, gradients and optimizer state, before activations, and {where} has "
        f"{there}; {offload} more machines with a strategy that shares the model out, or a smaller model; "
        "`smolcluster plan --memory` shows what fits"
    )
    if need > room.total:
        raise UserError(text)
    warn(text)


def check_server_disk(
    folder: Path,
    *,
    checkpoint_bytes: int,
    keep: int,
    least_bytes: int,
    most_bytes: int,
    there_bytes: int = 0,
    again: bool = False,
    warn: Callable[[str], None],
) -> int:
    """Return how many bytes a server's journal may take, between `least_bytes` and `most_bytes`.

    The disk must also hold checkpoints: `keep`, the best, and the one being written. `there_bytes`: what journal and
    checkpoints take already. With `again` (a restarted server) too little space is a warning: an error would end the run.
    """
    free = shutil.disk_usage(folder).free + there_bytes
    checkpoints = (keep + 2) * checkpoint_bytes
    if free < checkpoint_bytes + least_bytes:
        needs = f"a checkpoint needs about {size(checkpoint_bytes)} and " if checkpoint_bytes else ""
        text = (
            f"{needs}the server's journal {size(least_bytes)} at least, and {folder} has {size(free)} free; "
            "choose another --run-dir, or make room there"
        )
        if not again:
            raise UserError(text)
        warn(text)
    elif free < checkpoints + least_bytes:
        warn(
            f"{folder} has {size(free)} free: not enough for the server's journal, {keep} checkpoints of "
            f"{size(checkpoint_bytes)}, the best and the next one; make room there, or lower "
            "training.max_checkpoints_to_keep"
        )
    return max(least_bytes, min(most_bytes, free - checkpoints))


def check_disk_space(folder: Path, *, need_bytes: int) -> None:
    """Check that a checkpoint of weights and two optimizer states fits on the disk."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise UserError(
            f"a checkpoint needs about {size(need_bytes)} and {folder} has {size(free)} free; "
            "choose another --run-dir, or set training.checkpoint_steps=0"
        )
