"""Every group computes the same things: in memory, over gloo, over real sockets."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.tasks.counted import kernel_bytes
from tests.unit.comm.ranks import in_memory
from tests.world import forkserver

from smolcluster.comm.buckets import BucketSum, assign_buckets
from smolcluster.comm.group import Group, PeerLost, broadcast_tensors, gather_json, synchronize_weights
from smolcluster.comm.memory_group import MemoryGroup, MemoryHub
from smolcluster.comm.mesh import rendezvous
from smolcluster.comm.mesh.backends import BackendRequest, agree
from smolcluster.comm.rounds import Committed
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


# Buckets


def test_an_unknown_master_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may become known while machines start; then it is asked for again."""
    asked: list[str] = []

    def unknown(host: str, _: Any) -> Any:
        asked.append(host)
        if len(asked) == 1 or host == "mini9":
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: None)
    rendezvous._resolve(rendezvous.RankPlace(master_addr="mini2"))
    assert asked == ["mini2", "mini2"]
    with pytest.raises(UserError, match="mini9: this machine cannot resolve that name"):
        rendezvous._resolve(rendezvous.RankPlace(master_addr="mini9", join_timeout_s=0.0))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is one address")
@pytest.mark.parametrize("libuv", [False, True])
def test_the_store_listens_on_its_address_alone(monkeypatch: pytest.MonkeyPatch, libuv: bool) -> None:
    """torch by itself would listen on every address, 127.0.0.2 among them."""
    if libuv and not rendezvous._LIBUV_TAKES_A_SOCKET:
        pytest.skip("this torch has a store of libuv that takes no socket")
    monkeypatch.setattr(rendezvous, "_LIBUV_TAKES_A_SOCKET", libuv)
    store = rendezvous._open_store(rendezvous.RankPlace(world_size=2, master_addr="localhost"))
    other = rendezvous._open_store(rendezvous.RankPlace(rank=1, world_size=2, master_port=store.port))
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=300)
    with pytest.raises(UserError, match=f"--master-port {store.port} on 127.0.0.1 cannot be used"):
        rendezvous._open_store(rendezvous.RankPlace(world_size=2, master_port=store.port))


def test_the_store_of_another_machines_address_is_refused_for_its_address() -> None:
    with pytest.raises(
        UserError, match=r"^--master-addr 192\.0\.2\.1 is not an address of this machine, which runs rank 0"
    ):
        rendezvous._open_store(rendezvous.RankPlace(world_size=2, master_addr="192.0.2.1"))


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    f32, f16 = torch.float32, torch.float16
    assert assign_buckets([(f32, 4)] * 4, bucket_bytes=8, first_bucket_bytes=4) == ([2, 1, 1, 0], 3)
    assert assign_buckets([(f32, 100), (f32, 4)], bucket_bytes=8, first_bucket_bytes=4) == ([1, 0], 2)
    assert assign_buckets([(f32, 4), (f16, 4), (f32, 4)], bucket_bytes=100, first_bucket_bytes=100) == ([2, 1, 0], 3)
    assert assign_buckets([(f32, 4)], bucket_bytes=1, first_bucket_bytes=1) == ([0], 1)


class Recording(MemoryGroup):
    """Remembers when buckets left."""

    def __init__(self) -> None:
        super().__init__(MemoryHub(1), 0)
        self.sent: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.sent.append(tensor.numel())
        return super().all_reduce(tensor)


def test_a_bucket_leaves_while_backward_still_runs() -> None:
    """The last layer's gradient is on its way before the first layer's backward has begun."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 3, bias=False))
    group = Recording()
    buckets = BucketSum(list(layers.parameters()), group, bucket_bytes=1, num_slots=1)
    sent_when_first_layer_runs: list[int] = []
    layers[0].register_full_backward_pre_hook(lambda *_: sent_when_first_layer_runs.append(len(group.sent)))
    buckets.start(0, weight=1.0)
    layers(torch.ones(2, 4, requires_grad=True)).sum().backward()
    buckets.finish(0)
    assert sent_when_first_layer_runs == [1]
    assert group.sent == [12, 16 + 3], "the last bucket also carries the stop count, and who used which parameter"


def test_buckets_leave_in_order_whatever_order_gradients_come_in() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    group = Recording()
    buckets = BucketSum([first, second], group, bucket_bytes=1, num_slots=1)
    buckets.start(0, weight=0.5, stop=True)
    first.sum().backward()
    assert group.sent == [], "the second parameter's bucket must leave first"
    second.sum().backward()
    assert group.sent == [3, 2 + 3]
    buckets.finish(0)
    buckets.wait(0)
    buckets.give(Committed(1, 0))
    assert first.grad.tolist() == [0.5, 0.5]
    assert buckets.stop_count(0).item() == 1.0


def test_gradients_outside_an_armed_step_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    buckets = BucketSum([parameter], Recording(), bucket_bytes=100, num_slots=1)
    parameter.sum().backward()
    assert parameter.grad is not None
    buckets.start(0, weight=1.0)
    parameter.sum().backward()
    buckets.finish(0)
    buckets.wait(0)
    buckets.give(Committed(1, 0))
    assert parameter.grad.tolist() == [2.0, 2.0], "both micro-batches count"


def test_the_gradient_of_a_micro_batch_before_the_last_is_sent() -> None:
    """Of a parameter that the last one does not use. One that none of them uses has none, as without buckets."""
    early, last, never = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    buckets = BucketSum([early, last, never], Recording(), bucket_bytes=1, num_slots=1)
    early.sum().backward()
    buckets.start(0, weight=0.5)
    last.sum().backward()
    buckets.finish(0)
    buckets.wait(0)
    buckets.give(Committed(1, 0))
    assert [None if p.grad is None else p.grad.tolist() for p in (early, last, never)] == [[0.5] * 2, [0.5] * 2, None]


# Which backend


def wishes(*said: str) -> list[BackendRequest]:
    """Each "named gpu", where - is neither; two ranks to a host."""
    pairs = [[None if word == "-" else word for word in rank.split(" ", 1)] for rank in said]
    return [BackendRequest(host=f"host{rank // 2}", named=named, gpu=gpu) for rank, (named, gpu) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("said", "backend"),
    [
        (["- -", "- -"], "gloo"),
        (["- cuda a", "- cuda b", "- cuda c"], "nccl"),
        (["- cuda a", "- cuda a"], "gloo"),  # two workers on one GPU
        (["- cuda a", "- -"], "gloo"),  # a GPU node and a Raspberry Pi
        (["- cuda a", "- hip b"], "gloo"),
        (["gloo cuda a", "- cuda b"], "gloo"),  # one user's word holds for all
        (["- cuda a", "nccl cuda b"], "nccl"),
        (["- -", "mpi -"], "mpi"),
    ],
)
def test_ranks_agree_on_a_backend(said: list[str], backend: str) -> None:
    assert agree(wishes(*said)) == backend


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            ["- -", "gloo -", "mpi -"],
            "rank 2 on host1 has backend mpi and rank 1 on host0 has gloo; use the same --backend",
        ),
        (
            ["nccl cuda a", "- cuda b", "- -"],
            "rank 2 on host1 has no GPU that NCCL could use: NCCL needs a GPU for each",
        ),
        (["nccl cuda a", "nccl cuda b", "- cuda a"], "ranks 0 and 2 on host1 share a GPU"),
        (["nccl cuda a", "nccl hip b"], "the GPUs are of several kinds"),
    ],
)
def test_conflicting_backends_are_refused(said: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        agree(wishes(*said))


# Two with one number


class Store:
    """One of torch's, and something that happens before a rank signs."""

    def __init__(self, store: Any, before: Callable[[], Any]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self._before()
        self._store.set(key, value)


def sign(store: Any, rank: int, who: str) -> list[str]:
    """Who all of them are."""
    place = rendezvous.RankPlace(rank=rank, world_size=2, join_timeout_s=30.0)
    me = rendezvous.Signature(host="here", named=None, gpu=None, said={}, who=who)
    return [signed.who for signed in rendezvous._wait_for_all(store, place, me, lambda: False)]


def test_a_rank_that_was_started_twice_is_refused() -> None:
    """The second has looked and seen nobody; before it signs, the others have met."""
    store = dist.HashStore()

    def others_meet() -> None:
        with ThreadPoolExecutor() as pool:
            met = [pool.submit(sign, store, rank, f"rank {rank}") for rank in range(2)]
            assert [one.result() for one in met] == [["rank 0", "rank 1"]] * 2

    with pytest.raises(UserError, match="rank 1 was started twice: another process, on here"):
        sign(Store(store, others_meet), 1, "a twin")


def test_a_rank_that_restarts_before_all_have_joined_replaces_itself() -> None:
    store = dist.HashStore()
    left = rendezvous.Signature(host="here", named=None, gpu=None, said={}, who="one that left")
    store.set("joined/1", json.dumps(dataclasses.asdict(left)))
    with ThreadPoolExecutor() as pool:
        again = pool.submit(sign, store, 1, "rank 1")
        while json.loads(store.get("joined/1"))["who"] != "rank 1":
            time.sleep(0.001)
        assert sign(store, 0, "rank 0") == again.result() == ["rank 0", "rank 1"]


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
