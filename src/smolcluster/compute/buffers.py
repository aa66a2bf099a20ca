"""Running statistics (BatchNorm and others): a forward that makes them non-finite is undone.

A NaN in one batch would stay in a running mean forever. So buffers that forward changes are copied before it, and restored
when one of them is not finite after it. On a GPU the check is read one step later, without synchronizing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group, broadcast_in_place
from smolcluster.comm.sharded import local
from smolcluster.compute.timing import DelayedFlag


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinite values, or None."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(local(tensor)).all()):
            return name
    return None


class RunningStatistics:
    """The buffers of a model that forward changes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._places = [(part, name) for part in model.modules() for name in part._buffers]
        self._changing: set[int] | None = None  # places; None before the first forward
        self._versions: dict[int, tuple[int, int]] = {}  # place -> the tensor and its version, before forward
        self._saved: dict[int, Tensor] = {}  # copies from before forward
        self._older: dict[int, Tensor] = {}  # from before the forward of the previous step
        self._flag = DelayedFlag(device) if self._places else None
        self._delayed = device.type == "cuda"

    def save(self) -> None:
        """Call before forward: copy the buffers that it may change; after the first one, those that it has changed."""
        if not self._places:
            return
        now = self._buffers()
        self._versions = {place: (id(buffer), buffer._version) for place, buffer in now.items()}
        sources = {p: b for p, b in now.items() if self._changing is None or p in self._changing}
        copies = [torch.empty_like(buffer) for buffer in sources.values()]
        if copies:
            torch._foreach_copy_(copies, list(sources.values()))
        self._older, self._saved = self._saved, dict(zip(sources, copies, strict=True))

    def check(self) -> None:
        """Call after forward: undo it if a buffer is not finite. On a GPU this reads the check of the previous step."""
        if self._flag is None:
            return
        now = self._buffers()
        changed = {place for place, buffer in now.items() if self._versions.get(place) != (id(buffer), buffer._version)}
        if self._changing is None:
            # Compare values, once: torch's BatchNorm changes its buffers without a new version.
            changed |= {place for place, copy in self._saved.items() if _differ(copy, now.get(place))}
            self._saved = {place: copy for place, copy in self._saved.items() if place in changed}
        self._changing = (self._changing or set()) | changed
        broken = self._broken(now)
        if broken is None or not self._flag.read(broken):
            return
        if self._delayed:
            self._saved = self._older
        self._undo(now)

    def settle(self) -> None:
        """Call before buffers are sent or saved: complete the check of the last step."""
        now = self._buffers()
        broken = self._broken(now) if self._delayed and self._changing else None
        if broken is not None and bool(broken):
            self._undo(now)

    def changing(self) -> dict[str, Tensor]:
        """Return the buffers that forward has changed, by name."""
        own = {id(local(buffer)) for place, buffer in self._buffers().items() if place in (self._changing or ())}
        return {name: buffer for name, buffer in self._model.named_buffers() if id(local(buffer)) in own}

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Restore what `changing` returned."""
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, tensor in own.items():
                buffers[name].copy_(tensor)

    def _broken(self, now: dict[int, Tensor]) -> Tensor | None:
        """Return a flag on the device, whether a changed buffer is not finite."""
        places = sorted(self._changing or ())
        changed = [now[p] for p in places if p in now and now[p].is_floating_point() and now[p].numel()]
        if not changed:
            return None
        largest = [norm.float() for norm in torch._foreach_norm(changed, torch.inf)]
        return ~torch.isfinite(torch.stack(largest)).all()

    @torch.no_grad()
    def _undo(self, now: dict[int, Tensor]) -> None:
        for place, copy in self._saved.items():
            if place in now and now[place].shape == copy.shape:
                now[place].copy_(copy)

    def _buffers(self) -> dict[int, Tensor]:
        found = ((place, part._buffers[name]) for place, (part, name) in enumerate(self._places))
        return {place: local(buffer) for place, buffer in found if buffer is not None}


@contextlib.contextmanager
def buffers_of_first(model: nn.Module, group: Group | None) -> Iterator[None]:
    """Use the buffers of the first rank inside the block; restore each rank's own afterwards."""
    if group is None or group.size == 1:
        yield
        return
    buffers = {name: local(buffer) for name, buffer in model.named_buffers()}
    own = {name: buffer.clone() for name, buffer in buffers.items()}
    broadcast_in_place(group, buffers)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(own[name])


def _differ(before: Tensor, after: Tensor | None) -> bool:
    return after is None or before.shape != after.shape or bool((before != after).any())
