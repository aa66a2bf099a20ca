"""Who is served next: sequences in, batches out. Pure: no threads, no sockets, no clock of its own.

    waiting ── a way through the machines is free ──> on its way ── a token ──> on its way ...  ──> over
       ^                                                 │ a machine of its way is lost
       └─────────────────────────────────────────────────┘ from its first token on, under a new number

Batches. All sequences that have the same way and wait for their next token go together; a prompt goes in chunks, so that
nobody waits long behind it, and its chunks follow each other through the stages without waiting for an answer. As many batches
of tokens are under way as stages can work at the same time (`Ways.width`): with more, batches would stay small for ever.
One chunk of a prompt may be ahead of that, so that a stage finds work when it is done.

Memory. A machine reports how many tokens it has room for. A sequence begins where its tokens fit; as all of them grow it may
become too tight, then the one that came last steps back and begins again when there is room. One that fills a machine alone
begins again on a larger one of that stage; where there is none it ends, as at the end of the context.

Every start of a sequence has a number of its own, so whatever is still on its way from a former one is not mistaken.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from smolcluster.errors import SmolclusterError
from smolcluster.serve.engine.stage_model import Row
from smolcluster.serve.engine.types import Busy, RetriesExhausted, SequenceRequest, Token, Unavailable
from smolcluster.serve.engine.wire import SamplingState

Route = tuple[str, ...]  # a machine of each stage
StreamItem = Token | SmolclusterError

MOST_TRIES = 6  # of one sequence, before it is given up
MOST_TOLD = 65536  # tokens of openings in one batch: they travel as text, and a message has its limit
SPARE = 64  # tokens that a sequence should find room for when it begins beside others


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    running: int = 32
    waiting: int = 128
    chunk: int = 128  # tokens of prompts in one batch
    patience_s: float = 20.0  # for a machine that may come back
    loading_s: float = 600.0  # for one that is there, and loads


@dataclass(frozen=True, slots=True)
class Routes:
    """The machines that are ready, by stage, and how many batches they can work on at the same time."""

    stages: tuple[tuple[str, ...], ...] = ()
    width: int = 1
    room: Mapping[str, int] = field(default_factory=dict)  # tokens on a machine; one not named: any number
    coming: bool = False  # those that are to hold the missing layers are there, and load them

    @property
    def open(self) -> bool:
        return bool(self.stages) and all(self.stages)

    @property
    def longest(self) -> int | None:
        """The most tokens that a sequence alone can have; None: any number."""
        known = [[self.room[m] for m in stage if m in self.room] for stage in self.stages]
        limits = [
            max(rooms) for rooms, stage in zip(known, self.stages, strict=True) if rooms and len(rooms) == len(stage)
        ]
        return min(limits, default=None)


@dataclass(eq=False, slots=True)
class SequenceState:
    """A sequence from the question to its last token."""

    ask: SequenceRequest
    tell: Callable[[StreamItem], None]
    tokens: list[int]
    number: int
    arrived: int  # in this order they came
    way: Route | None = None
    sent: int = 0  # tokens that the machines have been given
    opened: bool = False  # the last stage knows how to choose
    tries: int = 0
    lost_at: float | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.ask.tokens)


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch, ready to go: its tokens lie one row after the other."""

    number: int
    way: Route
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    openings: dict[int, SamplingState]
    at: float


@dataclass(slots=True)
class Scheduler:
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    ways: Routes = field(default_factory=Routes)
    under_way: dict[int, SentBatch] = field(default_factory=dict)
    over: list[tuple[int, Route]] = field(
        default_factory=list
    )  # to be forgotten by the machines; the caller empties it
    _waiting: deque[SequenceState] = field(default_factory=deque)
    _running: dict[int, SequenceState] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _batches: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # Sequences

    def submit(self, ask: SequenceRequest, tell: Callable[[StreamItem], None]) -> SequenceState:
        """Raises NobodyThere or Busy; else `tell` gets the story's tokens as they come."""
        if not self.ways.open and not self.ways.coming:
            raise Unavailable("some layers of the model are on no machine")
        if len(self._waiting) >= self.limits.waiting:
            raise Busy(f"{len(self._waiting)} requests wait already")
        number = next(self._numbers)
        story = SequenceState(ask, tell, list(ask.tokens), number, arrived=number)
        self._waiting.append(story)
        return story

    def cancel(self, story: SequenceState) -> None:
        """Call `tell` no more. Nothing to do for a story that is over."""
        if story in self._waiting:
            self._waiting.remove(story)
        elif self._running.get(story.number) is story:
            self._end(story)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def load(self, machine: str) -> int:
        return len(self._on(machine))

    def _on(self, machine: str) -> list[SequenceState]:
        running = list(self._running.values())  # also asked for by threads that look on
        return [story for story in running if story.way is not None and machine in story.way]

    # Machines

    def set_ways(self, ways: Routes, *, now: float) -> None:
        """From now on these. Sequences whose way is not among them begin again, and their batches are waited for no longer:
        a machine that comes back is the same one to us, and has forgotten them."""
        if self.ways.coming and not (ways.open or ways.coming):  # the wait for the next machine begins now
            for story in self._waiting:
                story.lost_at = now
        self.ways = ways
        self.under_way = {number: sent for number, sent in self.under_way.items() if self._stands(sent.way)}
        for story in list(self._running.values()):
            if not self._stands(story.way):
                self._restart(story, now)

    def lost(self, batch: int, *, now: float, why: str = "it did not come back") -> None:
        """A batch that will not come back: its sequences begin again, each alone, so that one that cannot be computed takes
        no others with it. One that is not known: nothing."""
        sent = self.under_way.pop(batch, None)
        for row in sent.rows if sent is not None else ():
            story = self._running.get(row.sequence)
            if story is not None:
                self._try_again(story, now, why)

    def _try_again(self, story: SequenceState, now: float, why: str) -> None:
        story.tries += 1
        if story.tries >= MOST_TRIES:
            self._end(story, RetriesExhausted(f"given up after {story.tries} attempts: {why}"))
        else:
            self._restart(story, now)

    def give_up(self, *, now: float) -> None:
        """End the stories that have waited too long for a machine."""
        if self.ways.open:
            for story in self._waiting:
                story.lost_at = None  # whatever they wait for now
            return
        patience_s = self.limits.loading_s if self.ways.coming else self.limits.patience_s
        for story in list(self._waiting):
            since = story.lost_at = now if story.lost_at is None else story.lost_at
            if now - since > patience_s:
                self._waiting.remove(story)
                story.tell(Unavailable("some layers of the model have been on no machine for too long"))

    def _stands(self, way: Route | None) -> bool:
        if way is None or len(way) != len(self.ways.stages):
            return False
        return all(machine in stage for machine, stage in zip(way, self.ways.stages, strict=True))

    def _restart(self, story: SequenceState, now: float) -> None:
        """What the user has received stands; the machines get all of it again. The first to arrive is the first to go on."""
        self._leave(story)
        story.number, story.way, story.sent, story.opened = next(self._numbers), None, 0, False
        story.lost_at = now
        later = (place for place, other in enumerate(self._waiting) if other.arrived > story.arrived)
        self._waiting.insert(next(later, len(self._waiting)), story)

    def _leave(self, story: SequenceState) -> None:
        del self._running[story.number]
        if story.way is not None:
            self.over.append((story.number, story.way))

    def _end(self, story: SequenceState, last: StreamItem | None = None) -> None:
        self._leave(story)
        if last is not None:
            story.tell(last)

    # Batches

    def next_batch(self, *, now: float) -> SentBatch | None:
        """What to send now, if anything."""
        self._make_room(now)
        self._admit()
        for way in sorted({story.way for story in self._running.values() if story.way is not None}, key=self._busy):
            batch = self._batch_of(way, now)
            if batch is not None:
                self.under_way[batch.number] = batch
                return batch
        return None

    def chosen(self, batch: int, tokens: dict[int, Token]) -> None:
        """The answers to a batch. Of one that is not known, or of former starts: nothing. A story without one begins
        again."""
        sent = self.under_way.pop(batch, None)
        if sent is None:
            return
        for row in sent.rows:
            story = self._running.get(row.sequence)
            if story is None or not row.answer:
                continue
            if row.sequence in tokens:
                self._continue(story, tokens[row.sequence])
            else:
                self._try_again(story, sent.at, "no token came back")

    def _continue(self, story: SequenceState, token: Token) -> None:
        story.tries = 0
        if token.token in story.ask.stop_tokens:
            self._end(story, Token(token=-1, finish="stop"))
            return
        story.tokens.append(token.token)
        if story.generated >= story.ask.max_tokens:
            last = Token(token=token.token, logprob=token.logprob, top=token.top, finish="length")
            self._end(story, last)
        else:
            story.tell(token)

    def _admit(self) -> None:
        while self._waiting and self.ways.open and len(self._running) < self.limits.running:
            way = self._way_for(self._waiting[0])
            if way is None and self._running:
                return  # when one of these is over there will be room
            story = self._waiting.popleft()
            if way is not None:
                story.way, story.lost_at = way, None
                self._running[story.number] = story
            elif story.generated:  # the machines that are left have less memory
                story.tell(Token(token=-1, finish="length"))
            else:
                story.tell(
                    RetriesExhausted(f"{len(story.tokens)} tokens do not fit the memory of the machines that are there")
                )

    def _way_for(self, story: SequenceState) -> Route | None:
        """Of each stage the idlest machine with room for it."""
        way = []
        for stage in self.ways.stages:
            roomy = [machine for machine in stage if self._fits(machine, len(story.tokens))]
            if not roomy:
                return None
            way.append(min(roomy, key=lambda machine: (self.load(machine), machine)))
        return tuple(way)

    def _fits(self, machine: str, tokens: int) -> bool:
        room, there = self.ways.room.get(machine), self._on(machine)
        if room is None:
            return True
        spare = SPARE * (len(there) + 1) if there else 0
        return sum(len(story.tokens) for story in there) + tokens + spare <= room

    def _make_room(self, now: float) -> None:
        for machine, room in self.ways.room.items():
            there = sorted(self._on(machine), key=lambda story: story.arrived)
            while there and sum(len(story.tokens) for story in there) > room:
                last = there.pop()
                if there or self._has_room_elsewhere(machine, len(last.tokens)):
                    self._restart(last, now)
                else:
                    self._end(last, Token(token=-1, finish="length"))

    def _has_room_elsewhere(self, machine: str, tokens: int) -> bool:
        """Whether another machine of its stage could hold them, if it were alone there."""
        stage = next(stage for stage in self.ways.stages if machine in stage)
        return any(self.ways.room.get(other, math.inf) >= tokens for other in stage)

    def _busy(self, way: Route) -> int:
        return sum(sent.way == way for sent in self.under_way.values())

    def _batch_of(self, way: Route, now: float) -> SentBatch | None:
        stories = [story for story in self._running.values() if story.way == way]
        busy = [sent for sent in self.under_way.values() if sent.way == way]
        if len(busy) > self.ways.width:
            return None
        ready = [story for story in stories if story.sent < len(story.tokens)]
        doubtful = [story for story in ready if story.tries]
        if doubtful:  # alone; and before it others finish
            ready = doubtful[:1] if not busy else []
        # A prompt may be one batch ahead; tokens never: they would stay in small batches for ever.
        ahead = len(busy) == self.ways.width
        most = math.ceil(len(stories) / self.ways.width)
        rows: list[tuple[SequenceState, int]] = []
        if not ahead:
            rows = [(story, 1) for story in ready if len(story.tokens) - story.sent == 1][:most]
        rows += self._chunks([story for story in ready if len(story.tokens) - story.sent > 1], ahead=ahead)
        return self._send(way, rows, now) if rows else None

    def _chunks(self, prompts: list[SequenceState], *, ahead: bool) -> list[tuple[SequenceState, int]]:
        """Shares of one batch: all alike, and what a short one does not need goes to the longer. So no prompt waits for those
        before it."""
        room, rows = self.limits.chunk, []
        prompts.sort(key=lambda story: len(story.tokens) - story.sent)
        for others, story in zip(reversed(range(len(prompts))), prompts, strict=True):
            left = len(story.tokens) - story.sent
            count = min(left, -(-room // (others + 1)))
            if count > 0 and not (ahead and count == left):
                rows.append((story, count))
                room -= count
        return rows

    def _send(self, way: Route, rows: Iterable[tuple[SequenceState, int]], now: float) -> SentBatch:
        made: list[Row] = []
        tokens: list[int] = []
        openings: dict[int, SamplingState] = {}
        told = 0
        for story, count in rows:
            answer = story.sent + count == len(story.tokens)
            opening = _opening(story) if answer and not story.opened else None
            if opening is not None:
                if told and told + len(opening.tokens) > MOST_TOLD:
                    continue  # with the next batch
                told += len(opening.tokens)
                story.opened, openings[story.number] = True, opening
            start, story.sent = story.sent, story.sent + count
            made.append(Row(sequence=story.number, start=start, count=count, answer=answer))
            tokens += story.tokens[start : story.sent]
        return SentBatch(next(self._batches), way, tuple(made), tuple(tokens), openings, now)


def _opening(story: SequenceState) -> SamplingState:
    sampling, position = story.ask.sampling, len(story.tokens)
    if not sampling.looks_back:
        return SamplingState(sampling=sampling, position=position)
    return SamplingState(sampling=sampling, position=position, tokens=tuple(story.tokens), prompt=len(story.ask.tokens))


def width_of(stages: Sequence[Sequence[str]], cores: dict[str, tuple[str, int, int]]) -> int:
    """How many stages can compute at the same time: on one host as many as its cores bear.

    `cores`: of each machine its host, the cores it computes with, and those of the host.
    """
    wanted: dict[tuple[str, int], list[int]] = {}  # by host and its cores: what each of its stages computes with
    for machines in stages:
        if machines:
            host, own, there = cores[machines[0]]
            wanted.setdefault((host, there), []).append(own)
    total = sum(max(1, min(len(own), int(len(own) * there / sum(own)))) for (_, there), own in wanted.items())
    return max(1, min(len(stages), total))
