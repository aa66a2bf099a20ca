"""Who is served next, without machines: a model in a few lines answers the batches, and everything must come out as if each
sequence had been alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.errors import SmolclusterError
from smolcluster.serve.engine import scheduler as scheduling
from smolcluster.serve.engine.scheduler import MAX_TRIES, Routes, Scheduler, SchedulerLimits, SentBatch, width_of
from smolcluster.serve.engine.types import (
    Busy,
    PromptTooLong,
    RetriesExhausted,
    SamplingParams,
    SequenceRequest,
    Token,
    Unavailable,
)

TWO = Routes((("a",), ("b",)))


def after(tokens: tuple[int, ...]) -> int:
    """The model: what follows depends on all that came before."""
    return hash(tokens) % 1000 + 1


class Machines:
    """They see only what they are sent, and keep it by number."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.caches: dict[int, list[int]] = {}

    def answer(self, sent: SentBatch) -> dict[int, Token]:
        chosen, place = {}, 0
        for row in sent.rows:
            cache = self.caches.setdefault(row.sequence, [])
            assert row.start == len(cache), "tokens are given once, in order"
            cache += sent.tokens[place : place + row.count]
            place += row.count
            if row.logits:
                chosen[row.sequence] = Token(token=after(tuple(cache)))
        return chosen

    def step(self) -> SentBatch:
        """The next batch, answered."""
        sent = self.scheduler.next_batch(now=0.0)
        self.scheduler.complete(sent.number, self.answer(sent))
        return sent

    def forget(self) -> None:
        for number, _ in self.scheduler.finished:
            self.caches.pop(number, None)
        self.scheduler.finished.clear()


class Told(list[Any]):
    def __call__(self, item: Any) -> None:
        self.append(item)

    @property
    def tokens(self) -> list[int]:
        return [item.token for item in self if isinstance(item, Token) and item.token >= 0]

    @property
    def finish(self) -> str | None:
        return self[-1].finish if self else None


def alone(ask: SequenceRequest) -> list[int]:
    tokens = list(ask.tokens)
    for _ in range(ask.max_tokens):
        tokens.append(after(tuple(tokens)))
    return tokens[len(ask.tokens) :]


def ask(*tokens: int, max_tokens: int = 3, **said: Any) -> SequenceRequest:
    return SequenceRequest(tokens=tokens, max_tokens=max_tokens, **said)


def serve(scheduler: Scheduler, machines: Machines) -> list[SentBatch]:
    """Until nothing is left to do."""
    seen = []
    while (sent := scheduler.next_batch(now=0.0)) is not None:
        seen.append(sent)
        scheduler.complete(sent.number, machines.answer(sent))
        machines.forget()
    return seen


def test_batches_of_a_lost_machine_are_dropped() -> None:
    """It comes back under its old name, and has forgotten everything."""
    scheduler, told = Scheduler(routes=TWO), Told()
    scheduler.submit(ask(1, 2, 3), told)
    lost = [scheduler.next_batch(now=0.0) for _ in range(3)]
    assert lost[0] is not None
    scheduler.set_routes(Routes((("a",), ())), now=1.0)
    scheduler.set_routes(TWO, now=2.0)
    scheduler.finished.clear()
    assert not scheduler.in_flight
    serve(scheduler, Machines(scheduler))
    assert told.tokens == alone(ask(1, 2, 3))
    assert told.finish == "length"


def test_one_sequence() -> None:
    scheduler, told = Scheduler(routes=TWO), Told()
    machines = Machines(scheduler)
    scheduler.submit(ask(1, 2, 3), told)
    batches = serve(scheduler, machines)
    assert told.tokens == alone(ask(1, 2, 3))
    assert told.finish == "length"
    assert [[(row.start, row.count) for row in sent.rows] for sent in batches] == [[(0, 3)], [(3, 1)], [(4, 1)]]
    assert machines.caches == {}
    assert (scheduler.running, scheduler.waiting, scheduler.in_flight) == (0, 0, {})


def test_a_stop_token_ends_the_sequence_and_is_not_delivered() -> None:
    scheduler, told = Scheduler(routes=TWO), Told()
    stop = alone(ask(5, max_tokens=2))[1]
    scheduler.submit(ask(5, max_tokens=9, stop_tokens=frozenset({stop})), told)
    serve(scheduler, Machines(scheduler))
    assert told.tokens == alone(ask(5, max_tokens=1))
    assert (told[-1].token, told.finish) == (-1, "stop")


def test_the_sampling_state_is_sent_once_with_its_history() -> None:
    scheduler = Scheduler(SchedulerLimits(chunk=2), routes=TWO)
    scheduler.submit(ask(1, 2, 3), Told())
    scheduler.submit(ask(4, 5, sampling=SamplingParams(frequency_penalty=0.5)), Told())
    batches = serve(scheduler, Machines(scheduler))
    openings = [opening for sent in batches for opening in sent.states.values()]
    told = sorted((opening.position, opening.tokens, opening.prompt) for opening in openings)
    assert told == [(2, (4, 5), 2), (3, (), 0)]  # tokens only for the one whose choice depends on them


def test_long_prompts_open_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of them travels as text, and a message has its limit."""
    monkeypatch.setattr(scheduling, "MAX_HISTORY", 8)
    scheduler, sequences = Scheduler(routes=TWO), [Told() for _ in range(4)]
    wanted = [ask(*range(n, n + 5), sampling=SamplingParams(repetition_penalty=1.5)) for n in range(4)]
    for one, told in zip(wanted, sequences, strict=True):
        scheduler.submit(one, told)
    batches = serve(scheduler, Machines(scheduler))
    assert max(sum(len(opening.tokens) for opening in sent.states.values()) for sent in batches) == 5
    assert [told.tokens for told in sequences] == [alone(one) for one in wanted]


def test_a_prompt_goes_in_chunks_that_follow_each_other() -> None:
    """One more than the stages can work on at once is in flight, but for the one that is answered."""
    scheduler = Scheduler(SchedulerLimits(chunk=4), routes=Routes((("a",), ("b",)), width=2))
    scheduler.submit(ask(*range(18)), Told())
    ahead = []
    while (sent := scheduler.next_batch(now=0.0)) is not None:
        ahead.append(sent)
    assert [(row.start, row.count) for sent in ahead for row in sent.rows] == [(0, 4), (4, 4), (8, 4)]
    machines = Machines(scheduler)
    for sent in ahead:
        scheduler.complete(sent.number, machines.answer(sent))
    assert [(row.start, row.count) for row in scheduler.next_batch(now=0.0).rows] == [(12, 4)]  # type: ignore[union-attr]


def test_sequences_are_batched_by_width() -> None:
    for width, expected in ((1, [8]), (2, [4, 4]), (4, [2, 2, 2, 2])):
        scheduler = Scheduler(routes=Routes((("a",),) * 4, width=width))
        machines = Machines(scheduler)
        for number in range(8):
            scheduler.submit(ask(number, max_tokens=50), Told())
        for _ in range(3):
            sent = []
            while (batch := scheduler.next_batch(now=0.0)) is not None:
                sent.append(batch)
            assert [len(batch.rows) for batch in sent] == expected
            for batch in sent:
                scheduler.complete(batch.number, machines.answer(batch))


def test_a_long_prompt_does_not_delay_decoding() -> None:
    scheduler, told = Scheduler(SchedulerLimits(chunk=16), routes=TWO), Told()
    machines = Machines(scheduler)
    scheduler.submit(ask(1, max_tokens=30), told)
    machines.step()
    scheduler.submit(ask(*range(160)), Told())
    for _ in range(10):
        assert sum(row.count for row in machines.step().rows) <= 17
    assert len(told) >= 10


def test_the_least_loaded_replicas_are_taken() -> None:
    scheduler = Scheduler(routes=Routes((("a1", "a2"), ("b1", "b2", "b3"))))
    for number in range(6):
        scheduler.submit(ask(number), Told())
    scheduler.next_batch(now=0.0)
    assert [scheduler.load(m) for m in ("a1", "a2", "b1", "b2", "b3")] == [3, 3, 2, 2, 2]


def test_limits() -> None:
    scheduler = Scheduler(SchedulerLimits(running=2, waiting=3), routes=TWO)
    scheduler.submit(ask(1), Told())
    scheduler.submit(ask(2), Told())
    scheduler.next_batch(now=0.0)
    for number in range(3):
        scheduler.submit(ask(number), Told())
    scheduler.next_batch(now=0.0)
    assert (scheduler.running, scheduler.waiting) == (2, 3)
    with pytest.raises(Busy, match="3 requests are queued"):
        scheduler.submit(ask(9), Told())


def test_a_cancelled_sequence_is_freed_at_once() -> None:
    scheduler = Scheduler(SchedulerLimits(running=1), routes=TWO)
    first, second = Told(), Told()
    sequence = scheduler.submit(ask(1, max_tokens=50), first)
    scheduler.submit(ask(2), second)
    sent = scheduler.next_batch(now=0.0)
    assert sent is not None
    scheduler.cancel(sequence)
    assert scheduler.finished == [(sequence.number, ("a", "b"))]
    scheduler.cancel(sequence)
    machines = Machines(scheduler)
    scheduler.complete(sent.number, machines.answer(sent))
    assert first == []
    serve(scheduler, machines)
    assert second.tokens == alone(ask(2))


def test_a_lost_machine_costs_time_and_no_token() -> None:
    scheduler, told = Scheduler(routes=Routes((("a",), ("b", "c")))), Told()
    machines = Machines(scheduler)
    scheduler.submit(ask(1, 2, max_tokens=6), told)
    for _ in range(3):
        machines.step()
    lost = scheduler.next_batch(now=0.0)
    scheduler.set_routes(Routes((("a",), ("c",))), now=1.0)
    assert scheduler.finished == [(lost.rows[0].sequence, ("a", "b"))]
    assert scheduler.in_flight == {}  # nobody waits for it
    machines.forget()
    serve(scheduler, machines)
    scheduler.complete(lost.number, {lost.rows[0].sequence: Token(token=666)})  # it comes back after all
    assert told.tokens == alone(ask(1, 2, max_tokens=6))


def test_a_sequence_without_a_token_is_retried_then_fails() -> None:
    """Nothing else would ever wake it."""
    scheduler, told, other = Scheduler(routes=TWO), Told(), Told()
    machines = Machines(scheduler)
    forgotten = scheduler.submit(ask(1, 2, 3), told)
    scheduler.submit(ask(4, 5), other)
    for _ in range(100):
        sent = scheduler.next_batch(now=0.0)
        if sent is None:
            break
        answers = machines.answer(sent)
        answers.pop(forgotten.number, None)
        scheduler.complete(sent.number, answers)
        machines.forget()
    assert other.tokens == alone(ask(4, 5))
    (last,) = told
    assert isinstance(last, RetriesExhausted)
    assert scheduler.running == 0


def test_restarted_sequences_keep_their_order() -> None:
    """Where the machines that are left have less room, who came first is not the one to wait."""
    scheduler, sequences = Scheduler(SchedulerLimits(running=2), routes=TWO), [Told() for _ in range(3)]
    for first, told in enumerate(sequences):
        scheduler.submit(ask(first, 5, max_tokens=20), told)
    scheduler.next_batch(now=0.0)
    scheduler.set_routes(Routes((("a",), ())), now=1.0)
    assert [sequence.request.tokens[0] for sequence in scheduler._waiting] == [0, 1, 2]
    scheduler.set_routes(dataclasses.replace(TWO, cache_tokens={"a": 60, "b": 60}), now=2.0)  # for one of them
    sent = scheduler.next_batch(now=2.0)
    assert sent.tokens == (0, 5)
    scheduler.fail(sent.number, now=3.0)
    assert [sequence.request.tokens[0] for sequence in scheduler._waiting] == [0, 1, 2]


def test_a_batch_that_keeps_failing_ends_its_sequence() -> None:
    scheduler, told = Scheduler(routes=TWO), Told()
    scheduler.submit(ask(1), told)
    for _ in range(MAX_TRIES):
        sent = scheduler.next_batch(now=0.0)
        scheduler.fail(sent.number, now=0.0)
    assert scheduler.next_batch(now=0.0) is None
    assert isinstance(told[-1], SmolclusterError)


@pytest.mark.parametrize(("loading", "patient_s"), [(False, 10.0), (True, 100.0)])
def test_waiting_for_a_machine_times_out(loading: bool, patient_s: float) -> None:
    """Longer for layers that are being loaded."""
    scheduler, told = Scheduler(SchedulerLimits(patience_s=10.0, loading_s=100.0), routes=TWO), Told()
    scheduler.submit(ask(1, max_tokens=9), told)
    scheduler.next_batch(now=0.0)
    scheduler.set_routes(Routes((("a",), ()), loading=loading), now=5.0)
    scheduler.expire(now=4.0 + patient_s)
    assert told == []
    scheduler.expire(now=6.0 + patient_s)
    assert isinstance(told[-1], Unavailable)
    if loading:
        scheduler.submit(ask(1), Told())
        assert scheduler.waiting == 1
    else:
        with pytest.raises(Unavailable):
            scheduler.submit(ask(1), Told())


def test_every_loss_restarts_the_timeout() -> None:
    """One that waits for its turn has not waited for a machine."""
    scheduler, told = Scheduler(SchedulerLimits(patience_s=10.0, running=1), routes=TWO), Told()
    scheduler.submit(ask(1, max_tokens=9), Told())
    scheduler.submit(ask(2, max_tokens=9), told)
    scheduler.next_batch(now=0.0)
    for at in (5.0, 50.0):
        scheduler.set_routes(Routes((("a",), ())), now=at)
        scheduler.expire(now=at + 1)
        scheduler.set_routes(TWO, now=at + 2)
        scheduler.expire(now=at + 3)
        assert told == []


def test_losing_loading_machines_restarts_the_timeout() -> None:
    scheduler, told = Scheduler(SchedulerLimits(patience_s=10.0, loading_s=100.0), routes=TWO), Told()
    scheduler.submit(ask(1, max_tokens=9), told)
    scheduler.next_batch(now=0.0)
    scheduler.set_routes(Routes((("a",), ()), loading=True), now=5.0)
    scheduler.set_routes(Routes((("a",), ())), now=50.0)
    scheduler.expire(now=59.0)
    assert told == []
    scheduler.set_routes(Routes((("a",), ())), now=60.0)  # another change of the same
    scheduler.expire(now=61.0)
    assert isinstance(told[-1], Unavailable)


def test_how_many_stages_work_at_once() -> None:
    def width(*machines: tuple[str, int, int]) -> int:
        cores = {str(n): machine for n, machine in enumerate(machines)}
        return width_of([(name,) for name in cores], cores)

    assert width(("x", 1, 8), ("y", 4, 4), ("z", 2, 2)) == 3
    assert width(*[("x", 1, 2)] * 4) == 2
    assert width(*[("x", 2, 2)] * 4) == 1
    assert width(("x", 4, 4)) == 1


def test_a_failing_sequence_fails_no_others() -> None:
    scheduler, told = Scheduler(routes=TWO), [Told() for _ in range(4)]
    machines = Machines(scheduler)
    for number, tell in enumerate(told):
        scheduler.submit(ask(number, 7), tell)
    while (sent := scheduler.next_batch(now=0.0)) is not None:
        if 2 in sent.tokens:  # whatever has this token fails
            scheduler.fail(sent.number, now=0.0, why="NaN")
        else:
            scheduler.complete(sent.number, machines.answer(sent))
        machines.forget()
    assert [tell.tokens for tell in told if tell is not told[2]] == [alone(ask(n, 7)) for n in (0, 1, 3)]
    assert "NaN" in str(told[2][0])


def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it() -> None:
    scheduler = Scheduler(SchedulerLimits(chunk=30), routes=TWO)
    for length in (200, 200, 2):
        scheduler.submit(ask(*range(length)), Told())
    sent = scheduler.next_batch(now=0.0)
    assert sorted((row.sequence, row.count) for row in sent.rows) == [(1, 14), (2, 14), (3, 2)]
    assert [row.logits for row in sent.rows if row.sequence == 3] == [True]


def tight(room: int) -> Routes:
    return Routes((("a",), ("b",)), cache_tokens={"b": room})


@pytest.mark.parametrize("room", [2, 3])
def test_sequences_that_do_not_fit_wait(room: int) -> None:
    scheduler = Scheduler(routes=tight(room * (50 + 64)))
    for _ in range(3):
        scheduler.submit(ask(*range(50)), Told())
    assert scheduler.next_batch(now=0.0) is not None
    assert (scheduler.running, scheduler.waiting) == (room, 3 - room)


def test_the_last_sequence_is_preempted_and_loses_no_token() -> None:
    scheduler, told = Scheduler(routes=tight(300)), [Told() for _ in range(2)]
    machines, asks = Machines(scheduler), [ask(1, 2, max_tokens=200), ask(3, 4, 5, max_tokens=150)]
    for one, tell in zip(asks, told, strict=True):
        scheduler.submit(one, tell)
    most, order = 0, []
    while (sent := scheduler.next_batch(now=0.0)) is not None:
        machines.forget()
        scheduler.complete(sent.number, machines.answer(sent))
        most = max(most, sum(map(len, machines.caches.values())))
        order += [n for n, tell in enumerate(told) if tell.finish == "length" and n not in order]
        machines.forget()
    assert [tell.tokens for tell in told] == [alone(one) for one in asks]
    assert 250 < most <= 300
    assert order == [0, 1]


def test_a_sequence_that_fills_a_machine_ends() -> None:
    scheduler, told = Scheduler(routes=tight(20)), Told()
    scheduler.submit(ask(1, 2, max_tokens=50), told)
    serve(scheduler, Machines(scheduler))
    assert told.tokens == alone(ask(1, 2, max_tokens=19))
    assert (told[-1].token, told.finish) == (-1, "length")
    assert scheduler.running == 0


def test_a_sequence_that_fills_a_machine_moves_to_a_larger_one() -> None:
    scheduler, told = Scheduler(routes=Routes((("a",), ("b", "c")), cache_tokens={"b": 20, "c": 40})), Told()
    scheduler.submit(ask(1, 2, max_tokens=50), told)
    routes = {sent.route for sent in serve(scheduler, Machines(scheduler))}
    assert routes == {("a", "b"), ("a", "c")}
    assert told.tokens == alone(ask(1, 2, max_tokens=39))
    assert (told[-1].token, told.finish) == (-1, "length")


def test_a_restarted_sequence_that_no_longer_fits_ends() -> None:
    scheduler, told = Scheduler(routes=tight(50)), Told()
    scheduler.submit(ask(1, 2, max_tokens=40), told)
    machines = Machines(scheduler)
    while len(told.tokens) < 25:
        machines.step()
    scheduler.set_routes(Routes((("c",), ("d",)), cache_tokens={"d": 20}), now=0.0)
    serve(scheduler, machines)
    assert told.tokens == alone(ask(1, 2, max_tokens=25))
    assert (told[-1].token, told.finish) == (-1, "length")


def test_a_prompt_that_fits_nowhere_is_refused() -> None:
    scheduler, told, other = Scheduler(routes=tight(20)), Told(), Told()
    scheduler.submit(ask(*range(30)), told)
    scheduler.submit(ask(1), other)
    serve(scheduler, Machines(scheduler))
    assert isinstance(told[0], PromptTooLong)
    assert str(told[0]) == "30 tokens; the connected machines have memory for 20"
    assert other.tokens == alone(ask(1))


@pytest.mark.parametrize(
    ("room", "longest"),
    [({}, None), ({"a": 7}, None), ({"a": 7, "b": 9}, 9), ({"a": 7, "b": 9, "c": 8}, 8), ({"c": 8}, 8)],
)
def test_the_longest_sequence(room: dict[str, int], longest: int | None) -> None:
    assert Routes((("a", "b"), ("c",)), cache_tokens=room).max_sequence_tokens == longest


@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.none() | st.integers(68, 200),
)
def test_any_order_and_any_losses_give_the_tokens_of_a_sequence_alone(
    seed: int, width: int, replicas: int, chunk: int, room: int | None
) -> None:
    rng = random.Random(seed)
    stages = tuple(tuple(f"{letter}{n}" for n in range(replicas)) for letter in "abc")
    rooms = {} if room is None else {machine: room for stage in stages for machine in stage}
    scheduler = Scheduler(SchedulerLimits(running=4, waiting=100, chunk=chunk), routes=Routes(stages, width, rooms))
    machines = Machines(scheduler)
    asks = [
        ask(*(rng.randrange(50) for _ in range(rng.randint(1, 60))), max_tokens=rng.randint(1, 8)) for _ in range(8)
    ]
    told = [Told() for _ in asks]
    for one, tell in zip(asks, told, strict=True):
        scheduler.submit(one, tell)
    queues: dict[tuple[str, ...], list[SentBatch]] = {}
    for _ in range(10_000):
        sent = scheduler.next_batch(now=0.0)
        if sent is not None:
            queues.setdefault(sent.route, []).append(sent)
        waiting = [queue for queue in queues.values() if queue]
        if sent is None and not waiting:
            break
        if waiting and rng.random() < 0.7:  # the batches of a route come back in order
            first = rng.choice(waiting).pop(0)
            if rng.random() < 0.05:
                scheduler.fail(first.number, now=0.0)
                machines.forget()
            elif all(row.sequence in machines.caches or row.start == 0 for row in first.rows):
                answered = machines.answer(first) if first.number in scheduler.in_flight else {}
                scheduler.complete(first.number, answered)
                machines.forget()
            else:
                scheduler.fail(first.number, now=0.0)
                machines.forget()
    for one, tell in zip(asks, told, strict=True):
        if not isinstance(tell[-1], SmolclusterError):  # lost too often
            assert tell.tokens == alone(one)
