"""Machines that hold layers are killed, stopped and come back while they answer: the text goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import queue
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.places import at_most, eventually
from tests.serving import GREEDY, RandomSource, cluster, fronted, llama
from torch import Tensor

from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.engine.identity import new_peer
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.front import Front
from smolcluster.serve.engine.scheduler import SchedulerLimits
from smolcluster.serve.engine.stage import StageWorker
from smolcluster.serve.engine.stage_model import Row
from smolcluster.serve.engine.types import SamplingParams, SequenceRequest, Token, Unavailable
from smolcluster.serve.engine.wire import StageBatch, StageOffer

pytestmark = pytest.mark.usefixtures("warm")
PROMPT = (1, 2, 3, 4)
COUNT = 60


@pytest.fixture(scope="module")
def source() -> RandomSource:
    return RandomSource(llama(layers=4))


def ask(count: int = COUNT, *, sampling: SamplingParams = GREEDY) -> SequenceRequest:
    return SequenceRequest(tokens=PROMPT, max_tokens=count, sampling=sampling)


async def told(front: Front, wanted: SequenceRequest, *, at: int, act: Callable[[], None]) -> tuple[list[int], float]:
    """The text, and the longest time without a token; `act` is done when `at` tokens are there."""
    tokens, times = [], []
    async for token in front.stream(wanted):
        tokens.append(token.token)
        times.append(time.monotonic())
        if len(tokens) == at:
            act()
    return tokens, max(b - a for a, b in pairwise(times))


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=5)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_spare_takes_over_in_the_middle_of_a_text(
    source: RandomSource, victim: str, sampling: SamplingParams
) -> None:
    with fronted(source, *"abc", stages=2) as (front, stages):
        whole = asyncio.run(_all(front, ask(sampling=sampling)))
        eventually(lambda: front.state()["spares"], what="a spare")
        kill = partial(stages.signal, victim, signal.SIGKILL)
        tokens, gap_s = asyncio.run(told(front, ask(sampling=sampling), at=20, act=kill))
        assert tokens == whole
        assert sampling is not GREEDY or whole == source.greedy(PROMPT, COUNT)
        assert gap_s < at_most(2.0)
        assert [lost["name"] for lost in front.state()["lost"]] == [victim]


def machines(front: Front) -> set[str]:
    """Those that hold layers, and spares."""
    state = front.state()
    return {m["name"] for m in [*state["spares"], *(m for stage in state["stages"] for m in stage["machines"])]}


async def _all(front: Front, wanted: SequenceRequest) -> list[int]:
    return [token.token async for token in front.stream(wanted)]


def test_neighbours_take_over_and_give_back(source: RandomSource) -> None:
    with fronted(source, *"abc", stages=3) as (front, stages):
        kill = partial(stages.signal, "b", signal.SIGKILL)
        tokens, gap_s = asyncio.run(told(front, ask(), at=20, act=kill))
        assert tokens == source.greedy(PROMPT, COUNT)
        assert gap_s < at_most(2.0)
        assert [stage["layers"] for stage in front.state()["stages"]] == [[0, 1], [2, 3]]
        stages.start("d")
        eventually(lambda: len(front.state()["stages"]) == 3 and front.state()["ready"], what="three stages again")
        assert asyncio.run(_all(front, ask())) == source.greedy(PROMPT, COUNT)


def test_a_suspended_machine_is_dropped_and_rejoins(source: RandomSource) -> None:
    with fronted(source, *"abc", stages=2) as (front, stages):
        stop = partial(stages.signal, "a", signal.SIGSTOP)
        tokens, gap_s = asyncio.run(told(front, ask(), at=20, act=stop))
        assert tokens == source.greedy(PROMPT, COUNT)
        assert gap_s < 3.0  # a second until it is noticed, and the time to load
        stages.signal("a", signal.SIGCONT)
        eventually(lambda: "a" in machines(front), what="it to be taken back")


def test_without_machines_sequences_wait_and_new_ones_are_refused(source: RandomSource) -> None:
    with fronted(source, "a", stages=1, limits=SchedulerLimits(patience_s=15.0)) as (front, stages):

        async def story() -> list[int]:
            tokens = []
            async for token in front.stream(ask()):
                tokens.append(token.token)
                if len(tokens) == 20:
                    stages.signal("a", signal.SIGKILL)
                    stages.processes["a"].wait()
                    stages.start("again")
            return tokens

        assert asyncio.run(story()) == source.greedy(PROMPT, COUNT)
        for name in ("a", "again"):
            stages.signal(name, signal.SIGKILL)
        eventually(lambda: not front.state()["ready"], what="the loss to be noticed", timeout_s=20)
        with pytest.raises(Unavailable):
            asyncio.run(_all(front, ask()))


def test_waiting_for_a_machine_times_out(source: RandomSource) -> None:
    with fronted(source, "a", stages=1, limits=SchedulerLimits(patience_s=1.0)) as (front, stages):

        async def story() -> None:
            count = 0
            async for _ in front.stream(ask(200)):
                count += 1
                if count == 20:
                    stages.signal("a", signal.SIGKILL)

        with pytest.raises(Unavailable, match="not loaded on any stage for 1 s"):
            asyncio.run(story())


def test_a_closed_stream_frees_caches_at_once(source: RandomSource) -> None:
    with cluster(source, *"ab") as made:

        async def leave() -> None:
            stream = made.front.stream(ask(200))
            async for _ in stream:
                break
            await stream.aclose()

        asyncio.run(leave())
        eventually(lambda: made.front.state()["running"] == 0, what="the place to be free")
        parts = [worker._stage_model for worker, _, _ in made.stages.values()]
        eventually(lambda: not any(part.lengths() for part in parts if part is not None), what="caches to be empty")


def test_a_batch_lost_between_two_stages_is_restarted(source: RandomSource) -> None:
    """Both are still there: nobody but the one that has sent it knows that something is wrong."""
    with cluster(source, *"ab") as made:
        worker = made.stages["b"][0]
        hear, count = worker._dispatch, 0

        def lose_one(link: Link, message: Message) -> None:
            nonlocal count
            count += message.kind is Kind.ROWS
            if message.kind is Kind.ROWS and count == 20:
                link.close("somebody has pulled the cable")
            else:
                hear(link, message)

        worker._dispatch = lose_one  # type: ignore[method-assign]
        tokens, gap_s = asyncio.run(told(made.front, ask(), at=COUNT, act=lambda: None))
        assert tokens == source.greedy(PROMPT, COUNT)
        assert count > 20
        assert gap_s < at_most(5.0)
        assert made.front.state()["lost"] == []


class Guest:
    """Somebody who is let in, and is no machine of this model."""

    def __init__(self, address: str, *, role: str = "stage", instance: str | None = None) -> None:
        me = new_peer(role=role, rank=0, host="guest")
        self._transport = TcpTransport(me if instance is None else dataclasses.replace(me, instance=instance))
        self._links: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._dialer = self._transport.dial(address, self)
        self.link = self._links.get(timeout=300)

    def linked(self, link: Link) -> None:
        self._links.put(link)

    def place(self, link: Link, head: Head) -> None:
        return None

    def received(self, link: Link, message: Message) -> None:
        self.heard.put(message)

    def unlinked(self, link: Link, reason: str) -> None:
        self._dialer.close()
        self._ends.put(reason)

    def refused(self, address: str, reason: str) -> None:
        self._ends.put(reason)

    def put_out(self) -> str:
        """Why."""
        return self._ends.get(timeout=300)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()


def told_by_a_guest(address: str, *messages: Message, role: str = "stage") -> str:
    with Guest(address, role=role) as guest:
        for message in messages:
            guest.link.send(message)
        return guest.put_out()


ASK = Message(kind=Kind.ASK)
OFFER = StageOffer(
    name="x", host="x", address="127.0.0.1:1", device="cpu", cores=1, host_cores=1, memory_bytes=1 << 33, layer_s=1.0
)


def test_a_peer_cannot_answer_for_another_stage(source: RandomSource) -> None:
    """The front: a batch is answered by the last machine of its way and by nobody else."""
    with cluster(source, *"ab") as made:
        right = source.greedy(PROMPT, COUNT)
        forged = {n: Token(token=0) for n in range(1, 20)}

        def forge() -> None:
            (batch,) = [*made.front._scheduler.in_flight] or [1]
            for message in (
                Message(kind=Kind.CHOSEN, step=batch, meta=wire.chosen_meta(forged, ())),
                Message(kind=Kind.FAILED, step=batch, meta={"why": "x"}),
            ):
                guest.link.send(message)

        async def story() -> list[int]:
            tokens = []
            async for token in made.front.stream(ask()):
                tokens.append(token.token)
                if guest.link.open:
                    made.front._transport.call_later(0.0, forge)  # while a batch is under way
            return tokens

        for _ in range(3):
            with Guest(made.front.address) as guest:
                guest.link.send(ASK)
                assert guest.heard.get(timeout=300).kind is Kind.PLAN
                assert asyncio.run(story()) == right
                assert guest.put_out() == "that batch was not routed to this stage"


def test_tokens_outside_the_vocabulary_are_refused(source: RandomSource) -> None:
    """Else every batch with it would fail, at a machine that can do nothing for it."""
    with cluster(source, *"ab") as made:
        worker = made.stages["b"][0]
        choose, wrong = worker._sample, iter([*range(5), 1 << 63])

        def choose_one(rows: list[Row], logits: Tensor) -> dict[int, Token]:
            number = next(wrong, 0)
            return {
                n: dataclasses.replace(t, token=number) if number > 96 else t for n, t in choose(rows, logits).items()
            }

        worker._sample = choose_one  # type: ignore[method-assign]
        assert made.text(PROMPT, 12) == source.greedy(PROMPT, 12)
        assert [lost["why"] for lost in made.front.state()["lost"]] == ["a token outside the vocabulary"]


def test_a_peer_without_the_secret_cannot_compute_on_a_stage(source: RandomSource) -> None:
    """Neither write into caches that are not his, nor have new ones kept for him."""
    batch = StageBatch(rows=(Row(sequence=1, start=0, count=2, logits=False),), route=(("ab", "127.0.0.1:1"),))
    tokens = Message(kind=Kind.ROWS, step=1, meta=wire.meta_of(batch), payload=torch.tensor([1, 2]))
    hidden = dataclasses.replace(batch, route=(), secret="x" * 32)
    numbers = Message(kind=Kind.ROWS, step=1, meta=wire.meta_of(hidden), payload=torch.ones(2, 32))
    with cluster(source, *"ab") as made:
        assert made.text(PROMPT, 12) == source.greedy(PROMPT, 12)
        for worker, _, _ in made.stages.values():
            for message in (tokens, numbers):
                assert "no buffer for" in told_by_a_guest(worker.address, message)
            assert "without tokens" in told_by_a_guest(worker.address, Message(kind=Kind.ROWS))
            assert "cannot connect" in told_by_a_guest(worker.address, role="worker")
            assert worker._stage_model is not None
            eventually(lambda part=worker._stage_model: not part.lengths(), what="caches to be empty")  # type: ignore[misc]
        assert made.text(PROMPT, 12) == source.greedy(PROMPT, 12)


def test_a_machine_asks_once_and_offers_itself_once(source: RandomSource) -> None:
    offer = Message(kind=Kind.JOIN, meta=wire.meta_of(OFFER))
    with cluster(source, *"ab") as made:
        assert "has sent ASK already" in told_by_a_guest(made.front.address, ASK, ASK)
        assert made.front.state()["lost"] == []
        assert "has joined already" in told_by_a_guest(made.front.address, ASK, offer, offer)
        eventually(lambda: not made.front.state()["spares"], what="it to be gone")
        _, transport, _ = made.stages["a"]
        with Guest(made.front.address, instance=transport.me.instance) as guest:  # under the name of one that is there
            guest.link.send(ASK)
            assert "has sent ASK already" in guest.put_out()
        assert made.text(PROMPT, 12) == source.greedy(PROMPT, 12)
        assert made.front.state()["ready"]


def test_invalid_connections_do_not_disturb_serving(source: RandomSource) -> None:
    """Bytes that are no frames, and a worker of training that has the wrong address."""
    with cluster(source, *"ab") as made:
        places = [made.front.address, *(worker.address for worker, _, _ in made.stages.values())]
        for place in places:
            host, _, port = place.rpartition(":")
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"SMOL\x01\x00" + b"\x00" * 200):
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as line:
                    line.sendall(said)
                    line.recv(100)
        assert made.text(PROMPT, 12) == source.greedy(PROMPT, 12)


class FailsOnce(RandomSource):
    """Its weights cannot be loaded where they are asked for first."""

    failed = False

    def _load(self, layers: range, **said: Any) -> dict[str, Tensor]:
        if not self.failed:
            self.failed = True
            raise ValueError("a weight that does not fit fp16")
        return super()._load(layers, **said)


def test_a_spare_replaces_a_machine_that_fails_to_load() -> None:
    source = FailsOnce(llama())
    with cluster(source, "a", "b", stages=1) as made:  # ready, although the first of them has failed
        assert made.text((1, 2, 3), 8) == source.greedy((1, 2, 3), 8)
        (problem,) = made.front.problems()
        assert "a weight that does not fit fp16" in problem


class Tight(RandomSource):
    """More than half of it fits nowhere, whatever the machines say."""

    def _load(self, layers: range, **said: Any) -> dict[str, Tensor]:
        if len(layers) > self.config.num_layers // 2:
            raise RuntimeError("out of memory")
        return super()._load(layers, **said)


def test_machines_that_overstated_their_memory_get_fewer_layers() -> None:
    """One is lost, the other fails to take all of it. When there are two again each holds its half."""
    source = Tight(llama())
    with cluster(source, "a", "b", files=False) as made:
        made.remove("b")
        eventually(made.front.problems, what="it to fail")
        assert not made.front.loading
        made.add("b", files=False)
        assert made.front.wait_ready(300), made.front.problems()
        assert made.text((1, 2, 3), 8) == source.greedy((1, 2, 3), 8)
        layers = [stage["layers"] for stage in made.front.state()["stages"]]
        assert layers == [[0, 2], [3, 5]]


def test_serving_resumes_on_new_machines_after_all_are_lost(source: RandomSource) -> None:
    """The last one held everything, and none of those that come could."""
    share = source.layer_bytes(torch.float32)
    half = int((sum(share.layers) / 2 + share.embedding + share.head) / 0.8)
    with cluster(source, "large", "a") as made:
        made.remove("a")
        eventually(lambda: len(made.front.state()["stages"]) == 1, what="one to hold everything")
        made.remove("large")
        made.add("a", memory_bytes=half)
        made.add("b", memory_bytes=half)
        assert made.front.wait_ready(300), made.front.state()
        assert made.text((1, 2, 3), 8) == source.greedy((1, 2, 3), 8)


def test_an_answer_that_cannot_be_sent_is_reported_as_failed(
    source: RandomSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever asked would wait until the batch counts as stuck."""
    told: list[Kind] = []
    real = StageWorker._send_front

    def tell(self: StageWorker, kind: Kind, **said: Any) -> None:
        told.append(kind)
        if kind is Kind.CHOSEN and told.count(kind) == 2:
            raise ValueError("what no message can say")
        real(self, kind, **said)

    with cluster(source, "a") as made:
        monkeypatch.setattr(StageWorker, "_send_front", tell)
        assert made.text((1, 2, 3), 8) == source.greedy((1, 2, 3), 8)
        assert told.count(Kind.CHOSEN) == 9


@pytest.mark.parametrize(
    ("lasted", "tokens", "quick"),
    [
        ((1, 0.01), 1, True),
        ((1, 0.01), 8, True),
        ((1, 0.01), 60, False),  # a prompt, after a single token
        ((60, 0.1), 60, True),
        ((60, 0.1), 1, True),
        ((128, 0.3), 1, False),  # how long one takes is not known: less than that
        ((1, math.inf), 1, False),
    ],
)
def test_only_short_batches_run_on_the_transports_thread(lasted: Any, tokens: int, quick: bool) -> None:
    worker = SimpleNamespace(_queued=0, _done=0, _last_batch=lasted)
    row = Row(sequence=1, start=0, count=tokens, logits=True)
    assert StageWorker._runs_inline(worker, StageBatch(rows=(row,), secret="")) == quick  # type: ignore[arg-type]


def test_offers_may_change_while_they_are_read() -> None:
    machines: dict[str, Any] = {}

    class Comes:
        @property
        def offer(self) -> None:
            machines[f"another-{len(machines)}"] = SimpleNamespace(offer=None)

    machines["a"] = Comes()
    assert Front._offers(SimpleNamespace(_machines=machines)) == {}  # type: ignore[arg-type]


class Unreadable(RandomSource):
    """Its files are gone."""

    def load(self, layers: range, **options: Any) -> dict[str, Tensor]:
        raise RuntimeError("a disk that cannot be read")


def test_weights_that_the_front_cannot_read_are_a_problem() -> None:
    """A machine without files waits for them in vain; nobody waits for that machine."""
    with cluster(Unreadable(llama()), "a", files=False, ready=False) as made:
        (problem,) = eventually(made.front.problems, what="a problem")
        assert problem == "a: the server cannot read the weights: a disk that cannot be read"
        assert not made.front.loading
        with pytest.raises(Unavailable):
            made.text((1, 2, 3), 8)


def test_machines_that_are_too_small_wait_for_larger_ones() -> None:
    source = RandomSource(llama())
    with cluster(source, "a", "b", memory_bytes=50_000, distribution="auto", ready=False) as made:
        assert eventually(made.front.problems, what="a problem")
        for name in "cd":
            made.add(name)  # slower or not, these two are large enough
        assert made.front.wait_ready(300)
        assert made.text((1, 2, 3), 8) == source.greedy((1, 2, 3), 8)
