"""The local state of a worker (`State.own`), saved on its disk after the steps that the run saves.

Depending on the strategy: error feedback of the codec, local weights, the state of the inner optimizer, late work. It is at
least as large as the model, so it is not sent. A restarted worker that receives the run's state of such a step loads it;
without it the worker starts with none, like one that joins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

log = logging.getLogger(__name__)


class OwnState:
    def __init__(self, folder: Path, *, rank: int, keep: int) -> None:
        """`keep`: the number of steps to keep, as for checkpoints."""
        self._folder, self._rank, self._keep = folder, rank, keep
        self._last = -1

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the tensors, if there are any. A full disk is only a warning."""
        if not tensors or step == self._last:
            return
        path = self._path(step)
        partial = path.with_suffix(".part")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
            partial.replace(path)
            for old in sorted(self._folder.glob(self._path_name("*")))[: -self._keep]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the local state of step %d is not saved: %s", step, error)
        self._last = step

    def load(self, step: int) -> dict[str, Tensor]:
        path = self._path(step)
        try:
            return dict(load_file(path)) if path.exists() else {}
        except (OSError, SafetensorError) as error:
            log.warning("the local state of step %d cannot be read and starts empty: %s", step, error)
            return {}

    def _path(self, step: int) -> Path:
        return self._folder / self._path_name(f"{step:08d}")

    def _path_name(self, step: str) -> str:
        return f"rank{self._rank}-step-{step}.safetensors"
