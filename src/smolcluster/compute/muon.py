"""Muon: orthogonalized momentum for matrices; AdamW for embeddings, the output layer and vectors.

    for each matrix W of shape m x n with gradient G:
        M <- mu M + G
        O <- newton_schulz(G + mu M)                               Nesterov momentum, with singular values near 1
        W <- (1 - lr decay) W - 0.2 sqrt(max(m, n)) lr O           the RMS of AdamW's updates, at the same rate

The kernel of a convolution is a matrix of output channels x the rest. Matrices of one shape are orthogonalized as one batch, in
bf16 on a GPU. A sharded matrix is gathered for that; each rank keeps its shard of the momentum and of the result.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. The factor 0.2 sqrt(max(m, n)): Liu et al.,
"Muon is scalable for LLM training", 2025, where PyTorch's own `torch.optim.Muon` (2.9 and later) calls it `match_rms_adamw`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.comm.sharded import full_tensor, gradient, like, local, part_of
from smolcluster.compute.bare_optimizers import AdamW
from smolcluster.models.protocols import WithOutputLayer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial: steep at zero, and near 1 for singular values of 0.3 to 1
STEPS = 5
MARK = "_smolcluster_orthogonalized"  # an attribute of modules


class Muon(AdamW):  # type: ignore[misc, valid-type]
    """AdamW, and Muon for groups with `momentum`."""

    param_groups: list[dict[str, Any]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's looks for its own state in every parameter's

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        momentum, rate = group["momentum"], group["lr"]
        found_inf = getattr(self, "found_inf", None)  # a flag on the device: skip this step
        skip = None if found_inf is None else found_inf.bool()
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            if (grad := gradient(parameter)) is None:
                continue
            state = self.state[parameter]
            before = local(state["momentum_buffer"]) if state else torch.zeros_like(grad)
            after = before * momentum + grad
            state["momentum_buffer"] = like(parameter, after if skip is None else torch.where(skip, before, after))
            ahead = full_tensor(like(parameter, grad + momentum * after)).flatten(1)
            by_shape.setdefault(tuple(ahead.shape), []).append((parameter, ahead))
        for (rows, columns), matrices in by_shape.items():
            factor = 0.2 * math.sqrt(max(rows, columns))
            updates_BMN = newton_schulz(torch.stack([matrix for _, matrix in matrices]))
            for (parameter, _), update_MN in zip(matrices, updates_BMN, strict=True):
                mine, update = local(parameter), part_of(update_MN.view(parameter.shape), parameter).to(parameter.dtype)
                after = (mine * (1 - rate * group["weight_decay"])).sub_(update, alpha=rate * factor)
                mine.copy_(after if skip is None else torch.where(skip, mine, after))


def newton_schulz(x_BMN: Tensor) -> Tensor:
    """Return approximately the nearest orthogonal matrices: singular values end between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    wide = x_BMN.shape[1] <= x_BMN.shape[2]
    narrow = torch.bfloat16 if x_BMN.is_cuda and x_BMN.dtype == torch.float32 else x_BMN.dtype
    x: Tensor = (x_BMN if wide else x_BMN.mT).to(narrow)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def mark_matrices(model: nn.Module) -> None:
    """Mark the modules whose matrices are orthogonalized, before the model is partitioned."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    output = model.output_layer if isinstance(model, WithOutputLayer) else next(reversed(linear), None)
    for module in model.modules():
        setattr(module, MARK, _may_orthogonalize(module) and module is not output)


def _may_orthogonalize(module: nn.Module) -> bool:
    return not isinstance(module, nn.Embedding | nn.EmbeddingBag)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters that are orthogonalized, and the others."""
    if not any(hasattr(module, MARK) for module in model.modules()):
        mark_matrices(model)
    kinds: dict[nn.Parameter, bool] = {}  # a shared parameter only if all its modules are marked
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                matrix = parameter.ndim >= 2 and getattr(module, MARK, _may_orthogonalize(module))
                kinds[parameter] = kinds.get(parameter, True) and matrix
    return [p for p, matrix in kinds.items() if matrix], [p for p, matrix in kinds.items() if not matrix]
