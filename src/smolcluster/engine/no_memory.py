"""Running code on tensors that have shapes and no memory: what torch's FakeTensorMode needs beside it.

- a number that is read from such a tensor is 0, a flag is false
- what is real stays real: a device mesh, for one, is made of real numbers
- nobody is there to answer a pipeline's questions
- a model is moved, or changes its type, by new parameters
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from smolcluster.compute.ledger import Ledger


class NoMemory(Ledger):  # type: ignore[no-untyped-call]
    """A ledger of tensors without memory. Open it inside a FakeTensorMode."""

    def answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # what is not there cannot be pinned
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].constant is None:
                return False if args[0].dtype == torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        elif FakeTensor not in types and any(isinstance(arg, Tensor) for arg in args):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return super().answer(func, types, args, kwargs)


@contextmanager
def quietly() -> Iterator[None]:
    """torch warns of much that does not matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_vote() -> Iterator[None]:
    """Newer pipeline stages ask each other whether all shapes are known. They are."""
    from torch.distributed.pipelining import PipelineStage

    asked = getattr(PipelineStage, "_warmup_backward_result", None)
    if asked is None:
        yield
        return
    name = "_warmup_backward_result"
    setattr(PipelineStage, name, lambda *_, **__: torch.tensor([1], dtype=torch.int32))
    try:
        yield
    finally:
        setattr(PipelineStage, name, asked)


@contextmanager
def moving() -> Iterator[None]:
    """`module.to(...)`: torch would change each tensor in its place, which those without memory do not always allow."""
    before = nn.Module._apply
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Each parameter is replaced, once, wherever it is used."""
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
