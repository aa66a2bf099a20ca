"""The weights of a stage: kept between assignments, read from files of this machine, or received from the front."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from smolcluster.errors import SmolclusterError
from smolcluster.models.parts import part_of
from smolcluster.observe.text import printable
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.sources import open_source
from smolcluster.serve.engine.stage_model import StageModel
from smolcluster.serve.engine.wire import Assignment, ServedModel

log = logging.getLogger(__name__)


class StageWeights:
    def __init__(self, device: torch.device, dtype: torch.dtype, *, files: Path | None = None) -> None:
        """`files`: the file or folder from which the front may request weights (--model)."""
        self._device, self._dtype = device, dtype
        self._files = None if files is None else files.resolve()
        self._source: ModelSource | None = None  # the one opened last
        self.tensors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def clear(self) -> None:
        self.tensors = {}

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}

    def load(self, model: ServedModel, assignment: Assignment) -> bool:
        """Load the missing weights from local files. Return False if this machine has no such files."""
        source, layers = self._find(model), assignment.layers
        if source is None:
            return False
        names = part_of(self.tensors, model.config, layers, first=assignment.first, last=assignment.last)
        kept = {name: self.tensors[name] for name in names}
        names, none = list(model.config.shapes()), range(layers.start, layers.start)

        def lacks(part: range, *, first: bool = False, last: bool = False) -> bool:  # embedding, head
            return not kept.keys() >= set(part_of(names, model.config, part, first=first, last=last))

        missing = [n for n in layers if lacks(range(n, n + 1))]
        first, last = assignment.first and lacks(none, first=True), assignment.last and lacks(none, last=True)
        self.tensors = kept  # frees the others before any are read
        spans = _spans(missing) or [none]
        for number, span in enumerate(spans):
            kept |= source.load(
                span,
                first=first and number == 0,
                last=last and number == len(spans) - 1,
                dtype=self._dtype,
                device=self._device,
            )
        return True

    def build(self, model: ServedModel, assignment: Assignment) -> StageModel:
        return StageModel(
            model.config,
            assignment.layers,
            first=assignment.first,
            last=assignment.last,
            weights=self.tensors,
            device=self._device,
            dtype=self._dtype,
        )

    def _find(self, model: ServedModel) -> ModelSource | None:
        if self._source is not None and self._source.fingerprint == model.fingerprint:
            return self._source
        name = printable(model.name)
        if not self._may_open(model.reference):
            log.info("%s may not be loaded from local files (see --model): receiving the weights from the server", name)
            return None
        try:
            found = open_source(model.reference)
        except SmolclusterError as error:
            log.info("%s is not on this machine (%s): receiving the weights from the server", name, error)
            return None
        if found.fingerprint != model.fingerprint:
            log.warning(
                "the local copy of %s differs from the served model: receiving the weights from the server", found.name
            )
            return None
        self._source = found
        return found

    def _may_open(self, reference: Mapping[str, str]) -> bool:
        """Return whether --model allows loading these files. Models in installed packages are always allowed."""
        if reference.get("kind") == "package":
            return True
        try:
            return self._files is not None and Path(reference.get("path", "")).resolve().is_relative_to(self._files)
        except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links
            return False


def _spans(numbers: list[int]) -> list[range]:
    """Return runs of consecutive numbers: [3, 4, 8] -> 3 to 4, 8 to 8."""
    spans: list[range] = []
    for number in numbers:
        if spans and spans[-1].stop == number:
            spans[-1] = range(spans[-1].start, number + 1)
        else:
            spans.append(range(number, number + 1))
    return spans
