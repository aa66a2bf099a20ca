"""A machine that holds layers: it offers itself to a front, holds the layers it is assigned, and passes batches on.

    the transport's thread     receives; puts tasks into a queue; computes short batches itself
    this thread                loads, computes, chooses; one thing after the other

A batch that cannot go on ends here with a FAILED to the front, which begins its sequences again. A front that is lost is
dialled until it is back, or another is there; layers are kept meanwhile, caches are not.
"""

from __future__ import annotations

import dataclasses
import functools
import hmac
import logging
import math
import os
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from smolcluster.comm.addresses import is_loopback
from smolcluster.comm.elastic.collectives.operations import Destination
from smolcluster.comm.elastic.collectives.state_transfer import IncomingState
from smolcluster.comm.elastic.transport.api import Dialer, Handler, Link, Transport
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.comm.elastic.transport.sockets import join_address, split_address
from smolcluster.compute.device import synchronize
from smolcluster.compute.memory import built_in_bytes, free_bytes
from smolcluster.errors import SmolclusterError
from smolcluster.models.parts import part_of, type_name
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import build
from smolcluster.observe.text import printable
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.part import Part, Row, cache_bytes_per_token
from smolcluster.serve.engine.sampling import Chooser, choose
from smolcluster.serve.engine.sources import Source, open_source
from smolcluster.serve.engine.types import Token
from smolcluster.serve.engine.wire import Assignment, Batch, Model, Offer, Opening, Spent

log = logging.getLogger(__name__)

REMEMBERED = 65536  # sequences that are over
DIAL_S = 1.5  # for a machine that comes next
PASSED_ON = 64  # batches, of which none is under way any more when so many others have followed
EARLY_S = 0.05  # a timer may be early by a little
# Of the memory that is left: a cache that grows is there twice for a moment, and has room beyond its tokens.
FOR_CACHES = 0.75
PROBES = 8
QUICK_TOKENS, QUICK_S = 64, 0.15


class Holder:
    """Handler of all its links: the one to the front, and those between stages."""

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
        source: Source | None = None,
        files: Path | None = None,
    ) -> None:
        """`advertise`: the host that peers dial, where it is not the one that is listened on. `source`: a model that is
        open already. `files`: a file or folder of this machine that the front may name; without, its weights come over the
        wire, and only a model in an installed package is opened here."""
        self._transport, self._front_address = transport, front
        self._name, self._host, self._device = name, host, device
        self._dtype = dtype
        self._memory_bytes = memory_bytes
        self._source = source
        self._files = None if files is None else files.resolve()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._put = self._done = 0  # tasks: counted by the transport's thread, and by the one that computes
        self._lasted = (1, math.inf)  # the last batch of these layers: its tokens, and seconds
        self._front: Link | None = None
        self._ending = False
        self.refusal: str | None = None  # why the front would not have us; it is not asked again
        self._links: dict[str, Link] = {}  # to machines that come next, by instance
        self._dialers: dict[str, Dialer] = {}
        self._unsent: dict[str, list[tuple[float, Message]]] = {}  # for machines that are being dialled
        self._passed_on: dict[Link, deque[int]] = {}  # batches that have left
        self._landing: dict[Link, tuple[Batch, float]] = {}
        self._incoming: IncomingState | None = None
        self._slice: Destination | None = None  # of it, on its way
        self._wanted: tuple[int, Assignment] | None = None  # whose weights come from the front
        self._secret: str | None = None  # of the front: whose batches are taken
        # Of the thread that computes, or of the transport's while that has nothing to do.
        self._model: Model | None = None
        self._weights: dict[str, Tensor] = {}
        self._part: Part | None = None
        self._choosers: dict[int, Chooser] = {}
        self._over: OrderedDict[int, None] = OrderedDict()
        bound = transport.listen(*listen, self)
        self.address = bound if advertise is None else join_address(advertise, split_address(bound)[1])
        self._dialer = transport.dial(
            front, self._dialled(self.front_is_there, self.front_is_gone, self._front_refused)
        )

    def run(self) -> None:
        """Until `stop`."""
        while (task := self._todo.get()) is not None:
            try:
                task()
            except Exception:  # one bad task must not end a machine that others depend on
                log.exception("a task failed")
            self._done += 1

    def stop(self) -> None:
        """From any thread."""
        self._ending = True
        self._todo.put(None)

    def _later(self, task: Callable[[], None]) -> None:
        """On the thread that computes, after what is there already. Called on the transport's thread only."""
        self._put += 1
        self._todo.put(task)

    def _quick(self, batch: Batch) -> bool:
        """Whether to compute on the transport's own thread: waking another one twice takes longer than a hop should.

        Only when that one has nothing to do, and for so short a time that no heartbeat is late: fewer tokens than the last
        batch had take no longer than it did, and more of them no longer than in proportion.
        """
        idle = self._put == self._done
        tokens, seconds = self._lasted
        return idle and batch.num_tokens <= QUICK_TOKENS and seconds * max(1.0, batch.num_tokens / tokens) < QUICK_S

    # Received, on the transport's thread

    def linked(self, link: Link) -> None:
        """The stage before this one, or a peer that claims to be: its batches must carry the front's secret."""
        if link.peer.role != "stage":
            link.close(f"a {link.peer.role} has no business with a stage of inference")

    def place(self, link: Link, head: Head) -> Tensor | None:
        if head.kind is Kind.STATE and link is self._front and self._incoming is not None:
            self._slice = self._incoming.place(head)
            return None if self._slice is None else self._slice.tensor
        if head.kind is not Kind.ROWS or self._model is None:
            return None
        try:
            batch = wire.read_batch(head.meta)
        except ValueError as error:
            link.close(str(error))
            return None
        if self._secret is None or not hmac.compare_digest(batch.secret.encode(), self._secret.encode()):
            link.close("a batch that the front has not sent")
            return None
        width = None if head.dtype == "int64" else self._model.config.model_dim
        tensor = wire.landing(head, num_tokens=batch.num_tokens, width=width)
        if tensor is not None:
            self._landing[link] = (batch, time.monotonic())
        return tensor

    def received(self, link: Link, message: Message) -> None:
        try:
            self._hear(link, message)
        except (ValueError, SmolclusterError) as error:  # the latter: an address that is none
            link.close(str(error))

    def _hear(self, link: Link, message: Message) -> None:
        if message.kind is Kind.ROWS:
            landed, payload = self._landing.pop(link, None), message.payload
            if landed is None or payload is None:
                raise ValueError("rows without tokens or activations")
            (batch, at), number, codec = landed, message.step, message.codec
            if self._quick(batch):
                self._work(number, batch, payload, codec, at)
            else:
                self._later(lambda: self._work(number, batch, payload, codec, at))
        elif link is not self._front:
            link.close(f"{message.kind.name} is not spoken between stages")
        elif message.kind is Kind.PLAN:
            model = wire.read_model(message.meta)
            self._later(lambda: self._offer(model))
        elif message.kind is Kind.LAYERS:
            if self._model is None:
                raise ValueError("layers of a model that was never told")
            assignment = wire.read_assignment(message.meta, num_layers=self._model.config.num_layers)
            number, self._secret = message.step, assignment.secret
            self._incoming = self._slice = self._wanted = None  # of an assignment before: the front sends no more of it
            for instance, address in assignment.next:
                self._dial(instance, address)
            self._later(lambda: self._hold(number, assignment))
        elif message.kind is Kind.STATE:
            self._state(message)
        elif message.kind is Kind.FORGET:
            numbers = wire.read_sequences(message.meta)
            self._later(lambda: self._forget(numbers))
        elif message.kind is Kind.STOP:
            log.info("the server has ended, and so does this stage")
            self.stop()
        else:
            link.close(f"{message.kind.name} is not for a stage")

    def unlinked(self, link: Link, reason: str) -> None:
        self._landing.pop(link, None)

    def refused(self, address: str, reason: str) -> None:
        """A peer that connected to us speaks another version. Not logged: there may be many."""

    def _dialled(
        self,
        linked: Callable[[Link], None],
        unlinked: Callable[[Link, str], None],
        refused: Callable[[str, str], None],
    ) -> Handler:
        """The handler of a link that is opened from here."""
        own = SimpleNamespace(linked=linked, unlinked=unlinked, refused=refused)
        own.place, own.received = self.place, self.received
        return cast(Handler, own)

    def _front_refused(self, address: str, reason: str) -> None:
        self.refusal = reason
        self.stop()

    def front_is_there(self, link: Link) -> None:
        self._front = link
        log.info("linked to the server at %s as %s", self._front_address, self._name)
        link.send(Message(kind=Kind.ASK))

    def front_is_gone(self, link: Link, reason: str) -> None:
        self.unlinked(link, reason)
        if link is self._front:
            if not self._ending:
                log.warning("the server at %s is gone: %s", self._front_address, reason)
            self._front, self._incoming, self._wanted, self._secret = None, None, None, None
            self._later(self._forget_all)

    # Machines that come next, on the transport's thread

    def _dial(self, instance: str, address: str) -> None:
        """A loopback address is one of the front's machine: from elsewhere it is found where the front is."""
        front, (host, port) = split_address(self._front_address)[0], split_address(address)
        if is_loopback(host) and not is_loopback(front):
            address = join_address(front, port)
        if instance not in self._dialers:
            handler = self._dialled(
                functools.partial(self._next_is_there, instance),
                functools.partial(self._next_is_unlinked, instance),
                lambda _, reason: self._next_is_gone(instance, reason),
            )
            self._dialers[instance] = self._transport.dial(address, handler)

    def _next_is_there(self, instance: str, link: Link) -> None:
        if link.peer.instance != instance:
            link.close("another process was meant")
            return
        self._links[instance] = link
        for _, message in self._unsent.pop(instance, []):
            self._pass_on(link, message)

    def _next_is_gone(self, instance: str, reason: str) -> None:
        self._links.pop(instance, None)
        dialer = self._dialers.pop(instance, None)
        if dialer is not None:
            dialer.close()
        for _, message in self._unsent.pop(instance, []):
            self._failed(message.step, f"the next stage is gone: {reason}")

    def _next_is_unlinked(self, instance: str, link: Link, reason: str) -> None:
        """What had left over this link may not have come. The front knows what it still waits for, and when the machine itself
        is gone: that it has to find out first, or it would take these batches for ones that cannot be computed."""
        front, numbers = self._front, self._passed_on.pop(link, ())

        def tell() -> None:
            for number in numbers if self._front is front else ():
                self._failed(number, f"the link to the next stage was lost: {reason}")

        self._transport.call_later(DIAL_S, tell)
        self._next_is_gone(instance, reason)

    def _send_next(self, instance: str, address: str, message: Message) -> None:
        link = self._links.get(instance)
        if link is not None and link.open:
            self._pass_on(link, message)
            return
        self._unsent.setdefault(instance, []).append((time.monotonic(), message))
        self._dial(instance, address)
        self._transport.call_later(DIAL_S, lambda: self._give_up(instance))

    def _give_up(self, instance: str) -> None:
        now = time.monotonic()
        waiting = self._unsent.pop(instance, [])
        due = now - DIAL_S + EARLY_S
        late = [message for at, message in waiting if at <= due]
        self._unsent[instance] = [(at, message) for at, message in waiting if at > due]
        for message in late:
            self._failed(message.step, f"the next stage cannot be reached within {DIAL_S:g} s")
        if not self._unsent[instance]:
            del self._unsent[instance]
            if late and instance not in self._links and instance in self._dialers:
                self._dialers.pop(instance).close()

    def _pass_on(self, link: Link, message: Message) -> None:
        def sent(whole: bool) -> None:
            if whole:
                self._passed_on.setdefault(link, deque(maxlen=PASSED_ON)).append(message.step)
            else:
                self._failed(message.step, f"{link.peer.name} was lost")

        link.send(message, sent=sent)

    def _failed(self, number: int, why: str) -> None:
        self._tell(Kind.FAILED, step=number, meta={"why": why[:500]})

    # Done, on this thread

    def _offer(self, model: Model) -> None:
        """Say what is here for this model."""
        if self._model is not None and self._model.fingerprint != model.fingerprint:
            self._part, self._weights = None, {}
        self._forget_all()
        self._model = model
        held = sum(tensor.nbytes for tensor in self._weights.values())  # what is free now, it has taken already
        offer = Offer(
            name=self._name,
            host=self._host,
            address=self.address,
            device=str(self._device),
            cores=torch.get_num_threads() if self._device.type == "cpu" else 1,
            host_cores=os.cpu_count() or 1,
            memory_bytes=self._memory_bytes or free_bytes(self._device) + held,
            layer_s=probe(model.config, self._device, self._type()),
            weight_bytes=self._type().itemsize,
            shared_bytes=built_in_bytes(self._device),
        )
        self._tell(Kind.JOIN, meta=wire.meta_of(offer))

    def _type(self) -> torch.dtype:
        return self._dtype or (torch.float32 if self._device.type == "cpu" else torch.bfloat16)

    def _hold(self, number: int, assignment: Assignment, sent: dict[str, Tensor] | None = None) -> None:
        """`sent`: the weights, where they have come from the front."""
        model, layers = self._model, assignment.layers
        assert model is not None
        if assignment.name != self._name:
            log.info("the server calls this stage %s: there is another %s", printable(assignment.name), self._name)
            self._name = assignment.name
        try:
            if not self._holds(assignment):
                weights = self._load(model, assignment) if sent is None else self._moved(sent)
                if weights is None:
                    self._part, self._weights = None, {}  # their memory goes before the others' comes
                    self._wanted = (number, assignment)
                    self._tell(Kind.HELD, step=number, meta={"need": type_name(self._type())})
                    return
                self._build(model.config, assignment, weights)
            self._say_held(number)
        except (SmolclusterError, ValueError, OSError, RuntimeError) as error:  # RuntimeError: no memory on the device
            log.error("layers %d to %d cannot be held: %s", layers.start, layers.stop - 1, error)
            self._part, self._weights = None, {}
            self._tell(Kind.HELD, step=number, meta={"why": str(error)[:500] or type(error).__name__})

    def _holds(self, assignment: Assignment) -> bool:
        part, wanted = self._part, (assignment.layers, assignment.first, assignment.last)
        return part is not None and (part.layers, part.first, part.last) == wanted

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device, self._type()) for name, tensor in tensors.items()}

    def _say_held(self, number: int) -> None:
        self._forget_all()
        room, part = self._room(), self._part
        assert part is not None
        log.info("holds layers %d to %d, with room for %d tokens", part.layers.start, part.layers.stop - 1, room)
        self._tell(Kind.HELD, step=number, meta={"room": room})

    def _room(self) -> int:
        """For so many tokens there are keys and values in the memory that is left."""
        part, free = self._part, free_bytes(self._device)
        assert part is not None
        if self._memory_bytes is not None:
            free = min(free, self._memory_bytes - sum(tensor.nbytes for tensor in self._weights.values()))
        return max(0, int(FOR_CACHES * free)) // (len(part.layers) * cache_bytes_per_token(part.config, part.dtype))

    def _load(self, model: Model, assignment: Assignment) -> dict[str, Tensor] | None:
        """What is not here yet, from files; None when this machine has none of them."""
        source, layers = self._find(model), assignment.layers
        if source is None:
            return None
        names = part_of(self._weights, model.config, layers, first=assignment.first, last=assignment.last)
        kept = {name: self._weights[name] for name in names}
        missing = [n for n in layers if not part_of(kept, model.config, range(n, n + 1), first=False, last=False)]
        first = assignment.first and not (self._part is not None and self._part.first)
        last = assignment.last and not (self._part is not None and self._part.last)
        self._part, self._weights = None, kept  # what is not kept makes room for what comes
        spans = _spans(missing) or [range(layers.start, layers.start)]
        for place, span in enumerate(spans):
            kept |= source.load(
                span,
                first=first and place == 0,
                last=last and place == len(spans) - 1,
                dtype=self._type(),
                device=self._device,
            )
        return kept

    def _find(self, model: Model) -> Source | None:
        if self._source is not None and self._source.fingerprint == model.fingerprint:
            return self._source
        if not self._may_open(model.reference):
            log.info(
                "the files of %s are not open to the server (see --model): it will send them", printable(model.name)
            )
            return None
        try:
            found = open_source(model.reference)
        except SmolclusterError as error:
            log.info("the files of %s are not here (%s): the front will send them", printable(model.name), error)
            return None
        if found.fingerprint != model.fingerprint:
            log.warning("%s is another model here: the front will send its own", found.name)
            return None
        self._source = found
        return found

    def _may_open(self, reference: Mapping[str, str]) -> bool:
        """Whether the owner of this machine lets the front name these files."""
        if reference.get("kind") == "package":
            return True
        try:
            return self._files is not None and Path(reference.get("path", "")).resolve().is_relative_to(self._files)
        except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links
            return False

    def _build(self, config: DecoderConfig, assignment: Assignment, weights: dict[str, Tensor]) -> None:
        self._part = Part(
            config,
            assignment.layers,
            first=assignment.first,
            last=assignment.last,
            weights=weights,
            device=self._device,
            dtype=self._type(),
        )
        self._weights, self._lasted = weights, (1, math.inf)

    def _work(self, number: int, batch: Batch, payload: Tensor, codec: str, arrived: float) -> None:
        """One batch: through the layers, then to the next stage or back to the front."""
        began = time.monotonic()
        try:
            message = self._run(number, batch, payload, codec, arrived, began)
            if message.kind is Kind.CHOSEN:
                self._tell(Kind.CHOSEN, step=number, meta=message.meta)
        except Exception as error:  # noqa: BLE001 - whatever it is: the front begins these sequences again, and we go on
            log.warning("batch %d ends here: %s", number, error)
            for row in batch.rows:
                self._drop(row.sequence)
            self._failed(number, f"{self._name}: {error}")
            return
        if message.kind is Kind.ROWS:
            instance, address = batch.route[0]
            link = self._links.get(instance)
            if link is not None and link.open:  # from this thread: waking the transport's would take longer
                self._pass_on(link, message)
            else:
                self._transport.call_later(0.0, lambda: self._send_next(instance, address, message))

    def _run(self, number: int, batch: Batch, payload: Tensor, codec: str, arrived: float, began: float) -> Message:
        part, model = self._part, self._model
        if part is None or model is None:
            raise ValueError("no layers are held here")
        if part.first != (payload.dtype == torch.int64) or part.last == bool(batch.route):
            raise ValueError("this batch is not for the layers that are held here")
        width = model.config.model_dim
        x = payload if part.first else wire.decode(payload, codec, num_tokens=batch.num_tokens, width=width)
        rows, x = self._still_wanted(batch.rows, x)
        out = part.run(rows, x.to(self._device)) if rows else x
        if not part.last:
            encoded, used = wire.encode(out, model.codec) if rows else (payload, codec)
            synchronize(self._device)
            spent = (*batch.spent, self._spent(rows, arrived, began))
            passed = dataclasses.replace(batch, rows=rows or batch.rows, route=batch.route[1:], spent=spent)
            return Message(kind=Kind.ROWS, step=number, codec=used, meta=wire.meta_of(passed), payload=encoded)
        for sequence, opening in batch.samplings.items():
            if sequence not in self._over:
                self._choosers[sequence] = _chooser(opening)
        chosen = self._choose([row for row in rows if row.answer], out) if rows else {}
        spent = (*batch.spent, self._spent(rows, arrived, began))
        return Message(kind=Kind.CHOSEN, meta=wire.chosen_meta(chosen, spent))

    def _still_wanted(self, rows: tuple[Row, ...], x: Tensor) -> tuple[tuple[Row, ...], Tensor]:
        """Without sequences that are over: their caches are gone."""
        if not any(row.sequence in self._over for row in rows):
            return rows, x
        pieces = zip(rows, torch.split(x, [row.count for row in rows]), strict=True)
        kept = [(row, piece) for row, piece in pieces if row.sequence not in self._over]
        if not kept:
            return (), x[:0]
        return tuple(row for row, _ in kept), torch.cat([piece for _, piece in kept])

    def _choose(self, rows: list[Row], logits: Tensor) -> dict[int, Token]:
        missing = [row.sequence for row in rows if row.sequence not in self._choosers]
        if missing:
            raise ValueError(f"how to choose for sequence {missing[0]} was never said")
        choosers = [self._choosers[row.sequence] for row in rows]
        tokens = choose(choosers, logits)
        for chooser, token in zip(choosers, tokens, strict=True):
            chooser.accept(token.token)
        return {row.sequence: token for row, token in zip(rows, tokens, strict=True)}

    def _spent(self, rows: Sequence[Row], arrived: float, began: float) -> Spent:
        now = time.monotonic()
        if rows:
            self._lasted = (sum(row.count for row in rows), now - began)
        return Spent(name=self._name, waited_s=round(began - arrived, 6), computed_s=round(now - began, 6))

    def _forget(self, sequences: list[int]) -> None:
        for sequence in sequences:
            self._over[sequence] = None
            self._drop(sequence)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def _drop(self, sequence: int) -> None:
        self._choosers.pop(sequence, None)
        if self._part is not None:
            self._part.forget(sequence)

    def _forget_all(self) -> None:
        self._choosers.clear()
        self._over.clear()
        if self._part is not None:
            for sequence in self._part.lengths():
                self._part.forget(sequence)

    def _tell(self, kind: Kind, *, step: int = 0, meta: Mapping[str, Any]) -> None:
        front = self._front
        if front is not None:
            front.send(Message(kind=kind, step=step, meta=dict(meta)))

    # Weights that come from the front

    def _state(self, message: Message) -> None:
        """On the transport's thread: the pages of the list, then every slice."""
        if self._incoming is None:
            if self._wanted is None:
                raise ValueError("weights that nobody asked for")
            limit = self._memory_bytes or free_bytes(self._device)
            self._incoming = IncomingState(message.meta, expected=None, limit_bytes=limit)
        elif self._slice is not None:
            self._slice.arrived()
            self._slice = None
        else:
            self._incoming.add(message.meta)
        if self._incoming.complete:
            tensors, wanted = self._incoming.tensors, self._wanted
            self._incoming, self._wanted = None, None
            assert wanted is not None
            self._later(lambda: self._hold(*wanted, tensors))


def _chooser(opening: Opening) -> Chooser:
    prompt, generated = opening.tokens[: opening.prompt], opening.tokens[opening.prompt :]
    return Chooser(opening.sampling, prompt=prompt, generated=generated, position=opening.position)


def _spans(numbers: list[int]) -> list[range]:
    """[3, 4, 8] -> 3 to 4, 8 to 8."""
    spans: list[range] = []
    for number in numbers:
        if spans and spans[-1].stop == number:
            spans[-1] = range(spans[-1].start, number + 1)
        else:
            spans.append(range(number, number + 1))
    return spans


def probe(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds that a token takes through one layer here: the quickest of a few."""
    one = dataclasses.replace(config, num_layers=1, vocab_size=1)
    weights = {name: tensor.to(device, dtype) for name, tensor in build(one).state_dict().items()}
    part = Part(one, range(1), first=False, last=False, weights=weights, device=device, dtype=dtype)
    x = torch.zeros(1, config.model_dim, device=device)
    times = []
    for start in range(min(PROBES, config.max_seq_len)):
        synchronize(device)
        began = time.perf_counter()
        part.run([Row(sequence=0, start=start, count=1, answer=False)], x)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
