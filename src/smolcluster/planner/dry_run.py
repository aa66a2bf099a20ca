"""A dry run: the resolved configuration, the placement of ranks and the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smolcluster.comm.mesh.backends import BackendRequest, agree, check_backend, gpu_for_nccl
from smolcluster.compute.device import choose_device
from smolcluster.config import dump
from smolcluster.config.options import RoundOptions
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.engine.checks import check_balance, check_enough_samples
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.run_length import last_step
from smolcluster.errors import UserError
from smolcluster.observe.text import size
from smolcluster.parallel.placement import Cost
from smolcluster.planner.candidates import as_configured
from smolcluster.planner.forecast import SeatMemory, Workload, forecast, limit_per_rank, nodes_of
from smolcluster.planner.memory_estimate import Activations, samples_per_step
from smolcluster.strategies.registry import find_strategy, not_used, read_options
from smolcluster.tasks.find import find_task


def describe_run(config: Config, *, workers: int, run_dir: RunDir, backend: str | None, plane: str = "mesh") -> str:
    """Return the text of a dry run. Opens the data and builds the model on fake tensors, so that mistakes are reported."""
    device = choose_device(config.training.device)
    options, ignored = read_options(config.strategy, plane=plane)
    check_balance(config, options)
    strategy = find_strategy(config.strategy.name, plane, options)
    named = len(config.cluster.workers)
    nodes = [
        replace(node, machine=node.name if rank < named else "this machine", stays=plane != "elastic")
        for rank, node in enumerate(nodes_of(config, workers))
    ]
    seats = strategy.plan(options, nodes, None).checked().seats
    task = find_task(config)
    samples = len(as_dataset(task.train_data()))
    counts = samples_per_step(config, nodes, seats)
    check_enough_samples(samples, counts)
    steps = last_step(config.training, samples=samples, batch=sum(counts))
    workload = Workload.open(config, task, num_ranks=workers, device=device)
    shape = workload.shape
    cost = strategy.plan(options, nodes, shape).checked().cost

    lines = [
        dump(config).rstrip(),
        "",
        f"# task {task.name}: {shape.parameters:,} parameters, {samples:,} training samples",
    ]
    if plane == "elastic":
        how = f"listening on {config.cluster.bind}"
    else:
        check_backend(backend)
        gpus = [gpu_for_nccl(choose_device(config.training.device, local_rank=rank)) for rank in range(workers)]
        wanted = [BackendRequest(host=n.machine, named=backend, gpu=g) for n, g in zip(nodes, gpus, strict=True)]
        how = f"backend {agree(wanted)}"
    server = " and a server" if any(s.role == "server" for s in seats) else ""
    lines.append(f"# strategy {config.strategy.name} on {workers} worker(s){server}, device {device}, {how}")
    shown = [axis for axis in ("pp", "cp", "tp") if axis != "cp" or any(s.coords.get("cp") for s in seats)]
    for s in seats:
        if s.role == "server":
            lines.append("#   server")
        elif plane == "elastic":
            lines.append(f"#   rank {s.rank}: {s.role} on {s.node}, {nodes[s.rank].batch_size} samples at a time")
        else:
            place = "".join(f", {axis} {s.coords[axis]}" for axis in shown if axis in s.coords)
            lines.append(f"#   rank {s.rank}: {s.role} on {s.node}, data shard {s.shard}{place}")
    if ignored:
        lines.append(f"# {not_used(config.strategy.name, plane, ignored)}")
    lines.extend(f"# {line}" for line in describe_memory(workload, plane))
    lines.append(f"# {describe_traffic(cost)}")
    lines.append(f"# {steps:,} steps of {sum(counts):,} samples")
    if isinstance(options, RoundOptions) and options.equal_time:
        lines[-1] += (
            f" if all machines are equally fast; {options.steps_per_round} steps in a round are those of the median machine"
        )
    lines.append(f"# run directory: {run_dir.path}")
    return "\n".join(lines)


def describe_traffic(cost: Cost) -> str:
    """Describe the traffic of a worker in a step, and in the exchanges of a strategy that does not exchange every step."""
    text = f"a step sends {_amount(cost.bytes_sent)} of parameters and gradients from each worker"
    if cost.bytes_at_once:
        text += f", at most {_amount(cost.bytes_at_once)} at once"
    if cost.bytes_at_end > cost.bytes_at_once:
        text += f", and {_amount(cost.bytes_at_end)} in the last round"
    return text + (", and activations, which are not counted here" if cost.activations_travel else "")


def _amount(sent: int) -> str:
    unit = ("MiB", 2**20) if sent >= 2**20 / 100 else ("KiB", 2**10)
    return f"{sent / unit[1]:.2f} {unit[0]}" if sent else "nothing"


def describe_memory(workload: Workload, plane: str) -> list[str]:
    """Describe the peak memory of each seat, and whether it fits."""
    way = Activations(checkpointing=workload.config.training.gradient_checkpointing)
    seen = forecast(workload, as_configured(workload.config, plane), ways=[way], every_seat=True)
    if seen.cannot:
        raise UserError(seen.cannot)
    lines = [_seat(seat, way) for seat in seen.seats]
    limit, words = limit_per_rank(workload.device, len(workload.nodes), None)
    short = [seat for seat in seen.seats if seat.peak(way) > limit]
    lines.append(f"memory: {words}; " + ("it does not fit: see `smolcluster plan --memory`" if short else "it fits"))
    return lines


def _seat(seat: SeatMemory, way: Activations) -> str:
    who = "server" if seat.role == "server" else f"rank{'s' * (len(seat.ranks) > 1)} {ranges(seat.ranks)}"
    peak = seat.ways.get(way)
    held = seat.states if peak is None else peak.of_each_kind
    parts = [
        f"{size(held.parameters)} parameters",
        f"{size(held.gradients)} gradients",
        f"{size(held.optimizer)} optimizer",
    ]
    if held.other:
        parts.append(f"{size(held.other)} activations and buffers")
    line = f"{who}: {', '.join(parts)}; at most {size(seat.peak(way))} at a time"
    if peak is not None and seat.start > peak.at_peak.total:
        line += ", while the model is built"
    if seat.role == "server":
        line += f"; journal: {size(seat.journal_step)} a step, up to {size(seat.journal_limit)} of its disk"
    return f"{line} ({seat.note})" if seat.note else line


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as `0-3, 6`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
