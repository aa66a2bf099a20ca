"""What processes of the elastic plane say to each other: every kind of message, and what is known of a peer.

`frames.py` has their bytes, `api.py` how they move. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Types of payloads, and the bytes of one number. Their order is that of the header's `dtype`.
ITEM_BYTES: Mapping[str, int] = {
    **{"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8},
    **{"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1},
}


class Kind(enum.IntEnum):
    """Every message there is. `step`, `channel` and `meta` mean what the line says; a payload only where one is named."""

    # The handshake, before anything else is listened to.
    HELLO = 1  # who I am, my versions, a nonce
    PROOF = 2  # that I hold the token, over both nonces and the certificate
    ACCEPT = 3  # you are in
    REFUSE = 4  # and why; the link ends

    # Life.
    BEAT = 8  # I am alive
    BYE = 9  # I leave on purpose, and why; the link ends

    # Membership.
    ASK = 16  # worker: what is trained here?
    PLAN = 17  # server: the configuration, the run's id
    JOIN = 18  # worker: I am ready; my model's layout, my batch size
    WELCOME = 19  # server: you take part from this step on; what STATE will follow, the lease
    STATE = 20  # one tensor of weights or optimizer state; channel is its number in the list that came before
    VIEW = 21  # coordinator: the members and their addresses from now on; heartbeat roster: what each has reported
    EVENT = 22  # worker: one line of its record, for the run directory
    STOP = 23  # server: the run is over
    REPORT = 24  # worker: its counters at the end; member of a heartbeat roster: all its fields, at every change

    # Parameter servers.
    PUSH = 32  # worker: a bucket of my gradient of this step (payload, encoded); channel is the bucket
    AVERAGE = 33  # server: a bucket of the averaged gradient of this step (payload, encoded)
    PULL = 34  # worker: send me your weights
    WEIGHTS = 35  # server: a bucket of its weights at this version (payload)
    ACK = 36  # server: your gradient of this step is taken, or refused and why; meta may have the next lease

    # Agreement without a parameter server.
    DONE = 48  # worker: I hold the sum of this step; its norm, and mine
    COMMIT = 49  # coordinator: this step counts, with these samples
    SUSPECT = 51  # worker: I cannot reach this peer
    WAITING = 52  # worker: I compute nothing, and wait for others in this view
    LEASE = 53  # coordinator: the samples of a member's first rounds in the view that was sent before

    # Inference.
    LAYERS = 80  # front: hold these layers of the model; step numbers the assignment
    HELD = 81  # stage: I hold them, or why not, or that I need their weights
    # A batch on its way: tokens or activations (payload, encoded); step is its number, meta its rows and route.
    ROWS = 82
    CHOSEN = 83  # last stage: the next token of each sequence in the batch, and where its time went
    FAILED = 84  # stage: this batch ends here, and why
    FORGET = 85  # front: these sequences are over

    # Groups.
    CHUNK = 64  # a piece of a collective (payload); step is the operation, channel the piece
    # Worker to worker: proof that I am the member I name, by the key that the coordinator gave us; coordinator: such keys.
    MEMBER = 65


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who is at an end of a link. Names itself in the handshake; the token proves only that it belongs to the cluster."""

    role: str  # worker, server; of inference stage, front; of a heartbeat roster member
    rank: int
    host: str
    instance: str  # of the process: 16 hex digits, new at every start
    run: str = ""  # run id, 16 hex digits; empty for one that does not know it yet
    versions: Mapping[str, str] = field(default_factory=dict)  # smolcluster, python, torch, platform

    @property
    def name(self) -> str:
        """For messages: `worker 2 (pi5)`."""
        return f"{self.role} {self.rank} ({self.host})" if self.role == "worker" else f"{self.role} ({self.host})"


@dataclass(slots=True, kw_only=True)
class Message:
    """One frame. The payload is a contiguous CPU tensor; its dtype and shape travel with it."""

    kind: Kind
    step: int = 0
    channel: int = 0
    epoch: int = 0  # of the view it belongs to; receivers drop what is older
    codec: str = "fp32"
    meta: dict[str, Any] = field(default_factory=dict)
    encoded: bytes = b""  # meta as it is written, where the same goes to many (`frames.shared`)
    payload: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of a message before its payload is received."""

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
        """Describe a message whose payload, of this type and size, is still to come."""
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
