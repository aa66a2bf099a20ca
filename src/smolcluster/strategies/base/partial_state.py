"""Saving and loading where each rank holds a part of the model (`parallel.py`).

Names are those of the whole model, and a checkpoint has the whole model: assembled, or as the boxes of all ranks. So any
strategy resumes from the checkpoint of any other. Of the ranks that hold the same part the first saves it, or its owner.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group, collect_tensors
from smolcluster.comm.mesh.torch_traffic import EngineTraffic
from smolcluster.comm.sharded import axes_of, box_name, full_tensor, has_first, like, local, part_of, place
from smolcluster.parallel.exchange import GradientExchange
from smolcluster.parallel.pipe import Pipe
from smolcluster.parallel.stages import COPY
from smolcluster.parallel.tensor_styles import Fusions
from smolcluster.strategies.base import OptionsT, Scope, State, Strategy


class PartialState(Strategy[OptionsT]):
    coords: dict[str, int]
    data: Group  # along dp and cp
    pp: Group
    _exchange: GradientExchange
    _fusions: Fusions
    _pipe: Pipe | None
    _traffic: EngineTraffic
    _evaluated: bool

    def state(self, of: Scope = "run") -> State:
        """Return the whole state on the lead rank; the others take part in gathering it and return an empty one."""
        self._evaluated = False
        with self._exchange.in_full():
            return self._rank_state() if of == "rank" else self._full_state(of)

    def _full_state(self, of: Scope) -> State:
        weights = self._full_weights()
        if of == "weights":
            return State(weights=weights, optimizer={}, numbers={})
        optimizer, numbers = self.replica.state_dict()
        moments = self._gather(optimizer, prefixed=True)
        return State(weights=weights, optimizer=moments, numbers=numbers, own=self._own_buffers())

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that differ from those of the first data shard, which saves the model's."""
        return self.replica.buffers.changing() if self.data.rank > 0 else {}

    def _rank_state(self) -> State:
        optimizer, numbers = self.replica.state_dict()
        kinds = {"weights": self.replica.weights(), "optimizer": optimizer}
        boxes: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        full_shapes: dict[str, dict[str, list[int]]] = {kind: {} for kind in kinds}
        parameters = self.replica.model.state_dict(keep_vars=True)
        saved_before = set() if self._pipe is None else self._pipe.copied
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                plain = name if kind == "weights" else name.partition("/")[2]
                if name.endswith(COPY) or parameters[plain] in saved_before:
                    continue
                full_shapes[kind][name] = list(tensor.shape)
                part, (offsets, _) = local(tensor), place(tensor)
                if kind == "weights":
                    part = part.to(self.replica.layout[name].dtype)  # in the type of the model
                if part.numel() and self._saves(tensor, parameters[plain]):
                    boxes[kind].update(
                        {box_name(name, at): rows for at, rows in self._fusions.runs(plain, part, offsets)}
                    )
        return State(**boxes, numbers=numbers, full_shapes=full_shapes, own=self._own_buffers())

    def _saves(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Return whether this rank saves the tensor: the first of those that hold it."""
        axes = axes_of(tensor)
        along_dp = "shards" in axes or "replicas" in axes or self._shard_saves(parameter)
        return along_dp and ("tp" in axes or self.coords["tp"] == 0) and has_first(tensor)

    def _shard_saves(self, tensor: Tensor) -> bool:
        """Return whether this data shard saves the tensor: its owner, or the first."""
        if self._exchange.owners and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            return self._exchange.updates(tensor)
        return self.coords["dp"] == self.coords["cp"] == 0

    def _full_weights(self) -> dict[str, Tensor]:
        """Return the whole weights in the types of the model."""
        weights = self._gather(self.replica.weights())
        return {name: tensor.to(self.replica.layout[name].dtype) for name, tensor in weights.items()}

    def _gather(self, tensors: dict[str, Tensor], *, prefixed: bool = False) -> dict[str, Tensor]:
        """Gather along tp and the data ranks, then along pp. `prefixed`: names are kind/parameter."""
        parameters = self.replica.model.state_dict(keep_vars=True)
        found = {}
        for name, tensor in tensors.items():
            with self._traffic.counted():
                full = full_tensor(tensor)
            plain = name.partition("/")[2] if prefixed else name
            if self.coords["tp"] == 0 and not name.endswith(COPY) and self._shard_saves(parameters[plain]):
                found[name] = self._fusions.restored(plain, full)
        if self._exchange.owners and self.coords["tp"] == 0:
            found = collect_tensors(self.data, found)
        first = self.coords["dp"] == self.coords["cp"] == self.coords["tp"] == 0
        if first and self.pp.size > 1:
            found = collect_tensors(self.pp, found)
        return found if self.context.seat.rank == 0 else {}

    def load_state(self, state: State) -> None:
        self._evaluated = False
        with self._exchange.in_full():
            self._load(state)

    def _load(self, state: State) -> None:
        replica = self.replica
        with torch.no_grad():
            for name, tensor in replica.model.state_dict().items():
                local(tensor).copy_(self._part(name, state.weights[name.removesuffix(COPY)], tensor))
        kinds: dict[str, list[str]] = {}  # of states the optimizer keeps for each parameter
        for key in state.optimizer:
            kind, _, name = key.partition("/")
            kinds.setdefault(name, []).append(kind)
        mine: dict[str, Tensor] = {}
        for name, parameter in replica.model.named_parameters():
            saved = name.removesuffix(COPY)
            for kind in kinds.get(saved, []) if self._exchange.updates(parameter) else []:
                full = state.optimizer[f"{kind}/{saved}"]
                if full.shape == parameter.shape:
                    part = self._part(name, full, parameter).to(local(parameter.detach()).device, copy=True)
                    mine[f"{kind}/{name}"] = like(parameter, part)
                else:
                    mine[f"{kind}/{name}"] = full.clone()  # a counter
        replica.load_optimizer(mine, state.numbers, bare=not state.optimizer)
        replica.buffers.load(state.own)

    def _part(self, name: str, full: Tensor, tensor: Tensor) -> Tensor:
        """Return the part of `full` that belongs to this rank's part of `tensor`."""
        return part_of(self._fusions.arranged(name.removesuffix(COPY), full), tensor)
