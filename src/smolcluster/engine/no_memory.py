"""Running code on tensors that have shapes and no memory: what torch's FakeTensorMode needs beside it.

- a number that is read from such a tensor is 0, a flag is false
- what is real stays real: a device mesh, for one, is made of real numbers
- the operations that a step is made of are asked for their shapes at once
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_map_only

from smolcluster.compute.ledger import Ledger

# Of these torch's kernels for tensors without memory say all there is to know. FakeTensorMode is careful about much else, which
# takes most of the time of a rehearsal.
PLAIN = frozenset(
    """
    detach view _unsafe_view t transpose permute expand unsqueeze squeeze split split_with_sizes slice select alias clone
    mm addmm bmm baddbmm add sub mul div sum mean cat stack add_ sub_ mul_ div_ zero_ fill_ neg rsqrt pow tanh relu sigmoid
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward linalg_vector_norm
    gelu gelu_backward silu silu_backward _softmax _softmax_backward_data _safe_softmax _log_softmax
    _log_softmax_backward_data native_dropout native_dropout_backward embedding embedding_dense_backward
    _fused_adamw_ _foreach_add_ _foreach_mul_ _foreach_norm
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    """.split()  # noqa: SIM905 - a list of so many lines would say no more
)
ELSEWHERE = frozenset({"device", "out", "pin_memory"})  # arguments that say where a result goes


class NoMemory(Ledger):  # type: ignore[no-untyped-call]
    """A ledger of tensors without memory. Open it inside a FakeTensorMode."""

    def answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if FakeTensor in types and func.__name__.partition(".")[0] in PLAIN and not ELSEWHERE & kwargs.keys():
            device = _common_device((*args, *kwargs.values()), self.fake)
            if device is not None:
                with in_kernel_invocation_manager(self.fake):
                    result = func(*args, **kwargs)
                return tree_map_only(Tensor, lambda t: _wrapped(self.fake, t, device), result)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].constant is None:
                return False if args[0].dtype == torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        elif FakeTensor not in types and any(isinstance(arg, Tensor) for arg in args):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return super().answer(func, types, args, kwargs)


def _common_device(args: Any, mode: FakeTensorMode) -> torch.device | None:
    """Of all tensors among the arguments, if these are of this mode and together."""
    found = None
    for arg in args:
        if isinstance(arg, list | tuple):
            if arg and isinstance(arg[0], Tensor):
                inner = _common_device(arg, mode)
                if inner is None or found not in (None, inner):
                    return None
                found = inner
        elif isinstance(arg, Tensor):
            if not isinstance(arg, FakeTensor) or arg.fake_mode is not mode or found not in (None, arg.fake_device):
                return None
            found = arg.fake_device
    return found


def _wrapped(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else FakeTensor(mode, tensor, device)


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
