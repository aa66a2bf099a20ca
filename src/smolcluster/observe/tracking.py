"""Experiment trackers: the name of a run and of its metrics, and TensorBoard (extra `tensorboard`); wandb.py has the other."""

from __future__ import annotations

import importlib
from pathlib import Path

from smolcluster.errors import needed
from smolcluster.observe.events import Event, RunStarted, StepLogged

# Field of StepLogged -> name in TensorBoard and W&B. The order is the order of the charts.
METRICS = {
    **{name: f"train/{name}" for name in ("loss", "grad_norm")},
    **{f"val_{name}": f"val/{name}" for name in ("loss", "accuracy", "ppl")},
    **{
        name: name
        for name in (
            *("lr", "tokens_per_s", "samples_per_s", "step_time_s", "compute_s", "comm_s"),
            *("staleness", "staleness_max", "stale_rejected", "skipped"),
            *("bytes_sent", "bytes_received", "samples", "tokens"),
        )
    },
}


def run_name(started: RunStarted) -> str:
    """`EDP-worker-macbook_rank1_lr0.001_bs32`."""
    return (
        f"{started.algorithm}-{started.role}-{started.host}"
        f"_rank{started.rank}_lr{started.learning_rate:g}_bs{started.batch_size}"
    )


def metrics_of(row: StepLogged) -> dict[str, float]:
    """The numbers of one row under the trackers' names; what was not measured is left out."""
    values = {name: getattr(row, field) for field, name in METRICS.items()}
    values |= {f"val/{name}": value for name, value in (row.val_extra or {}).items()}
    values |= {f"gradients/{name}": norm for name, norm in (row.gradient_norms or {}).items()}
    return {name: value for name, value in values.items() if value is not None}


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
