"""What `plan` says of every strategy is so: the bytes of a step by the kernel's own counters, the memory by every storage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from benchmarks import p12
from benchmarks.harness import mesh_bytes
from benchmarks.tasks import counted
from tests.conformance.cases import Case, all_cases, assert_good_end, over
from tests.equivalence.settings.test_memory import measured
from tests.world import ElasticWorld

from smolcluster.planner.candidates import Choice
from smolcluster.planner.forecast import Workload, forecast
from smolcluster.planner.memory_estimate import Activations
from smolcluster.tasks.find import find_task

CASES = all_cases()
CPU = torch.device("cpu")
SHAPE = {"model.model_dim": 64, "model.num_layers": 4, "model.num_heads": 4, "model.max_seq_len": 64}
# Two workers, where the strategy takes them: what it says of more is the same formula.
NEAREST = {case.name.rpartition(" on ")[0]: case for case in sorted(CASES, key=lambda case: -abs(case.workers - 2))}
PAIRS = [case.on(2) if case.plane == "elastic" else case for case in NEAREST.values() if case.equals_single]


# Bytes

STEPS = {"mesh": 10, "elastic": 40}  # on the elastic plane a reading may fall into the middle of a message
COUNTED = SHAPE | {"training.batch_size": 8, "training.eval_steps": 0, "training.checkpoint_steps": 0}
OFTEN = {"logging.log_interval": 1}  # the mesh plane's own count is in the rows; on the elastic plane rows travel too
NEVER = {"logging.log_interval": 1000}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux's")
@pytest.mark.usual(when=lambda case: case.ends and case.workers == 2)
@over([case for case in PAIRS if case.workers > 1])
def test_bytes_of_a_step_are_those_of_the_plan(tmp_path: Path, case: Case) -> None:
    """At most 2 % and headers may come on top, and nothing may be missing."""
    counts = tmp_path / "counts"
    counts.mkdir()
    task = mesh_bytes.TASK if case.plane == "mesh" else p12.TASK
    overrides = COUNTED | {
        "training.batch_size": 8 * case.workers // 2
    }  # of many small messages the headers would show
    overrides |= {} if case.strategy == "pipeline" else {"model.num_layers": 2}
    overrides |= {"strategy.balance": False} if case.strategy == "edp" else {}  # micro-batches are counted
    overrides |= (OFTEN if case.plane == "mesh" else NEVER) | {"training.steps": STEPS[case.plane], "task": task}
    world = case.train(tmp_path / "run", overrides, environ={counted.FOLDER: str(counts)})
    assert_good_end(world)
    config = case.config(overrides)
    if isinstance(world, ElasticWorld):
        row = p12.compare(config, p12.steps_of(counts, config))
        assert row["verdict"] == "met", row
        assert all(sent >= row["formula_sent"] and got >= row["formula_received"] for sent, got in row["samples"]), row
        return
    subject = Workload.open(config, find_task(config), num_ranks=case.workers, device=CPU)
    costs = subject.with_choice(choice_of(case)).placement.costs
    for rank, cost in zip(world.ranks, costs, strict=True):
        rows = rank.rows()[mesh_bytes.WARM :]
        steps = rows[-1].step - rows[0].step
        said = [
            (rows[-1].bytes_sent - rows[0].bytes_sent) / steps,
            (rows[-1].bytes_received - rows[0].bytes_received) / steps,
        ]
        kernel = counted.per_step(counted.read_rows(counts / f"{rows[0].rank}.txt"), interval=1)
        planned = (cost.bytes_sent, cost.bytes_received)
        assert list(kernel) == pytest.approx(said, rel=mesh_bytes.LIMIT - 1)
        if cost.activations_travel:
            assert all(a >= b * 0.999 for a, b in zip(said, planned, strict=True)), (said, planned)
        else:
            assert said == pytest.approx(planned, rel=0.03)


def choice_of(case: Case) -> Choice:
    return Choice(label=case.name, strategy=case.strategy, options=dict(case.options), plane=case.plane)


# Memory


@pytest.mark.usual(when=lambda case: case.chosen)
@over([case for case in PAIRS if case.plane == "mesh"])
def test_memory_is_that_of_the_plan(case: Case) -> None:
    """The tolerance of 5 % is for what backends allocate by themselves; here they agree to the byte but for it."""
    config = case.config(SHAPE | {"training.batch_size": 4, "training.steps": 10})
    subject = Workload.open(config, find_task(config), num_ranks=case.workers, device=CPU)
    plan = forecast(subject, choice_of(case), ways=[Activations()], every_seat=True)
    assert not plan.cannot
    planned = {rank: seat.ways[Activations()].at_peak.total for seat in plan.seats for rank in seat.ranks}
    for rank, held in enumerate(measured(config)):
        assert held == pytest.approx(planned[rank], rel=0.05)
