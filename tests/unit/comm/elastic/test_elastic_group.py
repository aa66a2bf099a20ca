"""Collectives over the elastic transport: every operation, many at once, and what happens when members come and go."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.places import eventually
from tests.unit.comm.ranks import SECONDS, at_once

from smolcluster.comm.elastic.collectives import peers as peers_module
from smolcluster.comm.elastic.collectives import schedule
from smolcluster.comm.elastic.collectives.group import ElasticGroup
from smolcluster.comm.elastic.collectives.operations import MAX_AHEAD
from smolcluster.comm.elastic.collectives.peers import Peers
from smolcluster.comm.elastic.collectives.state_transfer import state_messages
from smolcluster.comm.elastic.membership.pairwise_keys import PairwiseKeys, member_mac, parse_keys
from smolcluster.comm.elastic.transport.api import Head, Kind, Link, Message, Peer, Transport
from smolcluster.comm.elastic.transport.connection import TcpLink
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport
from smolcluster.comm.group import Group, PeerLost, gather_json
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.view import View, ViewChanged, ViewMember


def instance(rank: int, life: int = 0) -> str:
    return f"{life:08x}{rank:08x}"


class World:
    """Workers of one process, each with a transport and peers of its own."""

    def __init__(self, **tcp: Any) -> None:
        self.tcp = {"limits": LinkLimits(silence_s=SECONDS), **tcp}
        self.transports: dict[str, TcpTransport] = {}
        self.peers: dict[str, Peers] = {}
        self.lost: list[tuple[str, ViewMember, str]] = []  # the reporting instance, the lost member, the reason

    def add(self, rank: int, *, life: int = 0, **options: Any) -> ViewMember:
        me = Peer(role="worker", rank=rank, host="here", instance=instance(rank, life))
        transport = self.transport(me)
        peers = self.peers[me.instance] = Peers(transport, **{"timeout_s": SECONDS, **options})
        peers.on_lost = lambda member, reason: self.lost.append((me.instance, member, reason))
        address = peers.listen("127.0.0.1", 0)
        return ViewMember(rank, me.instance, "here", address)

    def transport(self, me: Peer) -> TcpTransport:
        self.transports[me.instance] = TcpTransport(me, **self.tcp)
        return self.transports[me.instance]

    def form(self, view: View) -> list[ElasticGroup]:
        return [self.peers[member.instance].form(view) for member in view.members]

    def groups(self, size: int) -> list[ElasticGroup]:
        return self.form(View(1, 0, tuple(self.add(rank) for rank in range(size))))

    def kill(self, member: ViewMember) -> None:
        """As by SIGKILL: its connections end without a message."""
        transport = self.transports.pop(member.instance)
        transport.call_later(0, lambda: [link.abort() for link in list(transport.connections)])
        transport.close()

    def close(self) -> None:
        for peers in self.peers.values():
            peers.close()
        if self.transports:
            at_once(list(self.transports.values()), TcpTransport.close)


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World()) as world:
        yield world


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
SEVERAL = pytest.mark.parametrize("size", [2, 3, 4, 5])


@pytest.fixture
def groups(world: World, size: int) -> list[ElasticGroup]:
    return world.groups(size)


# Every operation, against the group in memory


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, so that the sum is exact in every type and any order."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return torch.randint(0, 20, (count,), generator=generator).to(dtype)


def everything(group: Group) -> dict[str, torch.Tensor]:
    n, rank = group.size, group.rank
    results: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        for count in (0, 1, 3, 4099):
            name = f"{dtype} {count}"
            summed = values(rank, count, dtype)
            group.all_reduce(summed).wait()
            part, gathered = torch.zeros(count, dtype=dtype), torch.zeros(n * count, dtype=dtype)
            group.reduce_scatter(part, values(rank, n * count, dtype)).wait()
            group.all_gather(gathered, values(rank, count, dtype)).wait()
            copied = values(rank, count, dtype)
            group.broadcast(copied, source=n - 1).wait()
            results |= {f"{name} sum": summed, f"{name} part": part, f"{name} all": gathered, f"{name} copy": copied}
    ring = torch.zeros(2, 3)
    if n > 1:
        sent = group.send(torch.full((2, 3), float(rank)), to=(rank + 1) % n, tag=3)
        group.recv(ring, source=(rank - 1) % n, tag=3).wait()
        sent.wait()
    group.barrier()
    return {**results, "ring": ring}


@SIZES
def test_every_operation_gives_what_the_group_in_memory_gives(groups: list[ElasticGroup]) -> None:
    expected = at_once(MemoryGroup.world(len(groups)), everything)
    for ours, theirs in zip(at_once(groups, everything), expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@SIZES
def test_tensors_of_many_pieces(groups: list[ElasticGroup]) -> None:
    count, n = 700_001, len(groups)

    def work(group: Group) -> list[torch.Tensor]:
        tensor = torch.full((count,), group.rank + 1.0)
        group.all_reduce(tensor).wait()
        copied = torch.arange(count, dtype=torch.float32) if group.rank == n - 1 else torch.zeros(count)
        group.broadcast(copied, source=n - 1).wait()
        gathered = torch.zeros(n * 300_000, dtype=torch.float16)
        group.all_gather(gathered, torch.full((300_000,), float(group.rank), dtype=torch.float16)).wait()
        return [tensor, copied, gathered]

    for tensor, copied, gathered in at_once(groups, work):
        assert torch.equal(tensor, torch.full((count,), n * (n + 1) / 2))
        assert torch.equal(copied, torch.arange(count, dtype=torch.float32))
        assert torch.equal(gathered, torch.arange(n, dtype=torch.float16).repeat_interleave(300_000))


@SIZES
def test_sums_have_the_same_bits_everywhere_and_every_time(groups: list[ElasticGroup]) -> None:
    def work(group: Group) -> list[bytes]:
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
            group.all_reduce(tensor).wait()
            results.append(tensor.view(torch.uint8).numpy().tobytes())
        return results

    first, *others = at_once(groups, work) + at_once(groups, work)
    assert all(other == first for other in others)


@SIZES
def test_tensors_that_do_not_lie_in_a_row(groups: list[ElasticGroup]) -> None:
    n = len(groups)

    def work(group: Group) -> None:
        matrix = torch.arange(12, dtype=torch.float32).view(3, 4)
        columns = matrix[:, 1:3]
        group.all_reduce(columns).wait()
        assert matrix[:, 1:3].equal(n * torch.arange(12.0).view(3, 4)[:, 1:3])
        assert matrix[:, 0].equal(torch.tensor([0.0, 4.0, 8.0])), "what lies between is left alone"
        output = torch.zeros(n, 2).t()
        group.all_gather(output, torch.ones(4)[::2] * group.rank).wait()
        assert output.reshape(-1).equal(torch.arange(n, dtype=torch.float32).repeat_interleave(2))
        whole = torch.ones(3 * n, 2)[:, 0]
        part = torch.zeros(3, 2)[:, 1]
        group.reduce_scatter(part, whole).wait()
        assert part.equal(torch.full((3,), float(n)))
        assert whole.equal(torch.ones(3 * n))
        weights = torch.zeros(3, requires_grad=True) if group.rank else torch.ones(3, requires_grad=True)
        group.broadcast(weights, source=0).wait()
        assert weights.detach().equal(torch.ones(3))

    at_once(groups, work)


def test_alone_every_operation_is_done_at_once(world: World) -> None:
    (group,) = world.groups(1)
    everything(group)
    assert group.traffic.bytes_sent == group.traffic.bytes_received == 0
    group.abort(ViewChanged("not any more"))
    with pytest.raises(ViewChanged, match="not any more"):
        group.barrier()


def test_wrong_arguments_are_refused(world: World) -> None:
    group, _ = world.groups(2)
    with pytest.raises(ValueError, match="not 2 x 3"):
        group.all_gather(torch.zeros(5), torch.zeros(3))
    with pytest.raises(ValueError, match="no rank 2"):
        group.broadcast(torch.zeros(1), source=2)
    with pytest.raises(ValueError, match="itself"):
        group.send(torch.zeros(1), to=0)
    with pytest.raises(ValueError, match="complex64"):
        group.all_reduce(torch.zeros(1, dtype=torch.complex64))


# In flight together


@SIZES
def test_many_operations_in_flight(groups: list[ElasticGroup]) -> None:
    n = len(groups)

    def work(group: Group) -> None:
        sums = [torch.full((1 + 9973 * i,), float(group.rank + i)) for i in range(12)]
        copies = [torch.full((50_000,), float(group.rank * i)) for i in range(12)]
        works = []
        for i in range(12):
            works += [group.all_reduce(sums[i]), group.broadcast(copies[i], source=i % n)]
        for work in reversed(works):
            work.wait()
        for i in range(12):
            assert sums[i].eq(sum(range(n)) + n * i).all()
            assert copies[i].eq(i % n * i).all()

    at_once(groups, work)


@SEVERAL
def test_one_rank_comes_much_later(groups: list[ElasticGroup]) -> None:
    """The others' pieces are there before it has called anything."""
    *early, late = groups
    tensors = [[torch.full((200_000,), float(r + i)) for i in range(4)] for r in range(len(groups))]
    works = [[group.all_reduce(t) for t in tensors[r]] for r, group in enumerate(early)]
    eventually(lambda: late._exchange._early != {})  # type: ignore[attr-defined]
    assert not any(work.done for rank in works for work in rank)
    works.append([late.all_reduce(t) for t in tensors[-1]])
    eventually(lambda: all(work.done for rank in works for work in rank))  # without anybody waiting for it
    for work in [work for rank in works for work in rank]:
        work.wait()
    for rank in tensors:
        for i, tensor in enumerate(rank):
            assert tensor.eq(sum(range(len(groups))) + len(groups) * i).all()


@SEVERAL
def test_sends_with_a_tag_keep_their_order_and_do_not_mix(groups: list[ElasticGroup]) -> None:
    first, second = groups[0], groups[1]
    sent = [first.send(torch.full((3,), float(i)), to=1, tag=i % 2) for i in range(6)]
    odd = [torch.zeros(3) for _ in range(3)]
    even = [torch.zeros(3) for _ in range(3)]
    for work in [second.recv(t, source=0, tag=1) for t in odd] + [second.recv(t, source=0, tag=0) for t in even]:
        work.wait()
    for work in sent:
        work.wait()
    assert [t[0].item() for t in odd] == [1, 3, 5]
    assert [t[0].item() for t in even] == [0, 2, 4]


def test_groups_within_a_group(world: World) -> None:
    groups = world.groups(4)

    def work(group: ElasticGroup) -> None:
        halves = [group.sub([0, 1]), group.sub([3, 2])]
        half = halves[group.rank // 2]
        assert halves[1 - group.rank // 2] is None
        assert (half.size, half.rank) == (2, [0, 1, 1, 0][group.rank])
        tensor = torch.full((70_000,), 10.0**group.rank)
        whole = torch.ones(10)
        works = [half.all_reduce(tensor), group.all_reduce(whole)]  # both groups count for themselves
        for work in works:
            work.wait()
        assert tensor[0].item() == (11, 11, 1100, 1100)[group.rank]
        assert whole[0].item() == 4
        alone = half.sub([1])
        nested = half.sub([1, 0])
        assert nested is not None
        assert (alone is None) == (half.rank == 0)
        said = gather_json(nested, group.rank)
        assert said == [[1, 0], [2, 3]][group.rank // 2]
        half.close()
        group.barrier()

    at_once(groups, work)


@pytest.mark.parametrize("count", [7, 1000, 300_000])
def test_traffic_is_what_was_moved(world: World, count: int) -> None:
    n = 4
    groups = world.groups(n)
    at_once(groups, lambda group: group.all_reduce(torch.zeros(count)).wait())
    plans = [schedule.choose(n, rank, count, itemsize=4) for rank in range(n)]
    for group, plan in zip(groups, plans, strict=True):
        acts = [(act, 4 * (chain.stop - chain.start)) for chain in plan for act in chain.acts]
        assert group.traffic.bytes_sent == sum(size for act, size in acts if not act.verb.receives)
        assert group.traffic.bytes_received == sum(size for act, size in acts if act.verb.receives)


# Members come and go


def next_view(view: View, members: Sequence[ViewMember]) -> View:
    return View(view.epoch + 1, view.step, tuple(members))


def test_a_member_dies_in_the_middle_of_a_sum(world: World) -> None:
    groups = world.groups(3)
    members = groups[0].view.members
    at_once(groups, lambda group: group.barrier())

    # The last one never calls the operation, and is gone.
    tensors = [torch.full((400_000,), float(r + 1)) for r in range(2)]
    works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=False)]
    world.kill(members[2])
    eventually(
        lambda: {(who, member) for who, member, _ in world.lost} >= {(m.instance, members[2]) for m in members[:2]}
    )
    assert not any(work.finished.is_set() for work in works), "a loss alone raises nothing"  # type: ignore[attr-defined]

    # The coordinator's word: the others go on without it, over the links they have.
    link = _links(world, members[0], members[1])
    second = world.form(next_view(groups[0].view, members[:2]))
    for work in works:
        with pytest.raises(ViewChanged, match="view 2 has 2"):
            work.wait()
    for rank, tensor in enumerate(tensors):
        tensor.fill_(rank + 1.0)
    at_once(second, lambda group: group.all_reduce(tensors[group.rank]).wait())
    assert all(tensor.eq(3.0).all() for tensor in tensors)
    assert _links(world, members[0], members[1]) == link
    assert _links(world, members[0], members[2]) == []

    # It comes back as a new process and gets a place of its own.
    again = world.add(2, life=1)
    third = world.form(next_view(second[0].view, (*members[:2], again)))
    assert at_once(third, lambda group: gather_json(group, group.rank)) == [[0, 1, 2]] * 3
    assert _links(world, members[0], members[1]) == link


def test_a_member_dies_while_pieces_fly(world: World) -> None:
    """The aborted sum does not write into memory that the next view uses."""
    groups = world.groups(3)
    members = groups[0].view.members
    tensors = [torch.full((2_000_000,), float(r + 1)) for r in range(3)]
    works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
    eventually(lambda: groups[0].traffic.bytes_received > 500_000)
    world.kill(members[2])
    second = world.form(next_view(groups[0].view, members[:2]))
    for work in works[:2]:
        with pytest.raises(ViewChanged):
            work.wait()
    for _ in range(3):
        for rank, tensor in enumerate(tensors[:2]):
            tensor.fill_(rank + 1.0)
        at_once(second, lambda group: group.all_reduce(tensors[group.rank]).wait())
        assert all(tensor.eq(3.0).all() for tensor in tensors[:2])
    assert world.peers[members[0].instance]._links._kept_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_members_come_and_go_at_any_moment(world: World, seed: int) -> None:
    """Sums of the next view are right, whatever was in flight when the view changed, and no memory stays reserved."""
    chance = random.Random(seed)
    members = [world.add(rank) for rank in range(3)]
    view = View(1, 0, tuple(members))
    groups = world.form(view)
    kills = 0
    for life in range(1, 9):
        # Sums under way in some of the members, at some point of their way, when something happens.
        torn = [torch.ones(chance.choice([10, 70_000, 900_000])) for _ in range(chance.randint(0, 3))]
        callers = groups if chance.random() < 0.5 else chance.sample(groups, len(groups) - 1)
        for group in callers:
            for tensor in torn:
                group.all_reduce(tensor.clone())
        if torn and callers is groups:
            eventually(lambda: any(group.traffic.bytes_received > 0 for group in groups))  # noqa: B023
        if len(members) > 2 and chance.random() < 0.5:
            world.kill(members.pop(chance.randrange(len(members))))
            kills += 1
        if len(members) < 4 and chance.random() < 0.6:
            members.append(world.add(10 + life, life=life))
        view = next_view(view, members)
        groups = world.form(view)

        # The next view sums as if nothing had been.
        counts = [chance.choice([1, 5000, 300_001]) for _ in range(3)]

        def work(group: ElasticGroup, counts: list[int] = counts) -> None:
            tensors = [torch.full((count,), group.rank + 1.0) for count in counts]
            for each in [group.all_reduce(tensor) for tensor in tensors]:
                each.wait()
            n = group.size
            assert all(tensor.eq(n * (n + 1) / 2).all() for tensor in tensors)

        at_once(groups, work)
    assert kills > 0
    for member in members:
        links = world.peers[member.instance]._links
        eventually(lambda: links._kept_bytes == 0)  # noqa: B023
        eventually(lambda: all(o._queued_bytes == 0 and not o.waiting for o in links._queues.values()))  # noqa: B023


def _links(world: World, one: ViewMember, other: ViewMember) -> list[Link]:
    outlet = world.peers[one.instance]._links._queues.get(other.instance)
    return [] if outlet is None else list(outlet.links)


def linked(world: World, members: Sequence[ViewMember]) -> set[tuple[int, int]]:
    """The pairs of members with a link."""
    pairs = itertools.combinations(members, 2)
    return {(a.rank, b.rank) for a, b in pairs if _links(world, a, b) and _links(world, b, a)}


def test_only_neighbours_in_the_ring_have_a_link(world: World) -> None:
    groups = world.groups(6)
    members, ring = groups[0].view.members, {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)}
    eventually(lambda: linked(world, members) == ring)
    at_once(groups, lambda group: group.all_gather(torch.zeros(60), torch.ones(10)).wait())
    at_once(groups, lambda group: group.reduce_scatter(torch.zeros(10), torch.ones(60)).wait())
    assert linked(world, members) == ring
    assert all(len(_links(world, a, b)) <= 1 for a in members for b in members)


def test_a_link_is_made_when_an_operation_needs_it(world: World) -> None:
    groups = world.groups(6)
    at_once(groups, lambda group: group.barrier())
    members, before = groups[0].view.members, linked(world, groups[0].view.members)

    # The later of the two has called it, and the earlier one has not: it does not wait for ever to be dialled.
    sent = groups[4].send(torch.ones(3), to=1)
    eventually(lambda: linked(world, members) == before | {(1, 4)})
    received = torch.zeros(3)
    groups[1].recv(received, source=4).wait()
    sent.wait()
    assert received.eq(1).all()
    assert world.lost == []


def test_a_lost_link_is_reported_only_by_those_who_need_it(world: World) -> None:
    first = world.groups(5)
    members = first[0].view.members
    at_once(first, lambda group: group.send(torch.ones(1), to=3).wait() if group.rank == 1 else None)
    second = world.form(next_view(first[0].view, members))
    at_once(second, lambda group: group.all_gather(torch.zeros(5), torch.ones(1)).wait())

    def closed() -> bool:
        for link in _links(world, members[1], members[3]):  # both may have dialled
            link.close("not needed in this view")
        return (1, 3) not in linked(world, members)

    eventually(closed)
    assert world.lost == []
    world.kill(members[3])
    eventually(
        lambda: {who for who, lost, _ in world.lost if lost == members[3]} == {members[i].instance for i in (2, 4)}
    )


def test_a_lost_link_is_reported_again_when_the_next_operation_needs_it(world: World) -> None:
    """The coordinator may have dropped the first report, because rounds were committed since."""
    members = (world.add(0, connect_s=0.2), world.add(1))
    groups = world.form(View(1, 0, members))
    at_once(groups, lambda group: group.barrier())
    world.kill(members[1])
    eventually(lambda: members[0].instance in {who for who, _, _ in world.lost})
    groups[0].send(torch.ones(1), to=1)
    eventually(lambda: (members[0].instance, members[1], "no connection within 0.2 s") in world.lost)


def test_a_neighbour_that_cannot_be_reached_is_reported(world: World) -> None:
    first, second = world.add(0, connect_s=0.2), world.add(1, connect_s=0.2)
    gone = ViewMember(2, instance(2), "here", "127.0.0.1:9")
    for member in (first, second):
        world.peers[member.instance].form(View(1, 0, (first, second, gone)))
    eventually(lambda: {who for who, member, _ in world.lost if member == gone} == {first.instance, second.instance})
    assert world.lost[0][2] == "no connection within 0.2 s"


def test_abort_reaches_every_wait_at_once(world: World) -> None:
    group, other = world.groups(2)
    works = [group.all_reduce(torch.zeros(1000)) for _ in range(3)]
    error = ViewChanged("enough")
    waiting = threading.Event()

    def wait() -> BaseException | None:
        waiting.set()
        with pytest.raises(ViewChanged, match="enough") as raised:
            works[0].wait()
        return raised.value

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wait)
        waiting.wait()
        group.abort(error)
        assert future.result(SECONDS / 2) is error
    for work in (*works, group.all_reduce(torch.zeros(3)), group.sub([0, 1]).broadcast(torch.zeros(3), source=1)):
        with pytest.raises(ViewChanged, match="enough"):
            work.wait()
    group.abort(PeerLost("the first word counts"))
    with pytest.raises(ViewChanged, match="enough"):
        group.barrier()
    other.close()
    with pytest.raises(PeerLost, match="closed"):
        other.barrier()


def test_chunks_of_an_older_view_are_dropped_and_counted(world: World) -> None:
    ahead, behind = world.groups(2)
    view = ahead.view
    at_once([ahead, behind], lambda group: group.barrier())
    peers = [world.peers[member.instance] for member in view.members]
    ahead = peers[0].form(next_view(view, view.members))
    old = behind.all_reduce(torch.ones(10_000))
    eventually(lambda: peers[0].dropped_chunks == 1)

    # Its pieces of the new view wait where the view is not known yet.
    ours, theirs = torch.ones(200_000), torch.ones(200_000)
    work = ahead.all_reduce(ours)
    eventually(lambda: any(head.epoch == 2 for _, head, _ in peers[1]._ahead))
    behind = peers[1].form(next_view(view, view.members))
    with pytest.raises(ViewChanged):
        old.wait()
    behind.all_reduce(theirs).wait()
    work.wait()
    assert ours.eq(2).all()
    assert theirs.eq(2).all()
    assert peers[1]._links._kept_bytes == 0
    assert world.lost == [], "the link outlived it all"


def test_chunks_of_a_view_that_was_skipped_are_dropped(world: World) -> None:
    groups = world.groups(2)
    first = groups[0].view
    peers = [world.peers[member.instance] for member in first.members]
    second = next_view(first, first.members)
    peers[0].form(second).broadcast(torch.ones(10), source=0)
    eventually(lambda: any(head.epoch == 2 for _, head, _ in peers[1]._ahead))
    third = next_view(second, first.members)
    groups = world.form(third)
    at_once(groups, lambda group: group.barrier())
    assert peers[1].dropped_chunks == 1
    assert peers[1]._links._kept_bytes == 0
    with pytest.raises(ValueError, match="is not newer than"):
        peers[0].form(second)
    with pytest.raises(ValueError, match="not a member of view"):
        peers[0].form(View(9, 0, first.members[1:]))


def head_of(count: int, *, epoch: int) -> Head:
    """Of the first piece that rank 1 sends."""
    place = {"step": 0, "channel": 1, "epoch": epoch, "meta": {"tag": 0}}
    return Head(kind=Kind.CHUNK, codec="fp32", dtype="float32", shape=(count,), nbytes=4 * count, **place)  # type: ignore[arg-type]


def test_memory_is_the_callers_again_only_when_no_piece_is_half_way_in(world: World) -> None:
    """A new view while a piece is being received: `form` waits for its end, or for the link's."""
    groups = world.groups(2)
    at_once(groups, lambda group: group.barrier())
    view = groups[0].view
    peers, transport = world.peers[instance(0)], world.transports[instance(0)]
    (link,) = _links(world, view.members[0], view.members[1])
    tensor = torch.zeros(100)
    groups[0].recv(tensor, source=1)
    placed = _on_thread(transport, lambda: peers.place(link, head_of(100, epoch=1)))
    assert placed.data_ptr() == tensor.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(peers.form, next_view(view, view.members[:1]))
        eventually(lambda: peers._settling is not None or future.done())
        future.result(SECONDS)  # the link of the member that is gone was closed, and that ended it
    assert link not in peers._destinations


class HalfWayOut:
    """Two workers, and pieces of an aborted sum that cannot leave the first: the second reads nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        groups = world.groups(2)
        at_once(groups, lambda group: group.barrier())
        self.view = groups[0].view
        self.peers = [world.peers[member.instance] for member in self.view.members]
        (self.link,) = _links(world, *self.view.members)
        self.tensor = torch.ones(1 << 20)
        self._release, held = threading.Event(), threading.Event()
        world.transports[instance(1)].call_later(0, lambda: (held.set(), self._release.wait(SECONDS)))
        assert held.wait(SECONDS)
        groups[0].all_reduce(self.tensor)
        eventually(lambda: self.link.queued_bytes > 0)
        for group in groups:
            group.abort(ViewChanged("another member is gone"))

    def form(self, rank: int) -> ElasticGroup:
        return self.peers[rank].form(next_view(self.view, self.view.members))

    @property
    def waits(self) -> bool:
        """Whether the first worker waits for the end of what it sends."""
        return _on_thread(self.world.transports[instance(0)], lambda: self.peers[0]._settling is not None)

    def let_go(self) -> None:
        self._release.set()


@pytest.fixture
def half_way_out() -> Iterator[HalfWayOut]:
    with contextlib.closing(World(buffer_size=65536, limits=LinkLimits(silence_s=SECONDS))) as world:
        made = HalfWayOut(world)
        yield made
        made.let_go()


def test_memory_is_the_callers_again_only_when_no_piece_is_half_way_out(half_way_out: HalfWayOut) -> None:
    """Changed while it leaves, a piece would not fit its checksum, and a link between two healthy members would end."""
    changed = threading.Event()

    def again(rank: int) -> torch.Tensor:
        group = half_way_out.form(rank)
        tensor = half_way_out.tensor if rank == 0 else torch.empty(1 << 20)
        tensor.fill_(5.0)
        if rank == 0:
            changed.set()
        group.all_reduce(tensor).wait()
        return tensor

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(again, rank) for rank in range(2)]
        eventually(lambda: changed.is_set() or half_way_out.waits)
        half_way_out.let_go()
        assert all(future.result(SECONDS).eq(10.0).all() for future in futures)
    assert half_way_out.link.open
    assert half_way_out.world.lost == []


def test_forming_a_view_does_not_wait_for_a_broken_link(
    half_way_out: HalfWayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "SETTLE_S", 2 * SECONDS)  # the end of the link is enough
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(half_way_out.form, 0)
        eventually(lambda: half_way_out.waits)
        assert isinstance(half_way_out.link, TcpLink)
        half_way_out.world.transports[instance(0)].call_later(0, lambda: half_way_out.link.end("the cable is out"))
        future.result(SECONDS)
    eventually(lambda: [(who, member.rank) for who, member, _ in half_way_out.world.lost] == [(instance(0), 1)])


def test_a_member_that_is_slow_to_take_pieces_is_not_cut_off(
    half_way_out: HalfWayOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "SETTLE_S", 0.1)
    half_way_out.form(0)
    assert half_way_out.link.open
    assert half_way_out.link.queued_bytes > 0


def test_a_piece_may_begin_before_its_view_and_end_after_its_operation_was_called(world: World) -> None:
    groups = world.groups(2)
    at_once(groups, lambda group: group.barrier())
    view = groups[0].view
    peers, transport = world.peers[instance(0)], world.transports[instance(0)]
    (link,) = _links(world, view.members[0], view.members[1])
    placed = _on_thread(transport, lambda: peers.place(link, head_of(3, epoch=2)))
    group = peers.form(next_view(view, view.members))
    tensor = torch.zeros(3)
    work = group.recv(tensor, source=1)
    _on_thread(transport, lambda: placed.fill_(7.0))
    _on_thread(transport, lambda: peers.received(link, Message(kind=Kind.CHUNK, payload=placed)))
    work.wait()
    assert tensor.eq(7).all()
    assert peers._links._kept_bytes == 0


def _on_thread(transport: Transport, call: Callable[[], Any]) -> Any:
    done, results = threading.Event(), []
    transport.call_later(0, lambda: (results.append(call()), done.set()))
    assert done.wait(SECONDS)
    return results[0]


def test_a_silent_peer_is_named(world: World) -> None:
    view = View(1, 0, tuple(world.add(rank, timeout_s=0.05) for rank in range(2)))
    group, _ = world.form(view)
    with pytest.raises(PeerLost, match=r"all_reduce: nothing moved for 0\.05 s; waiting for worker 1 \(here\)"):
        group.all_reduce(torch.zeros(1)).wait()


def test_another_process_at_a_members_address_is_not_that_member(world: World) -> None:
    me, other = world.add(0), world.add(1)
    world.peers[me.instance].form(View(1, 0, (me, ViewMember(1, instance(1, life=7), "here", other.address))))
    eventually(lambda: world.lost != [])
    assert world.lost[0][2] == "another process has its address"


# Hostile members


class Hostile:
    """A member without `Peers`: it accepts links and sends what the test chooses."""

    def __init__(self, world: World, rank: int) -> None:
        self.links: dict[str, Link] = {}
        self.ended: dict[str, str] = {}
        self.member = ViewMember(rank, instance(rank), "there", "")
        me = Peer(role="worker", rank=rank, host="there", instance=self.member.instance)
        self.transport = world.transport(me)
        address = self.transport.listen("127.0.0.1", 0, self)
        self.member = ViewMember(rank, instance(rank), "there", address)

    def linked(self, link: Link) -> None:
        self.links[link.peer.instance] = link

    def place(self, link: Link, head: Head) -> torch.Tensor | None:
        return torch.empty(head.shape, dtype=getattr(torch, head.dtype))

    def received(self, link: Link, message: Message) -> None: ...

    def unlinked(self, link: Link, reason: str) -> None:
        self.ended[link.peer.instance] = reason

    def refused(self, address: str, reason: str) -> None: ...


def chunk(step: int, channel: int, count: int, **fields: Any) -> Message:
    payload = torch.zeros(count, dtype=fields.pop("dtype", torch.float32))
    return Message(kind=Kind.CHUNK, step=step, channel=channel, epoch=fields.pop("epoch", 1), payload=payload, **fields)


def announced(count: Any) -> Message:
    return Message(kind=Kind.STATE, meta={"count": count, "meta": {}})


def slice_of(number: int, payload: torch.Tensor, **meta: Any) -> Message:
    return Message(kind=Kind.STATE, channel=number, meta=meta, payload=payload)


HOSTILE = {
    "wrong size": [chunk(0, 0, 999)],
    "wrong type": [chunk(0, 0, 1000, dtype=torch.int32)],
    "no such piece": [chunk(0, 12, 1000)],
    "copied instead of added": [chunk(0, 1, 1000)],
    "twice": [chunk(0, 0, 1000), chunk(0, 0, 1000)],
    "far in the future": [chunk(2 + MAX_AHEAD, 0, 1000)],
    "too large": [chunk(1, 0, schedule.MAX_PIECE_BYTES // 4 + 1)],
    "empty": [chunk(1, 0, 0)],
    "more than is kept": [chunk(1, i, 100_000) for i in range(5)],
    "more than is kept, for a later view": [chunk(1, i, 100_000, epoch=2) for i in range(5)],
    "many of nothing much": [chunk(1, i, 1, epoch=2) for i in range(2500)],
    "no sub-group": [chunk(0, 0, 1000, meta={"group": "../1"})],
    "no tag": [chunk(0, 0, 1000, meta={"tag": [1]})],
    "early, and then it does not fit": [chunk(1, 0, 7)],
    "another kind": [Message(kind=Kind.STOP)],
    "state out of the blue": [Message(kind=Kind.STATE, channel=0, payload=torch.zeros(3))],
    "state without a count": [Message(kind=Kind.STATE, meta={"meta": {}})],
    "state that is too large": [announced(1), slice_of(0, torch.zeros(3), name="a", shape=[2**39])],
}


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_message_ends_only_its_link(world: World, messages: list[Message]) -> None:
    members = [world.add(rank, limit_bytes=1_200_000) for rank in range(2)]
    hostile = Hostile(world, 2)
    view = View(1, 0, (*members, hostile.member))
    groups = [world.peers[member.instance].form(view) for member in members]
    eventually(lambda: set(hostile.links) == {member.instance for member in members})

    # A ring, and the hostile one stands before rank 0 in it: 3000 elements are 1000 for each of the three.
    groups[0].all_reduce(torch.zeros(3000))
    for message in messages:
        hostile.links[members[0].instance].send(message)
    groups[0].all_reduce(torch.zeros(3000))
    eventually(lambda: members[0].instance in hostile.ended)
    assert members[1].instance not in hostile.ended
    # Reported once for each of its links, if it was linked again in between.
    eventually(lambda: {(who, member) for who, member, _ in world.lost} == {(members[0].instance, hostile.member)})

    # Nobody else is disturbed.
    received = torch.zeros(5)
    sent = groups[0].send(torch.ones(5), to=1)
    groups[1].recv(received, source=0).wait()
    sent.wait()
    assert received.eq(1).all()
    assert not [member for _, member, _ in world.lost if member is not hostile.member]


def test_a_lost_link_is_reported_although_another_one_to_that_member_is_open(world: World) -> None:
    """Pieces that were on their way over it are not sent again."""
    me, other = world.add(0), Hostile(world, 1)
    peers = world.peers[me.instance]
    peers.form(View(1, 0, (me, other.member)))
    eventually(lambda: me.instance in other.links)
    first = other.links.pop(me.instance)
    other.transport.dial(me.address, other)
    eventually(lambda: me.instance in other.links)
    eventually(lambda: len(_on_thread(world.transports[me.instance], lambda: _links(world, me, other.member))) == 2)
    first.close("cut")
    eventually(lambda: world.lost != [])
    assert world.lost[0][:2] == (me.instance, other.member)
    assert other.links[me.instance].open


def test_chunks_of_a_process_outside_the_view_end_its_link(world: World) -> None:
    groups = world.groups(2)
    stranger = Hostile(world, 7)
    stranger.transport.dial(groups[0].view.members[0].address, stranger)
    eventually(lambda: stranger.links != {})
    stranger.links[instance(0)].send(chunk(0, 0, 10))
    eventually(lambda: stranger.ended != {})
    at_once(groups, lambda group: group.barrier())


# Members that prove who they are


class Impostor(Hostile):
    """A process with the token that claims the instance of a member."""

    def __init__(self, world: World, rank: int) -> None:
        self.got: list[Kind] = []
        real = world.transports[instance(rank)]
        super().__init__(world, rank)
        world.transports |= {instance(rank): real, "impostor": self.transport}

    def place(self, link: Link, head: Head) -> torch.Tensor | None:
        self.got.append(head.kind)
        return super().place(link, head)

    def received(self, link: Link, message: Message) -> None:
        self.got.append(message.kind)


def form_with_keys(world: World, view: View, keys: PairwiseKeys, *members: ViewMember) -> list[ElasticGroup]:
    instances = [member.instance for member in view.members]
    return [
        world.peers[member.instance].form(view, parse_keys(keys.of(member.instance, instances)))
        for member in members or view.members
    ]


def assert_sums(groups: list[ElasticGroup]) -> None:
    def total(group: ElasticGroup) -> torch.Tensor:
        mine = torch.full((5000,), float(group.rank + 1))
        group.all_reduce(mine).wait()
        return mine

    expected = len(groups) * (len(groups) + 1) / 2
    assert all(bool(total.eq(expected).all()) for total in at_once(groups, total))


def test_members_that_prove_who_they_are_sum(world: World) -> None:
    """Also those whose links were made under a coordinator that has been restarted since, and has other keys."""
    members = [world.add(rank, proven=True) for rank in range(4)]
    assert_sums(form_with_keys(world, View(1, 0, tuple(members[:3])), PairwiseKeys()))
    assert_sums(form_with_keys(world, View(2, 0, tuple(members)), PairwiseKeys()))
    assert_sums(form_with_keys(world, View(3, 0, tuple(members[1:])), PairwiseKeys()))


def test_members_that_receive_new_keys_at_different_times_sum(world: World) -> None:
    a, b = (world.add(rank, proven=True) for rank in range(2))
    before, after = PairwiseKeys(), PairwiseKeys()
    form_with_keys(world, View(1, 0, (a, b)), before, a)
    first = form_with_keys(world, View(2, 0, (a, b)), after, b)
    assert_sums([*form_with_keys(world, View(2, 0, (a, b)), after, a), *first])


def test_a_key_that_is_learned_before_its_view_is_used_in_that_view_only(world: World) -> None:
    """A link proved with it in the view before would be used without my own proof, and the peer would wait for it."""
    a, b = (world.add(rank, proven=True) for rank in range(2))
    keys, peers = PairwiseKeys(), world.peers[b.instance]
    known = parse_keys(keys.of(b.instance, ["another member"]))
    peers.form(View(1, 0, (b,)), known)
    world.peers[a.instance].form(View(2, 0, (a, b)), {})  # it dials, and has no key to prove anything with yet
    eventually(lambda: bool(peers._unproven))
    known |= parse_keys(keys.of(b.instance, [a.instance]))
    (first,) = form_with_keys(world, View(3, 0, (a, b)), keys, a)
    eventually(lambda: all(said is not None for said in peers._unproven.values()))
    assert_sums([first, peers.form(View(3, 0, (a, b)), known)])


MADE_UP = Message(kind=Kind.MEMBER, epoch=1, meta={"proof": "00" * 32})
IMPOSTURES = {
    "a piece": [chunk(0, 0, 2500)],
    "a state": [announced(1)],
    "a proof that is made up": [MADE_UP],
    "no proof": [Message(kind=Kind.MEMBER, epoch=1, meta={"proof": None})],
    "a proof of another view": [Message(kind=Kind.MEMBER, epoch=9, meta={"proof": "00" * 32}), chunk(0, 0, 2500)],
}


@pytest.mark.parametrize("messages", IMPOSTURES.values(), ids=IMPOSTURES)
def test_to_know_an_instance_is_not_enough_to_be_that_member(world: World, messages: list[Message]) -> None:
    a, b = (world.add(rank, proven=True) for rank in range(2))
    view, keys = View(1, 0, (a, b)), PairwiseKeys()
    impostor = Impostor(world, 1)
    (first,) = form_with_keys(world, view, keys, a)
    impostor.transport.dial(a.address, impostor)
    eventually(lambda: impostor.links != {})
    for message in messages:
        impostor.links[a.instance].send(message)
    eventually(lambda: impostor.ended != {})
    assert_sums([first, *form_with_keys(world, view, keys, b)])
    assert set(impostor.got) <= {Kind.MEMBER}, "it got what was meant for the member"
    assert world.lost == []


def test_a_proof_is_refused_on_another_link(world: World) -> None:
    """Not even to somebody to whom it was sent."""
    a, b = (world.add(rank, proven=True) for rank in range(2))
    keys = parse_keys(PairwiseKeys().of(a.instance, [b.instance]))
    said = member_mac(keys[b.instance], binding=b"another link", instance=b.instance)
    impostor = Impostor(world, 1)
    world.peers[a.instance].form(View(1, 0, (a, b)), keys)
    impostor.transport.dial(a.address, impostor)
    eventually(lambda: impostor.links != {})
    impostor.links[a.instance].send(Message(kind=Kind.MEMBER, epoch=1, meta={"proof": said}))
    eventually(lambda: impostor.ended != {})


def test_a_member_that_is_busy_in_the_last_view_is_not_reported(world: World) -> None:
    """It is connected, and proves who it is when it forms the view."""
    a, b = (world.add(rank, proven=True, connect_s=0.1) for rank in range(2))
    view, keys, peers = View(1, 0, (a, b)), PairwiseKeys(), world.peers[a.instance]
    (first,) = form_with_keys(world, view, keys, a)
    eventually(lambda: bool(peers._unproven))
    checked = threading.Event()
    world.transports[a.instance].call_later(0.3, checked.set)
    assert checked.wait(SECONDS)
    assert world.lost == []
    assert_sums([first, *form_with_keys(world, view, keys, b)])


# State


STATE = {
    "weight": torch.arange(300_000, dtype=torch.float32).view(300, 1000),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}


def test_a_state_reaches_a_member_without_a_link(world: World) -> None:
    donor, joiner = world.add(0), world.add(1)
    world.peers[donor.instance].send_state(joiner, STATE, {"step": 12})
    meta, tensors = world.peers[joiner.instance].receive_state(SECONDS)
    assert meta == {"step": 12}
    assert tensors.keys() == STATE.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in STATE.items())
    assert all(tensors[name].dtype is tensor.dtype for name, tensor in STATE.items())

    # Their view uses the link that is there.
    groups = world.form(View(1, 0, (donor, joiner)))
    at_once(groups, lambda group: group.barrier())
    assert len(_links(world, donor, joiner)) == len(_links(world, joiner, donor)) == 1


def test_a_large_state_goes_in_slices_and_sums_pass_between_them(world: World) -> None:
    groups = world.groups(2)
    donor, joiner = groups[0].view.members
    state = {"a": torch.arange(600_001.0), "empty": torch.zeros(0), "b": torch.arange(900_000).view(3, -1)}
    assert len(state_messages(state, {})) == 1 + 3 + 1 + 7
    world.peers[donor.instance].send_state(joiner, state, {"step": 1})
    tensors = [torch.ones(500_000), torch.ones(500_000)]
    at_once(groups, lambda group: group.all_reduce(tensors[group.rank]).wait())
    meta, received = world.peers[joiner.instance].receive_state(SECONDS)
    assert meta == {"step": 1}
    assert list(received) == list(state)
    assert all(torch.equal(received[name], tensor) for name, tensor in state.items())
    assert all(tensor.eq(2).all() for tensor in tensors)


def test_ten_thousand_tensors_and_one_beyond_the_largest_payload_arrive() -> None:
    with contextlib.closing(World(limits=LinkLimits(payload_bytes=1 << 20, silence_s=60.0))) as world:
        donor, joiner = world.add(0), world.add(1)
        state = {
            f"layers.{i}.a_name_as_long_as_those_of_large_models.weight": torch.full((3,), i) for i in range(10_000)
        }
        state["large"] = torch.arange(500_000).view(5, -1)
        assert state["large"].nbytes > 1 << 20
        world.peers[donor.instance].send_state(joiner, state, {"step": 1})
        meta, received = world.peers[joiner.instance].receive_state(10 * SECONDS)
    assert meta == {"step": 1}
    assert list(received) == list(state)
    assert all(torch.equal(received[name], tensor) for name, tensor in state.items())


PART = slice_of(0, torch.zeros(2), name="a", shape=[3])
BAD_STATES = {
    "too many": ([announced(2**40)], "invalid"),
    "no number": ([announced("2")], "invalid"),
    "announced twice": ([announced(1), announced(1)], "invalid"),
    "not the next slice": ([announced(1), PART, slice_of(2, torch.zeros(1))], "lost"),
    "of another type": ([announced(1), PART, slice_of(1, torch.zeros(1, dtype=torch.int32))], "lost"),
}
SAID = {"invalid": "sent an invalid state", "lost": "was lost while sending its state"}


def open_donation(world: World) -> tuple[Peers, Link]:
    """A joiner's peers, and the link on which a member that speaks for itself sends it a state."""
    joiner, donor = world.add(1), Hostile(world, 0)
    donor.transport.dial(joiner.address, donor)
    eventually(lambda: donor.links != {})
    return world.peers[joiner.instance], donor.links[joiner.instance]


@pytest.mark.parametrize(("messages", "error"), BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_is_not_the_announced_one_ends_the_link(world: World, messages: list[Message], error: str) -> None:
    joiner, link = open_donation(world)
    for message in messages:
        link.send(message)
    with pytest.raises(PeerLost, match=SAID[error]):
        joiner.receive_state(SECONDS)


def test_an_incomplete_state_is_reported(world: World) -> None:
    joiner, link = open_donation(world)
    for message in (announced(2), slice_of(0, torch.zeros(2), name="a", shape=[2])):
        link.send(message)
    link.close("enough")
    with pytest.raises(PeerLost, match="was lost while sending its state: enough"):
        joiner.receive_state(SECONDS)
    with pytest.raises(PeerLost, match="no member has sent"):
        joiner.receive_state(0.01)


# Views on the wire


VIEW = View(
    3, 17, (ViewMember(0, "00" * 8, "mini1", "10.0.0.1:5000"), ViewMember(4, "ab" * 8, "pi5", "[fe80::1]:5000"))
)


def test_a_view_survives_the_wire() -> None:
    assert View.from_meta(json.loads(json.dumps(VIEW.to_meta()))) == VIEW
    assert VIEW.index("ab" * 8) == 1
    assert VIEW.index("cd" * 8) is None


META, MEMBER = VIEW.to_meta(), VIEW.members[0].to_meta()
NO_VIEWS: list[Any] = [
    *(None, [], "view", {"epoch": 1}, META | {"extra": 0}),
    *(META | {"epoch": epoch} for epoch in (-1, True, "3", 2**63)),
    META | {"step": 1.0},
    *(META | {"members": members} for members in ({}, [1], [{}] * 5000, [MEMBER] * 2)),
    META | {"members": [VIEW.members[1].to_meta(), MEMBER]},
    META | {"members": [MEMBER, MEMBER | {"rank": 1}]},
    META | {"members": [MEMBER | {"more": 1}]},
    META | {"members": [MEMBER | {"instance": "0" * 15 + "G"}]},
    *(META | {"members": [MEMBER | {"host": host}]} for host in ("a\nb", "", "a" * 256)),
    *(META | {"members": [MEMBER | {"address": address}]} for address in ("nowhere", "a:0", ":5000", "a:٣")),
]


@pytest.mark.parametrize("value", NO_VIEWS, ids=range(len(NO_VIEWS)))
def test_an_invalid_view_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        View.from_meta(value)


def test_sends_to_two_peers_at_once_with_one_tag(world: World) -> None:
    def work(group: ElasticGroup) -> float:
        big = torch.full((500_000,), float(group.rank))
        if group.rank == 0:
            for sent in [group.send(big, to=1), group.send(big, to=2)]:
                sent.wait()
        else:
            group.recv(big, source=0).wait()
        return float(big[0])

    assert at_once(world.groups(3), work) == [0.0, 0.0, 0.0]
