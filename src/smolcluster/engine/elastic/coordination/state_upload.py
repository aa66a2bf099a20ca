"""The state of the run, requested from the workers that hold it: to evaluate it, save it or send it to newcomers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.engine.elastic.gradient_gate import MAX_FAILED_ATTEMPTS
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import State


class UnusableState(Exception):
    """A state has NaN values or lacks a part. It must not be evaluated or saved."""


@dataclass(slots=True, eq=False)
class _Upload:
    """The state of one step, as its parts arrive."""

    step: int
    epoch: int
    missing: list[Member]
    parts: dict[str, list[Tensor]] = field(default_factory=dict)  # by tensor, flat
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Join the parts, once: the parts of a tensor are freed as soon as it is complete."""
        shapes = self.shapes.items()
        return {name: torch.cat([part.view(-1) for part in self.parts.pop(name)]).view(s) for name, s in shapes}


class StateUploads:
    """One upload at a time. Each member sends its part, or one member sends all where every member holds all (`replicated`)."""

    def __init__(
        self,
        roster: Roster,
        *,
        replicated: bool,
        holders: Callable[[int], list[Member]],
        accept: Callable[[int, State], None],
        arrived: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        """`holders(attempt)`: the members that send it, [] while unknown. `accept` raises UnusableState to reject a state."""
        self._roster, self._replicated, self._holders = roster, replicated, holders
        self._accept, self._arrived, self._warn = accept, arrived, warn
        self._upload: _Upload | None = None
        self._wanted = False
        self._rejected = 0  # states in a row

    @property
    def is_active(self) -> bool:
        return self._upload is not None

    def request(self, committed: int, *, wanted: bool = False) -> None:
        """Request the state of the last committed step, which workers hold now, if it or an earlier one is wanted."""
        self._wanted |= wanted
        if self._upload is not None or not self._wanted or not (holders := self._holders(self._rejected)):
            return
        self._wanted = False
        self._upload = _Upload(committed, self._roster.epoch, list(holders))
        for number, member in enumerate(holders):
            meta = {"first": number == 0}
            member.link.send(Message(kind=Kind.PULL, step=committed, epoch=self._roster.epoch, meta=meta))

    def abandon(self) -> None:
        """Drop the current upload; its step is requested again."""
        if self._upload is not None:
            self._wanted = True
            self._upload = None

    def waits_for(self, member: Member) -> bool:
        return self._upload is not None and member in self._upload.missing

    def take(self, member: Member, message: Message, *, committed: int) -> None:
        """Take a part of the state; accept the state when it is complete."""
        upload = self._upload
        if upload is None or member not in upload.missing or not upload.step <= message.step <= committed:
            return
        if not self._replicated and (upload.epoch, upload.step) != (message.epoch, message.step):
            return  # the answer to a request of an older view
        upload.step = message.step  # a member in the middle of a round answers after it
        if message.payload is not None:
            name = str(message.meta.get("name"))
            upload.parts.setdefault(name, []).append(message.payload)
            upload.shapes[name] = message.meta.get("shape", list(message.payload.shape))
        if message.meta.get("last"):
            upload.missing.remove(member)
        if upload.missing:
            return
        self._upload = None
        try:
            self._accept(upload.step, State.unpacked(upload.tensors(), message.meta["numbers"]))
        except UnusableState as why:
            self._reject(upload.step, str(why))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._roster.evict(member, f"it sent a state that cannot be loaded: {error}")
        else:
            self._rejected = 0
            self._arrived(upload.step)
            self.request(committed)

    def _reject(self, step: int, why: str) -> None:
        """Drop a state; it is requested again after the next step."""
        self._rejected += 1
        what = f"the state of step {step} arrived {why}"
        if self._rejected > MAX_FAILED_ATTEMPTS:
            raise SmolclusterError(
                f"{what}, {MAX_FAILED_ATTEMPTS} times in a row; continue from the last checkpoint with --resume"
            )
        self._warn(f"{what}: it is not used")
        self._wanted = True
