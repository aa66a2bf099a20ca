"""Step time of `allreduce` against torch DDP.

Compared: torch's DistributedDataParallel with its defaults, and with gradient_as_bucket_view=True, against our strategy
with staleness bound K = 0 (the same computation; that the losses agree is checked), and K = 1 and 2 beside it. Same
model, weights, batches, fused AdamW, clipping and learning rates, one gloo group for all of them.

How: one world of N processes with one thread each holds a model per variant; blocks of steps in turn, a barrier before
each; the time of a block is that of the slowest rank, and what K > 0 has in flight at the end of a block is waited for.
Plain DDP runs a second time as another variant: that is the noise. Links other than loopback are network namespaces
limited by `tc tbf` in both directions (root needed).

Target: K = 0 never slower than either DDP, within the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable

from benchmarks.harness import Comparison, Session, Target, Variant
from benchmarks.harness.network import RATES, Network, hosts, measured_rate
from benchmarks.harness.workload import SHAPES, Shape, make_config
from benchmarks.harness.world import World
from smolcluster.errors import SmolclusterError

EXAMPLE = "python -m benchmarks ddp --link 100mbit --workers 2"
VARIANTS = [
    {"name": "ddp", "kind": "ddp", "bucket_view": False},
    {"name": "ddp bucket view", "kind": "ddp", "bucket_view": True},
    {"name": "allreduce K=0", "kind": "ours", "staleness_bound": 0},
    {"name": "allreduce K=1", "kind": "ours", "staleness_bound": 1},
    {"name": "allreduce K=2", "kind": "ours", "staleness_bound": 2},
    {"name": "ddp again", "kind": "ddp", "bucket_view": False},
]
# Steps per block, blocks per repeat and blocks of warm-up, by (shape, limited link).
LENGTHS = {
    ("0.8m", False): (5, 6, 2),
    ("10m", False): (2, 4, 2),
    ("0.8m", True): (5, 3, 2),
    ("10m", True): (3, 1, 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", choices=["loopback", *RATES], default="loopback", help="default: loopback")
    parser.add_argument(
        "--workers", type=int, nargs="+", help="world sizes (default: 2 4 on loopback, else 2; quick: 2)"
    )
    parser.add_argument("--shape", choices=["0.8m", "10m"], nargs="+", help="models (default: both; quick: 0.8m)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    limited = arguments.link != "loopback"
    sizes = arguments.workers or ([2] if limited or session.quick else [2, 4])
    shapes = arguments.shape or (["0.8m"] if session.quick else ["0.8m", "10m"])
    session.name = f"ddp-{arguments.link}"
    session.parameters = {"link": arguments.link, "threads": 1}
    for size in sizes:
        with hosts(size, rate=arguments.link) if limited else contextlib.nullcontext() as network:
            if network is not None:
                session.parameters["link_measured_mbit_per_s"] = round(measured_rate(network) / 1e6, 1)
            for name in shapes:
                _compare(session, SHAPES[name], size=size, link=arguments.link, network=network)


def _compare(session: Session, shape: Shape, *, size: int, link: str, network: Network | None) -> None:
    block, rounds, warmup = (2, 2, 1) if session.quick else LENGTHS[shape.name, network is not None]
    steps = block * (warmup + session.repeats * rounds)
    with tempfile.TemporaryDirectory() as cache:
        overrides = {"training.device": "cpu", "strategy.name": "allreduce", "data.cache_dir": cache}
        config = make_config(shape, steps=steps, overrides=overrides)
        spec = {"config": config.model_dump(mode="json"), "block": block, "variants": VARIANTS}
        with World("benchmarks.programs.ddp_rank", size=size, spec=spec, network=network) as world:
            measured = session.compare(
                Comparison(
                    name=f"{size} workers, {link}, GPT of {shape.name}: time per step",
                    variants=[_variant(str(v["name"]), _block(world, str(v["name"]), block)) for v in VARIANTS],
                    rounds=rounds,
                    warmup=warmup,
                    parameters={**shape.overrides(), "workers": size, "link": link, "steps_per_block": block},
                )
            )
        _check_same_work(measured.beside)


def _variant(name: str, sample: Callable[[], tuple[float, float]]) -> Variant:
    if name == "ddp again":
        return Variant(name=name, run=sample, role="noise")
    if name.startswith("ddp"):
        return Variant(name=name, run=sample, role="peer")
    if name == "allreduce K=0":
        return Variant(name=name, run=sample, target=Target(limit=1.0))
    return Variant(name=name, run=sample, role="extra")


def _block(world: World, name: str, block: int) -> Callable[[], tuple[float, float]]:
    """Return seconds per step, and the loss."""

    def sample() -> tuple[float, float]:
        answers = world.ask({"variant": name})
        loss = sum(a["loss"] for a in answers) / len(answers)
        return max(float(a["seconds"]) for a in answers) / block, loss

    return sample


def _check_same_work(losses: dict[str, list[float]]) -> None:
    """A ratio means something only between equal computations. Sums are taken in another order, so rounding differs."""
    for name in ("ddp bucket view", "allreduce K=0", "ddp again"):
        for block, (theirs, ours) in enumerate(zip(losses["ddp"], losses[name], strict=True)):
            if not math.isclose(theirs, ours, rel_tol=1e-2):
                raise SmolclusterError(f"{name} lost DDP's path in block {block}: loss {ours} against {theirs}")
