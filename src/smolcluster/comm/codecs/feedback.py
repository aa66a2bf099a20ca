"""Error feedback: the encoding error of one step is added to the next.

    e = g + decay r
    payload = encode(e)
    r = e - decode(payload)

With decay 1 the decoded gradients of T steps sum to the true ones minus r, for any codec, and r stays bounded if the codec is a
contraction (topk, randk, int8, powersgd: the bounds in their files).

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs",
2014. Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smolcluster.errors import UserError

RESIDUAL = "residual"


@dataclass(slots=True)
class Memory:
    """A sender's state of one tensor."""

    residual: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)  # the codec's


class Feedback:
    """A sender's state of every tensor, by name. Tensors are replaced at every step, never modified, and so is the mapping
    `memories`: a caller may keep one and restore it.

    For a payload that is rejected or encoded again, `undo` returns to the last `commit`.
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        self.decay = decay
        self.memories: Mapping[str, Memory] = {}
        self._committed: Mapping[str, Memory] = {}
        self._decoded = torch.empty(0)

    def add(self, name: str, gradient: Tensor) -> Memory:
        """Return g + r in new memory, and the codec's state. Nothing changes until `keep`."""
        gradient = gradient.detach().to(device="cpu", dtype=torch.float32)
        memory = self.memories.get(name)
        if memory is None:
            return Memory(gradient.clone(memory_format=torch.contiguous_format))
        residual = torch.add(
            gradient, self._residual_of(name, gradient), alpha=self.decay, out=torch.empty(gradient.shape)
        )
        return Memory(residual, dict(memory.state))

    def add_all(self, gradients: Mapping[str, Tensor]) -> dict[str, Memory]:
        """Add to each gradient its residual, in place. Return them as memories of a codec that has no state.

        The gradients, in float32, become the residuals: on the device where they are.
        """
        known = {
            name: self._residual_of(name, gradient) for name, gradient in gradients.items() if name in self.memories
        }
        if known:
            torch._foreach_add_([gradients[name] for name in known], list(known.values()), alpha=self.decay)
        return {name: Memory(gradient) for name, gradient in gradients.items()}

    def _residual_of(self, name: str, gradient: Tensor) -> Tensor:
        residual = self.memories[name].residual
        if residual.shape != gradient.shape:
            raise UserError(
                f"the saved residual of {name} has shape {tuple(residual.shape)}, its gradient {tuple(gradient.shape)}; "
                "resume with the model that was saved"
            )
        return residual.to(gradient.device)

    def keep(self, memories: Mapping[str, Memory]) -> None:
        """Store the memories after an encoding; each residual is now the encoding error."""
        self.memories = {**self.memories, **memories}

    def scratch(self, shape: torch.Size) -> Tensor:
        """Return a buffer to decode a tensor into, shared by all tensors."""
        if self._decoded.numel() < shape.numel():
            self._decoded = torch.empty(shape.numel())
        return self._decoded[: shape.numel()].view(shape)

    def commit(self) -> None:
        """Make all encodings final."""
        self._committed = self.memories

    def undo(self) -> None:
        """Roll back all encodings since the last commit."""
        self.memories = self._committed

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state after the last commit."""
        return tensors_of(self._committed)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything by a `state_dict`."""
        self.memories = self._committed = memories_of(tensors)


def add_left_out(decoded: Tensor, before: Memory | None, after: Memory | None, *, decay: float) -> Tensor:
    """Add to a decoded gradient, in place, what its encoding left out; `before` and `after`: the memories around it."""
    if after is not None and after is not before:
        decoded += after.residual.cpu()
        if before is not None:
            decoded.sub_(before.residual.cpu(), alpha=decay)
    return decoded


def memories_of(tensors: Mapping[str, Tensor]) -> dict[str, Memory]:
    """Return the memories that `tensors_of` was called with."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        states.setdefault(name, {})[kind] = tensor.detach().to(device="cpu", dtype=torch.float32)
    lost = sorted(name for name, state in states.items() if RESIDUAL not in state)
    if lost:
        raise UserError(f"the saved error feedback has no residual for {', '.join(lost)}; resume without it")
    return {name: Memory(state.pop(RESIDUAL), state) for name, state in states.items()}


def tensors_of(memories: Mapping[str, Memory]) -> dict[str, Tensor]:
    """Return `residual/<name>` and `<state>/<name>`, not copied."""
    tensors = {}
    for name, memory in memories.items():
        tensors[f"{RESIDUAL}/{name}"] = memory.residual
        tensors |= {f"{key}/{name}": tensor for key, tensor in memory.state.items()}
    return tensors


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
