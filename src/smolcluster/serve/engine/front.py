"""The front: it knows the machines and what they hold, and every sequence that is under way.

Everything here happens on the transport's thread, where the answers come in: the next batch leaves in the moment in which one
comes back. Users are served by another thread (HTTP's); what they receive goes there through `tell`.

A machine is lost when its link ends or it is silent for `serve.SILENCE_S`. Then its layers move (`layout.mend`), and the
sequences that went through it begin again on the new way: prompt and all that was generated so far, as one prompt. With greedy
sampling, or with a seed, what follows is what would have followed.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives.state_transfer import state_messages
from smolcluster.comm.elastic.transport.api import Link, Transport
from smolcluster.comm.elastic.transport.connection import LinkLimits
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.text import printable
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.layout import Layout, Wish, check_wish, mend, plan, renew, smaller, welcome
from smolcluster.serve.engine.scheduler import Limits, Scheduler, Sent, Story, Told, Ways, width_of
from smolcluster.serve.engine.sources import Source
from smolcluster.serve.engine.types import MOST_NAME, Ask, Busy, NobodyThere, Token
from smolcluster.serve.engine.wire import Assignment, Batch, Model, Offer, Spent

log = logging.getLogger(__name__)

LINKS = LinkLimits(beat_s=0.2, silence_s=0.9)  # a stage that is dead is known to be in a second
TICK_S = 0.5
SLICES_AHEAD = 4  # of weights, on their way to a machine
STUCK_S = 60.0  # a batch that is under way for so long is lost somewhere
MOST_FAILURES = 4  # of a machine to hold what it is given; then it is given nothing more
RECENTLY_LOST_S = 60.0
RECENT_S = 5.0  # how far back "busy" looks


@dataclass(slots=True)
class Machine:
    """A stage's process, as the front knows it."""

    link: Link
    offer: Offer | None = None  # None: it has not offered itself yet
    assignment: int = 0  # the newest that it was given
    layers: range | None = None  # of that assignment
    held: bool = False  # and it is there
    room: int = 0  # tokens of sequences that it can hold beside it
    problem: str = ""
    failures: int = 0  # to hold what it was given
    tokens: int = 0
    work: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))  # when, and seconds computed

    @property
    def name(self) -> str:
        return self.offer.name if self.offer is not None else self.link.peer.host

    @property
    def state(self) -> str:
        if self.held:
            return "ready"
        return "failed" if self.problem else "spare" if self.layers is None else "loading"

    def busy(self, now: float) -> float:
        recent = [seconds for at, seconds in list(self.work) if at >= now - RECENT_S]
        return min(1.0, sum(recent) / RECENT_S)


class Front:
    """Handler of the links to all stages, and the `Engine` that the service asks."""

    def __init__(
        self,
        transport: Transport,
        source: Source,
        *,
        wish: Wish,
        codec: str = "fp16",
        dtype: torch.dtype = torch.float32,
        limits: Limits | None = None,
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        check_wish(wish, num_layers=source.config.num_layers)
        if codec not in wire.CODECS:
            raise UserError(f"unknown codec '{codec}'; known: {', '.join(wire.CODECS)}")
        self._transport, self._source, self._wish = transport, source, wish
        self._model = Model(
            name=source.name[-MOST_NAME:],
            config=source.config,
            fingerprint=source.fingerprint,
            reference=source.reference,
            codec=codec,
        )
        self._sizes = source.layer_bytes(dtype)
        self._scheduler = Scheduler(limits or Limits())
        self._machines: dict[str, Machine] = {}  # by instance
        self._layout: Layout | None = None
        self._assignments = 0
        self._secret = secrets.token_hex(16)  # sent to those that hold layers: it marks our batches
        self._lost: deque[tuple[float, dict[str, Any]]] = deque(maxlen=8)
        self._others: deque[str] = deque(maxlen=8)  # what is wrong with machines that never came
        self._changed: set[Callable[[], None]] = set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="smolcluster-weights")
        self._closed = False
        self._ready = threading.Event()
        self._news: list[tuple[Callable[[Told], None], Told]] = []  # for users; told when the next batch has left
        self.hops: deque[tuple[float, tuple[Spent, ...]]] = deque(maxlen=4096)  # of batches: seconds in all, and where
        self.address = transport.listen(*listen, self)
        self._tick()

    # The engine, for the thread that serves users

    @property
    def model_context(self) -> int:
        return self._source.config.max_seq_len

    @property
    def context(self) -> int:
        longest = self._scheduler.ways.longest
        return self._source.config.max_seq_len if longest is None else min(self._source.config.max_seq_len, longest)

    async def stream(self, ask: Ask) -> AsyncGenerator[Token, None]:
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Told]()

        def tell(item: Told) -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: the client is gone
                loop.call_soon_threadsafe(told.put_nowait, item)

        story: Story | None = None

        def submit() -> None:
            nonlocal story
            try:
                story = self._scheduler.submit(ask, lambda told: self._news.append((tell, told)))
            except (Busy, NobodyThere) as error:
                tell(error)
            else:
                self._pump()

        def cancel() -> None:
            if story is not None:
                self._scheduler.cancel(story)
                self._pump()

        self._transport.call_later(0.0, submit)
        try:
            while True:
                item = await told.get()
                if isinstance(item, SmolclusterError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            self._transport.call_later(0.0, cancel)

    def state(self) -> dict[str, Any]:
        """A picture for people, made where it is asked for: numbers may be of neighbouring moments."""
        now, layout = time.monotonic(), self._layout
        stages = layout.stages if layout is not None else ()
        return {
            "ready": self._scheduler.ways.open,
            "model": self._model.name,
            "layers": self._source.config.num_layers,
            "codec": self._model.codec,
            "stages": [
                {
                    "layers": [stage.layers.start, stage.layers.stop - 1],
                    "machines": self._pictures(stage.machines, now),
                }
                for stage in stages
            ],
            "spares": self._pictures(layout.spares if layout is not None else (), now),
            "lost": [lost for at, lost in list(self._lost) if now - at < RECENTLY_LOST_S],
            "problems": self.problems(),
            "there": len(self._offers()),
            "wanted": self._wish.stages,
            "running": self._scheduler.running,
            "waiting": self._scheduler.waiting,
        }

    def wait_ready(self, timeout_s: float) -> bool:
        return self._ready.wait(timeout_s)

    @property
    def coming(self) -> bool:
        """Whether every layer has a machine that holds it or loads it."""
        return self._scheduler.ways.open or self._scheduler.ways.coming

    def problems(self) -> list[str]:
        """Why machines hold nothing that are there, or should be."""
        known = [f"{machine.name}: {machine.problem}" for machine in list(self._machines.values()) if machine.problem]
        return [*known, *self._others]

    def note_problem(self, words: str) -> None:
        """Of a machine that will not come. From any thread."""
        self._others.append(words)

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
        self._reader.shutdown(cancel_futures=True)
        self._transport.close()

    def _pictures(self, instances: Iterable[str], now: float) -> list[dict[str, Any]]:
        machines = dict(self._machines)
        return [self._picture(instance, machines[instance], now) for instance in instances if instance in machines]

    def _picture(self, instance: str, machine: Machine, now: float) -> dict[str, Any]:
        return {
            "name": machine.name,
            "device": machine.offer.device if machine.offer is not None else "",
            "tokens": machine.tokens,
            "busy": round(machine.busy(now), 2),
            "sequences": self._scheduler.load(instance),
            "state": machine.state,
        }

    # Links

    def linked(self, link: Link) -> None:
        if link.peer.role != "stage":
            link.close(f"a {link.peer.role} has no business with a front of inference")

    def place(self, link: Link, head: Head) -> Tensor | None:
        return None  # a front receives no tensors

    def received(self, link: Link, message: Message) -> None:
        try:
            self._hear(link, message)
        except (ValueError, TypeError) as error:
            link.close(str(error))

    def refused(self, address: str, reason: str) -> None:
        """A front dials no one."""

    def unlinked(self, link: Link, reason: str) -> None:
        machine = self._machines.get(link.peer.instance)
        if machine is None or machine.link is not link:
            return
        now, instance = time.monotonic(), link.peer.instance
        picture = {**self._picture(instance, machine, now), "state": "lost", "why": reason}
        place = self._layout.stage_of(instance) if self._layout is not None else None
        picture["layers"] = [machine.layers.start, machine.layers.stop - 1] if machine.layers is not None else None
        del self._machines[instance]
        if machine.offer is None:  # it only asked
            return
        self._lost.append((now, {**picture, "stage": place, "at": round(time.time(), 1)}))
        if not self._closed:
            log.warning("%s is gone: %s", machine.name, printable(reason))
            if self._layout is not None:
                self._settle(mend(self._layout, instance, self._offers(), self._sizes))

    def _hear(self, link: Link, message: Message) -> None:
        instance = link.peer.instance
        machine = self._machines.get(instance)
        if message.kind is Kind.ASK and machine is not None:  # one that comes back is taken when its old link is over
            link.close("this machine has asked already")
        elif message.kind is Kind.ASK:
            self._machines[instance] = Machine(link)
            link.send(Message(kind=Kind.PLAN, meta=wire.model_meta(self._model)))
        elif machine is None or machine.link is not link:
            link.close("ask first what is served here")
        elif message.kind is Kind.JOIN and machine.offer is not None:
            link.close("this machine has offered itself already")
        elif message.kind is Kind.JOIN:
            machine.offer = self._named(wire.read_offer(message.meta), instance)
            self._joined(instance, machine.offer)
        elif message.kind is Kind.HELD:
            self._held(instance, machine, message)
        elif message.kind in (Kind.CHOSEN, Kind.FAILED):
            self._ended(link, message)
        else:
            link.close(f"{message.kind.name} is not for a front")

    # Who holds what

    def _offers(self) -> dict[str, Offer]:
        machines = list(self._machines.items())  # also asked for by threads that look on
        return {instance: machine.offer for instance, machine in machines if machine.offer is not None}

    def _named(self, offer: Offer, instance: str) -> Offer:
        """By a name that no other machine has: two on one host have the same until then."""
        taken = {other.name for known, other in self._offers().items() if known != instance}
        numbered = (f"{offer.name}-{number}" for number in itertools.count(2))
        name = offer.name if offer.name not in taken else next(name for name in numbered if name not in taken)
        return dataclasses.replace(offer, name=name)

    def _joined(self, instance: str, offer: Offer) -> None:
        log.info("%s offers itself: %s, %.1f GB", printable(offer.name), offer.device, offer.memory_bytes / 1e9)
        offers = self._offers()
        if self._layout is None and len(offers) < self._wish.stages:
            log.info("%d of %d stages are there", len(offers), self._wish.stages)
        try:
            if self._layout is not None:
                self._settle(welcome(self._layout, instance, self._wish, offers, self._sizes))
            elif len(offers) >= self._wish.stages:
                self._settle(plan(self._wish, offers, self._sizes))
        except UserError as error:  # they are too small; another may come
            log.error("%s", error)
            self._machines[instance].problem = str(error)

    def _settle(self, layout: Layout) -> None:
        """Adopt this layout, or a better one: assign layers where they change, and open ways through those that hold theirs."""
        self._layout = layout = renew(layout, self._wish, self._offers(), self._sizes)
        offers = self._offers()
        for stage, behind in zip(layout.stages, (*layout.stages[1:], None), strict=True):
            hops = tuple((m, offers[m].address) for m in behind.machines) if behind is not None else ()
            for instance in stage.machines:
                machine = self._machines[instance]
                if machine.layers != stage.layers:
                    self._assign(machine, stage.layers, hops)
        for instance in layout.spares:
            self._machines[instance].layers, self._machines[instance].held = None, False
        self._open_ways()

    def _assign(self, machine: Machine, layers: range, hops: tuple[tuple[str, str], ...]) -> None:
        self._assignments += 1
        machine.assignment, machine.layers, machine.held, machine.problem = self._assignments, layers, False, ""
        whole = self._source.config.num_layers
        assignment = Assignment(
            first_layer=layers.start,
            num_layers=len(layers),
            first=layers.start == 0,
            last=layers.stop == whole,
            secret=self._secret,
            name=machine.name,
            next=hops,
        )
        machine.link.send(Message(kind=Kind.LAYERS, step=self._assignments, meta=wire.meta_of(assignment)))

    def _held(self, instance: str, machine: Machine, message: Message) -> None:
        if message.step != machine.assignment or machine.layers is None:
            return  # of an assignment that has been overtaken
        if "need" in message.meta:
            dtype = wire.read_type(message.meta)
            self._send_weights(instance, machine, machine.assignment, machine.layers, dtype)
        elif "why" in message.meta:
            self._cannot_hold(instance, machine, printable(str(message.meta["why"]))[:500])
        else:
            machine.held, machine.room = True, wire.read_room(message.meta)
            log.info("%s holds layers %d to %d", machine.name, machine.layers.start, machine.layers[-1])
            self._open_ways()

    def _cannot_hold(self, instance: str, machine: Machine, why: str) -> None:
        """Others may; and it may be able to hold less."""
        assert self._layout is not None
        assert machine.layers is not None
        assert machine.offer is not None
        log.error("%s cannot hold layers %d to %d: %s", machine.name, machine.layers.start, machine.layers[-1], why)
        machine.offer = smaller(machine.offer, machine.layers, self._sizes)
        machine.problem, machine.layers, machine.held = why, None, False
        machine.failures += 1
        layout = mend(self._layout, instance, self._offers(), self._sizes)
        if machine.failures < MOST_FAILURES:
            layout = welcome(layout, instance, self._wish, self._offers(), self._sizes)
        self._settle(layout)

    def _send_weights(
        self, instance: str, machine: Machine, assignment: int, layers: range, dtype: torch.dtype
    ) -> None:
        """To a machine without the files, in the type that it holds: in a wider one they may not fit its memory. One machine
        after the other. On a thread of its own: it may take a while."""
        whole = self._source.config.num_layers

        def read() -> None:
            try:
                tensors = self._source.load(
                    layers,
                    first=layers.start == 0,
                    last=layers.stop == whole,
                    dtype=dtype,
                    device=torch.device("cpu"),
                )
                messages = state_messages(tensors, {"assignment": assignment})
            except Exception as error:  # noqa: BLE001 - whatever it is, the machine would wait for ever
                problem = f"its weights cannot be read here: {str(error)[:400] or type(error).__name__}"

                def give_up() -> None:
                    if machine.assignment == assignment and self._machines.get(instance) is machine:
                        self._cannot_hold(instance, machine, problem)

                self._transport.call_later(0.0, give_up)
                return

            left, over = iter(messages), threading.Event()

            def send(whole: bool = True) -> None:
                """The next slice, when one has gone: a share may be larger than what a link takes at once."""
                message = next(left, None) if whole and machine.assignment == assignment else None
                if message is None:
                    over.set()
                else:
                    machine.link.send(message, sent=send)

            for _ in range(SLICES_AHEAD):
                self._transport.call_later(0.0, send)
            while not over.wait(0.2) and not self._closed:
                pass  # so that no more than one share is in memory here

        self._reader.submit(read)

    def _open_ways(self) -> None:
        layout = self._layout
        assert layout is not None
        stages = tuple(tuple(m for m in stage.machines if self._machines[m].held) for stage in layout.stages)
        cores = {i: (o.host, o.cores, o.host_cores) for i, o in self._offers().items()}
        width = width_of(stages, cores) if all(stages) else 1
        coming = all(any(not self._machines[m].problem for m in stage.machines) for stage in layout.stages)
        ways = Ways(stages, width, self._room(stages), coming=coming)
        self._scheduler.set_ways(ways, now=time.monotonic())
        if ways.open:
            if not self._ready.is_set():
                log.info("all layers are held: ready")
            self._ready.set()
        else:
            self._ready.clear()
        self._pump()

    def _room(self, stages: tuple[tuple[str, ...], ...]) -> dict[str, int]:
        """Machines that are processes on one device share what it has."""
        offers = self._offers()
        sharing = Counter((offers[m].host, offers[m].device) for stage in stages for m in stage)
        return {
            m: self._machines[m].room // sharing[offers[m].host, offers[m].device] for stage in stages for m in stage
        }

    # Batches

    def _pump(self) -> None:
        """Send what can be sent, and tell the machines what they may forget: first, since the batch may need the room."""
        while (batch := self._scheduler.next_batch(now=time.monotonic())) is not None:
            self._forget()
            self._send(batch)
        self._forget()
        if self._news:
            self._transport.call_later(0.0, self._tell_news)

    def _forget(self) -> None:
        over: dict[str, list[int]] = {}
        for number, way in self._scheduler.over:
            for instance in way:
                over.setdefault(instance, []).append(number)
        self._scheduler.over.clear()
        for instance, numbers in over.items():
            if instance in self._machines:
                self._machines[instance].link.send(Message(kind=Kind.FORGET, meta={"sequences": numbers}))

    def _tell_news(self) -> None:
        """Waking users takes time, and the machines need none of them to go on: these come after."""
        news, self._news = self._news, []
        for tell, told in news:
            tell(told)

    def _send(self, sent: Sent) -> None:
        route = tuple((m, self._machines[m].offer.address) for m in sent.way[1:])  # type: ignore[union-attr]
        batch = Batch(rows=sent.rows, secret=self._secret, route=route, samplings=sent.openings)
        payload = torch.tensor(sent.tokens, dtype=torch.int64)
        message = Message(kind=Kind.ROWS, step=sent.number, meta=wire.meta_of(batch), payload=payload)
        try:
            self._machines[sent.way[0]].link.send(message)
        except ValueError as error:  # too long; only its own sequences fail
            self._scheduler.lost(sent.number, now=time.monotonic(), why=str(error))

    def _ended(self, link: Link, message: Message) -> None:
        """A batch is done or has failed. Accepted from the machines of its way only."""
        chosen, spent = wire.read_chosen(message.meta) if message.kind is Kind.CHOSEN else ({}, [])
        sent = self._scheduler.under_way.get(message.step)
        if sent is None:
            return  # it was given up meanwhile
        if link.peer.instance not in (sent.way[-1:] if message.kind is Kind.CHOSEN else sent.way):
            link.close("that batch went another way")
        elif any(token.token >= self._source.config.vocab_size for token in chosen.values()):
            link.close("a token that the model does not have")
        elif message.kind is Kind.CHOSEN:
            self._count(sent, spent)
            self._scheduler.chosen(message.step, chosen)
            self._pump()
        else:
            why = printable(str(message.meta.get("why")))[:500]
            log.warning("batch %d failed: %s", message.step, why)
            self._scheduler.lost(message.step, now=time.monotonic(), why=why)
            self._pump()

    def _count(self, sent: Sent, spent: list[Spent]) -> None:
        """Note how long a batch took, and where."""
        now, tokens = time.monotonic(), sum(row.count for row in sent.rows)
        self.hops.append((now - sent.at, tuple(spent)))
        for instance, one in zip(sent.way, spent, strict=False):
            if instance in self._machines:
                self._machines[instance].tokens += tokens
                self._machines[instance].work.append((now, one.computed_s))

    def _tick(self) -> None:
        if self._closed:
            return
        self._transport.call_later(TICK_S, self._tick)
        now = time.monotonic()
        self._scheduler.give_up(now=now)
        for number, sent in list(self._scheduler.under_way.items()):
            if now - sent.at > STUCK_S:
                log.error("batch %d has not come back for %g s", number, STUCK_S)
                self._scheduler.lost(number, now=now)
        self._pump()
