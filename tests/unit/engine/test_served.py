"""A server's bookkeeping of pushes, message by message: members that come back, push twice, or are too old."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.unit.engine.members import member
from tests.unit.engine.served import Server, Worker, adamw

from smolcluster.comm.elastic.membership.roster import Member, MemberMessage
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.compute.replica import Batch
from smolcluster.config.options import EDPOptions, SyncPSOptions
from smolcluster.data.leases import Range
from smolcluster.engine.elastic.gradient_gate import MAX_FAILED_ATTEMPTS
from smolcluster.engine.elastic.parameter_server import base
from smolcluster.engine.elastic.wal.journal import Journal
from smolcluster.errors import SmolclusterError
from smolcluster.parallel.placement import Node, Shape
from smolcluster.strategies.base import Commit
from smolcluster.strategies.base.replicated import Pushing
from smolcluster.strategies.edp import EDP
from smolcluster.strategies.syncps import SyncPS


@pytest.fixture
def syncps(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(SyncPS, SyncPSOptions(), monkeypatch)


@pytest.fixture
def edp(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(EDP, EDPOptions(), monkeypatch)


def test_one_that_comes_back_has_not_answered(syncps: Server) -> None:
    """Both links are lost after one push; whoever is back first is waited for, and nothing is refused."""
    a, b = syncps.join(0, 1)
    again = member(0)
    syncps.roster.script = [
        lambda: syncps.push(a, 1.0),
        lambda: syncps.roster.gone(a),
        lambda: syncps.roster.gone(b, back=again),
        lambda: None,
        lambda: None,
        lambda: syncps.push(again, 7.0),
        lambda: None,
    ]
    (push,) = syncps.role._collect(1)
    assert (push.member, float(push.tensors["weight"][0, 0])) == (again, 7.0)
    assert syncps.warned == []
    assert syncps.leases.held(again.instance) == {1: [Range(0, 4)]}


def test_what_was_pushed_of_a_step_that_begins_anew_does_not_count(syncps: Server) -> None:
    """It was computed on samples that have been set aside, though the step has the same number."""
    (a,) = syncps.join(0)
    before = a.epoch
    syncps.role._retry_step(1, "because")
    assert a.epoch > before
    syncps.roster.script = [
        lambda: syncps.push(a, 1.0, epoch=before),
        lambda: syncps.push(a, 2.0),
        lambda: None,
    ]
    (push,) = syncps.role._collect(1)
    assert float(push.tensors["weight"][0, 0]) == 2.0
    assert syncps.leases.commit(a.instance, 1) == [Range(4, 4)]


def test_half_a_push_of_before_is_not_the_beginning_of_the_next(syncps: Server) -> None:
    syncps.join(0)
    syncps.role._pushes[0, 1] = object()
    syncps.role._retry_step(1, "because")
    assert syncps.role._pushes == {}


def test_one_that_pushes_a_step_twice_is_put_out_and_ends_nobody(syncps: Server) -> None:
    a, b = syncps.join(0, 1)
    syncps.roster.script = [
        lambda: syncps.push(a, 1.0),
        lambda: syncps.push(a, 1.0, skip="a second thought"),
        lambda: syncps.push(b, 3.0),
        lambda: None,
    ]
    pushes = syncps.role._collect(1)
    assert syncps.roster.evicted == ["it pushed step 1 twice"]
    assert [push.member for push in pushes] == [b]
    syncps.role._record(pushes, syncps.role._average(pushes))
    assert syncps.leases.state_dict() == {"position": 8, "holes": [[0, 4]]}
    assert syncps.leases.grant("another", 1, 4) == [Range(0, 4)]  # leased again, not quarantined


def test_samples_of_a_gradient_that_was_only_too_old_are_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    edp = Server(EDP, EDPOptions(staleness_bound=0), monkeypatch)
    a, b = edp.join(0, 1)
    lease = edp.leases.held(a.instance)[1]
    edp.role.replica.updates = 1
    edp.role._answer(edp.push(a, 1.0, version=0))
    assert "1 versions old, which exceeds the staleness bound" in edp.warned[0]
    assert not edp.role._waiting
    assert edp.leases._quarantined == []
    assert edp.leases.held(a.instance)[3] == lease  # at once, and to whoever is next
    edp.role._answer(edp.push(b, 1.0, version=1))
    assert len(edp.role._waiting) == 1


@pytest.mark.parametrize(("strategy", "options"), [(SyncPS, SyncPSOptions()), (EDP, EDPOptions())])
def test_a_silent_member_is_waited_for_as_long_as_a_step_takes(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Pushing[Any]], options: Any
) -> None:
    """As without a parameter server: to pause it costs its gradient, and the whole state when it is back."""
    clock = [1000.0]
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    server = Server(strategy, options, monkeypatch)
    (a,) = server.join(0)
    for step, took_s in enumerate([5.0, 20.0, 300.0, 20.0], start=1):
        if step not in server.leases.held(a.instance):
            server.role.grant_lease(a, step)
        clock[0] += took_s
        push = server.role._arrived(server.push(a, 1.0, step=step))
        server.role._record([push], server.role._average([push]))
    assert server.roster.patience_s == 20.0


def test_edp_goes_on_counting_the_steps_of_a_worker_that_was_paused(edp: Server) -> None:
    """A gradient is known by its worker and the step of that worker: the same number must not count twice."""
    (worker,) = edp.join(0)
    for step in (1, 2, 3):
        edp.role._answer(edp.push(worker, 1.0, step=step, version=0))
    edp.role._gone(edp.roster.gone(worker, back=worker))
    edp.role._welcome()
    assert sorted(edp.leases.held(worker.instance)) == [4, 5]


class Tied(torch.nn.Module):
    """Weights under two names, as heads and embeddings often are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(2, 2)
        self.two = torch.nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.norm = torch.nn.BatchNorm1d(2)


@pytest.mark.parametrize(("strategy", "options"), [(SyncPS, SyncPSOptions()), (EDP, EDPOptions())])
def test_a_second_name_of_a_weight_is_no_buffer(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Pushing[Any]], options: Any
) -> None:
    """Or a worker's own copy of it would replace the server's at every step."""
    server = Server(strategy, options, monkeypatch, model=Tied())
    assert set(server.role._buffers.names) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize(
    ("strategy", "options"), [(SyncPS, SyncPSOptions()), (EDP, EDPOptions(worker_update_interval=1))]
)
def test_a_step_that_a_reconnect_cut_short_adds_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Pushing[Any]], options: Any
) -> None:
    """The server was restarted before it answered: the same samples at the same weights have the same gradient."""
    worker = Worker(strategy, options, monkeypatch)
    for epoch in (1, 2):
        worker.script = [Message(kind=Kind.WELCOME, epoch=epoch)]
        worker.strategy.step(Batch(parts=[torch.ones(4, 2)], samples=4, tokens=4, step=1))
    first, second = worker.pushed()
    assert first == second


@pytest.mark.parametrize("counted", [0, 1])
def test_what_was_left_out_of_a_gradient_is_kept_where_it_counted_before_a_reconnect(
    monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    """The server recorded the step, and died before the average had left."""
    worker = Worker(SyncPS, SyncPSOptions(codec="topk"), monkeypatch)
    worker.script = [Message(kind=Kind.WELCOME, epoch=2, meta={"counted": counted})]
    worker.strategy.step(Batch(parts=[torch.ones(4, 2)], samples=4, tokens=4, step=1))
    assert bool(worker.strategy.rounds.own_state()) == bool(counted)


class Normed(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(2, affine=False) for _ in range(layers))
        self.walks = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.walks += 1
        return super().state_dict(*args, **kwargs)


def test_the_cost_of_buffers_does_not_grow_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk through a ResNet's weights takes milliseconds: a step takes as many for 40 layers as for one."""

    def walks(layers: int) -> int:
        model = Normed(layers)
        server = Server(SyncPS, SyncPSOptions(), monkeypatch, model=model)
        (a,) = server.join(0)
        weights = {n: t.clone() for n, t in model.state_dict().items()}
        payloads = [p for _, p in server.role._buffers.encode(weights)]
        messages = [server.push(a, 1.0).message]
        messages += [
            Message(kind=Kind.PUSH, step=1, channel=1 + c, epoch=a.epoch, codec="fp32", payload=p)
            for c, p in enumerate(payloads)
        ]
        server.roster.script = [partial(MemberMessage, a, message) for message in messages] + [lambda: None]
        model.walks = 0
        (push,) = server.role._collect(1)
        average = server.role._average([push])
        flat = torch.cat([t.reshape(-1) for t in (*average.values(), *push.buffers.values())])
        server.role._take_step([push], average)
        server.role.replay(Commit(step=2, contributors=[], gradient=flat))
        return model.walks

    assert walks(40) == walks(1)


def gradient_messages(server: Server, who: Member, *, step: int, seed: int) -> list[MemberMessage]:
    """A push of random numbers and buffers, in all its buckets."""
    draw = torch.Generator().manual_seed(seed)
    role, said = server.role, {"samples": 4, "loss": "1.0", "version": strategy_version(server)}
    gradients = {n: torch.randn(p.shape, generator=draw) for n, p in server.model.named_parameters()}
    buffers = {n: torch.rand(s, generator=draw) for n, s in role._buffer_shapes.items()}
    payloads = [(role._gradients.codec.name, p) for _, p in role._gradients.encode(gradients, key=seed)]
    payloads += [("fp32", p) for _, p in role._buffers.encode(buffers)]
    return [
        MemberMessage(
            who,
            Message(
                kind=Kind.PUSH,
                step=step,
                channel=channel,
                epoch=who.epoch,
                codec=codec,
                meta=said if channel == 0 else {},
                payload=payload,
            ),
        )
        for channel, (codec, payload) in enumerate(payloads)
    ]


def strategy_version(server: Server) -> int:
    return int(server.role.replica.updates)


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 10))


DENSE, BUFFERS = 4 * sum(p.numel() for p in Blocks().parameters()), 4 * sum(b.numel() for b in Blocks().buffers())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk", "powersgd"])
@pytest.mark.parametrize(
    ("strategy", "workers", "more"),
    [(SyncPS, 3, {}), (EDP, 1, {}), (EDP, 2, {}), (EDP, 3, {"server_batch": 1}), (EDP, 5, {})],
)
def test_what_is_recorded_is_small_and_replays_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    strategy: type[Pushing[Any]],
    workers: int,
    more: dict[str, Any],
    codec: str,
) -> None:
    options = (SyncPSOptions if strategy is SyncPS else EDPOptions)(codec=codec, bucket_mb=0.01, **more)
    torch.manual_seed(0)
    server = Server(strategy, options, monkeypatch, model=Blocks())
    again = Server(strategy, options, monkeypatch, model=copy.deepcopy(server.model))
    sent = server.role._gradients.nbytes
    with Journal(tmp_path, sync_s=None) as journal:
        journal.recover()
        server_context = server.role.context.server_context
        server_context.record = lambda commit: journal.append(dict(commit.numbers), commit.gradient)
        server_context.expected, server_context.fresh, server.role.context.total_steps = workers, True, 3
        server.role.tokens_per_sample = 1
        members = [member(rank) for rank in range(workers)]
        server.roster.newcomers += members
        for step in (1, 2, 3):
            for who in members:
                messages = partial(gradient_messages, server, who, step=step, seed=10 * step + who.rank)
                server.roster.script += [Later(messages, n) for n in range(100)]
        server.role.serve()
        assert server.role.replica.updates == 3
    with Journal(tmp_path, sync_s=None) as journal:
        records = journal.recover().records
    assert len(records) == 3
    fed_back = server.role._gradients.codec.feedback
    pushes = 1 if more or (strategy is SyncPS and not fed_back) else workers
    for record in records:
        assert record.payload.nbytes == min(pushes * sent, DENSE) + BUFFERS
        again.role.replay(Commit(step=0, contributors=[], gradient=record.payload, numbers=record.meta))
    for (name, expected), found in zip(
        server.model.state_dict().items(), again.model.state_dict().values(), strict=True
    ):
        assert expected.numpy().tobytes() == found.numpy().tobytes(), name
    residuals, replayed = server.role.shared_state(), again.role.shared_state()
    assert residuals.keys() == replayed.keys()
    assert bool(residuals) == (strategy is SyncPS and fed_back)
    assert all(torch.equal(residual, replayed[name]) for name, residual in residuals.items())


class Later:
    """The n-th message of a push that is made when the first is asked for, if it has so many."""

    made: ClassVar[dict[int, list[MemberMessage]]] = {}

    def __init__(self, make: Callable[[], list[MemberMessage]], n: int) -> None:
        self.make, self.n = make, n

    def __call__(self) -> MemberMessage | None:
        if self.n == 0:
            Later.made = {id(self.make): self.make()}
        messages = Later.made[id(self.make)]
        return messages[self.n] if self.n < len(messages) else None


def test_edp_ends_when_every_worker_is_refused_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    edp = Server(EDP, EDPOptions(server_batch=1000), monkeypatch)
    a, b = edp.join(0, 1)
    steps = {a: itertools.count(1), b: itertools.count(1)}

    def push(who: Member, value: float, *, times: int = 1) -> None:
        for _ in range(times):
            edp.role._answer(edp.push(who, value, step=next(steps[who]), version=0))

    push(a, math.nan, times=50)  # one bad machine, while the other is busy: no reason to end
    push(b, 1.0)  # taken, and waits for others
    push(a, math.nan, times=50)
    for _ in range(MAX_FAILED_ATTEMPTS):
        push(b, math.nan)
        push(a, math.nan)
    assert edp.roster.evicted == []
    push(a, math.nan)
    with pytest.raises(SmolclusterError, match=r"step 1 .* 20 times in a row .*worker 1 \(testhost\): its norm is nan"):
        push(b, math.nan)


def test_samples_of_a_member_that_alone_is_refused_go_to_others(edp: Server) -> None:
    """Set aside, they would be one more hole in every line of the record; and so would a warning for each be."""
    edp.role.tokens_per_sample = 1
    good, bad = edp.join(0, 1)
    for step in range(1, 401):
        edp.role._answer(edp.push(bad, math.nan, step=step, version=0))
        edp.role._answer(edp.push(good, 1.0, step=step, version=0))
        edp.role._update(list(edp.role._waiting.values()))
        edp.role._waiting.clear()
    assert len(edp.leases.state_dict()["holes"]) < 20
    assert edp.roster.refused[bad.name] == 400
    assert len(edp.warned) < 150
    assert "(256 refusals so far)" in edp.warned[-1]


def test_what_a_worker_says_of_its_gradient_is_one_short_line(syncps: Server) -> None:
    (a,) = syncps.join(0)
    said = {"skip": "\x1b[2J" + "x" * 10**6, "samples": 4, "loss": "1.0"}
    assert syncps.role._arrived(MemberMessage(a, Message(kind=Kind.PUSH, step=1, epoch=a.epoch, meta=said))) is None
    (warning,) = syncps.warned
    assert len(warning) < 600
    assert warning.isprintable()


def test_one_that_pulls_without_reading_is_put_out(edp: Server) -> None:
    reads, reads_not = edp.join(0, 1)
    links: list[Any] = [reads.link, reads_not.link]
    links[0].queued_bytes, links[1].queued_bytes = 3 * edp.role._weights.nbytes, 2**21
    edp.role._send_weights(reads)
    edp.role._send_weights(reads_not)
    assert [link.sent[-1].kind is Kind.WEIGHTS for link in links] == [True, False]
    assert edp.roster.evicted == ["it requests the weights repeatedly without reading them"]


def test_edp_tells_every_worker_that_reads_what_changed(edp: Server) -> None:
    adamw(edp)
    a, b, c = edp.join(0, 1, 2)
    links: list[Any] = [a.link, b.link, c.link]
    links[2].queued_bytes = edp.role._weights.nbytes + 2**21  # it does not read
    before = {name: p.detach().clone() for name, p in edp.model.named_parameters()}
    edp.role._answer(edp.push(a, 1.0, version=0))
    edp.role._update(list(edp.role._waiting.values()))
    said = [[m for m in link.sent if m.kind is Kind.AVERAGE] for link in links]
    assert [[m.step for m in messages] for messages in said] == [[1], [1], []]
    assert [messages[-1].meta["counted"] for messages in said[:2]] == [1, 0]
    of_step = {"workers": 3, "norm": pytest.approx(math.sqrt(3)), "denominators": [1.0, 1.0]}
    assert all(of_step.items() <= messages[-1].meta.items() for messages in said[:2])
    change = {name: torch.empty_like(old) for name, old in before.items()}
    edp.role._changes.decode(0, said[0][0].payload, change)
    for name, p in edp.model.named_parameters():  # the first step of AdamW: all alike in size
        torch.testing.assert_close(change[name], p.detach() - before[name], rtol=0, atol=0.01)


@pytest.mark.parametrize("interval", [1, 10])
def test_edp_tells_changes_of_sgd_and_none_where_each_step_pulls(
    interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    edp = Server(EDP, EDPOptions(worker_update_interval=interval), monkeypatch)
    (a,) = edp.join(0)
    edp.role._answer(edp.push(a, 1.0, version=0))
    edp.role._update(list(edp.role._waiting.values()))
    link: Any = a.link
    said = [m.meta for m in link.sent if m.kind is Kind.AVERAGE]
    assert [meta["denominators"] for meta in said] == ([] if interval == 1 else [[]])


def timed(server: Server, who: Member, *, step: int, samples: int, seconds: float) -> None:
    server.role._answer(server.push(who, 1.0, step=step, version=0, samples=samples, compute_s=seconds))


def test_edp_leases_samples_by_speed_unless_machines_are_alike(edp: Server) -> None:
    a, b = edp.join(0, 1)
    a.automatic = b.automatic = True
    timed(edp, a, step=1, samples=4, seconds=9.0)
    assert a.speed == 0  # it warmed up
    timed(edp, a, step=2, samples=4, seconds=1.0)
    assert [edp.role._batch_size(each) for each in (a, b)] == [4, 4]  # of b nothing is known
    timed(edp, b, step=1, samples=4, seconds=9.0)
    timed(edp, b, step=2, samples=4, seconds=1.2)
    assert [edp.role._batch_size(each) for each in (a, b)] == [4, 4]

    def shares(*speeds: float) -> list[int]:
        a.speed, b.speed = speeds
        edp.role._shares = None
        return [edp.role._batch_size(each) for each in (a, b)]

    assert shares(4.0, 1.0) == [6, 2]
    assert shares(4.0, 0.01) == [7, 2]  # batch normalization needs two
    a.batch_size = b.batch_size = 400
    assert shares(1e9, 1e-9) == [776, 24]  # not everything is believed
    b.batch_size = 10_000
    assert shares(1e9, 1e-9) == [6400, 315]  # at most 16 batches
    a.batch_size = b.batch_size = 4
    b.automatic = False  # cluster.batch_size has a number for it
    assert shares(4.0, 1.0) == [4, 4]
    a.automatic = b.automatic = True
    edp.role.strategy.options = EDPOptions(balance=False)
    assert shares(4.0, 1.0) == [4, 4]
    edp.role.strategy.options = EDPOptions()
    edp.role.context.config.training.grad_accumulation = 8  # more parts than they have samples
    assert shares(4.0, 1.0) == [4, 4]


def test_edp_updates_when_all_have_pushed_or_a_global_batch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(EDP, EDPOptions(), monkeypatch)
    a, b = server.join(0, 1)
    a.batch_size = 5  # together 9; of the present leases 8
    timed(server, a, step=1, samples=4, seconds=1.0)
    assert not server.role._update_is_due()
    timed(server, b, step=1, samples=4, seconds=1.0)
    assert server.role._update_is_due()
    server.role._waiting, server.role._samples = {}, 0
    timed(server, a, step=2, samples=4, seconds=1.0)
    assert not server.role._update_is_due()
    timed(server, a, step=3, samples=5, seconds=1.0)
    assert server.role._update_is_due()

    server = Server(EDP, EDPOptions(server_batch=9), monkeypatch)
    (a,) = server.join(0)
    timed(server, a, step=1, samples=4, seconds=1.0)
    assert not server.role._update_is_due()


def test_a_push_with_a_buffer_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's NaN in a running mean is not taken over by the server, and from there by all."""
    server = Server(SyncPS, SyncPSOptions(), monkeypatch, model=Blocks())
    [who] = server.join(0)
    messages = gradient_messages(server, who, step=1, seed=1)
    spoiled = messages[-1].message.payload
    spoiled.view(torch.uint8).view(torch.float32)[0] = math.nan
    assert [server.role._arrived(message) for message in messages] == [None] * len(messages)
    [warning] = server.warned
    assert "is refused: its buffer layers.1." in warning
    assert server.roster.refused == {who.name: 1}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_an_overflow_lowers_the_scale_of_all_and_costs_no_samples(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    server = Server(EDP, EDPOptions(codec=codec), monkeypatch)  # type: ignore[arg-type]
    a, b = server.join(0, 1)
    scale = server.role.context.server_context.scale
    for who in (a, b):
        lost = server.leases.held(who.instance)[1]
        meta = {"skip": "the gradient overflowed in fp16", "samples": 4, "loss": "1.0", "scale": 2.0**16}
        server.role._answer(MemberMessage(who, Message(kind=Kind.PUSH, step=1, epoch=who.epoch, meta=meta)))
        answer = who.link.sent[-1]
        assert (answer.kind, answer.meta["scale"]) == (Kind.ACK, {"value": 2.0**15, "good_steps": 0})
        assert server.leases.held(who.instance)[3] == lost, "the samples are leased again"
    assert scale.value == 2.0**15, "both overflowed under one scale"
    assert all("overflowed in fp16 at loss scale 65536" in warning for warning in server.warned)


# What a server holds


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("strategy", "options"), [(SyncPS, SyncPSOptions), (EDP, EDPOptions)])
def test_pushes_are_held_in_as_few_bytes_as_they_came(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Pushing[Any]], options: Any, codec: str
) -> None:
    """And their average is what it is when each is decoded at once, bit by bit; `plan --memory` counts as many."""
    model, chosen = torch.nn.Linear(64, 256), options(codec=codec)
    server = Server(strategy, chosen, monkeypatch, model=model)
    served, members = server.role, server.join(*range(6))
    pushes, expected = [], {}
    for number, who in enumerate(members):
        generator = torch.Generator().manual_seed(number)
        gradient = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        ((_, payload),) = served._gradients.encode(gradient)
        decoded = {n: torch.empty(p.shape) for n, p in model.named_parameters()}
        served._gradients.decode(0, payload, decoded)
        for name, tensor in decoded.items():
            expected[name] = tensor.mul_(1 / 6) if number == 0 else expected[name].add_(tensor, alpha=1 / 6)
        meta = {"samples": 4, "loss": "1.0"}
        said = Message(kind=Kind.PUSH, step=1, epoch=who.epoch, codec=codec, meta=meta, payload=payload)
        pushes.append(served._arrived(MemberMessage(who, said)))
    held = sum(t.nbytes for p in pushes for t in (*p.tensors.values(), *(p.encoded or {}).values()))
    assert held == 6 * served._gradients.nbytes
    average = served._average(pushes)
    assert all(torch.equal(average[name], tensor) for name, tensor in expected.items())

    numbers = sum(p.numel() for p in model.parameters())
    shape = Shape(
        parameters=numbers,
        bytes_per_parameter=4,
        optimizer_states=2,
        tensors=[tuple(p.shape) for p in model.parameters()],
    )
    cost = strategy.plan(chosen, [Node(name="here", batch_size=4)] * 6, shape).server
    at_work = 2 * 4 * numbers if codec != "fp32" else 0  # the average, and a set to decode into
    assert cost.gradient_bytes >= held + at_work
    if strategy is SyncPS:
        assert cost.gradient_bytes == held + at_work + served._gradients.nbytes
