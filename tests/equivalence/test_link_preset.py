"""diloco without options: which preset is picked, by which measured link, who learns of it, and what keeps it."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks.harness.network import Network, check_possible, hosts
from tests.equivalence.test_diloco import CONFIG
from tests.world import TASKS, ElasticWorld, Rank, Seat, Who, World, run_elastic_world, run_world

from smolcluster.comm.elastic.membership.link_probe import LinkProbe, bytes_requested
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.comm.link_speed import BUDGET_S, MAX_BYTES
from smolcluster.config import load_config, resolve
from smolcluster.config.options import AllReduceOptions, DiLoCoOptions
from smolcluster.engine.link_preset import LAN_MBIT_S, pick_preset
from smolcluster.errors import UserError
from smolcluster.observe.events import Notice, RunStarted
from smolcluster.planner.dry_run import describe_memory
from smolcluster.planner.forecast import UNPICKED, Workload
from smolcluster.tasks.find import find_task


def test_thresholds_and_what_is_left_open() -> None:
    speeds = (None, LAN_MBIT_S / 1000, LAN_MBIT_S - 1, LAN_MBIT_S, 1e5)
    assert [pick_preset(speed).preset for speed in speeds] == [None, "wan", "wan", "lan", "lan"]
    assert DiLoCoOptions().picks_preset
    assert DiLoCoOptions(inner_steps=5, fragments=5).picks_preset
    set_ones = [{"preset": "lan"}, {"codec": "fp32"}, {"codec_bits": 4}, {"outer_lr": 0.7}, {"outer_momentum": 0}]
    for options in [*set_ones, {"nesterov": True}, {"use_quantization": False}]:
        assert not DiLoCoOptions(**options).picks_preset
    assert not AllReduceOptions().picks_preset


def test_a_plan_says_that_the_preset_is_open() -> None:
    config = resolve(load_config([], overrides={"task": f"{TASKS}:Double", "strategy.name": "diloco"}))
    workload = Workload.open(config, find_task(config), num_ranks=2, device=torch.device("cpu"))
    (said,) = [line for line in describe_memory(workload, "mesh") if line.startswith("ranks 0-1")]
    assert said.endswith(f"({UNPICKED})")


# The probe of the elastic plane, with a clock and links of its own


class Wire(Link):
    """A worker's link of so many Mbit/s, which answers what it is asked."""

    def __init__(self, mbit_per_s: float) -> None:
        self.mbit_per_s, self.sent = mbit_per_s, 0
        self.asked: list[int] = []

    def send(self, message: Message, **_: Any) -> Any:
        assert message.kind is Kind.ASK
        self.asked.append(bytes_requested(message))

    queued_bytes = silent_s = cast(Any, 0)

    def close(self, reason: str) -> None: ...


class Probed:
    """A probe, and the time."""

    def __init__(self, expected: int, **options: Any) -> None:
        self.now = 0.0
        self.probe = LinkProbe(expected=expected, clock=lambda: self.now, **options)

    def answer(self, wire: Wire) -> bool:
        nbytes = wire.asked.pop()
        self.now += nbytes * 8 / 1e6 / wire.mbit_per_s
        return self.probe.took(wire, Message(kind=Kind.STATE, payload=torch.zeros(nbytes, dtype=torch.uint8)))

    def measure(self, wire: Wire) -> float:
        started = self.now
        self.probe.begin(wire)
        while wire.asked:
            assert self.answer(wire)
        return self.now - started


def test_the_slowest_upload_counts_within_two_seconds() -> None:
    run = Probed(expected=3)
    wires = [Wire(900.0), Wire(1.0), Wire(40.0)]
    for wire in wires:
        assert run.probe.speed is None
        assert run.measure(wire) <= BUDGET_S
    assert run.probe.speed == pytest.approx(1.0)
    run.probe.forget(wires[1])  # its worker is gone: another one is waited for
    assert run.probe.speed is None
    run.measure(Wire(60.0))
    assert run.probe.speed == pytest.approx(40.0)


def test_those_that_came_are_enough_after_a_while() -> None:
    run = Probed(expected=2, patience_s=60.0)
    late = Wire(10.0)
    run.measure(Wire(80.0))
    run.probe.begin(late)
    assert run.probe.speed is None
    run.now += 60.0
    assert run.probe.speed == pytest.approx(80.0)
    assert run.probe.measuring == {late}, "it gets the plan as well"


def test_bytes_that_nobody_asked_for_are_refused() -> None:
    run, wire = Probed(expected=1), Wire(10.0)
    message = Message(kind=Kind.STATE, payload=torch.zeros(64, dtype=torch.uint8))
    assert not run.probe.took(wire, message)
    run.probe.begin(wire)
    assert not run.probe.took(wire, message), "of another size"
    asked = (None, "x", -1, True, 2**40)
    assert [bytes_requested(Message(kind=Kind.ASK, meta={"bytes": n})) for n in asked] == [0, 0, 0, 0, MAX_BYTES]


# Whole runs


def test_one_machine_needs_no_preset(tmp_path: Path) -> None:
    """As without this choice: fp32 and the outer options of the paper. It is said once."""
    world = run_world(2, tmp_path, CONFIG, task="Double", strategy="diloco")
    assert notices(world.ranks[0]) == [pick_preset(None).describe("diloco")]
    assert notices(world.ranks[1]) == []
    assert presets(world.ranks) == [None, None]
    assert json.loads((tmp_path / "link.json").read_text()) == {"preset": None, "mbit_per_s": None}


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        check_possible()
    except UserError as error:
        pytest.skip(str(error))
    with hosts(3, rate=None) as network:
        yield network


def test_all_ranks_of_the_mesh_plane_pick_by_the_slowest_link(tmp_path: Path, network: Network) -> None:
    """Rank 1 sends at 8 Mbit/s; the run goes on with the pick when the link has become fast. What is set wins."""
    places = [(network.namespace(host), network.address(host)) for host in range(2)]
    tweaks = {rank: [("smolcluster.engine.worker", "on_one_machine", operator.not_)] for rank in range(2)}

    def train(name: str, overrides: dict[str, Any], **world: Any) -> World:
        world |= {"places": places, "tweaks": tweaks}
        return run_world(2, tmp_path / name, CONFIG | overrides, task="Double", strategy="diloco", **world)

    network.slow(1, "8mbit")
    slow = train("slow", {"training.checkpoint_steps": 4})
    (said,) = notices(slow.ranks[0])
    assert "preset wan, as " in said
    assert presets(slow.ranks) == ["wan", "wan"]
    assert 0 < json.loads((tmp_path / "slow/link.json").read_text())["mbit_per_s"] < LAN_MBIT_S
    network.mend_rate(1)
    saved = slow.run_dir / "checkpoints" / "step-00000004"
    assert presets(train("elsewhere", {}, resume=saved).ranks) == ["wan", "wan"]
    chosen = train("chosen", {"strategy.codec": "int8", "training.steps": 2})
    assert notices(chosen.ranks[0]) == []
    assert presets(chosen.ranks) == [None, None]


def test_workers_of_the_elastic_plane_adopt_what_the_server_picks(tmp_path: Path, network: Network) -> None:
    """One worker's upload is slow. The server that is restarted keeps the pick, also if the link is fast now."""
    places: dict[Who, tuple[str, str]] = {
        who: (network.namespace(host), network.address(host)) for host, who in enumerate(("server", 0, 1))
    }
    network.slow(2, "8mbit")

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(30)
        network.mend_rate(2)
        world.restart("server")

    config = CONFIG | {"training.steps": 150, "cluster.plane": "elastic", "training.checkpoint_steps": 0}
    del config["strategy.inner_steps"]  # the preset has another
    world = run_elastic_world(
        2,
        tmp_path,
        config,
        task="Double",
        strategy="diloco",
        places=places,
        environ={"SMOLCLUSTER_TOKEN": new_token()},
        script=script,
    )
    assert set(world.statuses.values()) == {0}
    first, second = notices(world.server)
    assert "preset wan, as " in first
    assert second == first
    assert presets(world.workers) == ["wan", "wan"]
    assert [line["step"] for line in world.history() if line["kind"] == "commit"] == [30, 60, 90, 120, 150]
    assert world.summary["replicas_agree"] is True


def notices(who: Rank | Seat) -> list[str]:
    return [e.message for e in who.events if isinstance(e, Notice) and e.message.startswith("diloco: ")]


def presets(everyone: list[Rank] | list[Seat]) -> list[str | None]:
    """With which each of them began."""
    started = [next(e for e in who.events if isinstance(e, RunStarted)) for who in everyone]
    return [event.config["strategy"]["preset"] for event in started]
