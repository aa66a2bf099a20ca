"""Rendezvous of the ranks of a fixed world.

Rank 0 serves torch's key-value store on a TCP port; the others connect to it, and the backend then opens connections
between all ranks. On one machine everything stays on loopback: the store gets a socket bound to the address, since torch's
own listener ignores the host and listens on all addresses.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from smolcluster.comm.addresses import connect_tcp, is_address, is_loopback
from smolcluster.comm.group import Group, PeerLost
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.mesh.backends import BackendRequest, agree, gpu_for_nccl
from smolcluster.comm.mesh.torch_group import TorchGroup
from smolcluster.errors import UserError

if sys.platform == "linux":
    import fcntl

    SIOCGIFADDR = 0x8915

log = logging.getLogger(__name__)

EXCHANGE_TIMEOUT_S = 600.0
_POLL_S = 0.02
LOG_AFTER_S = 3.0  # log which ranks are missing
_REMEDIES = {"world size": "use the same --world-size on every machine"}
_ALL_JOINED = "roll"  # in the store: the list of all signatures
_MISSING = "missing"  # in the store: a rank did not join in time
LEAVE_S = 5.0
BACKLOG = 1024
# Before torch 2.8 the libuv store does not take an open socket; the legacy backend does.
_LIBUV_TAKES_A_SOCKET = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A process's rank in a fixed world. `master_port` 0: rank 0 takes any free port and passes it to `announce`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    join_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(BackendRequest):
    """What each rank posts in the store for the others."""

    said: dict[str, str]  # values that must be the same on all ranks
    who: str = field(default_factory=lambda: secrets.token_hex(8))  # a nonce: two processes may have the same rank


def connect(
    place: RankPlace,
    *,
    device: torch.device,
    backend: str | None = None,
    announce: Callable[[int], None] | None = None,
    versions: Mapping[str, str] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Group:
    """Join the world; returns when every rank has joined.

    `backend`: the requested one; None: the ranks agree on one. `versions`: must be the same on all ranks. Raises PeerLost if
    `stop_requested` while it waits.
    """
    if place.world_size == 1:
        return MemoryGroup.world(1)[0]
    if is_loopback(place.master_addr):
        _stay_on_loopback()
    else:
        _use_interface_to(place.master_addr)
        log.warning("torch.distributed is neither authenticated nor encrypted: use it only on a trusted network")

    _resolve(place, stop_requested)
    if place.rank > 0:
        _wait_for_rank_0(place, stop_requested)
    opened = _open_store(place)
    if place.rank == 0 and announce is not None:
        announce(opened.port)
    store = _of_this_attempt(opened)
    said = {**(versions or {}), **_must_match(place)}
    me = Signature(host=socket.gethostname(), named=backend, gpu=gpu_for_nccl(device), said=said)
    backend = _checked(_wait_for_all(store, place, me, stop_requested), store, place)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=EXCHANGE_TIMEOUT_S),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:  # DistError and its subclasses are RuntimeErrors
        raise PeerLost(f"the ranks could not connect to each other: {str(error).splitlines()[0]}") from error
    world = dist.group.WORLD
    assert world is not None
    return TorchGroup(world, device=device, met_at=(opened.host, opened.port))


def _wait_for_rank_0(place: RankPlace, stop_requested: Callable[[], bool]) -> None:
    """Wait until rank 0 listens. TCPStore's own wait cannot be interrupted and reports no clear error."""
    began, warned = time.monotonic(), False
    while True:
        _leave_if(stop_requested)
        with contextlib.suppress(OSError), connect_tcp(place.master_addr, place.master_port, timeout_s=5.0):
            return
        waited = time.monotonic() - began
        if waited > place.join_timeout_s:
            raise _unreachable(place)
        if waited > LOG_AFTER_S and not warned:
            log.warning("waiting for rank 0 at %s:%d", place.master_addr, place.master_port)
            warned = True
        time.sleep(_POLL_S)


def _unreachable(place: RankPlace) -> UserError:
    return UserError(
        f"rank {place.rank} cannot reach rank 0 at {place.master_addr}:{place.master_port} after {place.join_timeout_s:g} s "
        "(cluster.join_timeout); check that rank 0 runs with this address and port, and that no firewall blocks it"
    )


def _leave_if(stop_requested: Callable[[], bool]) -> None:
    if stop_requested():
        raise PeerLost("interrupted while waiting for the other ranks")


def _resolve(place: RankPlace, stop_requested: Callable[[], bool] = lambda: False) -> None:
    """Resolve rank 0's name, retrying: DNS may start later than this machine."""
    host, until, warned = place.master_addr, time.monotonic() + place.join_timeout_s, False
    while True:
        _leave_if(stop_requested)
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "not a host name"
            if isinstance(error, UnicodeError) or time.monotonic() > until:
                raise UserError(
                    f"--master-addr {host}: this machine cannot resolve that name ({why}); use the address of rank 0, "
                    "such as 192.168.1.10"
                ) from error
        if not warned:
            log.warning("cannot resolve --master-addr %s (%s); retrying for %g s", host, why, place.join_timeout_s)
            warned = True
        time.sleep(1.0)


def _open_store(place: RankPlace) -> TCPStore:
    """Open the store: rank 0 listens, the others connect and retry."""
    host = "127.0.0.1" if place.master_addr == "localhost" else place.master_addr  # not ::1
    options: dict[str, Any] = {"is_master": False}
    port = place.master_port
    if place.rank == 0 and not _torchrun_holds_the_store():
        port, options = _listen(host, port)
    try:
        return TCPStore(
            host,
            port,
            place.world_size,
            timeout=datetime.timedelta(seconds=place.join_timeout_s),
            wait_for_workers=False,
            **options,
        )
    except RuntimeError as error:
        if place.rank == 0:
            where = f"{place.master_addr}:{place.master_port}"
            raise UserError(f"cannot start the rendezvous on {where}: {str(error).splitlines()[0]}") from error
        raise _unreachable(place) from error


def _of_this_attempt(store: TCPStore) -> Store:
    """Return a namespace of this attempt: torchrun's store survives a restart, with the keys of the last attempt."""
    if not _torchrun_holds_the_store():
        return store
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for_all(store: Store, place: RankPlace, me: Signature, stop_requested: Callable[[], bool]) -> list[Signature]:
    """Post this rank's signature, wait for all others, and return them. Missing ranks are named in the error.

    When every rank has posted, rank 0 publishes the list. A process that is not in it duplicates a rank; a process that is
    restarted before that replaces its own signature.
    """
    keys = [f"joined/{rank}" for rank in range(place.world_size)]
    began, warned = time.monotonic(), False

    def absent() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    try:
        store.set(keys[place.rank], json.dumps(asdict(me)))
        while not store.check([_ALL_JOINED]):  # TCPStore.wait prints a stack trace at a timeout
            _leave_if(stop_requested)
            if place.rank == 0 and store.check(keys):
                store.set(_ALL_JOINED, json.dumps([json.loads(line) for line in store.multi_get(keys)]))
                continue
            waited = time.monotonic() - began
            if waited > place.join_timeout_s or store.check([_MISSING]):
                missing = absent() or [0]  # rank 0 did not publish the list
                break
            if waited > LOG_AFTER_S and not warned and place.rank == 0:
                log.warning("waiting for %s of %d", _ranks(absent()), place.world_size)
                warned = True
            time.sleep(_POLL_S)
        else:
            signed = [Signature(**line) for line in json.loads(store.get(_ALL_JOINED))]
            if signed[place.rank] != me:
                raise UserError(
                    f"rank {place.rank} was started twice: another process, on {signed[place.rank].host}, has that rank; "
                    "give every process a different --rank"
                )
            return signed
        store.set(_MISSING, "")  # ranks that join later need not wait for the timeout
        _wait_for_readers(store, place, [rank for rank in range(place.world_size) if rank not in missing])
    except RuntimeError as error:
        raise PeerLost("rank 0 was lost before all ranks had joined") from error
    where = f"{place.master_addr}:{place.master_port}" if place.master_port else place.master_addr
    raise UserError(
        f"{_ranks(missing)} of {place.world_size} did not join at {where} "
        f"within {place.join_timeout_s:g} s (cluster.join_timeout); start them with the same --master-addr and --master-port"
    )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _must_match(place: RankPlace) -> dict[str, str]:
    return {"world size": str(place.world_size)}


def _checked(signed: Sequence[Signature], store: Store, place: RankPlace) -> str:
    """Check that versions and world size agree on all ranks, and return the backend."""
    try:
        for rank, other in enumerate(signed):
            for what, version in signed[0].said.items():
                if other.said.get(what) != version:
                    remedy = _REMEDIES.get(what, "install the same version on every machine")
                    raise UserError(
                        f"rank {rank} on {other.host} has {what} {other.said.get(what)} and rank 0 on {signed[0].host} has "
                        f"{version}; {remedy}"
                    )
        return agree(signed)
    except UserError:
        _wait_for_readers(store, place, range(place.world_size))
        raise


def _wait_for_readers(store: Store, place: RankPlace, ranks: Iterable[int]) -> None:
    """Keep the store alive until these ranks have read what they need: it ends with rank 0."""
    store.set(f"read/{place.rank}", "")
    if place.rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"read/{rank}" for rank in ranks], datetime.timedelta(seconds=LEAVE_S))


def _torchrun_holds_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(host: str, port: int) -> tuple[int, dict[str, Any]]:
    """Return the store's port and TCPStore's options. A busy port raises UserError instead of a C++ stack trace.

    An address is bound here. A name is left to torch, which listens on all addresses: on its own machine a name often
    resolves to 127.0.1.1. On Windows torch cannot take an open socket.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.closing(socket.socket(family)) as listener:
        if sys.platform != "win32":  # there it would let two processes share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            if is_address(host) and sys.platform != "win32":
                listener.listen(BACKLOG)
                port = listener.getsockname()[1]
                fd = listener.detach()  # the store closes it
                return port, {"is_master": True, "master_listen_fd": fd, "use_libuv": _LIBUV_TAKES_A_SOCKET}
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                why = "is not an address of this machine, which runs rank 0; pass rank 0's address to every rank"
                raise UserError(f"--master-addr {host} {why}") from error
            raise UserError(
                f"--master-port {port} on {host} cannot be used: {error.strerror}; "
                "another process may be using it; choose another with --master-port"
            ) from error
    if is_loopback(host):
        log.warning("on Windows torch listens on every address, not only %s; block port %d in the firewall", host, port)
    return port, {"is_master": True}


def _stay_on_loopback() -> None:
    """Make gloo and nccl use loopback for a run on one machine; by default they listen on the network."""
    if not hasattr(socket, "if_nameindex"):
        return
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])


def _use_interface_to(address: str) -> None:
    """Make gloo use the interface that routes to rank 0. Its default is the host name's address, often a loopback one."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # UDP: sends nothing, only chooses the route
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
