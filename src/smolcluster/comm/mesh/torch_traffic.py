"""Count the traffic of torch's engine: FSDP2, DTensor and torch's pipelines do not use our groups.

`TrafficCounter` is a dispatch mode that sees every collective. It costs a Python call per torch operation, so repeated work
is counted once: `EngineTraffic.counted` remembers its bytes and adds them from then on.

Compiled work is counted the second time: torch does not compile code that it first runs under a dispatch mode.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smolcluster.comm.group import Group, Traffic
from smolcluster.comm.mesh.volume import Exchange, moved

log = logging.getLogger(__name__)

# Name of torch's operation -> the collective, and the index of the argument with the full tensor.
_EXCHANGES: dict[str, tuple[Exchange, int]] = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "scatter_": ("scatter", 0),
    "gather_": ("gather", 1),
}
_TAKES_ONE_PART = {"all_gather", "scatter", "gather"}  # their argument is one rank's part
_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan"}


class TrafficCounter(TorchDispatchMode):
    """Counts the bytes exchanged while it is active, by this thread and its backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Traffic()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is. torch calls this from 2.10 on; earlier versions run it eagerly once."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor decomposes it into plain operations and collectives first
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._add(func._overloadpacket.__name__, args)  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("send", "isend"):
            self.seen.add(_nbytes(args[0]), 0)
        elif name in ("recv_", "irecv", "recv_any_source_"):
            self.seen.add(0, _nbytes(args[0]))
        elif name in _EXCHANGES:
            kind, index = _EXCHANGES[name]
            group = _group(args)
            size, whole = group.size(), _nbytes(args[index])
            whole = whole * size if kind in _TAKES_ONE_PART else whole
            root = _root(args) if kind in ("broadcast", "scatter", "gather") else 0
            backend = dist.get_backend(group)
            self.seen.add(*moved(kind, whole, rank=group.rank(), size=size, backend=backend, root=root))
        elif name not in _SILENT:
            log.warning("the traffic of the unknown collective %s is not counted", name)


def _nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, Tensor))


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group: the first boxed argument, or the last one, which is its name."""
    resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    for value in args:
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
    return resolve(args[-1])


def _root(args: tuple[Any, ...]) -> int:
    return next(value for value in args if isinstance(value, int) and not isinstance(value, bool))


class EngineTraffic:
    """Adds the engine's traffic to that of a group."""

    def __init__(self, group: Group, *, compiled: bool) -> None:
        self._traffic, self._compiled = group.traffic, compiled
        self._known: dict[Hashable, tuple[int, int]] = {}
        self._met: set[Hashable] = set()  # compiled, and not counted yet

    @contextlib.contextmanager
    def counted(self, same: Hashable = None) -> Iterator[None]:
        """Wrap work of the engine. Work with the same key has the same traffic and is counted once."""
        known = None if same is None else self._known.get(same)
        if known is not None or self._leave_it(same):
            yield
            self._traffic.add(*known or (0, 0))
            return
        before = self._traffic.bytes_sent, self._traffic.bytes_received
        with TrafficCounter() as counter, torch.compiler.set_stance("eager_on_recompile"):
            yield
        # Subtract what our groups have counted themselves.
        sent = counter.seen.bytes_sent - (self._traffic.bytes_sent - before[0])
        received = counter.seen.bytes_received - (self._traffic.bytes_received - before[1])
        times = 2 if same in self._met else 1
        self._traffic.add(times * sent, times * received)
        if same is not None:
            self._known[same] = (sent, received)

    def _leave_it(self, same: Hashable) -> bool:
        """Return whether to skip counting: the first run of compiled work. The second run is counted twice."""
        if not self._compiled or same is None or same in self._met:
            return False
        self._met.add(same)
        return True
