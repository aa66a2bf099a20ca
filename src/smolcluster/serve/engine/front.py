"""The front: tracks the stages and the layers they hold, and every sequence in flight.

All of it runs on the transport's thread, where results arrive, so the next batch leaves as soon as one returns. Clients are
served by the HTTP thread; tokens reach it through `deliver`.

A stage is lost when its link ends or is silent for `LINKS.silence_s`. Its layers move (`layout.remove_machine`), and the
sequences routed through it restart on a new route: the prompt and all generated tokens, as one prompt. With greedy sampling, or
with a seed, the continuation is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import torch

from smolcluster.comm.elastic.transport.api import Handler, Link, Transport
from smolcluster.comm.elastic.transport.connection import LinkLimits
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.errors import SmolclusterError, UserError, unknown_name
from smolcluster.observe.text import printable
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.connected_stage import ConnectedStage
from smolcluster.serve.engine.layout import (
    LayoutOptions,
    StageLayout,
    add_machine,
    check_options,
    plan,
    reduce_offer,
    remove_machine,
    replan,
)
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.scheduler import (
    Routes,
    Scheduler,
    SchedulerLimits,
    SentBatch,
    SequenceState,
    StreamItem,
    width_of,
)
from smolcluster.serve.engine.types import MAX_NAME, Busy, SequenceRequest, Token, Unavailable
from smolcluster.serve.engine.weight_sender import WeightSender
from smolcluster.serve.engine.wire import Assignment, HopTiming, ServedModel, StageBatch, StageOffer

log = logging.getLogger(__name__)

LINKS = LinkLimits(beat_s=0.2, silence_s=0.9)  # a dead stage is detected within a second
TICK_S = 0.5
STUCK_S = 60.0  # a batch in flight for longer is considered lost
MAX_FAILURES = 4  # to load an assignment, after which a stage is assigned no layers
RECENTLY_LOST_S = 60.0


class Front(Handler):
    """Handler of the links to all stages, and the `Engine` of the service."""

    def __init__(
        self,
        transport: Transport,
        source: ModelSource,
        *,
        options: LayoutOptions,
        codec: str = "fp16",
        dtype: torch.dtype = torch.float32,
        limits: SchedulerLimits | None = None,
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        check_options(options, num_layers=source.config.num_layers)
        if codec not in wire.CODECS:
            raise unknown_name("codec", codec, wire.CODECS)
        self._transport, self._source, self._options = transport, source, options
        self._model = ServedModel(
            name=source.name[-MAX_NAME:],
            config=source.config,
            fingerprint=source.fingerprint,
            reference=source.reference,
            codec=codec,
        )
        self._sizes = source.layer_bytes(dtype)
        self._scheduler = Scheduler(limits or SchedulerLimits())
        self._machines: dict[str, ConnectedStage] = {}  # by instance
        self._layout: StageLayout | None = None
        self._assignments = 0
        self._secret = secrets.token_hex(16)  # sent to stages that hold layers: it authenticates our batches
        self._lost: deque[tuple[float, dict[str, Any]]] = deque(maxlen=8)
        self._notes: deque[str] = deque(maxlen=8)  # problems of stages that never connected
        self._weights = WeightSender(transport, source)
        self._closed = False
        self._ready = threading.Event()
        self._undelivered: list[tuple[Callable[[StreamItem], None], StreamItem]] = []
        # Of batches: total seconds, and those of each stage.
        self.hops: deque[tuple[float, tuple[HopTiming, ...]]] = deque(maxlen=4096)
        self.address = transport.listen(*listen, self)
        self._tick()

    # Engine, on the HTTP thread

    @property
    def model_context(self) -> int:
        return self._source.config.max_seq_len

    @property
    def context(self) -> int:
        limit = self._scheduler.routes.max_sequence_tokens
        return self.model_context if limit is None else min(self.model_context, limit)

    async def stream(self, request: SequenceRequest) -> AsyncGenerator[Token, None]:
        loop, items = asyncio.get_running_loop(), asyncio.Queue[StreamItem]()

        def deliver(item: StreamItem) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the client is gone
                loop.call_soon_threadsafe(items.put_nowait, item)

        sequence: SequenceState | None = None

        def submit() -> None:
            nonlocal sequence
            try:
                sequence = self._scheduler.submit(request, lambda item: self._undelivered.append((deliver, item)))
            except (Busy, Unavailable) as error:
                deliver(error)
            else:
                self._send_batches()

        def cancel() -> None:
            if sequence is not None:
                self._scheduler.cancel(sequence)
                self._send_batches()

        self._transport.call_later(0.0, submit)
        try:
            while True:
                item = await items.get()
                if isinstance(item, SmolclusterError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            self._transport.call_later(0.0, cancel)

    def state(self) -> dict[str, Any]:
        """Return the state for /health, /config and /events. Read from any thread: not a consistent snapshot."""
        now, layout = time.monotonic(), self._layout
        stages = layout.stages if layout is not None else ()
        return {
            "ready": self._scheduler.routes.ready,
            "model": self._model.name,
            "layers": self._source.config.num_layers,
            "codec": self._model.codec,
            "stages": [
                {
                    "layers": [stage.layers.start, stage.layers.stop - 1],
                    "machines": self._stages_json(stage.machines, now),
                }
                for stage in stages
            ],
            "spares": self._stages_json(layout.spares if layout is not None else (), now),
            "lost": [lost for at, lost in list(self._lost) if now - at < RECENTLY_LOST_S],
            "problems": self.problems(),
            "there": len(self._offers()),
            "wanted": self._options.stages,
            "running": self._scheduler.running,
            "waiting": self._scheduler.waiting,
        }

    def wait_ready(self, timeout_s: float) -> bool:
        return self._ready.wait(timeout_s)

    @property
    def loading(self) -> bool:
        """Return whether every layer is loaded or being loaded."""
        return self._scheduler.routes.ready or self._scheduler.routes.loading

    def problems(self) -> list[str]:
        """Return the reasons why stages hold no layers."""
        known = [f"{machine.name}: {machine.problem}" for machine in list(self._machines.values()) if machine.problem]
        return [*known, *self._notes]

    def note_problem(self, problem: str) -> None:
        """Record why a stage will not connect. From any thread."""
        self._notes.append(problem)

    def close(self) -> None:
        """Stop all stages."""
        done = threading.Event()

        def end() -> None:
            self._closed = True
            for machine in self._machines.values():
                machine.link.send(Message(kind=Kind.STOP))
            done.set()

        self._transport.call_later(0.0, end)
        done.wait(5.0)
        self._weights.close()
        self._transport.close()

    def _stages_json(self, instances: Iterable[str], now: float) -> list[dict[str, Any]]:
        machines = dict(self._machines)
        return [
            machines[instance].to_json(now, sequences=self._scheduler.load(instance))
            for instance in instances
            if instance in machines
        ]

    # Links

    def linked(self, link: Link) -> None:
        if link.peer.role != "stage":
            link.close(f"a {link.peer.role} cannot connect to an inference front")

    def received(self, link: Link, message: Message) -> None:
        try:
            self._dispatch(link, message)
        except (ValueError, TypeError) as error:
            link.close(str(error))

    def unlinked(self, link: Link, reason: str) -> None:
        machine = self._machines.get(link.peer.instance)
        if machine is None or machine.link is not link:
            return
        now, instance = time.monotonic(), link.peer.instance
        lost = machine.to_json(now, sequences=self._scheduler.load(instance)) | {"state": "lost", "why": reason}
        place = self._layout.stage_of(instance) if self._layout is not None else None
        lost["layers"] = [machine.layers.start, machine.layers.stop - 1] if machine.layers is not None else None
        del self._machines[instance]
        if machine.offer is None:  # it had not joined
            return
        self._lost.append((now, {**lost, "stage": place, "at": round(time.time(), 1)}))
        if not self._closed:
            log.warning("lost %s: %s", machine.name, printable(reason))
            if self._layout is not None:
                self._apply_layout(remove_machine(self._layout, instance, self._offers(), self._sizes))

    def _dispatch(self, link: Link, message: Message) -> None:
        instance = link.peer.instance
        machine = self._machines.get(instance)
        if message.kind is Kind.ASK and machine is not None:
            # A stage that reconnects is accepted once its old link has ended.
            link.close("this stage has sent ASK already")
        elif message.kind is Kind.ASK:
            self._machines[instance] = ConnectedStage(link)
            link.send(Message(kind=Kind.PLAN, meta=wire.model_meta(self._model)))
        elif machine is None or machine.link is not link:
            link.close("send ASK first")
        elif message.kind is Kind.JOIN and machine.offer is not None:
            link.close("this stage has joined already")
        elif message.kind is Kind.JOIN:
            machine.offer = self._uniquely_named(wire.read_offer(message.meta), instance)
            self._add_stage(instance, machine.offer)
        elif message.kind is Kind.HELD:
            self._on_held(instance, machine, message)
        elif message.kind in (Kind.CHOSEN, Kind.FAILED):
            self._on_batch_end(link, message)
        else:
            link.close(f"a front does not accept {message.kind.name}")

    # Layout

    def _offers(self) -> dict[str, StageOffer]:
        machines = list(self._machines.items())  # a copy: other threads read this too
        return {instance: machine.offer for instance, machine in machines if machine.offer is not None}

    def _uniquely_named(self, offer: StageOffer, instance: str) -> StageOffer:
        """Number the names of stages that have the same one."""
        taken = {other.name for known, other in self._offers().items() if known != instance}
        numbered = (f"{offer.name}-{number}" for number in itertools.count(2))
        name = offer.name if offer.name not in taken else next(name for name in numbered if name not in taken)
        return dataclasses.replace(offer, name=name)

    def _add_stage(self, instance: str, offer: StageOffer) -> None:
        log.info("%s joined: %s, %.1f GB", printable(offer.name), offer.device, offer.memory_bytes / 1e9)
        offers = self._offers()
        if self._layout is None and len(offers) < self._options.stages:
            log.info("%d of %d stages have joined", len(offers), self._options.stages)
        try:
            if self._layout is not None:
                self._apply_layout(add_machine(self._layout, instance, self._options, offers, self._sizes))
            elif len(offers) >= self._options.stages:
                self._apply_layout(plan(self._options, offers, self._sizes))
        except UserError as error:  # too little memory; another stage may join
            log.error("%s", error)
            self._machines[instance].problem = str(error)

    def _apply_layout(self, layout: StageLayout) -> None:
        """Adopt this layout, or a replanned one: assign layers where they change, and update the routes."""
        self._layout = layout = replan(layout, self._options, self._offers(), self._sizes)
        offers = self._offers()
        for stage, following in zip(layout.stages, (*layout.stages[1:], None), strict=True):
            hops = tuple((m, offers[m].address) for m in following.machines) if following is not None else ()
            for instance in stage.machines:
                machine = self._machines[instance]
                if machine.layers != stage.layers:
                    self._assign(machine, stage.layers, hops)
        for instance in layout.spares:
            self._machines[instance].layers, self._machines[instance].held = None, False
        self._update_routes()

    def _assign(self, machine: ConnectedStage, layers: range, hops: tuple[tuple[str, str], ...]) -> None:
        self._assignments += 1
        machine.assignment, machine.layers, machine.held, machine.problem = self._assignments, layers, False, ""
        assignment = Assignment(
            first_layer=layers.start,
            num_layers=len(layers),
            first=layers.start == 0,
            last=layers.stop == self._source.config.num_layers,
            secret=self._secret,
            name=machine.name,
            next=hops,
        )
        machine.link.send(Message(kind=Kind.LAYERS, step=self._assignments, meta=wire.meta_of(assignment)))

    def _on_held(self, instance: str, machine: ConnectedStage, message: Message) -> None:
        if message.step != machine.assignment or machine.layers is None:
            return  # of an earlier assignment
        if "need" in message.meta:
            dtype = wire.read_type(message.meta)
            self._send_weights(instance, machine, machine.assignment, machine.layers, dtype)
        elif "why" in message.meta:
            self._reject(instance, machine, printable(str(message.meta["why"]))[:500])
        else:
            machine.held, machine.room = True, wire.read_room(message.meta)
            log.info("%s holds layers %d to %d", machine.name, machine.layers.start, machine.layers[-1])
            self._update_routes()

    def _reject(self, instance: str, machine: ConnectedStage, why: str) -> None:
        """Give the layers to another stage, and fewer layers to this one."""
        assert self._layout is not None
        assert machine.layers is not None
        assert machine.offer is not None
        log.error("%s cannot hold layers %d to %d: %s", machine.name, machine.layers.start, machine.layers[-1], why)
        machine.offer = reduce_offer(machine.offer, machine.layers, self._sizes)
        machine.problem, machine.layers, machine.held = why, None, False
        machine.failures += 1
        layout = remove_machine(self._layout, instance, self._offers(), self._sizes)
        if machine.failures < MAX_FAILURES:
            layout = add_machine(layout, instance, self._options, self._offers(), self._sizes)
        self._apply_layout(layout)

    def _send_weights(
        self, instance: str, machine: ConnectedStage, assignment: int, layers: range, dtype: torch.dtype
    ) -> None:
        def wanted() -> bool:
            return machine.assignment == assignment

        def failed(problem: str) -> None:
            if wanted() and self._machines.get(instance) is machine:
                self._reject(instance, machine, problem)

        self._weights.send(machine.link, assignment, layers, dtype, wanted=wanted, failed=failed)

    def _update_routes(self) -> None:
        layout = self._layout
        assert layout is not None
        stages = tuple(tuple(m for m in stage.machines if self._machines[m].held) for stage in layout.stages)
        cores = {i: (o.host, o.cores, o.host_cores) for i, o in self._offers().items()}
        width = width_of(stages, cores) if all(stages) else 1
        loading = all(any(not self._machines[m].problem for m in stage.machines) for stage in layout.stages)
        routes = Routes(stages, width, self._room(stages), loading=loading)
        self._scheduler.set_routes(routes, now=time.monotonic())
        if routes.ready:
            if not self._ready.is_set():
                log.info("all layers are loaded: ready")
            self._ready.set()
        else:
            self._ready.clear()
        self._send_batches()

    def _room(self, stages: tuple[tuple[str, ...], ...]) -> dict[str, int]:
        """Divide the room of a device among the stages on it."""
        offers = self._offers()
        sharing = Counter((offers[m].host, offers[m].device) for stage in stages for m in stage)
        return {
            m: self._machines[m].room // sharing[offers[m].host, offers[m].device] for stage in stages for m in stage
        }

    # Batches

    def _send_batches(self) -> None:
        """Send all batches that can be sent. FORGET goes first: a batch may need that room."""
        while (batch := self._scheduler.next_batch(now=time.monotonic())) is not None:
            self._forget()
            self._send(batch)
        self._forget()
        if self._undelivered:
            self._transport.call_later(0.0, self._deliver)

    def _forget(self) -> None:
        finished: dict[str, list[int]] = {}
        for number, route in self._scheduler.finished:
            for instance in route:
                finished.setdefault(instance, []).append(number)
        self._scheduler.finished.clear()
        for instance, numbers in finished.items():
            if instance in self._machines:
                self._machines[instance].link.send(Message(kind=Kind.FORGET, meta={"sequences": numbers}))

    def _deliver(self) -> None:
        """Deliver tokens to clients, after the next batches have left: waking their thread takes time."""
        items, self._undelivered = self._undelivered, []
        for deliver, item in items:
            deliver(item)

    def _send(self, sent: SentBatch) -> None:
        route = tuple((m, self._machines[m].offer.address) for m in sent.route[1:])  # type: ignore[union-attr]
        batch = StageBatch(rows=sent.rows, secret=self._secret, route=route, samplings=sent.states)
        payload = torch.tensor(sent.tokens, dtype=torch.int64)
        message = Message(kind=Kind.ROWS, step=sent.number, meta=wire.meta_of(batch), payload=payload)
        try:
            self._machines[sent.route[0]].link.send(message)
        except ValueError as error:  # too large: fail the sequences of this batch only
            self._scheduler.fail(sent.number, now=time.monotonic(), why=str(error))

    def _on_batch_end(self, link: Link, message: Message) -> None:
        """Handle CHOSEN or FAILED, from stages of the batch's route only."""
        chosen, spent = wire.read_chosen(message.meta) if message.kind is Kind.CHOSEN else ({}, [])
        sent = self._scheduler.in_flight.get(message.step)
        if sent is None:
            return  # cancelled meanwhile
        if link.peer.instance not in (sent.route[-1:] if message.kind is Kind.CHOSEN else sent.route):
            link.close("that batch was not routed to this stage")
        elif any(token.token >= self._source.config.vocab_size for token in chosen.values()):
            link.close("a token outside the vocabulary")
        elif message.kind is Kind.CHOSEN:
            self._count(sent, spent)
            self._scheduler.complete(message.step, chosen)
            self._send_batches()
        else:
            why = printable(str(message.meta.get("why")))[:500]
            log.warning("batch %d failed: %s", message.step, why)
            self._scheduler.fail(message.step, now=time.monotonic(), why=why)
            self._send_batches()

    def _count(self, sent: SentBatch, spent: list[HopTiming]) -> None:
        """Record how long a batch took on each stage."""
        now, tokens = time.monotonic(), sum(row.count for row in sent.rows)
        self.hops.append((now - sent.at, tuple(spent)))
        for instance, one in zip(sent.route, spent, strict=False):
            if instance in self._machines:
                self._machines[instance].tokens += tokens
                self._machines[instance].work.append((now, one.computed_s))

    def _tick(self) -> None:
        if self._closed:
            return
        self._transport.call_later(TICK_S, self._tick)
        now = time.monotonic()
        self._scheduler.expire(now=now)
        for number, sent in list(self._scheduler.in_flight.items()):
            if now - sent.at > STUCK_S:
                log.error("no result of batch %d after %g s", number, STUCK_S)
                self._scheduler.fail(number, now=now)
        self._send_batches()
