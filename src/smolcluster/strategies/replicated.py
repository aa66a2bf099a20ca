"""What every strategy with a whole model on each worker shares: saving and loading, and the step that needs nobody."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from smolcluster.compute.optim import without_state
from smolcluster.compute.replica import Batch, Replica
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
