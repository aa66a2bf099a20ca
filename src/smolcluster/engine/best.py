"""Track the best checkpoint so far, by the metric that `training.best` names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from smolcluster.config.schema import split_best


class Best:
    def __init__(self, spec: str) -> None:
        """`spec` is `training.best`, such as "accuracy, max"."""
        self.spec = spec
        self.name, mode = split_best(spec)
        self._sign = -1.0 if mode == "max" else 1.0
        self._least = math.inf  # the best value so far, times the sign

    def improves(self, evaluation: Mapping[str, float]) -> bool:
        """Take an evaluation; return whether it is the best so far. NaN never is."""
        value = self._sign * evaluation.get(f"val_{self.name}", math.nan)
        if not value < self._least:
            return False
        self._least = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for state.json. A run that resumes with another metric starts without a best."""
        value = self._sign * self._least if math.isfinite(self._least) else None
        if self.spec == "loss, min":
            return {"best_val_loss": value}
        return {"best_val_loss": None, "best": {self.spec: value}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("best_val_loss") if self.spec == "loss, min" else (state.get("best") or {}).get(self.spec)
        value = math.inf if saved is None else self._sign * float(saved)
        self._least = math.inf if math.isnan(value) else value
