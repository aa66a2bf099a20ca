"""Memory estimates before a run: the tracker, fake tensors against the formulas, rejected plans, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.samples import spec_of
from tests.world import TASKS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smolcluster.cli import main
from smolcluster.compute import memory
from smolcluster.compute.memory import free_bytes, machine_bytes, parse_size
from smolcluster.compute.memory_tracker import MemoryTracker, MemoryUse, Peak
from smolcluster.config import load_config, resolve
from smolcluster.engine import role
from smolcluster.engine.checks import Room, check_memory
from smolcluster.engine.elastic.wal.journal import disk_bound
from smolcluster.engine.worker import Worker
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.text import size
from smolcluster.parallel.owned_buckets import fill_rows
from smolcluster.parallel.placement import Cost
from smolcluster.planner import estimate_pool
from smolcluster.planner.candidates import Choice, as_configured, choices
from smolcluster.planner.dry_run import describe_memory, ranges
from smolcluster.planner.estimate_pool import from_plain, to_plain
from smolcluster.planner.fake_tensors import OutputCache
from smolcluster.planner.forecast import (
    Forecast,
    MemoryPlan,
    SeatMemory,
    Workload,
    equal_seats,
    estimate_rank,
    forecast,
)
from smolcluster.planner.memory_estimate import Activations
from smolcluster.planner.memory_table import show_memory
from smolcluster.planner.report import choose, to_dict
from smolcluster.tasks.find import find_task

pytestmark = pytest.mark.usefixtures("warm")
CPU = torch.device("cpu")
GPT = {
    "model.model_dim": 48,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.max_seq_len": 16,
    "model.vocab_size": 301,  # divides by nothing
    "training.batch_size": 4,
    "training.device": "cpu",
}


def subject(ranks: int, overrides: dict[str, Any] | None = None) -> Workload:
    config = resolve(load_config([], overrides={**GPT, "cluster.num_workers": ranks, **(overrides or {})}))
    return Workload.open(config, find_task(config), num_ranks=ranks, device=CPU)


@pytest.fixture(scope="module")
def four() -> Workload:
    return subject(4)


# The tracker


def test_a_storage_counts_once_and_as_long_as_it_lives() -> None:
    with MemoryTracker(CPU) as tracker:
        a = torch.zeros(1000)
        views = [a.view(10, 100), a[5:], a.t()]
        assert tracker.now.total == 4000
        b = torch.zeros(500, dtype=torch.float64)
        assert tracker.now.total == 8000
        del a, views
        assert tracker.now.total == 4000
        b.untyped_storage().resize_(800)
        assert tracker.now.total == 800
    assert tracker.peak().at_peak.total == 8000


def test_what_something_is_for_may_be_said_after_the_peak() -> None:
    with MemoryTracker(CPU) as tracker:
        weight, passing = torch.zeros(100), torch.zeros(1000)
        since = tracker.position
        del passing
        more = torch.zeros(50)
        tracker.label([weight], "parameters")
        tracker.label([more, None], "optimizer")
    assert tracker.peak().at_peak == MemoryUse(parameters=400, other=4000)
    assert tracker.peak(since) == Peak(
        at_peak=MemoryUse(parameters=400, optimizer=200), of_each_kind=MemoryUse(parameters=400, optimizer=200)
    )
    assert tracker.peak(steady_state=True).at_peak == MemoryUse(parameters=400, optimizer=200, other=4000)


def test_the_tracker_sees_backward_and_leaves_torch_as_it_was() -> None:
    before = torch.UntypedStorage.resize_
    model = nn.Linear(64, 64)
    with MemoryTracker(CPU) as tracker:
        model(torch.zeros(2, 64)).sum().backward()
        assert model.weight.grad is not None
        tracker.label([model.weight.grad, model.bias.grad], "gradients")
        assert tracker.now.gradients == 4 * (64 * 64 + 64)
    assert torch.UntypedStorage.resize_ is before


# The estimate on fake tensors against the formulas


# In addition to the model diloco has tensors that the tracker cannot label: the weights at the start of the round, and the
# state of the outer optimizer.
ELSEWHERE = ("single", "pipeline", "diloco")
MESH = [
    *(c for c in choices(4, every=True) if c.plane == "mesh" and c.strategy not in ELSEWHERE),
    Choice(label="pipeline 1f1b", strategy="pipeline", options={"schedule": "1f1b"}),
    Choice(label="mesh, stage 1", strategy="mesh", options={"pp": 2, "fsdp_stage": 1}),
    Choice(label="mesh, stage 2", strategy="mesh", options={"pp": 2, "fsdp_stage": 2}),
    Choice(label="mesh, stage 3", strategy="mesh", options={"tp": 2, "fsdp_stage": 3}),
]


USUAL = ("allreduce", "fsdp 1", "fsdp 3", "tensor", "pipeline 1f1b", "mesh dp 2 x pp 2", "mesh, stage 3")


@pytest.mark.usual(when=lambda choice: choice.label in USUAL)
@pytest.mark.parametrize("choice", MESH, ids=lambda choice: choice.label)
def test_states_are_those_of_the_formula(four: Workload, choice: Choice) -> None:
    """Of every rank that differs. The optimizer counts its steps: four bytes for each parameter, beside the formula."""
    scene = four.with_choice(choice)
    costs = scene.placement.costs
    stage = choice.options.get("fsdp_stage")
    for alike in equal_seats(scene, every_seat=True):
        rank = alike[0].rank
        cost, seen = costs[rank], estimate_rank(four, choice, rank, [Activations()])
        at_most, at_rest = seen.ways[Activations()].of_each_kind, seen.states
        parameters = at_most.parameters if stage == 2 else at_rest.parameters  # whole while they are used
        gradients = (
            at_most.gradients
            if stage == 1 or (stage == 0 and choice.label == "mesh dp 2 x pp 2")
            else at_rest.gradients
        )
        assert parameters == pytest.approx(cost.parameter_bytes, rel=0.01)
        assert gradients == pytest.approx(cost.gradient_bytes, rel=0.01)
        assert at_rest.optimizer == pytest.approx(cost.optimizer_bytes, rel=0.02)


def test_a_later_step_holds_what_the_first_did(four: Workload) -> None:
    """So the first may stand for all: it lacks only the optimizer's state, which is added."""
    for label in ("fsdp 1", "fsdp 3", "pipeline 1f1b"):
        choice = next(c for c in choices(4) if c.label == label)
        first = estimate_rank(four, choice, 0, [Activations()]).ways[Activations()]
        later = estimate_rank(four, choice, 0, [Activations(), Activations(True, False), Activations()]).ways[
            Activations()
        ]
        assert first == later, label


@pytest.mark.usual(when=lambda label: label in ("allreduce", "fsdp 3"))
@pytest.mark.parametrize("label", ["allreduce", "fsdp 3", "pipeline 1f1b", "mesh dp 2 x tp 2"])
def test_torch_is_not_asked_again_what_an_operation_returns(
    four: Workload, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cache of answers a rehearsal sees the same bytes, and calls torch for few of its operations."""
    asked = 0
    dispatch = FakeTensorMode.dispatch

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        return dispatch(*args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    choice = next(c for c in choices(4) if c.label == label)
    first = estimate_rank(four, choice, 0, [Activations()])
    asked = 0
    assert estimate_rank(four, choice, 0, [Activations()]) == first
    cached, asked = asked, 0
    monkeypatch.setattr(OutputCache, "find", lambda *args: args[-1]())
    assert estimate_rank(four, choice, 0, [Activations()]) == first
    assert cached < asked / 3


def test_recomputing_takes_less_and_plain_attention_more() -> None:
    made = forecast(
        subject(1, {"model.max_seq_len": 64}),
        choices(1)[0],
        ways=[Activations(), Activations(True, False), Activations(False, True)],
    )
    ways = made.seats[0].ways
    assert (
        ways[Activations(True, False)].of_each_kind.other
        < ways[Activations()].of_each_kind.other
        < ways[Activations(False, True)].of_each_kind.other
    )


# Tasks of one's own


def own(name: str, ranks: int = 2) -> Workload:
    return subject(ranks, {"task": f"{TASKS}:{name}"})


def test_a_batch_that_is_too_small_for_a_schedule_is_said() -> None:
    choice = next(c for c in choices(4) if c.label == "pipeline 1f1b")
    made = forecast(subject(4, {"training.batch_size": 2}), choice, ways=[Activations()])
    assert made.cannot.startswith("schedule 1f1b on 4 ranks needs as many micro-batches, and a batch of 2 samples")


def test_a_task_of_ones_own_is_rehearsed_and_what_it_cannot_do_is_said() -> None:
    made = own("Tiny")
    rows = {
        c.label: forecast(made, c, ways=[Activations(), Activations(True, False), Activations(False, True)])
        for c in choices(2)
    }
    assert rows["fsdp 3"].seats[0].ways.keys() == {Activations()}  # it recomputes nothing and has no attention
    assert rows["single"].cannot == "strategy single has one worker, not 2; use --workers 1 or --strategy allreduce"
    assert rows["tensor"].cannot.startswith(
        "Sequential cannot be split by tensor parallelism: it has no tensor_styles()"
    )
    assert [seat.role for seat in rows["syncps"].seats] == ["worker", "server"]


def test_what_looks_at_a_batch_before_it_starts_is_rehearsed_too() -> None:
    """Layers that are measured, a model that is traced, sequences that are cut."""
    pipeline = next(c for c in choices(2) if c.label == "pipeline gpipe")
    for made in (subject(2, {"strategy.layer_distribution": "auto"}), own("Residual")):
        found = forecast(made, pipeline, ways=[Activations()])
        assert not found.cannot
        assert found.seats[0].ways[Activations()].at_peak.total > 0
    cut = Choice(label="cp", strategy="mesh", options={"cp": 2})
    assert forecast(subject(2, {}), cut, ways=[Activations()]).seats[0].ways
    odd = forecast(subject(2, {"model.max_seq_len": 31}), cut, ways=[Activations()])
    assert odd.cannot.startswith("strategy.cp = 2 does not divide sequences of 31 tokens")


def test_a_model_that_looks_at_values_gets_the_formula(tmp_path: Path) -> None:
    path = tmp_path / "looks.py"
    path.write_text(
        "import torch\nfrom smolcluster import Task\n"
        "class Looks(Task):\n"
        "    def model(self): return torch.nn.Linear(8, 8)\n"
        "    def train_data(self): return torch.ones(64, 8), torch.ones(64, 8)\n"
        "    def loss(self, model, batch): return model(batch[0][batch[0].sum(1) > 1]).mean()\n",
        encoding="utf-8",
    )
    made = forecast(subject(1, {"task": f"{path}:Looks"}), choices(1)[0], ways=[Activations()])
    assert made.seats[0].ways == {}
    assert made.seats[0].states.total == 4 * 4 * 72
    assert "activations are not known: the memory estimate failed (DynamicOutputShape" in made.seats[0].note


# What there is room for


def cost(states: int, *, offloaded: bool = False) -> Cost:
    moved = {"bytes_sent": 0, "bytes_received": 0, "messages": 0}
    return Cost(parameter_bytes=states, gradient_bytes=0, optimizer_bytes=0, offloaded=offloaded, **moved)


def room(gigabytes: float, free: float | None = None) -> Room:
    return Room(total=int(gigabytes * 1e9), free=int((gigabytes if free is None else free) * 1e9))


def checked(costs: list[Cost], **rooms: Any) -> list[str]:
    said: list[str] = []
    check_memory(
        costs, rank=0, machine=rooms.pop("machine", room(16)), gpu=rooms.pop("gpu", None), warn=said.append, **rooms
    )
    return said


def test_what_fits_is_let_through() -> None:
    assert checked([cost(3 * 10**9)] * 4) == []
    assert checked([cost(3 * 10**9)] * 100, gpu=room(8)) == []  # each has a GPU of its own


@pytest.mark.parametrize(
    ("costs", "rooms", "said"),
    [
        (
            [cost(5 * 10**9)] * 4,
            {},
            r"4 ranks on this machine together must hold 20.0 GB .* this machine has 16.0 GB; use",
        ),
        (
            [cost(5 * 10**9), cost(1)],
            {"gpu": room(4)},
            r"rank 0 of this machine must hold 5.00 GB .* its GPU has 4.00 GB",
        ),
        ([cost(3 * 10**9)] * 2, {"gpu": room(4), "sharers": 2}, r"each of 2 ranks on one GPU must hold 6.00 GB"),
        (
            [cost(9 * 10**9, offloaded=True)] * 2,
            {"gpu": room(80)},
            r"together must hold 18.0 GB .* has 16.0 GB; strategy.cpu_offload keeps them in the memory of the machine",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_bytes_and_a_remedy(
    costs: list[Cost], rooms: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said + ".*smolcluster plan --memory"):
        checked(costs, **rooms)


def test_memory_that_others_use_now_is_warned_of() -> None:
    (said,) = checked([cost(5 * 10**9)], machine=room(16, free=4))
    assert "must hold 5.00 GB" in said
    assert "has 4.00 GB free" in said


def test_a_worker_refuses_before_it_meets_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "room_of", lambda _: Room(total=10**6, free=10**6))
    config = resolve(load_config([], overrides={**GPT, "strategy.name": "pipeline", "cluster.num_workers": 2}))
    place = {"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 2}
    spec = spec_of(config=config.model_dump(mode="json"), run_dir=str(tmp_path), **place)
    with pytest.raises(UserError, match=r"2 ranks on this machine together must hold .* has 1\.00 MB"):
        Worker(spec, None, [])._prepare()  # type: ignore[arg-type]


def test_only_what_is_sure_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer of the task's own may keep nothing, and frozen parameters have no gradients."""
    path = tmp_path / "light.py"
    path.write_text(
        "import torch\nfrom smolcluster import Task\n"
        "class Light(Task):\n"
        "    def model(self): return torch.nn.Linear(99, 100)\n"
        "    def train_data(self): return torch.ones(64, 99), torch.ones(64, 100)\n"
        "    def loss(self, model, batch): return (model(batch[0]) - batch[1]).pow(2).mean()\n"
        "    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "class Frozen(Light):\n"
        "    def model(self):\n        model = super().model()\n"
        "        model.bias.requires_grad_(False)\n        return model\n",
        encoding="utf-8",
    )
    said: list[int] = []
    monkeypatch.setattr(role, "check_memory", lambda costs, **_: said.append(costs[0].states_bytes))
    for name in ("Light", "Frozen"):
        config = resolve(
            load_config([], overrides={"task": f"{path}:{name}", "training.device": "cpu", "training.batch_size": 4})
        )
        spec = spec_of(config=config.model_dump(mode="json"), run_dir=str(tmp_path))
        Worker(spec, None, [])._prepare()  # type: ignore[arg-type]
    assert said == [2 * 4 * 10_000]  # weights and gradients; and of the second nothing is said


def test_sizes_as_people_write_them() -> None:
    said = {"16GB": 16 * 10**9, "512MiB": 2**29, "1.5g": 1_500_000_000, "100": 100, "2 TB": 2 * 10**12}
    assert {text: parse_size(text, what="--limit") for text in said} == said
    for text in ("", "GB", "-1GB", "16QB", "0"):
        with pytest.raises(UserError, match="is not a size; write it as 16GB"):
            parse_size(text, what="--limit")


def test_this_machine_has_memory() -> None:
    assert 2**28 < free_bytes(CPU) <= machine_bytes()


def test_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(memory.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert free_bytes(CPU) > 1 << 28


# The plan


def row(label: str, peak: int, *, less: int | None = None, **fields: Any) -> Forecast:
    half = peak // 2
    ways = {
        Activations(): Peak(
            at_peak=MemoryUse(parameters=half, other=peak - half), of_each_kind=MemoryUse(parameters=half, other=peak)
        )
    }
    if less is not None:
        ways[Activations(True, False)] = Peak(
            at_peak=MemoryUse(parameters=less), of_each_kind=MemoryUse(parameters=less)
        )
    seat = SeatMemory(ranks=[0, 1], role="worker", states=ways[Activations()].of_each_kind, ways=ways, **fields)
    choice = Choice(label=label, strategy="fsdp", options={"fsdp_stage": 3})
    return Forecast(choice=choice, seats=[seat], costs=[dataclasses.replace(cost(0), bytes_sent=3 * 10**6)] * 2)


def plan(*rows: Forecast, limit: int = 10**9, **fields: Any) -> MemoryPlan:
    said = {"parameters": 1000, "ranks": 2, "device": "cpu", "limit_source": "said", "configured": Activations()}
    return MemoryPlan(**(said | {"limit": limit, "rows": list(rows)} | fields))


def test_the_first_that_fits_is_recommended_and_recomputing_only_if_none_does() -> None:
    rows = [row("large", 3 * 10**9, less=2 * 10**9), row("middle", 2 * 10**9, less=10**8), row("small", 10**9)]
    best = plan(*rows).recommended
    assert (best[0].choice.label, best[1]) == ("small", Activations())
    best = plan(*rows[:2]).recommended
    assert (best[0].choice.label, best[1]) == ("middle", Activations(True, False))
    assert plan(rows[0]).recommended is None
    assert plan(row("slow start", 10**8, start=2 * 10**9)).recommended is None
    assert plan(Forecast(choice=choices(1)[0], cannot="no")).recommended is None


def test_the_table_says_what_fits_and_why_not() -> None:
    rows = [
        row("first", 3 * 10**9, less=10**8),
        row("second", 10**8),
        Forecast(choice=choices(1)[0], cannot="not here"),
    ]
    stream = io.StringIO()
    show_memory(json.loads(json.dumps(to_dict(plan(*rows)))), stream)
    lines = stream.getvalue().splitlines()
    assert next(line for line in lines if line.startswith("first")).endswith("3.00 GB  with checkpointing")
    assert next(line for line in lines if line.startswith("second")).rstrip().endswith("100 MB  yes")
    assert any("pp|ppp" in line and "aaaa" in line for line in lines)  # the mark is the room there is
    assert "cannot run: single: not here" in lines
    flags = "--workers 2 --strategy fsdp --override strategy.fsdp_stage=3"
    assert lines[-1] == f"the first that fits: second  (smolcluster train ... {flags})"


def test_the_bytes_that_a_rank_sends_in_a_step(four: Workload) -> None:
    """By the strategy's own formula: allreduce sends 2 (N-1)/N of the gradients; of a pipeline activations travel too."""
    asked = [Choice(label=name, strategy=name) for name in ("allreduce", "pipeline")]
    found = to_dict(plan(*(forecast(four, choice, ways=[Activations()]) for choice in asked)))
    allreduce, pipeline = found["strategies"]
    assert allreduce["bytes_sent"] == [pytest.approx(2 * 3 / 4 * 4 * four.shape.parameters, abs=8)] * 4
    assert not allreduce["activations_travel"]
    assert pipeline["activations_travel"]
    stream = io.StringIO()
    show_memory(found, stream)
    head, first, second, *rest = stream.getvalue().splitlines()[1:]
    assert "sent a step" in head
    assert first.split()[1:3] == size(allreduce["bytes_sent"][0]).split()
    assert second.split()[1:3] == f"{size(max(pipeline['bytes_sent']))}*".split()
    assert "* and activations, which depend on the samples" in rest


def test_what_is_asked() -> None:
    labels = [c.label for c in choices(3)]
    assert not any("hybrid" in label for label in labels)  # 3 has no half
    assert [c.label for c in choices(1)] == ["single"]
    config = resolve(load_config([], overrides={**GPT, "strategy.name": "fsdp", "strategy.prefetch": 2}))
    asked = [c.label for c in choose(config, ranks=2, plane="mesh", only=["zero", "mp"])]
    assert asked[0] == as_configured(config, "mesh").label == "fsdp, as configured"
    assert "pipeline zbv" in asked
    assert not any(label.startswith("mesh") for label in asked)
    with pytest.raises(UserError, match="unknown strategy 'pipelin'; did you mean 'pipeline'"):
        choose(config, ranks=2, plane="mesh", only=["pipelin"])


def test_what_a_process_says_is_what_it_saw() -> None:
    seen = estimate_rank(subject(1), choices(1)[0], 0, [Activations(), Activations(False, True)])
    assert from_plain(json.loads(json.dumps(to_plain(seen)))) == seen


def test_the_page_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[3] / "docs/memory.md").read_text(encoding="utf-8")
    shown = page.split("```")[3].strip().splitlines()
    source = "8.00 GB for each rank, as given, less 300 MB for its process"
    rows = [row(c.label, 10**9) for c in choices(4) if c.strategy != "single"]
    table = plan(*rows, limit=7_700_000_000, parameters=124_439_808, ranks=4, limit_source=source)
    stream = io.StringIO()
    show_memory(to_dict(table), stream)
    printed = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert shown[:2] == [printed[0], printed[1].rstrip()]
    names = [line.split("  ")[0] for line in printed[2 : 2 + len(table.rows)]]
    assert [line.split("  ")[0] for line in shown[2 : 2 + len(table.rows)]] == names
    assert printed[-2] in shown


# The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to plan: `smolcluster plan --memory`"),
        (["--memory", "--nodes", "0"], "--nodes 0: at least one rank is needed"),
        (["--memory", "--nodes", "a,,b"], "--nodes 'a,,b': give a number, or names with commas"),
        (["--memory", "--limit", "much"], "--limit 'much' is not a size; write it as 16GB"),
        (["--memory", "--strategy", "fsdq"], "unknown strategy 'fsdq'; did you mean 'fsdp'"),
        (["--memory", "nosuch"], "nosuch"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_tells_each_seat() -> None:
    made = subject(3, {"strategy.name": "pipeline", "strategy.schedule": "gpipe"})
    lines = describe_memory(made, "mesh")
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1", "rank 2", "memory"]
    assert "activations and buffers; at most" in lines[0]
    assert lines[-1].endswith("it fits")
    made = subject(2, {"strategy.name": "syncps"})
    lines = describe_memory(made, "elastic")
    assert [line.split(":")[0] for line in lines] == ["ranks 0-1", "server", "memory"]
    assert "; journal: " in lines[1]


def test_what_a_server_writes_to_its_disk_follows_from_what_is_sent() -> None:
    """With 8 bits a quarter of it, where that is what comes or goes; a coordinator writes no tensors."""

    def journal(name: str, ranks: int = 2, **said: Any) -> tuple[int, int]:
        made = subject(ranks, {f"strategy.{key}": value for key, value in said.items()})
        choice = Choice(label=name, strategy=name, plane="elastic", options=said)
        (server,) = [seat for seat in forecast(made, choice, ways=[Activations()]).seats if seat.role == "server"]
        return server.journal_step, server.journal_limit

    parameters = subject(2, {}).shape.parameters
    dense = journal("syncps")[0]
    assert dense == 4 * parameters
    assert 2 * dense / 4 < journal("syncps", codec="int8")[0] < 2 * 0.3 * dense  # what both workers sent
    assert journal("edp")[0] == dense
    assert journal("edp", codec="int8")[0] < 0.6 * dense
    assert journal("edp", ranks=5, codec="int8")[0] == dense
    assert journal("allreduce") == (0, disk_bound(state_bytes=0, record_bytes=0))
    assert journal("syncps")[1] == disk_bound(state_bytes=3 * dense, record_bytes=dense)


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 6]) == "0-3, 6"


# Stage 1, turn by turn


def test_turns_take_every_number_of_every_share_once() -> None:
    shares = [[(0, 7), (3, 2)], [(1, 5)], [(2, 1), (4, 3)]]
    turns = fill_rows(shares, 4)
    assert [width for width, _ in turns] == [4, 4, 1]
    for owner, share in enumerate(shares):
        for parameter, length in share:
            mine = [p for _, pieces in turns for p in pieces if p.parameter == parameter]
            assert all(p.owner == owner for p in mine)
            assert [n for p in mine for n in range(p.first, p.first + p.length)] == list(range(length))
    for width, pieces in turns:
        places = [(p.owner, p.at + n) for p in pieces for n in range(p.length)]
        assert len(set(places)) == len(places)
        assert all(at < width for _, at in places)


# Rehearsals side by side

IMPORTS_FIRST = """
import sys, threading
from unittest import mock
from smolcluster.planner import estimate_pool
from smolcluster.planner.candidates import Choice
from smolcluster.planner.forecast import Forecast
asked = [Choice(label=n, strategy=n) for n in ("single", "fsdp", "pipeline")]
asked.append(Choice(label="edp", strategy="edp", plane="elastic"))
before = []
def forecast(subject, choice, *, ways, estimate):
    before.append(f"smolcluster.strategies.{choice.strategy}" in sys.modules)
    return Forecast(choice=choice)
with mock.patch.object(estimate_pool, "forecast", forecast), mock.patch.object(estimate_pool, "_child", mock.MagicMock()):
    estimate_pool.forecast_all(None, asked, [], processes=2)
print(before)
"""


def test_strategies_are_imported_before_threads_rehearse_them() -> None:
    """Two threads that import torch's compiler at once meet its modules half made."""
    ended = subprocess.run([sys.executable, "-c", IMPORTS_FIRST], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "[True, True, True, True]\n", ended.stderr


def test_whatever_ends_a_rehearsal_is_said(four: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Forecast:
        raise ImportError("half made")

    monkeypatch.setattr(estimate_pool, "forecast", broken)
    monkeypatch.setattr(estimate_pool, "_child", lambda _: contextlib.nullcontext(None))
    with pytest.raises(SmolclusterError, match="a memory estimate failed: ImportError: half made"):
        estimate_pool.forecast_all(four, choices(2)[:4], [], processes=2)
