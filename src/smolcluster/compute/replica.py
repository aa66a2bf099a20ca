"""One whole model on one device: forward, backward, apply.

    compute(batch)   forward and backward over the micro-batches of a step; gradients are left on the parameters
    apply()          unscale, clip, optimizer step at the learning rate of this update

Strategies exchange gradients between the two. A replica knows nothing of other replicas.

A gradient that is not finite is not applied: the step counts as an update, and as skipped. Ranks with the same norm skip the
same steps. On a GPU a fused optimizer skips by a flag on the device, as with torch's GradScaler, so that the host need not wait
for the norm. It waits with other optimizers, and in fp16, for the loss scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves

from smolcluster.comm.sharded import gradient, is_sharded
from smolcluster.compute.buffers import RunningStatistics
from smolcluster.compute.optim import load_named_state, named_state, without_state
from smolcluster.compute.precision import LossScale, autocast
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.models.protocols import CompiledByBlock

MIN_LAYERS_BY_REGION = 24  # layers from which on compiling by region is as fast as compiling the whole model

Loss = Callable[[nn.Module, Any], Tensor]
SKIPS_ON = "cuda"  # device on which steps are skipped without waiting
MAX_SKIPPED = 20  # steps in a row whose gradients were not finite, before a run fails


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one worker in one step: a part per micro-batch, each an argument of `Task.loss`."""

    parts: Sequence[Any]
    samples: int
    tokens: int
    step: int
    counts: Sequence[float] | None = (
        None  # targets of each part that count (`Task.count`); None: samples, with equal weight
    )

    @property
    def weight(self) -> float:
        """The weight of this batch among those of other workers."""
        return self.samples if self.counts is None else sum(self.counts)

    @property
    def shares(self) -> list[float] | None:
        """Each part's share of the mean over the batch; zero without targets. None: equal shares."""
        if self.counts is None:
            return None
        total = self.weight
        return [count / total if total else 0.0 for count in self.counts]


class Replica:
    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        learning_rate: Callable[[int], float],
        device: torch.device,
        precision: str = "fp32",
        grad_clip_norm: float | None = None,
        compile: bool = False,
        track_gradients: bool = False,
        layout: Mapping[str, Tensor] | None = None,
        num_parameters: int = 0,
        whole: bool = True,
    ) -> None:
        """`layout`, `num_parameters`: of the whole model, where this is a part of it (not `whole`)."""
        self.model = model
        self.layout = model.state_dict() if layout is None else layout  # names, shapes and types
        self.num_parameters = num_parameters or sum(p.numel() for p in model.parameters())
        self.whole = whole
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.device = device
        self.updates = 0  # how many gradients have been applied: the version of the weights
        self.scale = LossScale() if precision == "fp16" else None
        self.led = False  # a server checks the gradients and sets the loss scale
        self.buffers = RunningStatistics(model, device)
        # Steps without a finite gradient: in total, and in a row; tensors where the host does not wait.
        self._skipped: int | Tensor = 0
        self._in_row: int | Tensor = 0
        self._stepped = False  # the optimizer has state
        self.gradient_norms: dict[str, Tensor] = {}  # of the last applied gradient, if they are tracked
        self.norms: Callable[[], dict[str, Tensor]] = lambda: self.gradient_norms  # of the whole model's parameters
        self._plain_loss = loss
        self._loss: Loss = compiled(model, loss) if compile else loss
        self._learning_rate = learning_rate
        self._precision = precision
        self.grad_clip_norm = grad_clip_norm or None
        self.track_gradients = track_gradients

    @property
    def loss_scale(self) -> float:
        return self.scale.value if self.scale else 1.0

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate for the next update; that of its first group, where groups differ."""
        return self.rate_of(self.updates)

    def rate_of(self, update: int, group: Mapping[str, Any] | None = None) -> float:
        """The optimizer's rate for an update, counted from 0, for its first group or another."""
        group = next(iter(self.optimizer.param_groups), {}) if group is None else group
        return self._learning_rate(update) * float(group.get("lr_scale", 1.0))

    def compute(self, batch: Batch, *, before_last: Callable[[], None] | None = None, weight: float = 1.0) -> Tensor:
        """Compute gradients of the mean loss over the parts, times `weight`. `before_last` runs before the last backward."""
        if not self.model.training:
            self.model.train()
        self.drop_gradients()  # of an abandoned step
        total: Tensor | None = None
        self.buffers.save()
        shares = batch.shares
        for number, part in enumerate(batch.parts):
            part = to_device(part, self.device)
            share = None if shares is None else shares[number]
            with autocast(self._precision, self.device):
                loss = self._loss(self.model, part) if share != 0 else zero_loss(self._plain_loss, self.model, part)
            if self.updates == 0:
                check_loss(loss)
            if before_last is not None and number == len(batch.parts) - 1:
                before_last()
            factor = weight * self.loss_scale / len(batch.parts) if share is None else weight * self.loss_scale * share
            (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            if share != 0:
                mine = loss.detach() if share is None else loss.detach() * share
                total = mine if total is None else total + mine
        self.buffers.check()
        if total is None:
            return torch.zeros((), device=self.device)
        return total / len(batch.parts) if shares is None and len(batch.parts) > 1 else total

    def apply(self, *, scale: float | None = None, norm: float | Tensor | None = None) -> Tensor:
        """Update the weights with the gradients on the parameters. Return their norm before clipping.

        `norm`: that of the whole gradient, if this rank has a part of it or all must clip by the same factor. A step whose norm
        is not finite counts as an update but changes no weight and no optimizer state.
        """
        parameters = [p for p in self.parameters if p.grad is not None]
        gradients = [g for p in parameters if (g := gradient(p)) is not None]
        scale = self.loss_scale if scale is None else scale
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale)
        if norm is None:
            total = get_total_norm(gradients)
        else:
            dtype = torch.promote_types(
                self.parameters[0].dtype, torch.float32
            )  # some ranks may keep rounded parameters
            total = torch.as_tensor(norm, dtype=dtype, device=self.device)
        if self.track_gradients:
            self.gradient_norms = {n: p.grad.norm() for n, p in self.model.named_parameters() if p.grad is not None}
        skip = ~torch.isfinite(total)
        if self._skips_on_device(gradients):
            self._update(gradients, total, skip=skip)
            self._skipped, self._in_row = self._skipped + skip, (self._in_row + skip) * skip
        else:
            skipped = bool(skip)
            if not skipped:
                self._update(gradients, total)
            self._count(skipped=skipped, scale=scale)
        self.updates += 1
        self.drop_gradients()
        return total

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _update(self, gradients: list[Tensor], total: Tensor, *, skip: Tensor | None = None) -> None:
        """Clip, and take a step of the optimizer; `skip`: a flag on the device, whether to skip it."""
        if self.grad_clip_norm is not None and gradients:
            factor = torch.clamp(self.grad_clip_norm / (total + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        rate = self._learning_rate(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        found_inf = None if skip is None else skip.float()
        setattr(self.optimizer, "found_inf", found_inf)  # noqa: B010 - torch's fused optimizers read it
        self.optimizer.step()
        self._stepped = True

    def _skips_on_device(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the optimizer can skip a step on the device. In its first step that would leave state undefined."""
        able = self._stepped and getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return able and self.scale is None and bool(gradients) and gradients[0].device.type == SKIPS_ON

    def _count(self, *, skipped: bool, scale: float) -> None:
        """Count a step and update the loss scale."""
        if self.scale is not None and not self.led:
            self.scale.update(overflow=skipped, used=scale)
        self._skipped += skipped
        if not skipped:
            self._in_row = 0
        elif scale <= 1.0 or self.scale is None:  # else a lower loss scale may help
            self._in_row += 1
            self.check_progress()

    @property
    def skipped(self) -> int:
        """The number of updates that were skipped because of non-finite gradients. Synchronizes a GPU."""
        return int(self._skipped)

    def check_progress(self) -> None:
        """Raise when many steps in a row were skipped. Synchronizes a GPU."""
        if not self.led and int(self._in_row) >= MAX_SKIPPED:
            raise SmolclusterError(
                f"the gradients of the last {int(self._in_row)} steps had NaN or infinite values, and were not applied; "
                "check the data, or lower training.learning_rate"
            )

    def weights(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, not copied."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's tensors, and its counters separately."""
        numbers: dict[str, Any] = {"updates": self.updates}
        if self.skipped:
            numbers["skipped"] = self.skipped
        if self.scale is not None:
            numbers["loss_scale"] = self.scale.state_dict()
        return named_state(self.model, self.optimizer), numbers

    def load_state_dict(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], numbers: dict[str, Any]
    ) -> None:
        self.model.load_state_dict(weights)
        self.load_optimizer(optimizer, numbers, bare=not optimizer)

    def adopt_state_dict(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], numbers: dict[str, Any]
    ) -> None:
        """Load by using these tensors instead of copying them. The tensors in use before are not changed."""
        own = self.model.state_dict()
        different = [n for n, t in own.items() if n not in weights or weights[n].shape != t.shape]
        if different or len(weights) != len(own):
            self.load_state_dict(weights, optimizer, numbers)  # raises with the reason
            return
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            tensor.data = weights[name].to(tensor.device, tensor.dtype)
        self.load_optimizer(optimizer, numbers, bare=not optimizer)

    def missing_state(self, optimizer: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> list[str]:
        """Return the parameters without optimizer state, given that each has a gradient in every step."""
        overflowed = self.scale is not None and not optimizer  # perhaps in every step so far
        no_update = overflowed or int(numbers["updates"]) <= int(numbers.get("skipped", 0))
        return [] if no_update else without_state(self.model, self.optimizer, optimizer)

    def load_optimizer(self, optimizer: Mapping[str, Tensor], numbers: dict[str, Any], *, bare: bool) -> None:
        """`bare`: no state was saved for any parameter of the whole model."""
        load_named_state(self.model, self.optimizer, optimizer)
        self.updates, self._skipped = int(numbers["updates"]), int(numbers.get("skipped", 0))
        bare = bare and self.updates > self._skipped and any(group["params"] for group in self.optimizer.param_groups)
        if bare and self.scale is None and isinstance(self.optimizer, torch.optim.AdamW):
            raise UserError(
                f"the checkpoint has no optimizer state, as with plain SGD, and this run uses {type(self.optimizer).__name__}; "
                "resume with the training.optimizer that saved it"
            )
        if self.scale is not None and "loss_scale" in numbers:
            self.scale.load_state_dict(numbers["loss_scale"])


def compiled(model: nn.Module, loss: Loss) -> Loss:
    """Compile the loss; a deep model without hooks by region, which makes the first step faster."""
    if isinstance(model, CompiledByBlock) and model.num_layers >= MIN_LAYERS_BY_REGION and not model._forward_pre_hooks:
        model.compile_blocks()
        # The compiler reads `.grad` of tensors between regions.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    return torch.compile(loss)


def zero_loss(loss: Loss, model: nn.Module, part: Any) -> Tensor:
    """Return a loss of zero with zero gradients, for a part without targets: the mean over none is NaN.

    The model runs all the same, since other ranks may take part in its forward.
    """
    outputs: list[Tensor] = []

    def keep(*call: Any) -> None:
        outputs.extend(t for t in tree_leaves(call[-1]) if isinstance(t, Tensor) and t.requires_grad)

    hook = model.register_forward_hook(keep)
    try:
        found = loss(model, part)
    finally:
        hook.remove()
    return zero_from(outputs) if outputs else found * 0.0  # without outputs the model itself was not called


def zero_from(outputs: Sequence[Tensor]) -> Tensor:
    """Return a zero that depends on these tensors."""
    zeros = [(t * 0.0).sum() for t in outputs]
    return torch.stack([z.full_tensor() if is_sharded(z) else z for z in zeros]).sum()


def check_loss(loss: Any) -> None:
    """Raise UserError for a loss that backward cannot use."""
    if not isinstance(loss, Tensor):
        raise UserError(f"loss() must return a tensor, the mean over the batch, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise UserError(
            f"loss() must return one number, the mean over the batch, not a tensor of shape {tuple(loss.shape)}"
        )
    if not loss.requires_grad:
        raise UserError(
            "loss() does not depend on the model's parameters: is it detached, or computed without the model?"
        )


def to_device(part: Any, device: torch.device) -> Any:
    """Move every tensor in a batch; on a GPU without waiting for the copy."""
    if isinstance(part, Tensor):
        if part.device == device:
            return part
        if device.type == "cuda" and part.device.type == "cpu":
            part = part.pin_memory()
        return part.to(device, non_blocking=True)
    if isinstance(part, dict):
        return {key: to_device(value, device) for key, value in part.items()}
    if isinstance(part, list | tuple):
        moved = [to_device(value, device) for value in part]
        return type(part)(*moved) if hasattr(part, "_fields") else type(part)(moved)
    return part
