"""A worker on the elastic plane: it joins a server's run, trains, and rejoins after a lost connection.

The server decides what is trained; the owner of this machine decides about its files, network and code (`adopted_config.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch

from smolcluster.comm.elastic.membership.link_probe import bytes_requested
from smolcluster.comm.elastic.membership.server_link import ServerLink, Stopped
from smolcluster.comm.elastic.transport.messages import Kind
from smolcluster.comm.elastic.transport.security import check_dial, load_keyring
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import AtServer, Combination, Rounds
from smolcluster.data.sampler import Sampler
from smolcluster.engine.checks import batch_size_on, is_automatic
from smolcluster.engine.elastic.admission import layout_of, short_layout
from smolcluster.engine.elastic.adopted_config import ServerPlan, adopt, read_plan
from smolcluster.engine.elastic.member.member_side import MemberSide
from smolcluster.engine.elastic.member.own_state import OwnState
from smolcluster.engine.elastic.member.rounds import ElasticRounds
from smolcluster.engine.elastic.parameter_server.pushed_rounds import PushedRounds
from smolcluster.engine.elastic.server_summary import replica_sha256
from smolcluster.engine.identity import instance_of, new_peer, new_secret
from smolcluster.engine.loop import Loop
from smolcluster.engine.reader import LeaseReader
from smolcluster.engine.record import RunRecord
from smolcluster.engine.role import INTERRUPTED, Role
from smolcluster.errors import UserError
from smolcluster.observe.events import Event, Phase, StepLogged, plain, to_json
from smolcluster.observe.observer import Sink
from smolcluster.parallel.placement import Node, Seat
from smolcluster.strategies.base import Context
from smolcluster.strategies.base.replicated import Exchanging, Pushing

log = logging.getLogger(__name__)


class ElasticWorker(Role):
    """The methods are its phases, in order."""

    membership: MemberSide

    def run(self) -> int:
        try:
            self._connect()
        except Stopped:
            self.server_link.close()
            return INTERRUPTED
        self._prepare()
        self._build()
        self._join()
        try:
            self.loop.run()
        except Stopped:  # in the middle of a step
            self.reader.stopped = True
        return self._finish()

    def _connect(self) -> None:
        """Connect to the server, request its plan and adopt its configuration."""
        spec = self.spec
        mine = self.config.cluster
        keyring = load_keyring(mine.token, os.environ)
        check_dial(spec.server, keyring)
        self._secret = new_secret()
        me = new_peer(role="worker", rank=spec.rank, host=spec.host)
        self.transport = TcpTransport(
            dataclasses.replace(me, instance=instance_of(self._secret)),
            keyring=keyring,
            buffer_size=mine.buffer_size.get(spec.host),
            limits=LinkLimits(silence_s=mine.silence_timeout, stall_s=mine.stall_timeout),
        )
        self.server_link = ServerLink(self.transport, spec.server, stop_requested=self.channel.stop_requested)
        plan: ServerPlan | None = None
        while plan is None:
            message = self.server_link.get()
            if message is not None and message.kind is Kind.ASK and (wanted := bytes_requested(message)):
                self.server_link.send(Kind.STATE, payload=torch.zeros(wanted, dtype=torch.uint8))
            if message is not None and message.kind is Kind.PLAN:
                try:
                    plan = read_plan(message.meta)
                except ValueError as error:
                    raise UserError(f"the server at {spec.server} sent a plan that cannot be used: {error}") from error
        self.transport.me = dataclasses.replace(self.transport.me, run=plan.run)
        self.total_steps = plan.total_steps
        self.config = adopt(
            plan.config,
            own=self.config if spec.config else None,
            given=spec.overrides,
            strategy=spec.strategy,
            rank=spec.rank,
            server=spec.server,
        )
        self.observer.emit(Phase(rank=spec.rank, name="connected"))

    def _prepare(self) -> None:
        self._choose(lead=False)
        self._load_task()
        num = max(self.config.cluster.num_workers or 1, self.spec.rank + 1)
        nodes = [Node(name=self.spec.host, stays=False)] * num
        self._check_memory(nodes, first=self.spec.first_here, count=self.spec.local_world_size)

    def _build(self) -> None:
        spec, training = self.spec, self.config.training
        seat = Seat(rank=spec.rank, node=spec.host, shard=spec.rank)
        self.batch_size = batch_size_on(self.config, spec.host)
        self.context = Context(
            config=self.config,
            seat=seat,
            seats=[seat],
            group=MemoryGroup.world(1)[0],
            device=self.device,
            total_steps=self.total_steps,
            samples_per_step=[self.batch_size * training.grad_accumulation],
            stop_requested=self.channel.stop_requested,
            warn=self._warn,
            server_link=self.server_link,
            open_rounds=self._open_rounds,
        )
        self.strategy = self.strategy_class(self.options, self.context)
        self.strategy.setup(self.task)
        self.own = (
            OwnState(self.run_dir.own, rank=spec.rank, keep=training.max_checkpoints_to_keep) if spec.run_dir else None
        )
        self._kept = 0  # the step of the local state that was saved last
        if self.own is not None:
            self.membership.recall = self.own.load
        sampler = Sampler(len(self.train_data), seed=training.seed or 0)
        self.reader = LeaseReader(sampler, self.membership.lease, holds=self.membership.holds)
        self.loop = Loop(
            strategy=self.strategy,
            task=self.task,
            context=self.context,
            reader=self.reader,
            sampler=None,
            train_data=self.train_data,
            val_data=None,  # the server evaluates and saves
            observer=self.observer,
            keep=self._keep_own,
            record=RunRecord(
                self.context,
                self.task,
                host=spec.host,
                world_size=self.config.cluster.num_workers or 1,
                saver=None,
                traffic=lambda: self.transport.traffic,
            ),
        )

    def _keep_own(self, *, now: bool = False) -> None:
        """Save the local state after the rounds where the server saves."""
        if self.own is None or not isinstance(self.strategy, Exchanging):
            return
        if self.membership.alone:
            if not now:
                return
            self.membership.end_alone()
        if self.reader.in_round and not now:
            return
        every, step = self.config.training.checkpoint_steps or self.total_steps + 1, self.strategy.own_step
        if step is not None and (now or step // every > self._kept // every):
            self.own.save(step, self.strategy.state().own)
            self._kept = step

    def _open_rounds(self, strategy: Exchanging[Any], combination: Combination) -> Rounds:
        """Return the rounds of the strategy, which are also this worker's membership."""
        if isinstance(strategy, Pushing):
            assert isinstance(combination, AtServer)
            self.membership = pushed = PushedRounds(strategy, combination)
            return pushed
        self.membership = exchanged = ElasticRounds(strategy, combination)
        return exchanged

    def _join(self) -> None:
        def ready() -> dict[str, Any]:
            return {
                "secret": self._secret,
                "layout": short_layout(layout_of(self.strategy.state().weights)),
                "samples": len(self.train_data),
                "batch_size": self.batch_size * self.config.training.grad_accumulation,
                "automatic": is_automatic(self.config, self.spec.host, otherwise=self.strategy.options.balanced),
                "step": self.reader.taken,
                **self.membership.introduction(),
            }

        started = self._started_event(
            self.strategy,
            rank=self.spec.rank,
            world_size=self.config.cluster.num_workers or 1,
            first_step=0,
            steps=self.total_steps,
            batch_size=self.batch_size,
            global_batch=self.batch_size,
        )
        self._add_trackers(started, self.run_dir.path if self.spec.run_dir else Path())
        self.observer.emit(started)
        self.observer.add(_ServerSink(self.server_link))
        self.server_link.join = ready
        self.server_link.send(Kind.JOIN, meta=ready())

    def _finish(self) -> int:
        """Send the final report and leave."""
        if self.loop.step < self.total_steps:
            self._keep_own(now=True)
        report = self.loop.record.report(self.loop.step, batch_samples=self.batch_size)
        if isinstance(self.strategy, Exchanging) and self.strategy.combined == "workers":  # else replicas may differ
            report["weights_sha256"] = replica_sha256(self.strategy)
        self.server_link.send(Kind.REPORT, meta=plain(report))  # a loss is NaN before the first step
        self.server_link.close()
        if self.reader.stopped:
            return INTERRUPTED
        self.observer.emit(Phase(rank=self.spec.rank, name="finished"))
        return 0


class _ServerSink(Sink):
    """Send metric rows to the server, which writes the run's metrics.jsonl."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link

    def handle(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            self._link.send(Kind.EVENT, meta={"event": to_json(event)})
