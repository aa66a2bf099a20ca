"""The state that a coordinator holds: what a run starts with, or the last that a worker sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from smolcluster.engine.elastic.server_side import ServerSide
from smolcluster.strategies.base import Commit, State
from smolcluster.strategies.base.replicated import replica_state


class HoldsState(ServerSide):
    shared: Mapping[str, Tensor]

    def replay(self, commit: Commit) -> None:
        """Do nothing: the workers have the weights."""

    def load_state(self, state: State) -> None:
        """Replace the tensors of the state instead of copying into them: a save or a transfer of the old ones needs no copy."""
        self.replica.adopt_state_dict(state.weights, state.optimizer, state.numbers)
        self.shared = state.shared

    def shared_state(self) -> Mapping[str, Tensor]:
        return self.shared

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:
        self.shared = tensors

    def copied_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = replica_state(self.replica)
        state.shared = self.shared
        return {n: t.to("cpu").contiguous() for n, t in state.packed().items()}, state.numbers
