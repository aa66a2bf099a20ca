"""Saving and loading between and inside the rounds of local SGD (`local_steps.py`).

    weights         the anchor                          evaluated, exported; workers that join start from it
    shared          the outer optimizer's state         in every checkpoint; sent to workers that join
    own             the inner optimizer's state, error feedback, the error buffer of late rounds; in the middle of a round the
                    worker's weights and its progress; with `eager` its momentum, and its weights as the round began

A checkpoint of the mesh plane has the local state of each worker and the results in flight, so a round continues in its
middle. A checkpoint of the elastic plane is the state after a commit, with the inner state of one worker; rounds in flight are
trained again. Each worker keeps its local state on its disk, as of the end of the round of the checkpoint: workers that
restart in the same run directory continue with that. Workers that join, or rejoin between two checkpoints, start with the
inner state of another worker. Other strategies continue with that of rank 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from smolcluster.comm.codecs.feedback import under
from smolcluster.compute.optim import load_named_state, named_state
from smolcluster.errors import UserError
from smolcluster.strategies.base import Scope, State
from smolcluster.strategies.base.local_contributions import LocalContributions, LocalStepsT
from smolcluster.strategies.base.local_round import LATE, MOMENTS, OUTER, ROUND, WEIGHTS, LocalRound

START, EAGER = "start/", "eager/"  # prefixes in `State.own`
OF_ROUNDS = (WEIGHTS, MOMENTS, ROUND, LATE, START, EAGER)


class LocalState(LocalContributions[LocalStepsT]):
    outer: torch.optim.Optimizer  # the same on all workers
    _outer_of_mine: torch.optim.Optimizer  # with `eager`: this worker's
    _start: list[Tensor]  # with `eager`: the weights that local steps began with
    _applied: int
    _arrived: deque[tuple[int, int]]
    _at_start: bool

    def state(self, of: Scope = "run") -> State:
        state = super().state(of)
        if self._streaming.streams:
            state.numbers["fragments"] = [self._streaming.fragments, self.local_steps]
        if self.context.server_context is not None:
            return state
        outer = named_state(self.replica.model, self.outer)
        state.shared = {**state.shared, **{f"{OUTER}{name}": tensor for name, tensor in outer.items()}}
        own = dict(state.own)
        if self.context.fixed_group is None or self.context.seat.rank > 0:
            own |= {f"{MOMENTS}{name}": tensor for name, tensor in state.optimizer.items()}
        fixed = self.context.fixed_group is not None
        if self._streaming.streams or (self._in_round and fixed):
            anchors = {id(p): anchor for p, anchor in zip(self.replica.parameters, self._anchor, strict=True)}
            tensors = self.replica.model.state_dict(keep_vars=True)
            trained = {name: anchors[id(tensor)] for name, tensor in tensors.items() if id(tensor) in anchors}
            own |= {f"{WEIGHTS}{name}": state.weights[name] for name in self._names()} | self._mine.state()
            state.weights = {**state.weights, **trained}
        if self._streaming.eager:
            own |= {f"{START}{name}": tensor for name, tensor in zip(self._names(), self._start, strict=True)}
            mine_outer = named_state(self.replica.model, self._outer_of_mine)
            own |= {f"{EAGER}{name}": tensor for name, tensor in mine_outer.items()}
        if not fixed:
            state.numbers["updates"] = self._applied
        state.own = own | {f"{LATE}{name}": tensor for name, tensor in self._late.state(self._names()).items()}
        return state

    def load_state(self, state: State) -> None:
        self._check_fragments(state)
        own = state.own
        buffers = {name: tensor for name, tensor in own.items() if not name.startswith(OF_ROUNDS)}
        super().load_state(replace(state, optimizer=under(MOMENTS, own) or state.optimizer, own=buffers))
        if self.context.server_context is not None:
            return
        self._applied = self.replica.updates
        self._arrived.clear()
        self._mine, self._at_start = LocalRound(self.replica.updates), False
        if self._streaming.eager:
            torch._foreach_copy_(
                self._start, [own.get(f"{START}{n}", a) for n, a in zip(self._names(), self._anchor, strict=True)]
            )
            load_named_state(self.replica.model, self._outer_of_mine, under(EAGER, own))
        if (middle := LocalRound.saved_in(own)) is not None:
            self._mine = middle
            self._load_middle(own)
        if late := under(LATE, own):
            self._late.load(self._names(), late)

    def _load_rounds(self, state: State) -> None:
        if self.context.server_context is None:
            load_named_state(self.replica.model, self.outer, under(OUTER, state.shared))
            torch._foreach_copy_(self._anchor, [parameter.detach() for parameter in self.replica.parameters])
        super()._load_rounds(state)

    def _check_fragments(self, state: State) -> None:
        """Raise UserError if rounds in flight, and the position in a round, are of other fragments."""
        saved, mine = state.numbers.get("fragments"), [self._streaming.fragments, self.local_steps]
        if saved is not None and list(saved) != mine and (saved[0] != mine[0] or state.numbers.get("in_flight")):
            raise UserError(
                f"the checkpoint was made with strategy.fragments {saved[0]} and inner_steps {saved[0] * saved[1]}, and this "
                f"run has {mine[0]} and {mine[0] * mine[1]}; resume with those, or start a new run from its weights"
            )

    @torch.no_grad()
    def _load_middle(self, own: Mapping[str, Tensor]) -> None:
        """Continue in the middle of a round, with this worker's weights and the results that they do not have yet."""
        tensors = self.replica.model.state_dict()
        for name, tensor in under(WEIGHTS, own).items():
            tensors[name].copy_(tensor)
        if self.context.fixed_group is None:  # the anchor has the results that were in flight
            last, h = self._applied // self.local_steps * self.local_steps, self.local_steps
            flying = range(last, max(0, self._applied - self._streaming.overlap), -h)
            self._arrived.extend((step, self.rounds.slot_of(step)) for step in reversed(flying))
