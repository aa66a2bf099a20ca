"""What every strategy with a whole model on each worker shares: saving and loading, and the step that needs nobody."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from smolcluster.comm.group import broadcast_in_place, check_same_layout
from smolcluster.comm.rounds import Combination, Committed, MeshRounds, Rounds
from smolcluster.compute.optim import without_state
from smolcluster.compute.replica import Batch, Replica
from smolcluster.compute.timing import DelayedFlag
from smolcluster.strategies.base import OptionsT, State, StepReport, Strategy, build_replica
from smolcluster.tasks.base import Task


class Replicated(Strategy[OptionsT]):
    def setup(self, task: Task) -> None:
        self.replica = build_replica(task, self.context)

    @property
    def model(self) -> nn.Module:
        return self.replica.model

    def state(self) -> State:
        return replica_state(self.replica)

    def load_state(self, state: State) -> None:
        self.replica.load_state_dict(state.weights, state.optimizer, state.numbers)

    def without_state(self, optimizer: Iterable[str]) -> list[str]:
        return without_state(self.replica.model, self.replica.optimizer, optimizer)

    @property
    def skipped(self) -> int:
        return self.replica.skipped

    def check_progress(self) -> None:
        self.replica.check_progress()

    def drain(self) -> None:
        self.replica.buffers.settle()

    def gradient_norms(self) -> dict[str, Tensor]:
        return self.replica.gradient_norms


class Exchanging(Replicated[OptionsT]):
    """A strategy whose workers combine what they compute in rounds (`comm/rounds.py`), on either plane."""

    server_has_weights: ClassVar[bool] = False  # a coordinator asks the workers for them
    rounds: Rounds  # a worker's

    def open_rounds(self, combination: Combination) -> Rounds:
        """Combine with the other workers from now on. Ranks that stay start with the weights of rank 0."""
        context, weights = self.context, self.replica.weights()
        if context.open_rounds is not None:
            return context.open_rounds(self, combination)
        check_same_layout(context.group, weights)
        broadcast_in_place(context.group, weights)
        return MeshRounds(
            combination,
            self.apply,
            group=context.group,
            samples=context.samples_per_step,
            num_slots=self.rounds_in_flight + 1,
            stop_requested=context.stop_requested,
            stop_flag=DelayedFlag(context.device).read,
        )

    @property
    def rounds_in_flight(self) -> int:
        """How many rounds may be under way while the next is computed."""
        return 0

    @property
    def round_timeout(self) -> float | None:
        """How many seconds a worker may compute while others wait for it; None: as long as usual rounds suggest."""
        return None

    @property
    def stops_when_stale(self) -> bool:
        """Whether a worker ends when its contributions come too late to count."""
        return False

    @property
    def results_are_whole(self) -> bool:
        """Whether every member holds the whole result of a round."""
        return True

    @abstractmethod
    def apply(self, result: Committed) -> None:
        """Update the weights by the result of a round: all members in the same order, with the same result."""


def replica_state(replica: Replica) -> State:
    replica.buffers.settle()
    optimizer, numbers = replica.state_dict()
    return State(weights=replica.weights(), optimizer=optimizer, numbers=numbers)


def train_alone(replica: Replica, batch: Batch, *, stop: bool) -> StepReport:
    """One step of a worker without peers."""
    rate = replica.learning_rate
    loss = replica.compute(batch)
    norm = replica.apply()
    return StepReport(
        loss=loss, grad_norm=norm, learning_rate=rate, samples=batch.samples, tokens=batch.tokens, stop=stop
    )
