"""The messages of the elastic plane, and the identity of a peer.

`frames.py` encodes them, `api.py` sends them. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Bytes per element of each payload dtype. The header's `dtype` is an index into this order: append only.
ITEM_BYTES: Mapping[str, int] = {
    **{"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8},
    **{"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1},
}


class Kind(enum.IntEnum):
    """All messages. Each line names the sender and the content; a message has a payload only where one is named."""

    # Handshake
    HELLO = 1  # identity, versions, a nonce
    PROOF = 2  # a MAC with the token's key over both nonces and the certificate
    ACCEPT = 3  # the server's identity
    REFUSE = 4  # the reason; the link ends

    # Liveness
    BEAT = 8  # heartbeat
    BYE = 9  # the reason for closing; the link ends

    # Membership
    ASK = 16  # worker: requests the PLAN; server: requests a STATE of this many bytes, to measure the link
    PLAN = 17  # server: the configuration, the run's id
    JOIN = 18  # worker: ready to train; layout of the model, batch size
    WELCOME = 19  # server: admitted from this step on; the number of STATE messages that follow, the lease
    STATE = 20  # a slice of weights or optimizer state (payload), or the number of tensors that follow; channel counts slices
    VIEW = 21  # coordinator: the new members and their addresses; heartbeat roster: the reports of all members
    EVENT = 22  # worker: a record for the run directory
    STOP = 23  # server: the run is over
    REPORT = 24  # worker: its counters at the end; member of a heartbeat roster: all its fields, at every change

    # Parameter server
    PUSH = 32  # worker: a bucket of its gradient of this step (payload, encoded); channel is the bucket
    AVERAGE = (
        33  # server: a bucket of the averaged gradient of this step, or of its change of weights (payload, encoded)
    )
    PULL = 34  # worker: requests the weights
    WEIGHTS = 35  # server: a bucket of its weights at this version (payload)
    ACK = 36  # server: the gradient of this step is accepted, or rejected and why; meta may have the next lease

    # Coordinator
    DONE = 48  # worker: has the sum of this step; its norm and the norm of this worker's part
    COMMIT = 49  # coordinator: this step is committed, with these samples
    SUSPECT = 51  # worker: cannot reach this peer
    WAITING = 52  # worker: idle, waits for other members of this view
    LEASE = 53  # coordinator: the samples of a member's first rounds in the last view

    # Inference
    LAYERS = 80  # front: load these layers of the model; step numbers the assignment
    HELD = 81  # stage: the layers are loaded, or failed and why, or need their weights
    ROWS = 82  # a batch: tokens or activations (payload, encoded); step is its number, meta its rows and route
    CHOSEN = 83  # last stage: the next token of each sequence in the batch, and timings
    FAILED = 84  # stage: the batch failed, and why
    FORGET = 85  # front: these sequences are finished

    # Collectives
    CHUNK = 64  # a chunk of a collective (payload); step is the operation, channel the chunk
    MEMBER = 65  # worker to worker: MAC with their pairwise key; coordinator: the pairwise keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The identity that one end of a link claims. The token proves only that it belongs to the cluster."""

    role: str  # worker, server; inference: stage, front; heartbeat roster: member
    rank: int
    host: str
    instance: str  # of the process: 16 hex digits, new at every start
    run: str = ""  # run id, 16 hex digits; empty while it is unknown
    versions: Mapping[str, str] = field(default_factory=dict)  # smolcluster, python, torch, platform

    @property
    def name(self) -> str:
        """Return the name for logs: `worker 2 (pi5)`."""
        return f"{self.role} {self.rank} ({self.host})" if self.role == "worker" else f"{self.role} ({self.host})"


@dataclass(slots=True, kw_only=True)
class Message:
    """One frame. The payload is a contiguous CPU tensor; the header has its dtype and shape."""

    kind: Kind
    step: int = 0
    channel: int = 0
    epoch: int = 0  # of its view; receivers drop messages of older views
    codec: str = "fp32"
    meta: dict[str, Any] = field(default_factory=dict)
    encoded: bytes = b""  # encoded meta, of a message with many receivers (`frames.with_encoded_meta`)
    payload: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A message whose payload has not been received yet."""

    kind: Kind
    step: int
    channel: int
    epoch: int
    codec: str
    dtype: str  # "float32"
    shape: tuple[int, ...]
    nbytes: int
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, message: Message, *, dtype: str, shape: tuple[int, ...], nbytes: int) -> Head:
        return cls(
            kind=message.kind,
            step=message.step,
            channel=message.channel,
            epoch=message.epoch,
            codec=message.codec,
            dtype=dtype,
            shape=shape,
            nbytes=nbytes,
            meta=message.meta,
        )
