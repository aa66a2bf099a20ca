"""Operations of one view: plans that run piece by piece over the links between members.

An operation is a plan (`schedule.py`) and the memory it works on. It starts on the transport's thread as soon as it is
called; any number may run at once. It exchanges CHUNK messages:

    epoch     of the view; chunks of other views are handled by `peers.py`
    step      the operation's number: each rank counts its calls, and all ranks make the same calls in the same order
    channel   2 x the piece's index in the plan, + 1 if the receiver copies it, + 0 if it adds it
    meta      {} in the full group. {"group": "1.0"}: the first sub-group of the second sub-group, with a separate count.
              {"tag": 3}: a `send`; its number counts the sends from that rank with that tag

A piece to copy is received straight into the tensor; a piece to add is received into a staging buffer, added while it is
still in the cache, and forwarded. Chunks that arrive before their operation was called are kept.

After `abort` every `wait` raises. A piece that is partly received may still be written into its tensor, and one that is
partly sent is still read (changing it would break its checksum and end the link). So the memory of aborted operations is
free only after `Peers.form` has made the next view's group.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives import schedule
from smolcluster.comm.elastic.collectives.peer_links import PeerLinks, nothing
from smolcluster.comm.elastic.collectives.schedule import MAX_PIECE_BYTES, Act, Plan, Verb
from smolcluster.comm.elastic.transport.api import Head, Kind, Link, Message
from smolcluster.comm.elastic.transport.payloads import DTYPES
from smolcluster.comm.group import PeerLost, Traffic
from smolcluster.comm.view import View

WAITING_S = 1.0  # interval at which a `wait` reports that it waits
MAX_AHEAD = 4096  # operations by which a peer may be ahead of us
_PATH = re.compile(r"\d{1,6}(\.\d{1,6}){0,7}")
_SMALL_TORCH_ADD = 16_384  # elements: torch uses its thread pool for more


class Key(NamedTuple):
    """The key of the operation that a chunk belongs to."""

    path: str  # of the sub-group; empty: the full group
    tag: int | None  # None: a collective
    source: int  # of a send; -1: a collective
    number: int


@dataclass(slots=True)
class Destination:
    """Where to receive a payload, and what to call when it has arrived or was lost."""

    tensor: Tensor
    arrived: Callable[[], None] = nothing
    lost: Callable[[], None] = nothing
    callers_memory: bool = False


class Exchange:
    """The operations of one view, and the early chunks of operations that were not called yet."""

    def __init__(
        self,
        links: PeerLinks,
        view: View,
        *,
        timeout_s: float,
        need: Callable[[int], None],
        on_waiting: Callable[[], None],
    ) -> None:
        """`need`: called with the view index of each member that an operation needs a link to.

        `on_waiting`: called every `WAITING_S` by a thread that waits for an operation.
        """
        self.links, self.view, self.timeout_s, self._need = links, view, timeout_s, need
        self.on_waiting = on_waiting
        self.error: Exception | None = None
        self.moved_at = time.monotonic()  # when a chunk was last sent or received
        self._lock = threading.Lock()
        self._waiting: set[Operation] = set()  # guarded by the lock
        self._calls = 0
        self._running: dict[Key, Operation] = {}
        self._started: dict[tuple[str, int | None, int], int] = {}  # operations by path, tag and source
        self._early: dict[Key, dict[tuple[int, int], tuple[Link, Tensor]]] = {}  # (source, channel)

    # From any thread

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def call(self, operation: Operation) -> None:
        """Start an operation, in the order of the calls."""
        with self._lock:
            operation.order, self._calls = self._calls, self._calls + 1
            if self.error is not None:
                operation.finished.set()
                return
            self._waiting.add(operation)
        self.moved_at = time.monotonic()
        self.links.soon(lambda: self._start(operation))

    def abort(self, error: Exception) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            for operation in self._waiting:
                operation.finished.set()
            self._waiting.clear()
        self.links.soon(self._forget)

    # On the transport's thread

    def _start(self, operation: Operation) -> None:
        key = operation.key
        if self.error is not None:
            return
        counter = (key.path, key.tag, key.source)
        self._started[counter] = max(self._started.get(counter, 0), key.number + 1)
        self._running[key] = operation
        for place in operation.peers:
            self._need(place)
        operation.start()
        for (source, channel), (link, tensor) in self._early.pop(key, {}).items():
            self._take_early(operation, link, source, channel, tensor)

    def place(self, link: Link, source: int, head: Head) -> Destination | None:
        """Return where to receive a chunk from this member; None if it is invalid."""
        key = key_of(head, source)
        if key is None:
            return None
        if self.error is not None:
            return Destination(self.links.sink(head))
        self.moved_at = time.monotonic()
        operation = self._running.get(key)
        if operation is not None:
            return operation.place(source, head)
        if not self._may_come(key) or (source, head.channel) in self._early.get(key, {}):
            return None
        return keep(self.links, head, lambda tensor: self._keep(key, link, source, head.channel, tensor))

    def adopt(self, link: Link, source: int, head: Head, tensor: Tensor) -> None:
        """Take a chunk that was kept before this view was formed."""
        key = key_of(head, source)
        if key is not None and (key in self._running or self._may_come(key)):
            self._keep(key, link, source, head.channel, tensor)
        else:
            self.links.release(tensor.nbytes)
            link.close(f"a chunk of an invalid operation: number {head.step}")

    def finish(self, operation: Operation) -> None:
        del self._running[operation.key]
        with self._lock:
            self._waiting.discard(operation)
        operation.finished.set()

    def _may_come(self, key: Key) -> bool:
        """Return whether this operation has not been called here yet, but may be soon."""
        return 0 <= key.number - self._started.get((key.path, key.tag, key.source), 0) < MAX_AHEAD

    def _keep(self, key: Key, link: Link, source: int, channel: int, tensor: Tensor) -> None:
        """Keep a chunk until its operation is called, or take it if it was called meanwhile."""
        operation = self._running.get(key)
        if self.error is not None:
            self.links.release(tensor.nbytes)
        elif operation is None:
            self._early.setdefault(key, {})[source, channel] = (link, tensor)
        else:
            self._take_early(operation, link, source, channel, tensor)

    def _take_early(self, operation: Operation, link: Link, source: int, channel: int, tensor: Tensor) -> None:
        self.links.release(tensor.nbytes)
        if not operation.take_early(source, channel, tensor):
            link.close(f"an invalid chunk of {operation.name} {operation.key.number}")

    def _forget(self) -> None:
        """Drop everything after an abort."""
        for pieces in self._early.values():
            for _, tensor in pieces.values():
                self.links.release(tensor.nbytes)
        self._early.clear()
        self._running.clear()
        self.links.cancel(self.view.epoch)


def key_of(head: Head, source: int) -> Key | None:
    """Return the operation of a chunk; None if the chunk is invalid."""
    if head.nbytes > MAX_PIECE_BYTES or head.nbytes == 0 or len(head.shape) != 1:
        return None
    path, tag = head.meta.get("group", ""), head.meta.get("tag")
    if not isinstance(path, str) or (path and _PATH.fullmatch(path) is None) or type(tag) not in (int, type(None)):
        return None
    return Key(path, tag, -1 if tag is None else source, head.step)


def keep(links: PeerLinks, head: Head, then: Callable[[Tensor], None]) -> Destination | None:
    """Return new memory for an early chunk, or None if the limit is reached. `then` receives it."""
    if not links.keep(head.nbytes):
        return None
    tensor = torch.empty(head.shape, dtype=DTYPES[head.dtype])
    return Destination(tensor, lambda: then(tensor), lambda: links.release(tensor.nbytes))


class _Piece:
    __slots__ = ("acts", "at", "number", "start", "stop")

    def __init__(self, number: int, start: int, stop: int, acts: tuple[Act, ...]) -> None:
        self.number, self.start, self.stop, self.acts = number, start, stop, acts
        self.at = 0  # index of the current act


class Operation:
    """Runs one plan over one flat tensor, piece by piece. Everything but `wait` runs on the transport's thread."""

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        *,
        key: Key,
        flat: Tensor,
        plan: Plan,
        ranks: Sequence[int],
        traffic: Traffic,
        copy_back: Callable[[], None] | None = None,
    ) -> None:
        """`ranks`: the view index of each rank in the plan. `copy_back`: called by the first `wait`."""
        self.name, self.key, self.order = name, key, 0
        self.finished = threading.Event()
        self._exchange, self._flat, self._traffic = exchange, flat, traffic
        # numpy has no bfloat16, and is slow for float16.
        self._array = None if flat.dtype in (torch.bfloat16, torch.float16) else flat.numpy()
        self._dtype = str(flat.dtype).removeprefix("torch.")
        self._meta: dict[str, Any] = {"group": key.path} if key.path else {}
        if key.tag is not None:
            self._meta["tag"] = key.tag
        self.peers = {ranks[act.peer] for chain in plan for act in chain.acts}  # view indices
        self._pieces = _cut(plan, ranks, itemsize=flat.itemsize)
        self._unfinished = len(self._pieces)
        self._unsent = 0
        self._taken: set[tuple[int, int]] = set()  # (piece, act) of receives whose payload has arrived or is arriving
        self._kept: dict[tuple[int, int], Tensor] = {}  # payloads that arrived before their turn
        self._copy_back = copy_back

    # The caller's thread

    @property
    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> None:
        exchange = self._exchange
        while not self.finished.is_set():
            left = exchange.moved_at + exchange.timeout_s - time.monotonic()
            if left <= 0:
                raise PeerLost(f"{self.name}: nothing moved for {exchange.timeout_s:g} s; {self._waits_for()}")
            if not self.finished.wait(min(left, WAITING_S)):
                exchange.on_waiting()
        exchange.check()
        if self._copy_back is not None:
            self._copy_back()
            self._copy_back = None

    def _waits_for(self) -> str:
        acts = [piece.acts[at] for piece in self._pieces if (at := piece.at) < len(piece.acts)]
        names = sorted({self._exchange.view.members[act.peer].name for act in acts})
        return f"waiting for {', '.join(names)}" if names else "waiting for the last chunks to be sent"

    # The transport's thread

    def start(self) -> None:
        for piece in self._pieces:
            self._go_on(piece)
        self._check_finished()

    def place(self, source: int, head: Head) -> Destination | None:
        found = self._claim(source, head.channel, head.shape[0], head.dtype)
        if found is None:
            return None
        piece, at = found
        if at != piece.at:
            tensor = torch.empty(head.shape, dtype=self._flat.dtype)
            return Destination(tensor, lambda: self._came_early(piece, at, tensor))
        if piece.acts[at].verb is Verb.COPY:
            return Destination(self._flat[piece.start : piece.stop], lambda: self._copied(piece), callers_memory=True)
        buffer = self._exchange.links.stage()
        staged = buffer[: head.nbytes].view(self._flat.dtype)
        return Destination(
            staged, lambda: self._staged(piece, staged, buffer), lambda: self._exchange.links.unstage(buffer)
        )

    def take_early(self, source: int, channel: int, tensor: Tensor) -> bool:
        """Take a chunk that was kept until this operation started. Returns False if it is invalid."""
        found = self._claim(source, channel, tensor.numel(), str(tensor.dtype).removeprefix("torch."))
        if found is None:
            return False
        self._came_early(*found, tensor)
        return True

    def _claim(self, source: int, channel: int, elements: int, dtype: str) -> tuple[_Piece, int] | None:
        """Return the outstanding receive that this chunk is for, if its size and dtype match. Nothing else may take it."""
        number, verb = channel >> 1, Verb.COPY if channel & 1 else Verb.ADD
        if number >= len(self._pieces):
            return None
        piece = self._pieces[number]
        if piece.stop - piece.start != elements or dtype != self._dtype:
            return None
        for at in range(piece.at, len(piece.acts)):
            act = piece.acts[at]
            if act.verb is verb and act.peer == source:
                if (number, at) in self._taken:
                    return None
                self._taken.add((number, at))
                return piece, at
        return None

    def _copied(self, piece: _Piece) -> None:
        if self._exchange.error is None:
            self._received(piece)

    def _staged(self, piece: _Piece, staged: Tensor, buffer: Tensor) -> None:
        if self._exchange.error is None:
            self._add(piece, staged)
            self._received(piece)
        self._exchange.links.unstage(buffer)

    def _came_early(self, piece: _Piece, at: int, tensor: Tensor) -> None:
        if self._exchange.error is None:
            self._kept[piece.number, at] = tensor
            self._go_on(piece)
            self._check_finished()

    def _received(self, piece: _Piece) -> None:
        """Continue after the current act."""
        self._traffic.add(0, (piece.stop - piece.start) * self._flat.itemsize)
        piece.at += 1
        self._go_on(piece)
        self._check_finished()

    def _go_on(self, piece: _Piece) -> None:
        """Run the acts of this piece up to the next one that has to wait."""
        while piece.at < len(piece.acts):
            act = piece.acts[piece.at]
            if act.verb.receives:
                tensor = self._kept.pop((piece.number, piece.at), None)
                if tensor is None:
                    return
                if act.verb is Verb.ADD:
                    self._add(piece, tensor)
                else:
                    self._copy(piece, tensor)
                self._traffic.add(0, tensor.nbytes)
            else:
                self._send(piece, act)
            piece.at += 1
        self._unfinished -= 1

    def _send(self, piece: _Piece, act: Act) -> None:
        message = Message(
            kind=Kind.CHUNK,
            step=self.key.number,
            channel=2 * piece.number + (act.verb is Verb.SEND),
            epoch=self._exchange.view.epoch,
            meta=self._meta,
            payload=self._flat[piece.start : piece.stop],
        )
        self._unsent += 1
        self._traffic.add((piece.stop - piece.start) * self._flat.itemsize, 0)
        self._exchange.links.send(
            self._exchange.view.members[act.peer], message, order=self.order, left=self._piece_left
        )

    def _piece_left(self) -> None:
        self._unsent -= 1
        self._exchange.moved_at = time.monotonic()
        self._check_finished()

    def _check_finished(self) -> None:
        if self._unfinished == 0 and self._unsent == 0 and not self.finished.is_set():
            self._exchange.finish(self)

    def _add(self, piece: _Piece, other: Tensor) -> None:
        if self._array is not None:
            own = self._array[piece.start : piece.stop]
            np.add(own, other.numpy(), out=own)
            return
        # torch adds dtypes that numpy does not. In small steps, which do not use torch's thread pool.
        for start in range(piece.start, piece.stop, _SMALL_TORCH_ADD):
            stop = min(start + _SMALL_TORCH_ADD, piece.stop)
            self._flat[start:stop] += other[start - piece.start : stop - piece.start]

    def _copy(self, piece: _Piece, other: Tensor) -> None:
        own = self._flat[piece.start : piece.stop]
        np.copyto(own.view(torch.uint8).numpy(), other.view(torch.uint8).numpy())


def _cut(plan: Plan, ranks: Sequence[int], *, itemsize: int) -> list[_Piece]:
    """Return the pieces of a plan, numbered equally on every rank, with peers as view indices."""
    pieces: list[_Piece] = []
    for chain in plan:
        acts = tuple(Act(act.verb, ranks[act.peer]) for act in chain.acts)
        length = schedule.piece_elements((chain.stop - chain.start) * itemsize, itemsize=itemsize)
        for start in range(chain.start, chain.stop, length):
            pieces.append(_Piece(len(pieces), start, min(start + length, chain.stop), acts))
    return pieces
