"""The scheduler: sequences in, batches out. Pure: no threads or sockets, and callers pass the time.

    waiting ── admitted to a route ──> running ── a token ──> running ...  ──> finished
       ^                                 │ a machine of its route is lost
       └─────────────────────────────────┘ restarted from its first token, under a new number

**Batches.** All sequences of one route that wait for their next token share a batch. A prompt is prefilled in chunks, so that
it does not delay the other sequences; its chunks are pipelined through the stages. At most `Routes.width` batches are in
flight: the number of stages that can compute at the same time. One more may be a prompt chunk, so that a stage that becomes
idle has work.

**Memory.** A machine reports how many tokens it has room for. A sequence is admitted where its tokens fit. When a machine
runs out of room, the latest sequence is preempted and restarts when there is room. One that fills a machine alone restarts on a
larger machine of that stage; if there is none it ends, as at the end of the context.

Every start of a sequence has a new number, so late messages of an earlier start are ignored.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from smolcluster.errors import SmolclusterError
from smolcluster.serve.engine.stage_model import Row
from smolcluster.serve.engine.types import Busy, PromptTooLong, RetriesExhausted, SequenceRequest, Token, Unavailable
from smolcluster.serve.engine.wire import SamplingState

Route = tuple[str, ...]  # one machine of each stage
StreamItem = Token | SmolclusterError

MAX_TRIES = 6  # per sequence
MAX_HISTORY = 65536  # tokens of sampling states in one batch: they travel as JSON, and a message has a size limit
HEADROOM = 64  # free tokens per sequence that admission to a machine with other sequences requires


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    running: int = 32
    waiting: int = 128
    chunk: int = 128  # prompt tokens in one batch
    patience_s: float = 20.0  # how long to wait for a lost machine
    loading_s: float = 600.0  # the same while a machine loads the missing layers


@dataclass(frozen=True, slots=True)
class Routes:
    """The ready machines by stage, and how many batches they can process at the same time."""

    stages: tuple[tuple[str, ...], ...] = ()
    width: int = 1
    cache_tokens: Mapping[str, int] = field(default_factory=dict)  # capacity of each machine; absent: no limit
    loading: bool = False  # the missing layers are being loaded

    @property
    def ready(self) -> bool:
        return bool(self.stages) and all(self.stages)

    @property
    def max_sequence_tokens(self) -> int | None:
        """Return the maximum length of one sequence in tokens; None: no limit."""
        known = [[self.cache_tokens[m] for m in stage if m in self.cache_tokens] for stage in self.stages]
        limits = [
            max(rooms) for rooms, stage in zip(known, self.stages, strict=True) if rooms and len(rooms) == len(stage)
        ]
        return min(limits, default=None)


@dataclass(eq=False, slots=True)
class SequenceState:
    """A sequence from its request to its last token."""

    request: SequenceRequest
    deliver: Callable[[StreamItem], None]
    tokens: list[int]
    number: int
    arrived: int  # order of arrival
    route: Route | None = None
    sent: int = 0  # tokens sent to the machines
    opened: bool = False  # the last stage has its sampling state
    tries: int = 0
    lost_at: float | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch in flight; `tokens` are those of its rows, concatenated."""

    number: int
    route: Route
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    states: dict[int, SamplingState]
    at: float


@dataclass(slots=True)
class Scheduler:
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    routes: Routes = field(default_factory=Routes)
    in_flight: dict[int, SentBatch] = field(default_factory=dict)
    finished: list[tuple[int, Route]] = field(default_factory=list)  # caches to free; the caller clears it
    _waiting: deque[SequenceState] = field(default_factory=deque)
    _running: dict[int, SequenceState] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _batches: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # Sequences

    def submit(self, request: SequenceRequest, deliver: Callable[[StreamItem], None]) -> SequenceState:
        """Queue a sequence; `deliver` gets its tokens. Raises Unavailable or Busy."""
        if not self.routes.ready and not self.routes.loading:
            raise Unavailable("some layers are not loaded on any stage")
        if len(self._waiting) >= self.limits.waiting:
            raise Busy(f"{len(self._waiting)} requests are queued already")
        number = next(self._numbers)
        sequence = SequenceState(request, deliver, list(request.tokens), number, arrived=number)
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: SequenceState) -> None:
        """Stop delivering. No effect on a finished sequence."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif self._running.get(sequence.number) is sequence:
            self._end(sequence)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def load(self, machine: str) -> int:
        return len(self._on(machine))

    def _on(self, machine: str) -> list[SequenceState]:
        running = list(self._running.values())  # a copy: other threads read this too
        return [sequence for sequence in running if sequence.route is not None and machine in sequence.route]

    # Machines

    def set_routes(self, routes: Routes, *, now: float) -> None:
        """Set the routes. Restart the sequences whose route is lost, and drop their batches: a machine that reconnects has
        lost their caches."""
        if self.routes.loading and not (routes.ready or routes.loading):  # `patience_s` begins now
            for sequence in self._waiting:
                sequence.lost_at = now
        self.routes = routes
        self.in_flight = {number: sent for number, sent in self.in_flight.items() if self._is_valid(sent.route)}
        for sequence in list(self._running.values()):
            if not self._is_valid(sequence.route):
                self._restart(sequence, now)

    def fail(self, batch: int, *, now: float, why: str = "no result") -> None:
        """Restart the sequences of a batch, each alone, so that one that cannot be computed fails no others."""
        sent = self.in_flight.pop(batch, None)
        for row in sent.rows if sent is not None else ():
            sequence = self._running.get(row.sequence)
            if sequence is not None:
                self._retry(sequence, now, why)

    def _retry(self, sequence: SequenceState, now: float, why: str) -> None:
        sequence.tries += 1
        if sequence.tries >= MAX_TRIES:
            self._end(sequence, RetriesExhausted(f"failed {sequence.tries} times: {why}"))
        else:
            self._restart(sequence, now)

    def expire(self, *, now: float) -> None:
        """End the sequences that have waited too long for a machine."""
        if self.routes.ready:
            for sequence in self._waiting:
                sequence.lost_at = None  # they wait for room, not for a machine
            return
        patience_s = self.limits.loading_s if self.routes.loading else self.limits.patience_s
        for sequence in list(self._waiting):
            since = sequence.lost_at = now if sequence.lost_at is None else sequence.lost_at
            if now - since > patience_s:
                self._waiting.remove(sequence)
                sequence.deliver(Unavailable(f"some layers were not loaded on any stage for {patience_s:g} s"))

    def _is_valid(self, route: Route | None) -> bool:
        if route is None or len(route) != len(self.routes.stages):
            return False
        return all(machine in stage for machine, stage in zip(route, self.routes.stages, strict=True))

    def _restart(self, sequence: SequenceState, now: float) -> None:
        """Queue it again in order of arrival: the machines prefill the prompt and the generated tokens."""
        self._release(sequence)
        sequence.number, sequence.route, sequence.sent, sequence.opened = next(self._numbers), None, 0, False
        sequence.lost_at = now
        later = (place for place, other in enumerate(self._waiting) if other.arrived > sequence.arrived)
        self._waiting.insert(next(later, len(self._waiting)), sequence)

    def _release(self, sequence: SequenceState) -> None:
        del self._running[sequence.number]
        if sequence.route is not None:
            self.finished.append((sequence.number, sequence.route))

    def _end(self, sequence: SequenceState, last: StreamItem | None = None) -> None:
        self._release(sequence)
        if last is not None:
            sequence.deliver(last)

    # Batches

    def next_batch(self, *, now: float) -> SentBatch | None:
        """Return the next batch to send, None when nothing can be sent."""
        self._make_room(now)
        self._admit()
        routes = {sequence.route for sequence in self._running.values() if sequence.route is not None}
        for route in sorted(routes, key=self._busy):
            batch = self._batch_of(route, now)
            if batch is not None:
                self.in_flight[batch.number] = batch
                return batch
        return None

    def complete(self, batch: int, tokens: dict[int, Token]) -> None:
        """Take the tokens of a batch. A sequence without one is retried; unknown batches and earlier starts are ignored."""
        sent = self.in_flight.pop(batch, None)
        if sent is None:
            return
        for row in sent.rows:
            sequence = self._running.get(row.sequence)
            if sequence is None or not row.logits:
                continue
            if row.sequence in tokens:
                self._continue(sequence, tokens[row.sequence])
            else:
                self._retry(sequence, sent.at, "no token was returned")

    def _continue(self, sequence: SequenceState, token: Token) -> None:
        sequence.tries = 0
        if token.token in sequence.request.stop_tokens:
            self._end(sequence, Token(token=-1, finish="stop"))
            return
        sequence.tokens.append(token.token)
        if sequence.generated >= sequence.request.max_tokens:
            last = Token(token=token.token, logprob=token.logprob, top=token.top, finish="length")
            self._end(sequence, last)
        else:
            sequence.deliver(token)

    def _admit(self) -> None:
        while self._waiting and self.routes.ready and len(self._running) < self.limits.running:
            route = self._route_for(self._waiting[0])
            if route is None and self._running:
                return  # until one of these ends
            sequence = self._waiting.popleft()
            if route is not None:
                sequence.route, sequence.lost_at = route, None
                self._running[sequence.number] = sequence
            elif sequence.generated:  # the remaining machines have less memory
                sequence.deliver(Token(token=-1, finish="length"))
            else:
                limit = self.routes.max_sequence_tokens
                sequence.deliver(
                    PromptTooLong(f"{len(sequence.tokens)} tokens; the connected machines have memory for {limit}")
                )

    def _route_for(self, sequence: SequenceState) -> Route | None:
        """Return the least loaded machine of each stage with room for it."""
        route = []
        for stage in self.routes.stages:
            roomy = [machine for machine in stage if self._fits(machine, len(sequence.tokens))]
            if not roomy:
                return None
            route.append(min(roomy, key=lambda machine: (self.load(machine), machine)))
        return tuple(route)

    def _fits(self, machine: str, tokens: int) -> bool:
        room, running = self.routes.cache_tokens.get(machine), self._on(machine)
        if room is None:
            return True
        headroom = HEADROOM * (len(running) + 1) if running else 0
        return sum(len(sequence.tokens) for sequence in running) + tokens + headroom <= room

    def _make_room(self, now: float) -> None:
        for machine, room in self.routes.cache_tokens.items():
            running = sorted(self._on(machine), key=lambda sequence: sequence.arrived)
            while running and sum(len(sequence.tokens) for sequence in running) > room:
                last = running.pop()
                if running or self._has_room_elsewhere(machine, len(last.tokens)):
                    self._restart(last, now)
                else:
                    self._end(last, Token(token=-1, finish="length"))

    def _has_room_elsewhere(self, machine: str, tokens: int) -> bool:
        """Return whether an empty machine of its stage could hold them."""
        stage = next(stage for stage in self.routes.stages if machine in stage)
        return any(self.routes.cache_tokens.get(other, math.inf) >= tokens for other in stage)

    def _busy(self, route: Route) -> int:
        return sum(sent.route == route for sent in self.in_flight.values())

    def _batch_of(self, route: Route, now: float) -> SentBatch | None:
        sequences = [sequence for sequence in self._running.values() if sequence.route == route]
        busy = [sent for sent in self.in_flight.values() if sent.route == route]
        if len(busy) > self.routes.width:
            return None
        ready = [sequence for sequence in sequences if sequence.sent < len(sequence.tokens)]
        retried = [sequence for sequence in ready if sequence.tries]
        if retried:  # alone, after all others
            ready = retried[:1] if not busy else []
        # Decoding never runs ahead: its batches would stay small.
        ahead = len(busy) == self.routes.width
        max_rows = math.ceil(len(sequences) / self.routes.width)
        rows: list[tuple[SequenceState, int]] = []
        if not ahead:
            rows = [(sequence, 1) for sequence in ready if len(sequence.tokens) - sequence.sent == 1][:max_rows]
        rows += self._chunks([sequence for sequence in ready if len(sequence.tokens) - sequence.sent > 1], ahead=ahead)
        return self._send(route, rows, now) if rows else None

    def _chunks(self, prompts: list[SequenceState], *, ahead: bool) -> list[tuple[SequenceState, int]]:
        """Divide one batch evenly over the prompts; tokens that a short one does not need go to longer ones."""
        room, rows = self.limits.chunk, []
        prompts.sort(key=lambda sequence: len(sequence.tokens) - sequence.sent)
        for others, sequence in zip(reversed(range(len(prompts))), prompts, strict=True):
            left = len(sequence.tokens) - sequence.sent
            count = min(left, -(-room // (others + 1)))
            if count > 0 and not (ahead and count == left):
                rows.append((sequence, count))
                room -= count
        return rows

    def _send(self, route: Route, rows: Iterable[tuple[SequenceState, int]], now: float) -> SentBatch:
        made: list[Row] = []
        tokens: list[int] = []
        states: dict[int, SamplingState] = {}
        history = 0
        for sequence, count in rows:
            logits = sequence.sent + count == len(sequence.tokens)
            state = _sampling_state(sequence) if logits and not sequence.opened else None
            if state is not None:
                if history and history + len(state.tokens) > MAX_HISTORY:
                    continue
                history += len(state.tokens)
                sequence.opened, states[sequence.number] = True, state
            start, sequence.sent = sequence.sent, sequence.sent + count
            made.append(Row(sequence=sequence.number, start=start, count=count, logits=logits))
            tokens += sequence.tokens[start : sequence.sent]
        return SentBatch(next(self._batches), route, tuple(made), tuple(tokens), states, now)


def _sampling_state(sequence: SequenceState) -> SamplingState:
    sampling, position = sequence.request.sampling, len(sequence.tokens)
    if not sampling.looks_back:
        return SamplingState(sampling=sampling, position=position)
    return SamplingState(
        sampling=sampling, position=position, tokens=tuple(sequence.tokens), prompt=len(sequence.request.tokens)
    )


def width_of(stages: Sequence[Sequence[str]], cores: dict[str, tuple[str, int, int]]) -> int:
    """Return how many stages can compute at the same time, given the cores of their hosts.

    `cores`: for each machine its host, the cores it uses, and those of the host.
    """
    wanted: dict[tuple[str, int], list[int]] = {}  # cores of each stage, by host
    for machines in stages:
        if machines:
            host, used, available = cores[machines[0]]
            wanted.setdefault((host, available), []).append(used)
    total = sum(max(1, min(len(used), int(len(used) * have / sum(used)))) for (_, have), used in wanted.items())
    return max(1, min(len(stages), total))
