"""Every group computes the same things: in memory, over gloo, over real sockets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.tasks.counted import kernel_bytes
from tests.unit.comm.ranks import in_memory
from tests.world import forkserver

from smolcluster.comm.group import Group, PeerLost, broadcast_tensors, gather_json, synchronize_weights
from smolcluster.comm.memory_group import MemoryGroup, MemoryHub
from smolcluster.errors import UserError


def _gloo_rank(rank: int, size: int, pipe: Any, work: Callable[[Group], Any]) -> None:
    from smolcluster.comm.mesh.rendezvous import RankPlace, connect

    torch.set_num_threads(1)
    port = 0 if rank == 0 else pipe.recv()
    place = RankPlace(rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_port=port)
    group = connect(place, device=torch.device("cpu"), announce=pipe.send)
    pipe.send(work(group))
    group.close()


def over_gloo(size: int, work: Callable[[Group], Any]) -> list[Any]:
    context = forkserver()
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_gloo_rank, args=(rank, size, pipes[rank][1], work), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    port = pipes[0][0].recv()
    for ours, _ in pipes[1:]:
        ours.send(port)
    results = []
    for ours, _ in pipes:
        assert ours.poll(120), "a rank did not answer"
        results.append(ours.recv())
    for process in processes:
        process.join(300)
    return results


WORLDS = pytest.mark.parametrize(("run", "size"), [(in_memory, 1), (in_memory, 3), (over_gloo, 2), (over_gloo, 3)])


def everything(group: Group) -> dict[str, Any]:
    """One of each operation, on values that tell ranks apart."""
    n, rank = group.size, group.rank
    summed = torch.arange(5, dtype=torch.float32) * (rank + 1)
    group.all_reduce(summed).wait()
    part = torch.zeros(2)
    group.reduce_scatter(part, torch.arange(2 * n, dtype=torch.float32) + rank).wait()
    gathered = torch.zeros(2 * n)
    group.all_gather(gathered, torch.tensor([rank, -rank], dtype=torch.float32)).wait()
    copied = torch.full((3,), float(rank))
    group.broadcast(copied, source=n - 1).wait()
    ring = torch.zeros(1)
    if n > 1:
        sent = group.send(torch.tensor([float(rank)]), to=(rank + 1) % n, tag=3)
        got = group.recv(ring, source=(rank - 1) % n, tag=3)
        for work in (got, sent, got, sent):  # a second wait returns at once
            work.wait()
    group.barrier()
    halves = group.sub([0])
    return {
        "summed": summed.tolist(),
        "part": part.tolist(),
        "gathered": gathered.tolist(),
        "copied": copied.tolist(),
        "ring": ring.tolist(),
        "said": gather_json(group, {"rank": rank, "text": "ä" * rank}),
        "sub": None if halves is None else halves.size,
        "tensors": {
            name: tensor.tolist()
            for name, tensor in broadcast_tensors(
                group,
                {
                    "a": torch.tensor([1.5, 2.5]),
                    "half": torch.ones(3, dtype=torch.bfloat16),
                    "empty": torch.zeros(0),
                    "n": torch.tensor(7),
                }
                if rank == 0
                else None,
            ).items()
        },
    }


@WORLDS
def test_every_operation(run: Callable[..., list[Any]], size: int) -> None:
    results = run(size, everything)
    total = sum(range(1, size + 1))
    for rank, result in enumerate(results):
        assert result["summed"] == [i * total for i in range(5)]
        assert result["part"] == [size * (2 * rank + i) + sum(range(size)) for i in range(2)]
        assert result["gathered"] == [v for r in range(size) for v in (r, -r)]
        assert result["copied"] == [size - 1] * 3
        assert result["ring"] == [(rank - 1) % size]
        assert result["said"] == [{"rank": r, "text": "ä" * r} for r in range(size)]
        assert result["sub"] == (1 if rank == 0 else None)
        assert result["tensors"] == {"a": [1.5, 2.5], "half": [1.0] * 3, "empty": [], "n": 7}


def _many_sums(group: Group) -> list[float]:
    generator = torch.Generator().manual_seed(group.rank)
    values = [torch.randn(1000, generator=generator) for _ in range(5)]
    works = [group.all_reduce(v) for v in values]
    for work in works:
        work.wait()
    return torch.cat(values).tolist()


def test_sums_are_bit_identical_on_every_rank() -> None:
    first, *others = over_gloo(3, _many_sums)
    assert all(other == first for other in others)


def _measured_traffic(group: Group) -> tuple[float, float, float]:
    size = 1_000_000
    tensor = torch.zeros(size)
    group.barrier()
    before = kernel_bytes()
    counted = group.traffic.bytes_sent
    for _ in range(5):
        group.all_reduce(tensor).wait()
    group.barrier()
    after, counted = kernel_bytes(), group.traffic.bytes_sent - counted
    group.barrier()  # nobody closes a connection before everybody has counted
    return after[0] - before[0], after[1] - before[1], counted


@pytest.mark.parametrize("size", [2, 3, 4])
def test_counted_bytes_are_what_crossed_the_sockets(size: int) -> None:
    """The formula 2 (N-1)/N S against the kernel's own counters: at most 2 % and headers apart."""
    if not sys.platform.startswith("linux"):
        pytest.skip("TCP_INFO is Linux's")
    for sent, received, counted in over_gloo(size, _measured_traffic):
        if sent == 0:
            pytest.skip("this kernel does not count bytes per socket")
        assert counted == pytest.approx(5 * 2 * (size - 1) / size * 4_000_000, rel=1e-4)
        assert counted <= sent <= 1.02 * counted + 4096
        assert counted <= received <= 1.02 * counted + 4096


def test_a_silent_peer_is_an_error_not_a_hang() -> None:
    group = MemoryGroup(MemoryHub(2, timeout_s=0.05), 0)
    with pytest.raises(PeerLost, match=r"0\.05 s"):
        group.all_reduce(torch.zeros(1)).wait()


def weights_of(group: Group, *, seed: int, others: str = "alike") -> tuple[list[float], int]:
    generator = torch.Generator().manual_seed(seed + (group.rank if others == "other values" else 0))
    weights = {"a": torch.randn(500, generator=generator), "n": torch.ones((), dtype=torch.bfloat16)}
    if others == "another layout" and group.rank:
        weights["a"] = weights["a"].view(20, 25)
    synchronize_weights(group, weights)
    return [float(weights["a"].double().sum()), float(weights["n"])], group.traffic.bytes_sent


def test_weights_travel_only_where_ranks_made_other_ones() -> None:
    same = in_memory(3, lambda group: weights_of(group, seed=1))
    other = in_memory(3, lambda group: weights_of(group, seed=1, others="other values"))
    assert [weights for weights, _ in other] == [weights for weights, _ in same] == [same[0][0]] * 3
    assert same[0][1] < 1000 <= other[0][1]
    with pytest.raises(UserError, match=r"ranks \[1, 2\] built another model"):
        in_memory(3, lambda group: weights_of(group, seed=1, others="another layout"))
