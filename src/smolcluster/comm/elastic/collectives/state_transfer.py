"""Transfer of weights and optimizer state from one member to another: `received_state.py` with a meta from the sender.

A slice is received straight into its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.received_state import ReceivedState, slice_messages
from smolcluster.comm.elastic.transport.api import Head, Kind, Message
from smolcluster.comm.elastic.transport.frames import UnexpectedPayload
from smolcluster.comm.elastic.transport.payloads import DTYPES

MAX_TENSORS = 1 << 17


def state_messages(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> list[Message]:
    rows = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    return [Message(kind=Kind.STATE, meta={"count": len(rows), "meta": dict(meta)}), *slice_messages(rows)]


class IncomingState(ReceivedState):
    """A state that is being received."""

    def __init__(self, announced: Mapping[str, Any], *, limit_bytes: int) -> None:
        """Raises ValueError for an invalid announcement."""
        meta, count = announced.get("meta"), announced.get("count")
        if not isinstance(meta, dict) or type(count) is not int or not 0 <= count <= MAX_TENSORS:
            raise ValueError("a state must begin with the number of its tensors")
        super().__init__(count, limit_bytes=limit_bytes)
        self.meta: dict[str, Any] = meta

    def place(self, head: Head) -> Tensor:
        """Return where to receive the next slice. Raises UnexpectedPayload if this is not it."""
        try:
            return self.next(head.channel, DTYPES[head.dtype], head.shape, head.meta)
        except ValueError as error:
            raise UnexpectedPayload(str(error)) from error
