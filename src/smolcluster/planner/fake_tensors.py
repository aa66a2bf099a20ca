"""Run code on fake tensors: additions to torch's FakeTensorMode.

- a number that is read from a fake tensor is 0, a bool is false
- operations on real tensors are executed, such as those of a device mesh
- pipeline stages do not exchange shapes
- `module.to(...)` makes new parameters
- `OutputCache` avoids the 150 microseconds that torch needs to infer the output of an operation
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from smolcluster.compute.memory_tracker import MemoryTracker


class FakeTensorTracker(MemoryTracker):  # type: ignore[no-untyped-call]
    """A tracker of fake tensors. Open it inside a FakeTensorMode."""

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # fake memory cannot be pinned
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].constant is None:
                return False if args[0].dtype == torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        elif FakeTensor not in types and any(isinstance(arg, Tensor) for arg in args):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return _CACHE.find(
            self.fake, func, args, kwargs, lambda: super(FakeTensorTracker, self).run(func, types, args, kwargs)
        )


class _FakeOutput(NamedTuple):
    """The metadata of a tensor that an operation returns."""

    alias: int  # the argument whose storage it shares; -1: none
    is_argument: bool  # it is that argument itself
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: FakeTensor, arguments: Sequence[FakeTensor]) -> _FakeOutput:
        storages = [_storage(argument) for argument in arguments]
        alias = storages.index(_storage(tensor)) if _storage(tensor) in storages else -1
        is_argument = alias >= 0 and arguments[alias] is tensor
        offset = int(tensor.storage_offset())
        return cls(alias, is_argument, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, tensor.fake_device)

    def make(self, fake: Any, arguments: Sequence[FakeTensor]) -> FakeTensor:
        if self.is_argument:
            return arguments[self.alias]
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.alias >= 0:
                made.set_(arguments[self.alias].untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(fake, made, self.device)


class OutputCache:
    """A cache of the outputs of operations, by the metadata of their arguments.

    Not cached: an operation that depends on values, changes an argument's metadata or is not part of ATen.
    """

    _UNCACHED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[type, list[_FakeOutput | None]]] = {}
        self._cacheable: dict[Any, bool] = {}

    def find(self, fake: Any, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return the result of an operation; `run` calls torch."""
        if func not in self._cacheable:
            self._cacheable[func] = func.namespace == "aten" and self._UNCACHED.isdisjoint(func.tags)
        tensors: list[FakeTensor] = []
        key = _key(func, args, kwargs, tensors, fake) if self._cacheable[func] else None
        if key is None or not tensors:
            return run()
        if key in self._known:
            kind, known = self._known[key]
            made = [None if output is None else output.make(fake, tensors) for output in known]
            return kind(made) if kind in (tuple, list) else made[0]
        result = run()
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        if (
            all(o is None or (type(o) is FakeTensor and o.constant is None) for o in outputs)
            and len(set(map(_storage, tensors))) == len(tensors)  # else the alias of a result is ambiguous
            and key == _key(func, args, kwargs, [], fake)  # `out` may have been resized
        ):
            self._known[key] = (type(result), [None if o is None else _FakeOutput.of(o, tensors) for o in outputs])
        return result


_CACHE = OutputCache()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _key(func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor], fake: Any) -> Hashable | None:
    """Return the cache key; None if an argument is neither a fake tensor without a value nor a plain value."""
    key: list[Any] = [func, torch.get_default_dtype()]
    return tuple(key) if _describe((args, *kwargs.items()), key, tensors, fake) else None


def _describe(values: Any, key: list[Any], tensors: list[FakeTensor], fake: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_mode is not fake:
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            key.append(torch._C._dispatch_keys(value).raw_repr())
            tensors.append(value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _describe(value, key, tensors, fake):
                return False
        elif isinstance(value, Tensor) or not isinstance(value, Hashable):
            return False
        else:
            key += (kind, value)
    return True


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_shape_exchange() -> Iterator[None]:
    """Let newer pipeline stages assume that all ranks know all shapes, instead of exchanging them."""
    from torch.distributed.pipelining import PipelineStage

    name = "_warmup_backward_result"
    before = getattr(PipelineStage, name, None)
    if before is None:
        yield
        return
    setattr(PipelineStage, name, lambda *_, **__: torch.tensor([1], dtype=torch.int32))
    try:
        yield
    finally:
        setattr(PipelineStage, name, before)


@contextmanager
def replaced_parameters() -> Iterator[None]:
    """Let `module.to(...)` make new parameters: torch changes them in place, which is not always possible for fake ones."""
    before = nn.Module._apply
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    new: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in new:
                    with torch.no_grad():
                        changed = change(parameter)
                    same = changed is parameter
                    new[parameter] = parameter if same else nn.Parameter(changed, requires_grad=parameter.requires_grad)
                part._parameters[name] = new[parameter]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else change(buffer)
    return module
