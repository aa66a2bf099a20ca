"""Optimizers, the learning-rate schedule, and optimizer state by parameter name.

State is named after parameters ("exp_avg/blocks.0.mlp.up.weight"), never numbered, so that any strategy can load the state of
any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.comm.sharded import is_sharded
from smolcluster.compute.bare_optimizers import SGD, AdamW
from smolcluster.compute.muon import Muon, split_parameters
from smolcluster.config.schema import TrainingConfig
from smolcluster.errors import UserError

ADAMW_STATE, MOMENTUM_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"momentum_buffer"}
MUON_MOMENTUM = 0.95


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimizer of `training.optimizer`. Weight decay applies to matrices, not to vectors (biases, norms)."""
    trained, hidden = [p for p in model.parameters() if p.requires_grad], list[nn.Parameter]()
    if config.optimizer == "muon":
        hidden, trained = split_parameters(model)
    groups: list[dict[str, Any]] = [
        {"params": hidden, "weight_decay": config.weight_decay, "momentum": MUON_MOMENTUM},
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in trained)
    if config.optimizer == "sgd":
        fused &= not any(is_sharded(p) for p in trained)  # not supported by torch
        return SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
    kind = Muon if config.optimizer == "muon" else AdamW
    return kind(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) and not isinstance(optimizer, Muon)


def named_groups(
    named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Return each of these parameters with its group of the optimizer."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    return ((name, parameter, groups[parameter]) for name, parameter in named.items())


def adamw_denominator(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """Return what AdamW divides a parameter's momentum by."""
    corrected: Tensor = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"].to(state["exp_avg_sq"].device))
    return corrected.sqrt_().add_(group["eps"])


def adamw_denominator_means(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the mean over each parameter of what AdamW divides by; 0 where it has no state."""
    states = ((optimizer.state.get(parameter), group) for _, parameter, group in named_groups(named, optimizer))
    means = [adamw_denominator(state, group).mean() if state else torch.zeros(()) for state, group in states]
    return torch.stack([mean.float().to(means[0].device) for mean in means]).tolist() if means else []


def second_moment_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], gradient: Tensor
) -> Tensor:
    """Count a gradient in AdamW's second moment of a parameter, and in nothing else. Return the new denominator."""
    state = optimizer.state[parameter]
    if not state:
        state |= {"step": torch.zeros((), device=parameter.device if group["fused"] else None)}
        state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    state["step"] += 1
    state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
    return adamw_denominator(state, group)


def warmup_cosine(*, peak: float, floor: float, warmup: int, steps: int) -> Callable[[int], float]:
    """Return the learning rate by update, counted from 0: linear up to `peak`, then half a cosine down to `floor`.

    The last update has `floor`, and any later one too. Warm-up takes at most half of the run, so a short one reaches `peak`.
    """
    warmup = min(warmup, steps // 2)

    def rate(n: int) -> float:
        if n < warmup:
            return peak * (n + 1) / warmup
        progress = min(1.0, (n - warmup) / max(1, steps - 1 - warmup))
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * progress))

    return rate


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return optimizer state as "<state>/<parameter name>" -> tensor."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is not None:
                tensors[f"{key}/{names[parameter]}"] = torch.as_tensor(value)
    return tensors


def update_named_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Add or replace these tensors in the optimizer's state."""
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        state, name = key.split("/", 1)
        # On the parameter's device, except for the step counter.
        optimizer.state[parameters[name]][state] = tensor if tensor.ndim == 0 else tensor.to(parameters[name].device)


def load_named_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `named_state` returned. torch's own loader moves each tensor to its device."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        state, name = key.split("/", 1)
        by_parameter.setdefault(name, {})[state] = tensor
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    _check_kind(optimizer, names, by_parameter)
    packed: dict[str, Any] = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    packed["state"] = {i: by_parameter[names[p]] for i, p in enumerate(order) if names[p] in by_parameter}
    optimizer.load_state_dict(packed)


def without_state(model: nn.Module, optimizer: torch.optim.Optimizer, keys: Iterable[str]) -> list[str]:
    """Return the parameters without state among these keys of `named_state`, if this optimizer keeps state for them.

    It does so from a parameter's first gradient on. An unknown optimizer may keep none for some.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    have = {key.partition("/")[2] for key in keys}
    groups = [group for group in optimizer.param_groups if _kept(optimizer, group)]
    return [names[p] for group in groups for p in group["params"] if names[p] not in have]


def _kept(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """Return the names of the state that an optimizer may keep for each parameter of a group; None: not known."""
    if type(optimizer) in (SGD, torch.optim.SGD):
        return MOMENTUM_STATE if group["momentum"] else set()
    if type(optimizer) in (AdamW, Muon, torch.optim.AdamW):
        return MOMENTUM_STATE if "momentum" in group else ADAMW_STATE
    return None


def _check_kind(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Raise UserError where the state is of another optimizer. Unknown optimizers are not checked."""
    for group in optimizer.param_groups:
        kept = _kept(optimizer, group)
        for states in [saved.get(names[p], {}).keys() for p in group["params"]]:
            if kept is None or states <= (kept or MOMENTUM_STATE):
                continue
            found = {state for of in saved.values() for state in of}
            known = {"AdamW's": ADAMW_STATE, "SGD's": MOMENTUM_STATE, "Muon's": ADAMW_STATE | MOMENTUM_STATE}
            whose = next((name for name, kinds in known.items() if found <= kinds), "another optimizer's")
            raise UserError(
                f"the checkpoint has {whose} state ({', '.join(sorted(found))}) and this run uses "
                f"{type(optimizer).__name__}; resume with the training.optimizer that saved it"
            )
