"""Bases of strategies with a whole model on each worker: saving and loading, rounds, and a step without peers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, cast

from torch import Tensor, nn

from smolcluster.comm.buckets import BucketSum
from smolcluster.comm.codecs import chosen_codec
from smolcluster.comm.codecs.feedback import under
from smolcluster.comm.encoded_sum import EncodedSum
from smolcluster.comm.group import synchronize_weights
from smolcluster.comm.rounds import (
    AtServer,
    Combination,
    Committed,
    Contribution,
    MeshRounds,
    Rounds,
    ServerRounds,
)
from smolcluster.compute.replica import Batch, Replica
from smolcluster.compute.timing import DelayedFlag
from smolcluster.config.options import ExchangeOptions, ServedOptions
from smolcluster.parallel.shards import owners
from smolcluster.strategies.base import IN_FLIGHT, OptionsT, Scope, Share, State, StepReport, Strategy, build_replica
from smolcluster.tasks.base import Task

ServedT = TypeVar("ServedT", bound=ServedOptions)
CODEC = "codec/"  # prefix in `State.own`: error feedback
CombinedBy = Literal["workers", "server", "server, as they arrive"]  # by all-reduce; synchronously; asynchronously


class Replicated(Strategy[OptionsT]):
    def setup(self, task: Task) -> None:
        self.replica = build_replica(task, self.context)

    def state(self, of: Scope = "run") -> State:
        return replica_state(self.replica)

    def load_state(self, state: State) -> None:
        self.replica.load_state_dict(state.weights, state.optimizer, state.numbers)

    def drain(self) -> None:
        self.replica.buffers.settle()


class Exchanging(Replicated[OptionsT]):
    """A strategy whose workers combine what they compute in rounds (`comm/rounds.py`), on either plane."""

    combined: ClassVar[CombinedBy] = "workers"
    rounds: Rounds  # on workers

    def open_rounds(self, combination: Combination) -> Rounds:
        """Start to exchange with the other workers. On the mesh plane all start with the weights of rank 0."""
        context, weights = self.context, self.replica.weights()
        if context.open_rounds is not None:
            return context.open_rounds(self, combination)
        synchronize_weights(context.group, weights)
        return MeshRounds(
            combination,
            self.apply,
            group=context.group,
            samples=context.samples_per_step,
            num_slots=self.rounds_in_flight + 1,
            local_steps=self.local_steps,
            stop_requested=context.stop_requested,
            stop_flag=DelayedFlag(context.device).read,
        )

    def contribute(self, batch: Batch) -> AbstractContextManager[Contribution]:
        """Wrap the computation of this worker's contribution to the round that ends with this batch."""
        return self.rounds.contribute(
            batch.step,
            samples=batch.samples,
            weight=batch.weight,
            counted=batch.counts is not None,
            scale=self.replica.loss_scale,
        )

    def sum_of_workers(
        self,
        options: ExchangeOptions,
        parameters: Mapping[str, nn.Parameter] | None = None,
        *,
        slots: int | None = None,
    ) -> Combination:
        """Return the sum of `.grad` over workers: in buckets, or encoded where the options name a codec.

        `parameters`: by name; None: all that are trained. `slots`: None: one for each round that may be in flight.
        """
        trained = self.trained if parameters is None else parameters
        codec, slots = chosen_codec(options), self.rounds_in_flight + 1 if slots is None else slots
        if self.context.fixed_group is None and not codec.lossless:
            return EncodedSum(trained, codec=codec, deal=owners, num_slots=slots)
        bucket_bytes = int(options.bucket_mb * 2**20)
        return BucketSum(list(trained.values()), self.context.fixed_group, bucket_bytes=bucket_bytes, num_slots=slots)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in order."""
        return {name: p for name, p in self.replica.model.named_parameters() if p.requires_grad}

    @property
    def local_steps(self) -> int:
        """The number of local steps in a round."""
        return 1

    @property
    def equal_time(self) -> bool:
        """Whether each worker takes as many local steps in a round as it has time for; `local_steps`: of the median worker."""
        return False

    @property
    def rounds_in_flight(self) -> int:
        """The number of rounds that may be in flight while the next is computed."""
        return 0

    @property
    def round_timeout(self) -> float | None:
        """Seconds that a worker may compute while others wait for it; None: adaptive."""
        return None

    @property
    def quorum(self) -> float:
        """The share of the members that must have contributed to a round if the others are late; 1: wait for all."""
        return 1.0

    @property
    def max_rounds_apart(self) -> int:
        """The number of rounds that a worker may train without the coordinator; 0: it waits."""
        return 0

    # Elastic plane, with a quorum or offline

    def keep_late(self, late: Iterable[Contribution], *, held: Iterable[Contribution] = ()) -> None:
        """Keep these contributions, which were too late for their rounds. Others in flight do not count; those `held` may."""

    def contribute_late(self, mine: Contribution) -> None:
        """Contribute the late work to a round for which this worker has computed nothing else."""
        raise AssertionError(f"{type(self).__name__} waits for all")

    def unlease_late(self) -> None:
        """Forget the samples of the late work: they are in no lease of this worker."""

    def forget_late(self, reason: str) -> None:
        """Drop the late work."""

    def begin_alone(self) -> None:
        """Begin to train without the coordinator, from weights that include the late work."""
        raise AssertionError(f"{type(self).__name__} does not train alone")

    def end_alone(self) -> None:
        """Keep what was computed without the coordinator as late work."""
        raise AssertionError(f"{type(self).__name__} does not train alone")

    @property
    def stops_when_stale(self) -> bool:
        """Whether a worker stops when its contributions are too late to count."""
        return False

    @property
    def results_are_replicated(self) -> bool:
        """Whether every member holds the whole result of a round."""
        return True

    @property
    def version(self) -> int:
        """The last step of the last round that was applied."""
        return self.replica.updates

    @property
    def own_step(self) -> int | None:
        """The step to which this worker's local state belongs; None: it cannot continue from this state."""
        return self.replica.updates

    @property
    def shares_state_in_rounds(self) -> bool:
        """Whether the state that workers share is that of the last applied round also while the next is computed."""
        return self.local_steps == 1

    def rejoined(self) -> None:
        """Continue from the last applied round: what this worker computed since does not count."""

    @property
    def share(self) -> Share:
        group = self.context.group
        return Share(index=group.rank, count=group.size, replicas=group)

    def state(self, of: Scope = "run") -> State:
        state = super().state(of)
        if self.context.server_context is not None:  # a coordinator has no rounds of its own
            return state
        if self.context.fixed_group is not None and self.context.seat.rank > 0:
            state.own = self.replica.buffers.changing()
        if own := self.rounds.own_state():
            state.own = {**state.own, **{f"{CODEC}{name}": tensor for name, tensor in own.items()}}
        in_flight, results = self.rounds.state()
        if in_flight:
            state.numbers["in_flight"] = in_flight
            named = [zip(self._names(), result, strict=True) for result in results]
            results_of = ((f"{IN_FLIGHT}{i}/{n}", t) for i, result in enumerate(named) for n, t in result)
            state.shared = {name: tensor for name, tensor in results_of if tensor is not None}
        return state

    def load_state(self, state: State) -> None:
        super().load_state(state)
        buffers = dict(self.replica.model.named_buffers())  # subclasses add other names
        self.replica.buffers.load({name: own for name, own in state.own.items() if name in buffers})
        if own := under(CODEC, state.own):
            self.rounds.load_own(own)
        self._load_rounds(state)

    def _load_rounds(self, state: State) -> None:
        """Restore the rounds in flight."""
        if in_flight := state.numbers.get("in_flight"):
            numbers, names = range(len(in_flight)), self._names()
            results = [[state.shared.get(f"{IN_FLIGHT}{i}/{name}") for name in names] for i in numbers]
            self.rounds.load(in_flight, results)

    def _names(self) -> list[str]:
        """Return the names of the trained parameters, in order."""
        return list(self.trained)

    @abstractmethod
    def apply(self, result: Committed) -> None:
        """Update the weights with the result of a round: all members apply the same results in the same order."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What an asynchronous server announces after an update."""

    change: Mapping[str, Tensor] | None = None  # of the weights, in memory that is reused; None: one is missing
    counted: int = 0  # my last push that is in the weights
    workers: int = 1
    norm: float = 0.0  # of the gradient, before clipping
    denominators: Sequence[float] = ()  # AdamW's, the mean over each trained parameter


class Pushing(Exchanging[ServedT]):
    """A strategy whose workers push their gradients to a parameter server, which holds the weights and the optimizer."""

    combined: ClassVar[CombinedBy] = "server"
    rounds: ServerRounds

    def setup(self, task: Task) -> None:
        super().setup(task)
        if self.context.server_context is None:
            assert self.context.open_rounds is not None, "parameter servers need the elastic plane"
            self.rounds = cast(ServerRounds, self.context.open_rounds(self, AtServer(self.trained)))

    @abstractmethod
    def take_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Use the server's weights after this step."""

    def take_change(self, announced: Announced, step: int) -> None:
        """Follow the server's weights to this step."""
        raise AssertionError(f"{type(self).__name__} is synchronous")

    @abstractmethod
    def rejoined(self) -> None:
        """Continue with the server's state, which is loaded: what was in flight is discarded."""

    # Called by the server

    @property
    def announces(self) -> bool:
        """Whether the server sends the change of its weights in every step (asynchronous)."""
        return False

    @property
    def collect_timeout(self) -> float:
        """Seconds to wait for the others after the first gradient of a step."""
        raise AssertionError(f"{type(self).__name__} is not synchronous")

    @property
    def server_batch(self) -> int | None:
        """Samples that make an update; None: one batch of each member."""
        return None

    def weight_of(self, age: int) -> float | None:
        """Return the weight of a gradient that is `age` updates old; None: refuse it."""
        return 1.0


def replica_state(replica: Replica) -> State:
    replica.buffers.settle()
    optimizer, numbers = replica.state_dict()
    return State(weights=replica.weights(), optimizer=optimizer, numbers=numbers)


def train_alone(replica: Replica, batch: Batch, *, stop: bool) -> StepReport:
    """Take a step without peers."""
    rate = replica.learning_rate
    loss = replica.compute(batch)
    norm = replica.apply()
    return StepReport(
        loss=loss, grad_norm=norm, learning_rate=rate, samples=batch.samples, tokens=batch.tokens, stop=stop
    )
