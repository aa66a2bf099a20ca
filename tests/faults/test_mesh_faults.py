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
import torch
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


_GPU = ("smolcluster.comm.mesh.rendezvous", "gpu_for_nccl", tasks.gpu_of_its_own)
_UNCHECKED = ("smolcluster.engine.worker", "check_backend", tasks.nothing)  # by one rank alone, which sees no GPU here


@pytest.mark.parametrize(
    ("tweaks", "backend", "said", "advice"),
    [
        (
            {1: [("torch", "__version__", "2.11.0+cpu")]},
            None,
            "has torch 2.11.0 and rank 0 on",
            "install the same version on every machine",
        ),
        (
            {1: [("smolcluster.engine.identity", "__version__", "0.0.9")]},
            None,
            "has smolcluster 0.0.9 and rank 0 on",
            "install the same version on every machine",
        ),
        (
            {1: [("smolcluster.comm.mesh.rendezvous", "_must_match", tasks.another_size)]},
            None,
            "has world size 5 and rank 0 on",
            "use the same --world-size on every machine",
        ),
        (
            {0: [_GPU, _UNCHECKED], 1: [_UNCHECKED], 2: [_GPU, _UNCHECKED]},
            "nccl",
            "rank 1 on ",
            "has no GPU that NCCL could use",
        ),
    ],
    ids=["torch", "smolcluster", "world size", "nccl"],
)
def test_a_rank_that_does_not_fit_is_named_by_all(
    network: Network, tmp_path: Path, tweaks: dict[int, Sequence[Tweak]], backend: str | None, said: str, advice: str
) -> None:
    world = run_world(3, tmp_path, CONFIG, backend=backend, places=places(network, 3), tweaks=tweaks)
    assert [rank.status for rank in world.ranks] == [2, 2, 2]
    for rank in world.ranks:
        assert said in rank.failed.message
        assert advice in rank.failed.message


_ANOTHER_BUILD = ("torch", "__version__", torch.__version__.partition("+")[0] + "+cu126")


@pytest.mark.parametrize("tweaks", [{0: [_GPU], 1: [_GPU]}, {1: [_ANOTHER_BUILD]}], ids=["gloo", "builds of torch"])
def test_machines_with_and_without_a_gpu_go_together(
    network: Network, tmp_path: Path, tweaks: dict[int, Sequence[Tweak]]
) -> None:
    config = CONFIG | {"training.steps": 2}
    world = run_world(3, tmp_path, config, places=places(network, 3), tweaks=tweaks)
    assert [rank.status for rank in world.ranks] == [0, 0, 0]
