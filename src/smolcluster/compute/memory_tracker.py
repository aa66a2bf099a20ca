"""Record memory: every storage that is allocated, resized or freed while a `MemoryTracker` is open.

It is a dispatch mode, so it sees each operation of torch in forward, in backward and in the optimizer, on real and on fake
tensors. A storage counts once, however many tensors share it. It may be labelled later (`label`), since the peak is computed
from the entries.

Not recorded: what an operation allocates internally, and the buffers of communication backends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["parameters", "gradients", "optimizer"]
CUDA_BLOCK = 512  # torch's allocator rounds up to it
_DEVICE = torch.ops.prim.device.default
_PROPAGATE = "_propagate_tensor_meta_non_cached"  # how DTensor finds the shape of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes at one moment."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    other: int = 0  # activations, gathered parameters, temporary buffers

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.other

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    at_peak: MemoryUse  # at the moment with most bytes
    of_each_kind: MemoryUse  # the peak of each kind, at whatever moment


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager, for the storages of one kind of device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._numbers: dict[int, int] = {}  # of live storages, by address
        self._sizes: list[int] = []  # of every storage, by number
        self._entries: list[tuple[int, int]] = []  # number, change in bytes
        self._kinds: dict[int, Kind] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self.fake: Any = None
        self.attention = False  # whether torch's scaled_dot_product_attention was called
        self._propagating = 0  # > 0 while DTensor computes shapes on temporary tensors

    # Writing

    def __enter__(self) -> Self:
        self.fake = active_fake_mode()
        self._resize = resize = torch.UntypedStorage.resize_

        def recorded(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            result = resize(storage, *args, **kwargs)
            number = self._numbers.get(storage._cdata)
            if number is not None:
                self._set(number, self._rounded(storage.nbytes()))
            return result

        # Older versions use a fake mode of their own instead.
        self._propagate = propagate = getattr(ShardingPropagator, _PROPAGATE, None)

        def counted(*args: Any, **kwargs: Any) -> Any:
            assert propagate is not None
            self._propagating += 1
            try:
                return propagate(*args, **kwargs)
            finally:
                self._propagating -= 1

        torch.UntypedStorage.resize_ = recorded  # type: ignore[method-assign,assignment]
        if propagate is not None:
            setattr(ShardingPropagator, _PROPAGATE, counted)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        if self._propagate is not None:
            setattr(ShardingPropagator, _PROPAGATE, self._propagate)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check takes longer than everything else

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # by far the most frequent call
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor: the mode sees its inner tensors
        self.attention = self.attention or func.__name__.startswith("_scaled_dot_product")
        result = self.run(func, types, args, kwargs or {})
        if not self._propagating and active_fake_mode() is self.fake:  # not in another mode that computes shapes
            for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.record(leaf)
        return result

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.fake is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # it copies fake tensors, but not real ones
        return func(*args, **kwargs)

    def record(self, tensor: Tensor) -> int | None:
        """Record the storage of a tensor if it is new. Return its number; None where it does not count."""
        if isinstance(tensor, DTensor):
            return self.record(tensor.to_local())
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self._device:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it has no storage
            return None
        address = storage._cdata
        if address not in self._numbers:
            number = self._numbers[address] = len(self._sizes)
            self._sizes.append(0)
            self._set(number, self._rounded(storage.nbytes()))
            self._refs[number] = weakref.ref(storage, lambda _: self._on_freed(address, number))
        return self._numbers[address]

    def label(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Count the storages of these tensors as this kind, from their allocation on."""
        for tensor in tensors:
            number = None if tensor is None else self.record(tensor)
            if number is not None:
                self._kinds[number] = kind

    def _set(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self._entries.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _on_freed(self, address: int, number: int) -> None:
        self._set(number, 0)
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._refs.pop(number, None)

    def _rounded(self, size: int) -> int:
        return -(-size // CUDA_BLOCK) * CUDA_BLOCK if self._device == "cuda" else size

    # Reading

    @property
    def position(self) -> int:
        """The number of entries so far, for `since`."""
        return len(self._entries)

    def peak(self, since: int = 0, *, steady_state: bool = False) -> Peak:
        """Return the peak from the entry `since` on. `steady_state`: as if optimizer state had existed from the start."""
        state = sum(self._sizes[number] for number, kind in self._kinds.items() if kind == "optimizer")
        use: dict[Kind | None, int] = {None: 0, "optimizer": state if steady_state else 0}
        total, peak, most = sum(use.values()), dict(use), -1
        largest: dict[Kind | None, int] = {}
        for place, (number, delta) in enumerate(self._entries, start=1):
            kind = self._kinds.get(number)
            if steady_state and kind == "optimizer":
                continue
            use[kind] = use.get(kind, 0) + delta
            total += delta
            if place > since:
                largest[kind] = max(largest.get(kind, 0), use[kind])
                if total > most:
                    most, peak = total, dict(use)
        if most < 0:
            peak = use
        return Peak(at_peak=_memory_use(peak), of_each_kind=_memory_use({**use, **largest}))

    @property
    def now(self) -> MemoryUse:
        use: dict[Kind | None, int] = {}
        for number, delta in self._entries:
            kind = self._kinds.get(number)
            use[kind] = use.get(kind, 0) + delta
        return _memory_use(use)


def _memory_use(by_kind: dict[Kind | None, int]) -> MemoryUse:
    return MemoryUse(**{kind or "other": size for kind, size in by_kind.items()})
