"""Ranks of a fixed world on hosts of their own: they compute what one process does, and whatever is lost is named, in time.

Each host is a network namespace; ranks meet and exchange over veth links, not loopback. No launcher watches them.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.network import Network
from tests import tasks
from tests.equivalence.same_run import COMMON, GPT, assert_same_run
from tests.places import at_most, separate_hosts
from tests.world import Tweak, World, run_world

from smolcluster.observe.events import Event, Failed, StepLogged

SILENT_S = 2.0  # instead of half a minute
CONFIG = COMMON | GPT | {"model.num_layers": 4, "training.checkpoint_steps": 0}
ENDLESS = CONFIG | {"training.steps": 100_000}
SHORT: Sequence[Tweak] = [("smolcluster.comm.mesh.liveness", "SILENT_S", SILENT_S)]
GLOBAL_BATCH = 4


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with separate_hosts(3) as network:
        yield network


def places(network: Network, size: int) -> list[tuple[str, str]]:
    return [(network.namespace(rank % 3), network.address(rank % 3)) for rank in range(size)]


def tweaked(size: int, tweaks: Sequence[Tweak]) -> dict[int, Sequence[Tweak]]:
    return dict.fromkeys(range(size), tweaks)


class Story:
    """What is done to a world when rank 0 has logged a step, and when each rank fell afterwards."""

    def __init__(self, act: Any, *, at: int = 4) -> None:
        self._act, self._at = act, at
        self.acted = 0.0
        self.fell: dict[int, float] = {}

    def __call__(self, rank: int, event: Event, processes: Sequence[mp.process.BaseProcess]) -> None:
        if isinstance(event, StepLogged) and rank == 0 and event.step >= self._at and not self.acted:
            self._act(processes)
            self.acted = time.monotonic()
        if isinstance(event, Failed):
            self.fell[rank] = time.monotonic() - self.acted


# What they compute


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> World:
    config = CONFIG | {"training.batch_size": GLOBAL_BATCH, "training.checkpoint_steps": 4}
    return run_world(1, tmp_path_factory.mktemp("single"), config, task="DoubleGPT", strategy="single")


@pytest.mark.parametrize(
    ("strategy", "size", "options"),
    [
        ("fsdp", 4, {"strategy.fsdp_stage": 3, "training.batch_size": GLOBAL_BATCH // 4}),
        ("pipeline", 3, {"training.batch_size": GLOBAL_BATCH}),
    ],
)
def test_ranks_on_several_hosts_equal_one_process(
    network: Network, tmp_path: Path, alone: World, strategy: str, size: int, options: dict[str, Any]
) -> None:
    config = CONFIG | options | {"training.checkpoint_steps": 4}
    world = run_world(size, tmp_path, config, task="DoubleGPT", strategy=strategy, places=places(network, size))
    assert_same_run(alone, world, tolerance=1e-9)


# What is lost


@pytest.mark.parametrize(("strategy", "killed"), [("fsdp", 2), ("pipeline", 2), ("allreduce", 2), ("fsdp", 0)])
def test_a_killed_rank_on_another_host_is_named(network: Network, tmp_path: Path, strategy: str, killed: int) -> None:
    """Every other rank has ended 5 s later: at once by what the backend says, else by the watch."""
    story = Story(lambda processes: processes[killed].kill())
    world = run_world(3, tmp_path, ENDLESS, strategy=strategy, places=places(network, 3), on_event=story)
    for rank in {0, 1, 2} - {killed}:
        failed = world.ranks[rank].failed
        assert (failed.kind, world.ranks[rank].status) == ("peer", 1)
        assert f"rank {killed} on testhost is gone" in failed.message
        assert story.fell[rank] < at_most(5.0)
    assert world.ranks[killed].status is None


@pytest.mark.parametrize("cut", [0, 2])
def test_a_host_that_is_cut_off_is_missed(network: Network, tmp_path: Path, cut: int) -> None:
    """The link goes down and no connection closes: a backend would wait for ten minutes. With rank 0 goes the rendezvous."""
    story = Story(lambda _: network.cut(cut))
    try:
        world = run_world(
            3, tmp_path, ENDLESS, places=places(network, 3), on_event=story, tweaks=tweaked(3, SHORT), strategy="fsdp"
        )
    finally:
        network.mend(cut)
    for rank in {0, 1, 2} - {cut}:
        failed = world.ranks[rank].failed
        assert f"rank {cut} on testhost has been silent for 2 s" in failed.message
        assert SILENT_S * 0.5 < story.fell[rank] < at_most(SILENT_S + 6.0)
    assert [rank.status for rank in world.ranks] == [None] * 3, "they were ended from outside the wait"
    assert world.ranks[cut].failed is not None, "and so was the one that was cut off"


def test_a_rank_that_fails_tells_the_others_why(network: Network, tmp_path: Path) -> None:
    world = run_world(2, tmp_path, ENDLESS, task="FailingGPT", places=places(network, 2))
    first, second = (rank.failed for rank in world.ranks)
    assert (first.kind, second.kind) == ("peer", "error")
    assert "rank 1 on testhost failed: ValueError: the third batch is cursed" in first.message


# Who does not fit


def test_a_rank_that_never_comes_is_named(network: Network, tmp_path: Path) -> None:
    world = run_world(3, tmp_path, CONFIG | {"cluster.join_timeout": 3}, places=places(network, 3), absent=[1])
    for rank in (0, 2):
        failed = world.ranks[rank].failed
        assert failed.kind == "user"
        assert f"rank 1 of 3 did not join at {network.address(0)}" in failed.message
        assert "within 3 s" in failed.message


@pytest.mark.parametrize(
    ("module", "package", "version"),
    [("torch", "torch", "2.11.0+cpu"), ("smolcluster.engine.identity", "smolcluster", "0.0.9")],
)
def test_another_version_is_refused(network: Network, tmp_path: Path, module: str, package: str, version: str) -> None:
    world = run_world(3, tmp_path, CONFIG, places=places(network, 3), tweaks={1: [(module, "__version__", version)]})
    assert [rank.status for rank in world.ranks] == [2, 2, 2]
    for rank in world.ranks:
        assert f"has {package} {version.partition('+')[0]} and rank 0 on" in rank.failed.message
        assert "install the same version on every machine" in rank.failed.message


_GPU = ("smolcluster.comm.mesh.rendezvous", "gpu_for_nccl", tasks.gpu_of_its_own)


def test_machines_with_and_without_a_gpu_agree_on_gloo(network: Network, tmp_path: Path) -> None:
    world = run_world(3, tmp_path, CONFIG, places=places(network, 3), tweaks={0: [_GPU], 1: [_GPU]})
    assert [rank.status for rank in world.ranks] == [0, 0, 0]


def test_nccl_where_a_rank_has_no_gpu_is_told_by_all(network: Network, tmp_path: Path) -> None:
    unchecked = (
        "smolcluster.engine.worker",
        "check_backend",
        tasks.nothing,
    )  # by one rank alone, which sees no GPU here
    tweaks = {0: [_GPU, unchecked], 1: [unchecked], 2: [_GPU, unchecked]}
    world = run_world(3, tmp_path, CONFIG, backend="nccl", places=places(network, 3), tweaks=tweaks)
    assert [rank.status for rank in world.ranks] == [2, 2, 2]
    for rank in world.ranks:
        assert rank.failed.message.startswith("rank 1 on ")
        assert "has no GPU that NCCL could use" in rank.failed.message


def test_ranks_of_another_world_are_told(network: Network, tmp_path: Path) -> None:
    tweaks = {1: [("smolcluster.comm.mesh.rendezvous", "_must_match", tasks.another_size)]}
    world = run_world(3, tmp_path, CONFIG, places=places(network, 3), tweaks=tweaks)
    assert [rank.status for rank in world.ranks] == [2, 2, 2]
    assert "has world size 5 and rank 0 on" in world.ranks[2].failed.message
    assert "use the same --world-size on every machine" in world.ranks[2].failed.message


def test_a_torch_for_gpus_and_one_for_cpus_go_together(network: Network, tmp_path: Path) -> None:
    import torch

    other = torch.__version__.partition("+")[0] + "+cu126"
    config = CONFIG | {"training.steps": 2}
    world = run_world(2, tmp_path, config, places=places(network, 2), tweaks={1: [("torch", "__version__", other)]})
    assert [rank.status for rank in world.ranks] == [0, 0]
