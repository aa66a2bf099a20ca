"""Rendezvous of a fixed world: the address and port of the store, signatures of the ranks, choice of the backend."""

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
import torch.distributed as dist

from smolcluster.comm.mesh import rendezvous
from smolcluster.comm.mesh.backends import BackendRequest, agree
from smolcluster.errors import UserError


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


# Two processes with one rank


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
