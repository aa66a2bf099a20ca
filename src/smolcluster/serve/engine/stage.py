"""A stage: joins a front, loads the layers it is assigned, and forwards batches.

    transport's thread     receives, and queues tasks; computes short batches itself
    main thread            loads, computes, samples; one task after the other

A batch that cannot be computed is reported as FAILED to the front, which restarts its sequences. If the front is lost, its
address is dialled until a front accepts the connection; layers are kept meanwhile, caches are not.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import math
import os
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.addresses import join_address, split_address
from smolcluster.comm.elastic.collectives.state_transfer import IncomingState
from smolcluster.comm.elastic.transport.api import Handler, Link, Transport
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.compute.device import synchronize
from smolcluster.compute.memory import free_bytes, physical_memory_bytes
from smolcluster.errors import SmolclusterError
from smolcluster.models.parts import type_name
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import build
from smolcluster.observe.text import printable
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.next_stages import NextStages, handler_of
from smolcluster.serve.engine.sampling import TokenSampler, sample
from smolcluster.serve.engine.stage_model import Row, StageModel, cache_bytes_per_token
from smolcluster.serve.engine.stage_weights import StageWeights
from smolcluster.serve.engine.types import Token
from smolcluster.serve.engine.wire import Assignment, HopTiming, SamplingState, ServedModel, StageBatch, StageOffer

log = logging.getLogger(__name__)

REMEMBERED = 65536  # finished sequences, to ignore their late rows
# Share of the free memory: a cache that grows exists twice for a moment, and has unused capacity.
FOR_CACHES = 0.75
PROBES = 8
QUICK_TOKENS, QUICK_S = 64, 0.15


class StageWorker(Handler):
    """Handler of all links of a stage: to the front, and between stages."""

    def __init__(
        self,
        transport: Transport,
        front: str,
        *,
        name: str,
        host: str,
        listen: tuple[str, int],
        advertise: str | None = None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        memory_bytes: int | None = None,
        files: Path | None = None,
    ) -> None:
        """`advertise`: the host that peers dial, if not the one listened on. `files`: a file or folder from which the front
        may request weights; without it, only models in installed packages are opened, and other weights come from the front."""
        self._front_address, self._name, self._host, self._device = front, name, host, device
        self._dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        self._memory_bytes = memory_bytes
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queued = self._done = 0  # counts of tasks, by the transport's thread and by the main thread
        self._last_batch = (1, math.inf)  # tokens and seconds, with these layers
        self._front: Link | None = None
        self._ending = False
        self.refusal: str | None = None  # why the front refused this stage
        self._landing: dict[Link, tuple[StageBatch, float]] = {}
        self._incoming: IncomingState | None = None
        self._wanted: tuple[int, Assignment] | None = None  # its weights come from the front
        self._secret: str | None = None  # of the front: authenticates batches
        # Used by the main thread, and by the transport's while the main thread is idle.
        self._model: ServedModel | None = None
        self._weights = StageWeights(device, self._dtype, files=files)
        self._stage_model: StageModel | None = None
        self._samplers: dict[int, TokenSampler] = {}
        self._finished: OrderedDict[int, None] = OrderedDict()
        self._next = NextStages(transport, self, front, failed=self._failed, front_link=lambda: self._front)
        bound = transport.listen(*listen, self)
        self.address = bound if advertise is None else join_address(advertise, split_address(bound)[1])
        handler = handler_of(self, linked=self.front_linked, unlinked=self.front_unlinked, refused=self._front_refused)
        self._dialer = transport.dial(front, handler)

    def run(self) -> None:
        """Run tasks until `stop`."""
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # a failed task must not end a stage that others depend on
                log.exception("a task failed")
            self._done += 1

    def stop(self) -> None:
        """End `run`. From any thread."""
        self._ending = True
        self._tasks.put(None)

    def _enqueue(self, task: Callable[[], None]) -> None:
        """Queue a task for the main thread. Called on the transport's thread only."""
        self._queued += 1
        self._tasks.put(task)

    def _runs_inline(self, batch: StageBatch) -> bool:
        """Return whether to compute on the transport's thread: waking the main thread takes longer than a short batch.

        Only while the main thread is idle, and if the batch is so short that no heartbeat is late. Its time is estimated from
        the last batch: in proportion to the tokens, but at least as long.
        """
        idle = self._queued == self._done
        tokens, seconds = self._last_batch
        return idle and batch.num_tokens <= QUICK_TOKENS and seconds * max(1.0, batch.num_tokens / tokens) < QUICK_S

    # Messages, on the transport's thread

    def linked(self, link: Link) -> None:
        """Accept stages only. Their batches must carry the front's secret."""
        if link.peer.role != "stage":
            link.close(f"a {link.peer.role} cannot connect to an inference stage")

    def place(self, link: Link, head: Head) -> Tensor | None:
        if head.kind is Kind.STATE and link is self._front and self._incoming is not None:
            return self._incoming.place(head)
        if head.kind is not Kind.ROWS or self._model is None:
            return None
        try:
            batch = wire.read_batch(head.meta)
        except ValueError as error:
            link.close(str(error))
            return None
        if self._secret is None or not hmac.compare_digest(batch.secret.encode(), self._secret.encode()):
            link.close("a batch without the front's secret")
            return None
        width = None if head.dtype == "int64" else self._model.config.model_dim
        tensor = wire.landing(head, num_tokens=batch.num_tokens, width=width)
        if tensor is not None:
            self._landing[link] = (batch, time.monotonic())
        return tensor

    def received(self, link: Link, message: Message) -> None:
        try:
            self._dispatch(link, message)
        except (ValueError, SmolclusterError) as error:  # the latter: an invalid address
            link.close(str(error))

    def _dispatch(self, link: Link, message: Message) -> None:
        if message.kind is Kind.ROWS:
            pending, payload = self._landing.pop(link, None), message.payload
            if pending is None or payload is None:
                raise ValueError("rows without tokens or activations")
            (batch, at), number, codec = pending, message.step, message.codec
            if self._runs_inline(batch):
                self._process(number, batch, payload, codec, at)
            else:
                self._enqueue(lambda: self._process(number, batch, payload, codec, at))
        elif link is not self._front:
            link.close(f"stages do not send each other {message.kind.name}")
        elif message.kind is Kind.PLAN:
            model = wire.read_model(message.meta)
            self._enqueue(lambda: self._join(model))
        elif message.kind is Kind.LAYERS:
            if self._model is None:
                raise ValueError("LAYERS before PLAN")
            assignment = wire.read_assignment(message.meta, num_layers=self._model.config.num_layers)
            number, self._secret = message.step, assignment.secret
            self._incoming = self._wanted = None  # of an earlier assignment
            for instance, address in assignment.next:
                self._next.dial(instance, address)
            self._enqueue(lambda: self._load_layers(number, assignment))
        elif message.kind is Kind.STATE:
            self._state(message)
        elif message.kind is Kind.FORGET:
            numbers = wire.read_sequences(message.meta)
            self._enqueue(lambda: self._forget(numbers))
        elif message.kind is Kind.STOP:
            log.info("the server has stopped: stopping this stage")
            self.stop()
        else:
            link.close(f"a stage does not accept {message.kind.name}")

    def unlinked(self, link: Link, reason: str) -> None:
        self._landing.pop(link, None)

    def _front_refused(self, address: str, reason: str) -> None:
        self.refusal = reason
        self.stop()

    def front_linked(self, link: Link) -> None:
        self._front = link
        log.info("connected to the server at %s as %s", self._front_address, self._name)
        link.send(Message(kind=Kind.ASK))

    def front_unlinked(self, link: Link, reason: str) -> None:
        self.unlinked(link, reason)
        if link is self._front:
            if not self._ending:
                log.warning("lost the server at %s: %s", self._front_address, reason)
            self._front, self._incoming, self._wanted, self._secret = None, None, None, None
            self._enqueue(self._free_all)

    def _failed(self, number: int, why: str) -> None:
        self._send_front(Kind.FAILED, step=number, meta={"why": why[:500]})

    # Tasks, on the main thread

    def _join(self, model: ServedModel) -> None:
        """Offer this machine's memory and speed for the model."""
        if self._model is not None and self._model.fingerprint != model.fingerprint:
            self._clear()
        self._free_all()
        self._model = model
        offer = StageOffer(
            name=self._name,
            host=self._host,
            address=self.address,
            device=str(self._device),
            cores=torch.get_num_threads() if self._device.type == "cpu" else 1,
            host_cores=os.cpu_count() or 1,
            memory_bytes=self._memory_bytes or free_bytes(self._device) + self._weights.nbytes,
            layer_s=probe(model.config, self._device, self._dtype),
            weight_bytes=self._dtype.itemsize,
            shared_bytes=physical_memory_bytes(self._device),
        )
        self._send_front(Kind.JOIN, meta=wire.meta_of(offer))

    def _load_layers(self, number: int, assignment: Assignment, received: dict[str, Tensor] | None = None) -> None:
        """Load the layers of an assignment. `received`: the weights, if they came from the front."""
        model, layers = self._model, assignment.layers
        assert model is not None
        if assignment.name != self._name:
            log.info("renamed to %s: another stage is named %s", printable(assignment.name), self._name)
            self._name = assignment.name
        try:
            if not self._is_loaded(assignment):
                self._stage_model = None  # frees the layers that are not kept
                if received is not None:
                    self._weights.receive(received)
                elif not self._weights.load(model, assignment):
                    self._weights.clear()
                    self._wanted = (number, assignment)
                    self._send_front(Kind.HELD, step=number, meta={"need": type_name(self._dtype)})
                    return
                self._stage_model, self._last_batch = self._weights.build(model, assignment), (1, math.inf)
            self._report_held(number)
        except (SmolclusterError, ValueError, OSError, RuntimeError) as error:  # RuntimeError: out of memory
            log.error("cannot load layers %d to %d: %s", layers.start, layers.stop - 1, error)
            self._clear()
            self._send_front(Kind.HELD, step=number, meta={"why": str(error)[:500] or type(error).__name__})

    def _clear(self) -> None:
        self._stage_model = None
        self._weights.clear()

    def _is_loaded(self, assignment: Assignment) -> bool:
        part, wanted = self._stage_model, (assignment.layers, assignment.first, assignment.last)
        return part is not None and (part.layers, part.first, part.last) == wanted

    def _report_held(self, number: int) -> None:
        self._free_all()
        room, part = self._room(), self._stage_model
        assert part is not None
        log.info("loaded layers %d to %d; room for %d tokens", part.layers.start, part.layers.stop - 1, room)
        self._send_front(Kind.HELD, step=number, meta={"room": room})

    def _room(self) -> int:
        """Return for how many tokens keys and values fit the free memory."""
        part, free = self._stage_model, free_bytes(self._device)
        assert part is not None
        if self._memory_bytes is not None:
            free = min(free, self._memory_bytes - self._weights.nbytes)
        return max(0, int(FOR_CACHES * free)) // (len(part.layers) * cache_bytes_per_token(part.config, part.dtype))

    def _process(self, number: int, batch: StageBatch, payload: Tensor, codec: str, arrived: float) -> None:
        """Compute a batch; send it to the next stage, or its tokens to the front."""
        began = time.monotonic()
        try:
            message = self._run(number, batch, payload, codec, arrived, began)
            if message.kind is Kind.CHOSEN:
                self._send_front(Kind.CHOSEN, step=number, meta=message.meta)
        except Exception as error:  # noqa: BLE001 - of any kind: the front restarts these sequences
            log.warning("batch %d failed: %s", number, error)
            for row in batch.rows:
                self._free(row.sequence)
            self._failed(number, f"{self._name}: {error}")
            return
        if message.kind is Kind.ROWS:
            instance, address = batch.route[0]
            self._next.send(instance, address, message)

    def _run(
        self, number: int, batch: StageBatch, payload: Tensor, codec: str, arrived: float, began: float
    ) -> Message:
        part, model = self._stage_model, self._model
        if part is None or model is None:
            raise ValueError("this stage holds no layers")
        if part.first != (payload.dtype == torch.int64) or part.last == bool(batch.route):
            raise ValueError("this batch is not for the layers of this stage")
        width = model.config.model_dim
        x = payload if part.first else wire.decode(payload, codec, num_tokens=batch.num_tokens, width=width)
        rows, x = self._still_wanted(batch.rows, x)
        out = part.run(rows, x.to(self._device)) if rows else x
        if not part.last:
            encoded, used = wire.encode(out, model.codec) if rows else (payload, codec)
            synchronize(self._device)
            spent = (*batch.spent, self._timing(rows, arrived, began))
            forwarded = dataclasses.replace(batch, rows=rows or batch.rows, route=batch.route[1:], spent=spent)
            return Message(kind=Kind.ROWS, step=number, codec=used, meta=wire.meta_of(forwarded), payload=encoded)
        for sequence, opening in batch.samplings.items():
            if sequence not in self._finished:
                self._samplers[sequence] = _sampler(opening)
        chosen = self._sample([row for row in rows if row.logits], out) if rows else {}
        spent = (*batch.spent, self._timing(rows, arrived, began))
        return Message(kind=Kind.CHOSEN, meta=wire.chosen_meta(chosen, spent))

    def _still_wanted(self, rows: tuple[Row, ...], x: Tensor) -> tuple[tuple[Row, ...], Tensor]:
        """Drop the rows of finished sequences: their caches are freed."""
        if not any(row.sequence in self._finished for row in rows):
            return rows, x
        pieces = zip(rows, torch.split(x, [row.count for row in rows]), strict=True)
        kept = [(row, piece) for row, piece in pieces if row.sequence not in self._finished]
        if not kept:
            return (), x[:0]
        return tuple(row for row, _ in kept), torch.cat([piece for _, piece in kept])

    def _sample(self, rows: list[Row], logits: Tensor) -> dict[int, Token]:
        missing = [row.sequence for row in rows if row.sequence not in self._samplers]
        if missing:
            raise ValueError(f"no sampling state for sequence {missing[0]}")
        samplers = [self._samplers[row.sequence] for row in rows]
        tokens = sample(samplers, logits)
        for sampler, token in zip(samplers, tokens, strict=True):
            sampler.accept(token.token)
        return {row.sequence: token for row, token in zip(rows, tokens, strict=True)}

    def _timing(self, rows: Sequence[Row], arrived: float, began: float) -> HopTiming:
        now = time.monotonic()
        if rows:
            self._last_batch = (sum(row.count for row in rows), now - began)
        return HopTiming(name=self._name, waited_s=round(began - arrived, 6), computed_s=round(now - began, 6))

    def _forget(self, sequences: list[int]) -> None:
        for sequence in sequences:
            self._finished[sequence] = None
            self._free(sequence)
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    def _free(self, sequence: int) -> None:
        self._samplers.pop(sequence, None)
        if self._stage_model is not None:
            self._stage_model.forget(sequence)

    def _free_all(self) -> None:
        self._samplers.clear()
        self._finished.clear()
        if self._stage_model is not None:
            for sequence in self._stage_model.lengths():
                self._stage_model.forget(sequence)

    def _send_front(self, kind: Kind, *, step: int = 0, meta: Mapping[str, Any]) -> None:
        front = self._front
        if front is not None:
            front.send(Message(kind=kind, step=step, meta=dict(meta)))

    # Weights from the front

    def _state(self, message: Message) -> None:
        """Receive STATE, on the transport's thread: the announcement, then every slice."""
        if self._incoming is None:
            if self._wanted is None:
                raise ValueError("STATE without a request for weights")
            limit = self._memory_bytes or free_bytes(self._device)
            self._incoming = IncomingState(message.meta, limit_bytes=limit)
        elif message.payload is None:
            raise ValueError("a state began before the last one was complete")
        if self._incoming.complete:
            tensors, wanted = self._incoming.tensors, self._wanted
            self._incoming, self._wanted = None, None
            assert wanted is not None
            self._enqueue(lambda: self._load_layers(*wanted, tensors))


def _sampler(opening: SamplingState) -> TokenSampler:
    prompt, generated = opening.tokens[: opening.prompt], opening.tokens[opening.prompt :]
    return TokenSampler(opening.sampling, prompt=prompt, generated=generated, position=opening.position)


def probe(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Measure the seconds of one token through one layer: the fastest of a few."""
    one = dataclasses.replace(config, num_layers=1, vocab_size=1)
    weights = {name: tensor.to(device, dtype) for name, tensor in build(one).state_dict().items()}
    part = StageModel(one, range(1), first=False, last=False, weights=weights, device=device, dtype=dtype)
    x = torch.zeros(1, config.model_dim, device=device)
    times = []
    for start in range(min(PROBES, config.max_seq_len)):
        synchronize(device)
        began = time.perf_counter()
        part.run([Row(sequence=0, start=start, count=1, logits=False)], x)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
