"""TensorBoard event files, one folder per rank (extra `tensorboard`)."""

from __future__ import annotations

import importlib
from pathlib import Path

from smolcluster.errors import needed
from smolcluster.observe.events import Event, StepLogged
from smolcluster.observe.tracking import metrics_of


class TensorBoardSink:
    """Writes the rows of one rank to `log_dir/run_name`; look at them with `tensorboard --logdir LOG_DIR`."""

    def __init__(self, log_dir: str | Path, run_name: str) -> None:
        with needed(extra="tensorboard", purpose="logging.tensorboard"):
            importlib.import_module("tensorboard")
        writers = importlib.import_module("torch.utils.tensorboard")
        self.path = Path(log_dir) / run_name
        # Rows are rare (one per log_interval), so a short interval shows them soon and costs nothing.
        self._writer = writers.SummaryWriter(str(self.path), flush_secs=10)

    def handle(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            for name, value in metrics_of(event).items():
                self._writer.add_scalar(name, value, event.step, walltime=event.time)

    def close(self) -> None:
        self._writer.close()
