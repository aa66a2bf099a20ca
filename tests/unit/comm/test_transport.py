"""The transport: over TCP with both event loops, and over TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.places import eventually, free_port
from tests.relay import Relay
from torch import Tensor

from smolcluster.comm.addresses import connect_tcp, join_address, split_address
from smolcluster.comm.elastic.transport import connection, frames, payloads, sockets, tcp
from smolcluster.comm.elastic.transport.api import Head, Kind, Link, Message, Peer, Transport
from smolcluster.comm.elastic.transport.connection import TcpLink
from smolcluster.comm.elastic.transport.handshake import NOT_A_MEMBER, Handshake, Refusal, read_peer
from smolcluster.comm.elastic.transport.security import MAX_TOKENS, Credentials, Keyring, NoToken, new_token
from smolcluster.comm.elastic.transport.sockets import INSTEAD_OF_BBR, set_options
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport
from smolcluster.comm.group import PeerLost
from smolcluster.errors import UserError

WAIT_S = 120.0
HERE = "127.0.0.1"


def make_peer(role: str = "worker", rank: int = 0, *, run: str = "") -> Peer:
    return Peer(
        role=role, rank=rank, host="here", instance=secrets.token_hex(8), run=run, versions={"smolcluster": "0.1.0"}
    )


class Recorder:
    """A handler that records its callbacks, and lets tests wait for them."""

    def __init__(self, place: Callable[[Head], Tensor | None] | None = None) -> None:
        self.links: list[Link] = []
        self.messages: list[Message] = []
        self.ends: list[str] = []
        self.refusals: list[tuple[str, str]] = []
        self.on_message: Callable[[Link, Message], None] = lambda link, message: None
        self.on_end: Callable[[], None] = lambda: None
        self._place = place or (lambda head: torch.empty(head.shape, dtype=payloads.DTYPES[head.dtype]))
        self._changed = threading.Condition()

    def _note(self, where: list[Any], what: Any) -> None:
        with self._changed:
            where.append(what)
            self._changed.notify_all()

    def linked(self, link: Link) -> None:
        self._note(self.links, link)

    def place(self, link: Link, head: Head) -> Tensor | None:
        return self._place(head)

    def received(self, link: Link, message: Message) -> None:
        self._note(self.messages, message)
        self.on_message(link, message)

    def unlinked(self, link: Link, reason: str) -> None:
        self.on_end()
        self._note(self.ends, reason)

    def refused(self, address: str, reason: str) -> None:
        self._note(self.refusals, (address, reason))

    def wait(self, ready: Callable[[Recorder], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self), WAIT_S), (
                f"waited in vain: {len(self.links)} links, {len(self.messages)} messages, "
                f"ends {self.ends}, refusals {self.refusals}"
            )

    def link(self, number: int = 0) -> Link:
        self.wait(lambda self: len(self.links) > number)
        return self.links[number]


class Told:
    """Records the calls of `sent`."""

    def __init__(self) -> None:
        self.all: list[tuple[int, bool]] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def of(self, number: int) -> Callable[[bool], None]:
        return lambda whole: self._note(number, whole)

    def _note(self, number: int, whole: bool) -> None:
        with self._changed:
            self.all.append((number, whole))
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, WAIT_S), self.all


class World:
    """Makes transports of one sort, and closes them in the end."""

    def __init__(self, sort: str) -> None:
        self.sort = sort
        self.token = new_token() if sort == "tls" else None
        self._transports: list[Transport] = []

    def transport(self, role: str = "worker", rank: int = 0, *, run: str = "", **limits: Any) -> Any:
        me = make_peer(role, rank, run=run)
        keyring = Keyring([self.token]) if self.token else None
        return self.keep(TcpTransport(me, keyring=keyring, limits=LinkLimits(**limits), uvloop=self.sort != "asyncio"))

    def keep(self, transport: Any) -> Any:
        """To close it in the end."""
        self._transports.append(transport)
        return transport

    def meet(
        self, server: Transport, worker: Transport, place: Callable[[Head], Tensor | None] | None = None
    ) -> tuple[Recorder, Recorder]:
        """The worker dials the server; what each end sees."""
        at_server, at_worker = Recorder(place), Recorder()
        worker.dial(server.listen(HERE, 0, at_server), at_worker)
        return at_server, at_worker

    def pair(self, **options: Any) -> tuple[Link, Recorder, Link, Recorder]:
        """A server's and a worker's end of one link."""
        server, worker = self.transport("server", **options), self.transport("worker", 1, **options)
        at_server, at_worker = self.meet(server, worker)
        return at_server.link(), at_server, at_worker.link(), at_worker

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def sorts(*names: str) -> Any:
    needs_cluster = {"uvloop": "uvloop", "tls": "cryptography"}
    return pytest.mark.parametrize(
        "world",
        [
            pytest.param(
                name, marks=pytest.mark.skipif(not _installed(needs_cluster.get(name)), reason="not installed")
            )
            for name in names
        ],
        indirect=True,
    )


def _installed(module: str | None) -> bool:
    import importlib.util

    return module is None or importlib.util.find_spec(module) is not None


TCP = sorts("asyncio", "uvloop", "tls")
PLAIN = sorts("asyncio")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


@TCP
class TestLinks:
    def test_both_ends_know_each_other(self, world: World) -> None:
        server, worker = world.transport("server", run="0123456789abcdef"), world.transport("worker", 3)
        at_server, at_worker = world.meet(server, worker)
        assert at_server.link().peer == worker.me
        assert at_worker.link().peer == server.me
        assert at_server.link().peer.name == "worker 3 (here)"

    def test_messages_both_ways(self, world: World) -> None:
        _, at_server, worker_link, at_worker = world.pair()
        at_server.on_message = lambda link, message: link.send(Message(kind=Kind.ACK, step=message.step))
        meta = {"samples": 16, "loss": 1.5, "names": ["a", "ä"], "none": None}
        worker_link.send(Message(kind=Kind.DONE, step=7, channel=2, epoch=3, meta=meta)).wait()
        at_worker.wait(lambda r: r.messages)
        (got,) = at_server.messages
        assert (got.kind, got.step, got.channel, got.epoch, got.meta) == (Kind.DONE, 7, 2, 3, meta)
        assert at_worker.messages[0].kind is Kind.ACK

    @pytest.mark.parametrize("count", [1, 5000, 3_000_000])
    def test_a_payload_lands_in_its_place(self, world: World, count: int) -> None:
        place = torch.zeros(count, dtype=torch.bfloat16)
        heads: list[Head] = []
        server, worker = world.transport("server"), world.transport()
        at_server, at_worker = world.meet(server, worker, lambda head: (heads.append(head), place)[1])  # type: ignore[func-returns-value]
        sent = torch.rand(count).to(torch.bfloat16)
        expected = sent.clone()
        message = Message(kind=Kind.PUSH, step=1, channel=4, codec="bf16", payload=sent, meta={"a": 1})
        at_worker.link().send(message).wait()
        sent.zero_()  # its memory is ours again
        at_server.wait(lambda r: r.messages)
        assert at_server.messages[0].payload is place
        assert torch.equal(place, expected)
        (head,) = heads
        assert (head.kind, head.channel, head.codec, dict(head.meta)) == (Kind.PUSH, 4, "bf16", {"a": 1})
        assert (head.dtype, head.shape, head.nbytes) == ("bfloat16", (count,), 2 * count)

    def test_messages_keep_their_order(self, world: World) -> None:
        """From several threads, large and small: each thread's arrive as it sent them."""
        _, at_server, link, _ = world.pair()

        def send(thread: int) -> None:
            for step in range(100):
                payload = torch.full((40_000 if step % 10 == 0 else 10,), float(step)) if step % 2 else None
                kind = Kind.CHUNK if payload is not None else Kind.ACK
                link.send(Message(kind=kind, step=step, channel=thread, payload=payload))

        threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        at_server.wait(lambda r: len(r.messages) == 300)
        for n in range(3):
            assert [m.step for m in at_server.messages if m.channel == n] == list(range(100))
        assert all((m.payload == m.step).all() for m in at_server.messages if m.payload is not None)

    def test_a_payload_without_a_place_ends_the_link_and_nothing_else(self, world: World) -> None:
        server, worker, other = world.transport("server"), world.transport(), world.transport("worker", 1)
        at_server = Recorder(lambda head: None if head.channel == 9 else torch.empty(head.shape))
        at_worker, at_other = Recorder(), Recorder()
        address = server.listen(HERE, 0, at_server)
        other.dial(address, at_other)
        worker.dial(address, at_worker)
        at_worker.link().send(Message(kind=Kind.PUSH, channel=9, payload=torch.zeros(100_000)))
        at_worker.wait(lambda r: r.ends)
        at_server.wait(lambda r: r.ends)
        assert "PUSH of step 0: no buffer for float32 of shape [100000]" in at_server.ends[0]
        at_other.link().send(Message(kind=Kind.PUSH, payload=torch.zeros(10)))
        at_server.wait(lambda r: r.messages)
        assert not at_other.ends

    def test_closing_tells_both_ends_why_after_what_was_sent(self, world: World) -> None:
        server_link, at_server, _, at_worker = world.pair()
        for step in range(50):
            server_link.send(Message(kind=Kind.WEIGHTS, step=step, payload=torch.zeros(20_000)))
        server_link.close("the run is over")
        assert not server_link.open
        at_worker.wait(lambda r: r.ends)
        at_server.wait(lambda r: r.ends)
        assert at_worker.ends[0] == at_server.ends[0] == "the run is over"
        assert [m.step for m in at_worker.messages] == list(range(50))
        server_link.close("twice does no harm")

    def test_sending_on_a_link_that_has_ended(self, world: World) -> None:
        server_link, at_server, _, at_worker = world.pair()
        server_link.close("done here")
        at_server.wait(lambda r: r.ends)
        told = Told()
        for number, payload in enumerate([None, torch.zeros(10), torch.zeros(100_000)]):
            work = server_link.send(Message(kind=Kind.CHUNK, payload=payload), sent=told.of(number))
            with pytest.raises(PeerLost, match=r"worker 1 \(here\): done here"):
                work.wait()
        told.wait(3)
        assert told.all == [(0, False), (1, False), (2, False)]
        assert threading.get_ident() not in told.threads
        assert server_link.queued_bytes == 0
        at_worker.wait(lambda r: r.ends)
        assert not at_worker.messages

    def test_sent_is_called_for_each_message(self, world: World) -> None:
        """Once for each, in order, on the transport's thread."""
        server_link, _, _, at_worker = world.pair()
        told = Told()
        for step, payload in enumerate([None, torch.zeros(10), torch.full((500_000,), 7.0)]):
            server_link.send(Message(kind=Kind.CHUNK, step=step, payload=payload), sent=told.of(step))
        told.wait(3)
        assert told.all == [(0, True), (1, True), (2, True)]
        assert len(told.threads) == 1
        assert threading.get_ident() not in told.threads
        at_worker.wait(lambda r: len(r.messages) == 3)
        assert at_worker.messages[2].payload.eq(7.0).all()  # type: ignore[union-attr]

    def test_the_dialer_comes_back_after_a_loss(self, world: World) -> None:
        _, at_server, _, at_worker = world.pair()
        for number in range(3):
            at_server.link(number).close("again")
            at_worker.link(number + 1).send(Message(kind=Kind.JOIN, step=number))
            at_server.wait(lambda r, number=number: len(r.messages) == number + 1)

    def test_the_dialer_comes_before_the_listener(self, world: World) -> None:
        server, worker = world.transport("server"), world.transport()
        at_server, at_worker = Recorder(), Recorder()
        port = free_port()
        worker.dial(f"{HERE}:{port}", at_worker)
        assert server.listen(HERE, port, at_server) == f"{HERE}:{port}"
        at_worker.link()

    def test_a_closed_dialer_leaves_its_link_alone_and_does_not_come_back(self, world: World) -> None:
        server, worker = world.transport("server"), world.transport()
        at_server, at_worker = Recorder(), Recorder()
        dialer = worker.dial(server.listen(HERE, 0, at_server), at_worker)
        link = at_worker.link()
        dialer.close()
        link.send(Message(kind=Kind.ACK))
        at_server.wait(lambda r: r.messages)
        link.close("enough")
        at_worker.wait(lambda r: r.ends)
        pause(worker, 0.3)
        assert len(at_worker.links) == 1

    def test_another_run_is_refused_by_both_and_for_good(self, world: World) -> None:
        server, worker = world.transport("server", run="a" * 16), world.transport(run="b" * 16)
        at_server, at_worker = Recorder(), Recorder()
        address = server.listen(HERE, 0, at_server)
        worker.dial(address, at_worker)
        at_worker.wait(lambda r: r.refusals)
        at_server.wait(lambda r: r.refusals)
        assert at_worker.refusals[0][0] == address
        assert f"belongs to run {'b' * 16}, server (here) to run {'a' * 16}" in at_worker.refusals[0][1]
        assert not at_server.links
        assert not at_worker.links

    def test_one_without_a_run_may_come(self, world: World) -> None:
        server, worker = world.transport("server", run="a" * 16), world.transport()
        _, at_worker = world.meet(server, worker)
        assert at_worker.link().peer.run == "a" * 16

    def test_later_means_on_the_transports_thread(self, world: World) -> None:
        transport = world.transport()
        threads: list[int] = []
        done = threading.Event()
        transport.call_later(0, lambda: threads.append(threading.get_ident()))
        transport.call_later(0.05, lambda: (threads.append(threading.get_ident()), done.set()))
        assert done.wait(WAIT_S)
        assert len(threads) == 2
        assert len(set(threads)) == 1
        assert threads[0] != threading.get_ident()

    def test_a_port_that_is_taken(self, world: World) -> None:
        server, other = world.transport("server"), world.transport("server")
        address = server.listen(HERE, 0, Recorder())
        port = int(address.rpartition(":")[2])
        with pytest.raises(UserError, match=f"cannot listen on {address}: .*[Cc]hoose another port"):
            other.listen(HERE, port, Recorder())

    def test_leaving_sends_what_is_queued_and_says_goodbye(self, world: World) -> None:
        server, worker = world.transport("server"), world.transport()
        at_server, at_worker = world.meet(server, worker)
        link = at_worker.link()
        for step in range(20):
            link.send(Message(kind=Kind.STATE, step=step, payload=torch.zeros(50_000)))
        link.send(Message(kind=Kind.REPORT, meta={"steps": 3}))
        worker.close()
        assert at_worker.ends == ["it has left"]
        at_server.wait(lambda r: r.ends)
        assert at_server.ends == ["it has left"]
        assert at_server.messages[-1].meta == {"steps": 3}
        assert len(at_server.messages) == 21
        worker.close()
        worker.call_later(0, lambda: None)  # nothing happens, and nothing breaks
        with pytest.raises(PeerLost):
            link.send(Message(kind=Kind.ACK)).wait()

    def test_traffic_is_what_crossed(self, world: World) -> None:
        server_link, at_server, worker_link, _ = world.pair()
        before = worker_link.traffic.bytes_sent, server_link.traffic.bytes_received
        worker_link.send(Message(kind=Kind.PUSH, payload=torch.zeros(1_000_000))).wait()
        at_server.wait(lambda r: r.messages)
        sent, received = worker_link.traffic.bytes_sent - before[0], server_link.traffic.bytes_received - before[1]
        assert 4_000_128 <= sent <= 4_001_000  # a beat may have slipped in
        assert 4_000_128 <= received <= 4_001_000
        assert worker_link.queued_bytes == 0
        assert worker_link.silent_s < 1.0


@TCP
class TestTcp:
    def test_queued_bytes_show_how_far_the_peer_is_behind(self, world: World) -> None:
        server_link, at_server, worker_link, _ = world.pair(silence_s=WAIT_S)
        with hold(server_link):
            works = [worker_link.send(Message(kind=Kind.PUSH, payload=torch.zeros(5_000_000))) for _ in range(4)]
            assert worker_link.queued_bytes > 40_000_000
        for work in works:
            work.wait()
        at_server.wait(lambda r: len(r.messages) == 4)
        assert worker_link.queued_bytes == 0

    @pytest.mark.parametrize(
        ("limits", "count", "said"),
        [({"queued_bytes": 30_000_000}, 5, "too slow"), ({"beat_s": 0.05, "stuck_s": 0.3}, 4, "none was sent for 0.")],
        ids=["much waits for it", "nothing leaves"],
    )
    def test_a_peer_that_is_too_slow_is_given_up(self, world: World, limits: Any, count: int, said: str) -> None:
        server_link, _, worker_link, at_worker = world.pair(silence_s=WAIT_S, **limits)
        with hold(server_link):
            works = [worker_link.send(Message(kind=Kind.PUSH, payload=torch.zeros(2_500_000))) for _ in range(count)]
            at_worker.wait(lambda r: r.ends)
            assert said in at_worker.ends[0]
            with pytest.raises(PeerLost, match="too slow"):
                works[-1].wait()

    def test_a_state_may_be_larger_than_what_usually_waits(self, world: World) -> None:
        """It is sent in one go; the peer is not too slow because the model is large."""
        server_link, at_server, worker_link, at_worker = world.pair(queued_bytes=20_000_000, silence_s=WAIT_S)
        part = torch.zeros(2_500_000)
        with hold(server_link):
            worker_link.send(Message(kind=Kind.WELCOME))
            for channel in range(6):
                worker_link.send(Message(kind=Kind.STATE, step=7, channel=channel, payload=part))
            assert worker_link.queued_bytes > 40_000_000
        at_server.wait(lambda r: len(r.messages) == 7 or r.ends)
        assert at_worker.ends == at_server.ends == []

    def test_a_peer_that_asks_and_does_not_read_is_given_up(self, world: World) -> None:
        """The same again is another set: however often it asks, no more waits for it than a few of them."""
        server_link, _, worker_link, at_worker = world.pair(queued_bytes=1_000_000, silence_s=WAIT_S)
        part = torch.zeros(1_000_000)
        with hold(server_link):
            for _ in range(8):
                for channel in range(3):
                    worker_link.send(Message(kind=Kind.WEIGHTS, step=7, channel=channel, payload=part))
            at_worker.wait(lambda r: r.ends)
        assert "too slow" in at_worker.ends[0]
        assert "the limit is 480" in at_worker.ends[0]  # four times 12 MB, and the headers

    def test_unsent_messages_are_reported_when_the_link_ends(self, world: World) -> None:
        server_link, _, worker_link, at_worker = world.pair(silence_s=WAIT_S)
        told = Told()
        at_worker.on_end = lambda: told.of(-1)(False)
        with hold(server_link):
            for step in range(3):
                message = Message(kind=Kind.PUSH, step=step, payload=torch.zeros(5_000_000))
                worker_link.send(message, sent=told.of(step))
            owner_of(worker_link).call_later(0, lambda: worker_link.end("gone"))  # type: ignore[attr-defined]
            told.wait(4)
        assert told.all == [(0, False), (1, False), (2, False), (-1, False)]

    def test_a_slow_link_is_not_silent(self, world: World) -> None:
        """Inside a payload we ask to be woken late; a line that needs longer for it than silence may last still counts."""
        server, worker = world.transport("server"), world.transport(silence_s=1.0, beat_s=0.1)
        at_server, at_worker = Recorder(), Recorder()
        with Relay(server.listen(HERE, 0, at_server), pace=drops(bytes_per_s=40_000)) as relay:
            worker.dial(relay.address, at_worker)
            payload = torch.arange(20_000, dtype=torch.float32)
            at_server.link().send(Message(kind=Kind.WEIGHTS, payload=payload))
            at_worker.wait(lambda r: r.messages or r.ends)
            assert not at_worker.ends
            assert torch.equal(at_worker.messages[0].payload, payload)  # type: ignore[arg-type]
            link = at_worker.link()
            assert isinstance(link, TcpLink)
            eventually(lambda: link._wake_at == 1)  # between payloads every byte counts

    def test_a_silent_peer_is_noticed(self, world: World) -> None:
        server_link, _, _, at_worker = world.pair(silence_s=0.6, beat_s=0.1)
        with hold(server_link):
            at_worker.wait(lambda r: r.ends)
        assert at_worker.ends[0].startswith("silent for 0.")
        at_worker.link(1)  # and comes back

    def test_beats_keep_a_quiet_link(self, world: World) -> None:
        _, at_server, worker_link, at_worker = world.pair(silence_s=0.4, beat_s=0.05)
        pause(owner_of(worker_link), 1.2)
        assert worker_link.open
        assert not at_worker.ends
        assert not at_server.messages, "beats are nobody's business"

    def test_a_stopped_peer_whose_kernel_answers_is_kept(self, world: World) -> None:
        """As in a call that holds the GIL. The bound for it is another one than for a machine that is gone."""
        server = world.transport("server", silence_s=0.6, beat_s=0.1, stall_s=WAIT_S)
        worker = world.transport(silence_s=WAIT_S, beat_s=0.1)
        (at_server, at_worker), go_on = world.meet(server, worker), threading.Event()
        link = at_server.link()
        at_worker.link()
        worker.call_later(0, lambda: go_on.wait(WAIT_S))
        eventually(lambda: link.stalled)
        go_on.set()
        eventually(lambda: not link.stalled)
        assert link.open
        assert at_server.ends == []

    @pytest.mark.parametrize(
        ("unanswered_s", "stall_s"),
        [(math.inf, 10 * WAIT_S), (None, 3.0)],
        ids=["the kernel tells", "it does not tell"],
    )
    def test_a_dead_link_ends_sooner_where_the_kernel_tells(
        self, world: World, monkeypatch: pytest.MonkeyPatch, unanswered_s: float | None, stall_s: float
    ) -> None:
        """Elsewhere than on Linux it lives for `stall_s`: the peer may only stand still."""
        monkeypatch.setattr(connection, "unanswered_s", lambda _: unanswered_s)
        server = world.transport("server", silence_s=0.6, beat_s=0.1, stall_s=stall_s)
        worker = world.transport(silence_s=WAIT_S, beat_s=0.1)
        (at_server, at_worker), go_on = world.meet(server, worker), threading.Event()
        at_server.link()
        at_worker.link()
        worker.call_later(0, lambda: go_on.wait(WAIT_S))
        at_server.wait(lambda r: r.ends)
        go_on.set()
        silent_s = float(at_server.ends[0].removeprefix("silent for ").removesuffix(" s"))
        assert silent_s >= (0.6 if unanswered_s is not None else stall_s)

    def test_time_in_which_this_process_was_suspended_does_not_count(self, world: World) -> None:
        """A laptop that was asleep, and its peer with it: the first to wake has an old clock and no beat from the other."""
        server, worker = world.transport("server", silence_s=WAIT_S), world.transport(silence_s=1.0, beat_s=0.1)
        at_server, at_worker = world.meet(server, worker)
        link = at_worker.link()
        with hold(at_server.link()):
            with hold(link):
                time.sleep(1.5)
            pause(worker, 0.1)  # awake for a beat, and nothing heard
        pause(worker, 1.0)
        assert link.open, at_worker.ends

    def test_the_memory_of_a_payload_is_free_when_its_work_is_done(self, world: World) -> None:
        """Changed at once after `wait`, many times, it always arrives as it was sent."""
        _, at_server, link, _ = world.pair()
        payload = torch.zeros(700_000)
        for step in range(20):
            payload.fill_(float(step))
            link.send(Message(kind=Kind.PUSH, step=step, payload=payload)).wait()
        at_server.wait(lambda r: len(r.messages) == 20)
        assert all((m.payload == m.step).all() for m in at_server.messages if m.payload is not None)

    def test_a_flood_of_messages_ends_the_link(self, world: World) -> None:
        _, at_server, link, _ = world.pair(messages_per_s=200)
        for _ in range(1000):
            link.send(Message(kind=Kind.ACK))
        at_server.wait(lambda r: r.ends)
        assert at_server.ends[0] == "more than 200 messages in a second"

    def test_a_run_learnt_later_counts_from_then_on(self, world: World) -> None:
        server, worker = world.transport("server", run="a" * 16), world.transport()
        at_server, at_worker = world.meet(server, worker)
        worker.me = dataclasses.replace(worker.me, run="a" * 16)
        at_worker.link().send(Message(kind=Kind.JOIN))
        at_server.wait(lambda r: r.messages)
        worker.me = dataclasses.replace(worker.me, run="b" * 16)
        at_worker.link().send(Message(kind=Kind.JOIN))
        at_server.wait(lambda r: r.ends)
        assert at_server.ends[0] == f"JOIN of run {'b' * 16}; this is run {'a' * 16}"

    def test_an_error_in_a_handler_ends_that_link_only(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        server, bad, good = world.transport("server"), world.transport(), world.transport("worker", 1)
        at_server, at_bad, at_good = Recorder(), Recorder(), Recorder()

        def stumble(link: Link, message: Message) -> None:
            if message.step == 13:
                raise RuntimeError("a mistake of ours")

        at_server.on_message = stumble
        address = server.listen(HERE, 0, at_server)
        bad.dial(address, at_bad)
        good.dial(address, at_good)
        at_good.link()
        at_bad.link().send(Message(kind=Kind.ACK, step=13))
        at_bad.wait(lambda r: r.ends)
        at_good.link().send(Message(kind=Kind.ACK, step=14))
        at_server.wait(lambda r: any(m.step == 14 for m in r.messages))
        assert "a mistake of ours" in caplog.text

    @pytest.mark.parametrize(("host", "shown"), [("localhost", "localhost:"), ("::1", "[::1]:")])
    def test_addresses(self, world: World, host: str, shown: str) -> None:
        if host == "::1" and not has_ipv6():
            pytest.skip("no IPv6 here")
        server, worker = world.transport("server"), world.transport()
        at_server, at_worker = Recorder(), Recorder()
        address = server.listen(host, 0, at_server)
        assert address.startswith(shown)
        worker.dial(address, at_worker)
        at_worker.link()

    def test_addresses_that_cannot_be_used(self, world: World) -> None:
        server, worker = world.transport("server"), world.transport()
        at_server, at_worker = Recorder(), Recorder()
        with pytest.raises(UserError, match="'nowhere' is not an address; write HOST:PORT"):
            worker.dial("nowhere", at_worker)
        with pytest.raises(
            UserError, match=r"cannot listen on 192\.0\.2\.1:0: .*; '192\.0\.2\.1' is no address of this m"
        ):
            server.listen("192.0.2.1", 0, at_server)

    def test_socket_options(self, world: World) -> None:
        _, _, link, _ = world.pair()
        assert isinstance(link, TcpLink)
        sock = link._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    def test_nothing_is_dialled_while_it_closes(self, world: World) -> None:
        """A handler that dials again when its link ends would leave a task in a loop that is closed."""
        server, worker = world.transport("server"), world.transport("worker", 1)
        _, at_worker = world.meet(server, worker)
        address = worker.listen(HERE, 0, at_worker)
        at_worker.link()
        dialled = []
        at_worker.on_end = lambda: dialled.append(worker.dial(address, Recorder()))
        worker.close()
        assert dialled
        assert worker.loop.is_closed()
        assert not worker._tasks

    def test_waiting_is_logged_once(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        worker, address = world.transport(), f"{HERE}:{free_port()}"
        worker.dial(address, Recorder())
        eventually(lambda: "waiting for a peer" in caplog.text)
        pause(worker, 0.5)
        assert caplog.text.count(f"waiting for a peer at {address}") == 1


@PLAIN
class TestBuffers:
    def test_buffer_size_reaches_both_ends(self, world: World) -> None:
        me = make_peer("server")
        server, worker = (world.keep(TcpTransport(me, buffer_size=1 << 16)) for _ in range(2))
        at_server, at_worker = world.meet(server, worker)
        for link in (at_worker.link(), at_server.link()):
            assert isinstance(link, TcpLink)
            sock = link._transport.get_extra_info("socket")
            assert 1 << 16 <= sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 1 << 18
        payload = torch.rand(1_000_000)
        at_worker.link().send(Message(kind=Kind.PUSH, payload=payload)).wait()
        at_server.wait(lambda r: r.messages)
        assert torch.equal(at_server.messages[0].payload, payload)  # type: ignore[arg-type]


class TestCongestion:
    """BBR leaves a part of a local line idle when sums go both ways (`benchmarks p1`)."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        with socket.create_server((HERE, 0)) as server, socket.create_connection(server.getsockname()) as sock:
            other, _ = server.accept()
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            except (AttributeError, OSError):
                pytest.skip("this system has no BBR")
            with other:
                yield sock, other

    def algorithm(self, sock: socket.socket) -> bytes:
        return bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)).rstrip(b"\0")

    def test_bbr_is_replaced_on_a_local_link(self, pair: tuple[socket.socket, socket.socket]) -> None:
        set_options(pair[0], buffer_size=None)
        assert self.algorithm(pair[0]) in INSTEAD_OF_BBR

    def test_bbr_stays_on_other_links(
        self, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sockets, "_is_local", lambda sock: False)
        set_options(pair[0], buffer_size=None)
        assert self.algorithm(pair[0]) == b"bbr"

    @pytest.mark.parametrize(
        ("address", "local"),
        [("192.168.1.7", True), ("10.0.0.1", True), ("fe80::1%eth0", True), ("8.8.8.8", False), ("2600::1", False)],
    )
    def test_which_addresses_are_local(self, address: str, local: bool) -> None:
        class Named:
            def getpeername(self) -> tuple[str, int]:
                return address, 1

        assert sockets._is_local(Named()) is local  # type: ignore[arg-type]


@pytest.mark.skipif(not _installed("cryptography"), reason="a token needs cryptography")
@PLAIN
class TestTokens:
    def meet(
        self, world: World, server_tokens: list[str], worker_tokens: list[str], *, uvloop: bool = True
    ) -> tuple[Recorder, Recorder]:
        server, worker = (
            world.keep(TcpTransport(make_peer(role), keyring=Keyring(tokens) if tokens else None, uvloop=uvloop))
            for role, tokens in (("server", server_tokens), ("worker", worker_tokens))
        )
        return world.meet(server, worker)

    @pytest.mark.parametrize(
        ("server_tokens", "worker_tokens", "said"),
        [(1, 2, "does not have our token"), (0, 1, "it may have no token")],
        ids=["a wrong one", "one where none is used"],
    )
    @pytest.mark.parametrize("uvloop", [False, True])
    def test_a_token_that_does_not_fit(
        self, world: World, server_tokens: int, worker_tokens: int, said: str, uvloop: bool
    ) -> None:
        mine, theirs = ([new_token() for _ in range(count)] for count in (server_tokens, worker_tokens))
        at_server, at_worker = self.meet(world, mine, theirs, uvloop=uvloop)
        at_worker.wait(lambda r: r.refusals)
        assert said in at_worker.refusals[0][1]
        assert not at_server.links

    def test_no_token_where_one_is_needed(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        """The other side cannot answer in a way that we could read: we keep trying, and say what may be wrong."""
        caplog.set_level(logging.INFO)
        at_server, _ = self.meet(world, [new_token()], [])
        said = "the peer closed the connection without a response; does it need a token? (smolcluster token add)"
        eventually(lambda: said in caplog.text)
        assert not at_server.links

    def test_during_a_change_of_tokens_either_will_do(self, world: World) -> None:
        """They meet by the first of the worker's tokens that the server has."""
        old, new, *others = (new_token() for _ in range(MAX_TOKENS))
        for server_tokens, worker_tokens, expected in (
            ([new, old], [old], old),
            ([old], [new, old], old),
            ([old, new], [new, old], new),
            ([new], [*others, old, new], new),
            ([*others, old, new], [new], new),
        ):
            at_server, at_worker = self.meet(world, server_tokens, worker_tokens)
            for link in (at_worker.link(), at_server.link()):
                assert isinstance(link, TcpLink)
                assert link._parser.cluster == Credentials(expected).cluster

    @pytest.mark.parametrize("uvloop", [False, True])
    def test_a_handshake_that_was_damaged_on_the_way_is_tried_again(
        self, world: World, uvloop: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(tcp, "LOG_AFTER_S", 0.0)
        token = new_token()
        server = world.keep(TcpTransport(make_peer("server"), keyring=Keyring([token])))
        worker = world.keep(TcpTransport(make_peer(), keyring=Keyring([token]), uvloop=uvloop))
        at_server, at_worker = Recorder(), Recorder()
        with Relay(server.listen(HERE, 0, at_server), change=first_damaged(byte=300)) as relay:
            worker.dial(relay.address, at_worker)
            at_worker.wait(lambda r: r.links or r.refusals)
            assert at_worker.refusals == []
            assert f"waiting for a peer at {relay.address}: TLS failed: " in caplog.text
            worker.close()
            server.close()

    def test_an_impostor_on_the_servers_side_is_refused(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has the certificate, by whatever means, and not the proof key."""
        token = new_token()
        keyring = Keyring([token])
        monkeypatch.setattr(keyring.current, "prove", lambda role, *, mine, theirs: bytes(32))
        monkeypatch.setattr(keyring.current, "verify", lambda proof, *, role, mine, theirs: True)
        server = world.keep(TcpTransport(make_peer("server"), keyring=keyring))
        _, at_worker = world.meet(server, world.keep(TcpTransport(make_peer(), keyring=Keyring([token]))))
        at_worker.wait(lambda r: r.refusals)
        assert at_worker.refusals[0][1] == NOT_A_MEMBER
        assert not at_worker.links


@PLAIN
class TestVersions:
    """Peers with another version of the protocol: both sides report both versions."""

    def test_a_newer_dialer(self, world: World) -> None:
        at_server, server = Recorder(), world.transport("server")
        with socket.create_connection(split_address(server.listen(HERE, 0, at_server)), timeout=WAIT_S) as sock:
            sock.sendall(b"SMOL" + (7).to_bytes(2, "little") + bytes(200))
            answer = sock.recv(4096)
        assert answer[:6] == b"SMOL" + frames.VERSION.to_bytes(2, "little")  # from which it learns ours
        at_server.wait(lambda r: r.refusals)
        assert "version 7 of the protocol and this side version 1" in at_server.refusals[0][1]

    @pytest.mark.parametrize(
        ("says", "words"),
        [
            (b"SMOL\x07\x00" + bytes(100), "version 7 of the protocol and this side version 1"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the peer speaks another protocol: its first bytes are b'HTTP'"),
        ],
    )
    def test_a_listener_of_another_kind(self, world: World, says: bytes, words: str) -> None:
        at_worker, worker = Recorder(), world.transport()
        with socket.create_server((HERE, 0)) as listener:
            worker.dial(join_address(*listener.getsockname()), at_worker)
            sock, _ = listener.accept()
            with sock:
                sock.sendall(says)
                at_worker.wait(lambda r: r.refusals)
            assert words in at_worker.refusals[0][1]
            worker.close()


class TestHandshake:
    def meet(self, client: Handshake, server: Handshake, *, cluster: bytes = bytes(8)) -> None:
        """Carry messages to and fro until nobody has anything to say."""
        to_server, to_client = client.begin(), server.begin()
        while to_server or to_client:
            for message in to_server:
                to_client += server.handle(message, cluster=cluster)
            to_server = []
            for message in to_client:
                to_server += client.handle(message, cluster=cluster)
            to_client = []

    def server(self, credentials: Credentials | None = None, **options: Any) -> Handshake:
        return Handshake(make_peer("server", **options), find=lambda cluster: credentials or NoToken())

    def client(self, credentials: Credentials | None = None, **options: Any) -> Handshake:
        return Handshake(make_peer("worker", 2, **options), credentials=credentials or NoToken())

    def test_two_meet(self) -> None:
        client, server = self.client(), self.server()
        self.meet(client, server)
        assert (server.peer.role, server.peer.rank, client.peer.role) == ("worker", 2, "server")

    def test_the_server_says_nothing_of_itself_before_the_proof(self) -> None:
        client, server = self.client(), self.server()
        (answer,) = server.handle(client.begin()[0], cluster=bytes(8))
        assert set(answer.meta) == {"nonce"}

    @pytest.mark.skipif(not _installed("cryptography"), reason="a token needs cryptography")
    def test_wrong_unknown_and_missing_tokens_are_told_the_same(self) -> None:
        mine, other = Credentials(new_token()), Credentials(new_token())
        for find in (lambda cluster: mine, lambda cluster: None):
            for client in (self.client(other), self.client()):
                with pytest.raises(Refusal) as refusal:
                    self.meet(client, Handshake(make_peer("server"), find=find))
                assert refusal.value.notify
                assert str(refusal.value) == NOT_A_MEMBER

    def test_a_servers_proof_does_not_pass_for_a_clients(self) -> None:
        """Whoever sends our own words back to us proves nothing."""
        server = self.server()
        (answer,) = server.handle(
            Message(kind=Kind.HELLO, meta={"nonce": "00" * 32, **dataclasses.asdict(make_peer())}), cluster=bytes(8)
        )
        nonce = bytes.fromhex(answer.meta["nonce"])
        reflected = NoToken().prove("server", mine=nonce, theirs=bytes(32))
        with pytest.raises(Refusal, match=NOT_A_MEMBER):
            server.handle(Message(kind=Kind.PROOF, meta={"proof": reflected.hex()}), cluster=bytes(8))

    @pytest.mark.parametrize("kind", [Kind.PROOF, Kind.ACCEPT, Kind.BEAT])
    def test_out_of_order(self, kind: Kind) -> None:
        for side in (self.client(), self.server()):
            with pytest.raises(Refusal, match=f"received {kind.name}, expected HELLO"):
                side.handle(Message(kind=kind), cluster=bytes(8))

    def test_refused_by_the_other_side(self) -> None:
        client = self.client()
        with pytest.raises(Refusal, match="go away  really") as refusal:
            client.handle(Message(kind=Kind.REFUSE, meta={"reason": "go away\n\x1breally"}), cluster=bytes(8))
        assert not refusal.value.notify

    @pytest.mark.parametrize(
        "change",
        [
            {"role": "admin"}, {"role": 1}, {"role": None},
            {"rank": -1}, {"rank": 1.0}, {"rank": True}, {"rank": "1"}, {"rank": 1 << 20},
            {"host": ""}, {"host": "x" * 256}, {"host": "a\nb"}, {"host": 5},
            {"instance": ""}, {"instance": "x" * 16}, {"instance": "a" * 15}, {"instance": " " * 14 + "aa"},
            {"run": "abc"}, {"run": 7}, {"run": ["a"]},
            {"versions": []}, {"versions": {"a": 1}}, {"versions": {"a": "b" * 101}}, {"versions": {"a": "\x00"}},
            {"versions": {str(n): "" for n in range(17)}},
        ],
        ids=str,
    )  # fmt: skip
    def test_every_field_of_a_hello_is_validated(self, change: dict[str, Any]) -> None:
        meta = dataclasses.asdict(make_peer())
        assert read_peer(meta).role == "worker"
        with pytest.raises(Refusal):
            read_peer({**meta, **change})
        with pytest.raises(Refusal):
            read_peer({name: value for name, value in meta.items() if name != "instance"})

    @pytest.mark.parametrize("nonce", [None, "", "00" * 31, "zz" * 32, 5, ["00"]])
    def test_nonces(self, nonce: Any) -> None:
        with pytest.raises(Refusal, match="nonce must be 64 hex digits"):
            self.server().handle(
                Message(kind=Kind.HELLO, meta={**dataclasses.asdict(make_peer()), "nonce": nonce}), cluster=bytes(8)
            )


def test_only_small_things_are_needed_to_import_it() -> None:
    """A worker without the extra still finds out what to install, instead of falling over an import."""
    code = "import sys; sys.modules['uvloop'] = sys.modules['cryptography'] = None; "
    code += "import smolcluster.comm.elastic.transport.tcp as t; t._new_loop(True).close()"
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


class AsksItself(socket.socket):
    """The system gives it the port that it asks for: what happens once in some ten thousand times, every time."""

    def connect(self, address: Any) -> None:
        if self.family == socket.AF_INET:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
        super().connect(address)


@TCP
def test_a_socket_connected_to_itself_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens yet. It would be a refusal for good, and keep the port from the one who is waited for."""
    port, attempts = free_port(), threading.Event()

    def dialed(*arguments: Any) -> Any:
        attempts.set()
        return draw(*arguments)

    draw = tcp.random.uniform
    monkeypatch.setattr(tcp.random, "uniform", dialed)
    worker, at_worker = world.transport("worker", 1), Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", AsksItself)
        with pytest.raises(ConnectionRefusedError):
            connect_tcp(HERE, port, timeout_s=WAIT_S)
        worker.dial(join_address(HERE, port), at_worker)
        assert attempts.wait(WAIT_S)
    server, at_server = world.transport("server"), Recorder()
    server.listen(HERE, port, at_server)
    at_server.link()
    assert at_worker.refusals == []


def test_pauses_between_dials_grow_and_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    enough = threading.Event()

    def draw(low: float, high: float) -> float:
        pauses.append(high)
        if len(pauses) == 8:
            enough.set()
        return 0.0

    monkeypatch.setattr(tcp.random, "uniform", draw)
    with contextlib.closing(TcpTransport(make_peer())) as worker:
        worker.dial(f"{HERE}:{free_port()}", Recorder())
        assert enough.wait(WAIT_S)
    assert pauses[:8] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


# Help


@contextlib.contextmanager
def hold(link: Link) -> Iterator[None]:
    """Block a transport's thread, as in a stopped process."""
    held, release = threading.Event(), threading.Event()
    owner_of(link).call_later(0, lambda: (held.set(), release.wait(WAIT_S)))
    assert held.wait(WAIT_S)
    try:
        yield
    finally:
        release.set()


def drops(*, bytes_per_s: int) -> Callable[[int], int]:
    """The pace of a slow line, once the handshake is through."""

    def pace(passed: int) -> int:
        if passed > 8000:
            time.sleep(500 / bytes_per_s)  # this is the line
        return 500

    return pace


def first_damaged(*, byte: int) -> Callable[[int, int, bytes], bytes]:
    """On the first connection one byte of what comes back is another."""

    def change(number: int, passed: int, data: bytes) -> bytes:
        damaged = bytearray(data)
        if number == 0 and passed <= byte < passed + len(data):
            damaged[byte - passed] ^= 1
        return bytes(damaged)

    return change


def pause(transport: Transport, seconds: float) -> None:
    """Wait, to see that the transport does nothing meanwhile."""
    done = threading.Event()
    transport.call_later(seconds, done.set)
    assert done.wait(WAIT_S)


def owner_of(link: Link) -> TcpTransport:
    assert isinstance(link, TcpLink)
    return link._owner


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
