"""P2: time to a validation loss between hosts with links of 1, 10 and 100 Mbit/s, and a plot of it.

Work: a GPT of 0.8 M parameters (4 layers of 128, context 64, bytes) on the embedded text, 2 workers or more, one thread each,
the same weights, order of samples, learning rates, clipping and number of steps for all.

Compared: torch DDP, its fp16 hook and its PowerSGD hook of rank 4, DiLoCo as a bare loop over gloo in fp32 (what OpenDiLoCo
and torchft do: H 30, outer Nesterov 0.7 / 0.9), and ours: allreduce and diloco with each preset, with AdamW and with Muon
inside, on the mesh plane; edp with int8 on the elastic plane.

How, for all but edp: the loss after a step does not depend on the network, so the curve over steps is measured once, without
a limit. Then the seconds of a step are measured over each link: whole rounds of diloco, single steps of the others, `--repeats`
times; the median counts. Time to a loss is steps to it times seconds of a step. So a run of DDP at 1 Mbit/s, which would take
hours, needs minutes. What is sent once, before the first step, does not count.

The curve of edp depends on the network, which decides who is ahead. So it runs over the link itself, until the loss or for
`--limit-s`, with the server on the host of worker 0. So does hivemind's Optimizer, where it is installed: an epoch is one batch
of each peer, gradients are sent in fp16, parameters not at all (`peers/`); the time of evaluations is subtracted. A method that
does not reach the loss has no figure.

Hosts are network namespaces (`harness/network.py`): Linux, root and iproute2 are needed. All hosts share this machine's cores,
so with more workers than cores computing takes longer, for all alike. With `--jobs` J, J methods are measured at once: J times
`--workers` must not exceed the cores. With `--keep FILE` an interrupted run continues. `python -m benchmarks.p2 RESULTS` draws
results again.

Target: 100x / 15x / 2.4x sooner than torch DDP at 1 / 10 / 100 Mbit/s; plain allreduce never later than DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Session
from benchmarks.harness.elastic_run import ElasticRun, elastic_config
from benchmarks.harness.jobs import add_job_arguments, call_each
from benchmarks.harness.methods import BARE, DDP, METHODS, OF_BYTES, OURS, steps_of, training
from benchmarks.harness.network import hosts
from benchmarks.harness.peer_programs import hivemind_peers, usable
from benchmarks.harness.plot import draw
from benchmarks.harness.processes import ROOT
from benchmarks.harness.workload import SHAPES, make_config
from smolcluster.errors import UserError
from smolcluster.observe.events import StepLogged

EXAMPLE = "python -m benchmarks p2 --workers 2 --links 1mbit 10mbit 100mbit --draw"
SHAPE = dataclasses.replace(SHAPES["0.8m"], batch_size=16)
TARGETS = {"1mbit": 100.0, "10mbit": 15.0, "100mbit": 2.4}
EVERY = 30  # steps between two points of a curve: whole rounds of every method
VAL_SAMPLES = 512
EDP, HIVEMIND = "edp, int8", "hivemind, fp16"
OVER_LINKS = (EDP, HIVEMIND)  # run over the link itself
POINTS_OF_HIVEMIND = 10  # steps between two points of its curve
NEVER = 10**6  # an interval beyond every run
SHOWN = [*(name for name in METHODS if name not in OF_BYTES), *OVER_LINKS]
COLUMNS = ["method", "step_s", "steps", "seconds", "sooner", "target", "verdict"]
PICTURE = ROOT / "docs" / "images" / "loss-over-time.svg"

Curve = list[tuple[float, float]]  # step or seconds, validation loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="hosts (default: 2)")
    parser.add_argument("--links", nargs="+", choices=TARGETS, help="default: all; quick: 10mbit")
    parser.add_argument("--steps", type=int, help="of a curve (default: 900; quick: 60)")
    parser.add_argument("--loss", type=float, help="to reach (default: what DDP has after four fifths of the steps)")
    parser.add_argument("--only", choices=SHOWN, nargs="+", help="besides DDP (default: all)")
    parser.add_argument("--limit-s", type=float, help="of a run of edp or hivemind (default: 300; quick: 20)")
    add_job_arguments(parser, "methods")
    parser.add_argument("--draw", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")


def run(session: Session, arguments: argparse.Namespace) -> None:
    steps = arguments.steps or (60 if session.quick else 900)
    if steps % EVERY:
        raise UserError(f"--steps {steps}: a multiple of {EVERY} is needed, so that rounds are whole")
    size, links = arguments.workers, arguments.links or (["10mbit"] if session.quick else list(TARGETS))
    limit_s = arguments.limit_s or (20.0 if session.quick else 300.0)
    wanted = arguments.only or (["diloco, wan", BARE, EDP] if session.quick else SHOWN)
    names = [DDP, *(name for name in SHOWN if name in wanted and name != DDP)]
    if HIVEMIND in names and not usable({HIVEMIND: ("hivemind", None)}):
        names.remove(HIVEMIND)

    # Over steps, without a limit.
    methods, how = [name for name in names if name not in OVER_LINKS], {"jobs": arguments.jobs, "keep": arguments.keep}
    made = call_each(curve_of, [(name, size, steps) for name in methods], **how)
    curves: dict[str, Curve] = dict(zip(methods, made, strict=True))
    loss = arguments.loss or curves[DDP][len(curves[DDP]) * 4 // 5 - 1][1]
    session.name = f"p2-{size}"
    session.parameters = {
        **SHAPE.overrides(),
        "workers": size,
        "steps": steps,
        "loss": loss,
        "curves": curves,
        "links": {},
    }

    # Over the links. What takes longest is begun first.
    orders = list(itertools.product(links, [*(name for name in OVER_LINKS if name in names), *methods]))
    rest = {"size": size, "steps": steps, "repeats": session.repeats, "limit_s": limit_s, "loss": loss}
    measured = dict(zip(orders, call_each(_over_link, [(*order, rest) for order in orders], **how), strict=True))
    for link in links:
        paces = {name: measured[link, name] for name in methods}
        over_time = {
            name: [(step * statistics.median(paces[name]), at) for step, at in curve] for name, curve in curves.items()
        } | {name: measured[link, name] for name in names if name in OVER_LINKS}
        session.parameters["links"][link] = {"step_s": paces, "over_time": over_time}
        rows = [_row(name, link, paces, over_time, curves, loss) for name in over_time]
        session.show(f"{size} workers, {link}: time to a validation loss of {loss:.3f}", rows, COLUMNS)
    if arguments.draw:
        _draw(session.parameters)


def _row(
    name: str,
    link: str,
    paces: Mapping[str, Sequence[float]],
    over_time: Mapping[str, Curve],
    curves: Mapping[str, Curve],
    loss: float,
) -> dict[str, Any]:
    seconds, peer = first_at(over_time[name], loss), first_at(over_time[DDP], loss)
    row: dict[str, Any] = {"method": name, "seconds": seconds}
    if name in paces:
        row |= {"step_s": statistics.median(paces[name]), "steps": first_at(curves[name], loss)}
    if seconds is None or peer is None:
        return row | {"verdict": "not reached"}
    row["sooner"] = peer / seconds
    if name in OURS:
        target = 1.0 if name == "allreduce" else TARGETS[link]
        row |= {"target": f">= {target:g}", "verdict": "met" if row["sooner"] >= target else "missed"}
    return row


def first_at(curve: Curve, loss: float) -> float | None:
    """Where a curve comes down to the loss, on the line between the two points around it; None: nowhere."""
    before: tuple[float, float] | None = None
    for x, y in curve:
        if y <= loss:
            return x if before is None else before[0] + (x - before[0]) * (before[1] - loss) / (before[1] - y)
        before = x, y
    return None


def curve_of(name: str, size: int, steps: int) -> Curve:
    with training(name, SHAPE, steps=steps, size=size) as world:
        curve = []
        for step in range(EVERY, steps + 1, EVERY):
            curve.append((float(step), float(steps_of(world, EVERY, val_samples=VAL_SAMPLES)["val_loss"])))
    print(f"  {name:<32}loss {curve[-1][1]:.3f} after {steps} steps", flush=True)
    return curve


def paces_of(name: str, size: int, link: str, steps: int, repeats: int) -> list[float]:
    """Seconds of a step over this link. PowerSGD begins after two steps, so two are not counted."""
    block = EVERY if name == BARE or name.startswith("diloco") else 1
    with hosts(size, rate=link) as network, training(name, SHAPE, steps=steps, size=size, network=network) as world:
        steps_of(world, max(2, block))
        seconds = [steps_of(world, block)["seconds"] / block for _ in range(repeats)]
    print(f"  {name:<32}{statistics.median(seconds):.3f} s a step at {link}", flush=True)
    return seconds


def _over_link(link: str, name: str, rest: Mapping[str, Any]) -> Any:
    """Seconds of a step, or the curve of a method that runs over the link itself."""
    size, steps = rest["size"], rest["steps"]
    if name not in OVER_LINKS:
        return paces_of(name, size, link, steps, rest["repeats"])
    run_over = edp_over if name == EDP else hivemind_over
    return run_over(link, size=size, steps=steps, limit_s=rest["limit_s"], loss=rest["loss"])


def edp_over(link: str, *, size: int, steps: int, limit_s: float, loss: float) -> Curve:
    """As it runs: seconds since its first row, and the validation loss."""
    overrides = {
        "strategy.codec": "int8",
        "strategy.worker_update_interval": 4,
        "training.eval_steps": EVERY,
        "training.eval_samples": VAL_SAMPLES,
    }
    config = elastic_config(SHAPE, workers=size, steps=steps, strategy="edp", overrides=overrides)

    def enough(rows: Sequence[StepLogged]) -> bool:
        at = rows[-1].val_loss
        return rows[-1].time - rows[0].time > limit_s or (at is not None and at <= loss)

    with contextlib.ExitStack() as stack:
        network = stack.enter_context(hosts(size, rate=link))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = stack.enter_context(ElasticRun(config, folder / "run", network=network))
        run.watch(enough, timeout_s=3 * limit_s + 120.0)
    first = run.rows[0].time if run.rows else 0.0
    curve = [(row.time - first, row.val_loss) for row in run.rows[1:] if row.val_loss is not None]
    _tell_end(EDP, curve, link, limit_s)
    return curve


def hivemind_over(link: str, *, size: int, steps: int, limit_s: float, loss: float) -> Curve:
    """As it runs: seconds since its first step, without those for evaluating, and the validation loss."""
    overrides = {"training.seed": 42, "training.device": "cpu", "strategy.name": "allreduce"}
    config = make_config(SHAPE, steps=steps, overrides=overrides)
    order: dict[str, Any] = {
        "lockstep": True,
        "steps": steps,
        "every": 1,
        "val_every": POINTS_OF_HIVEMIND,
        "val_samples": VAL_SAMPLES,
        "codec": "fp16",
        "average_state_every": NEVER,
        "timeout_s": limit_s,
    }
    curve: Curve = []
    with (
        hosts(size, rate=link) as network,
        hivemind_peers(config, size=size, network=network, **order) as program,
    ):
        first: float | None = None
        for row in program.rows():
            now = row["time"] - row.get("paused_s", 0.0)
            first = now if first is None else first
            if (at := row.get("val_loss_now")) is not None:
                curve.append((now - first, at))
            if now - first > limit_s or (at is not None and at <= loss):
                break
    _tell_end(HIVEMIND, curve, link, limit_s)
    return curve


def _tell_end(name: str, curve: Curve, link: str, limit_s: float) -> None:
    last = f"loss {curve[-1][1]:.3f} after {curve[-1][0]:.0f} s" if curve else f"no loss within {limit_s:g} s"
    print(f"  {name:<32}{last} at {link}", flush=True)


def _draw(parameters: Mapping[str, Any]) -> None:
    panels = {
        link.replace("mbit", " Mbit/s"): {name: curve for name, curve in measured["over_time"].items() if curve}
        for link, measured in parameters["links"].items()
    }
    title = f"Validation loss over seconds, {parameters['workers']} workers"
    PICTURE.write_text(draw(panels, title=title, across="seconds"), encoding="utf-8")
    print(f"drawn: {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":  # python -m benchmarks.p2 benchmarks/results/p2-2.json: draw what was kept
    _draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["parameters"])
