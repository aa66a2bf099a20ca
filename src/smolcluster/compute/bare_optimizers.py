"""torch's AdamW and SGD without the wrappers that disable the compiler, whose import takes seconds."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def _never_compiled(kind: type[OptimizerT]) -> type[OptimizerT]:
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**bare, "step": torch.no_grad()(inspect.unwrap(kind.step))})


AdamW = _never_compiled(torch.optim.AdamW)
SGD = _never_compiled(torch.optim.SGD)
