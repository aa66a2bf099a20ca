"""Experiment trackers: TensorBoard and Weights & Biases (extras `tensorboard`, `wandb`), with the names of runs and metrics."""

from __future__ import annotations

import importlib
import logging
import netrc
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smolcluster.errors import needed
from smolcluster.observe.events import Event, RunFinished, RunStarted, StepLogged, plain

logger = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 30.0  # after which the run is kept offline
_FINISH_TIMEOUT_S = 30.0  # for the upload at the end; the rest stays on disk

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
    """Return the measured numbers of one row by the trackers' names."""
    values = {name: getattr(row, field) for field, name in METRICS.items()}
    values |= {f"val/{name}": value for name, value in (row.val_extra or {}).items()}
    values |= {f"gradients/{name}": norm for name, norm in (row.gradient_norms or {}).items()}
    return {name: value for name, value in values.items() if value is not None}


class TensorBoardSink:
    """Writes the rows of one rank to `log_dir/run_name`, for `tensorboard --logdir LOG_DIR`."""

    def __init__(self, log_dir: str | Path, run_name: str) -> None:
        with needed(extra="tensorboard", purpose="logging.tensorboard"):
            importlib.import_module("tensorboard")
        writers = importlib.import_module("torch.utils.tensorboard")
        self.path = Path(log_dir) / run_name
        # Rows are rare (one per log_interval), so frequent flushing costs nothing.
        self._writer = writers.SummaryWriter(str(self.path), flush_secs=10)

    def handle(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            for name, value in metrics_of(event).items():
                self._writer.add_scalar(name, value, event.step, walltime=event.time)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run, for the rows of one rank.

    All network calls are made by a thread. Without a login the run is kept offline in the run directory, and `wandb sync`
    uploads it later.
    """

    def __init__(self, project: str, run_name: str, run_dir: str | Path, config: Mapping[str, Any]) -> None:
        with needed(extra="wandb", purpose="logging.wandb"):
            self._wandb: Any = importlib.import_module("wandb")
        self._run_dir = Path(run_dir)
        self._arguments = {"project": project, "name": run_name, "dir": str(run_dir), "config": plain(dict(config))}
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        if self._error is not None:
            raise RuntimeError(f"W&B stopped: {self._error}") from self._error
        if isinstance(event, StepLogged | RunFinished):
            self._inbox.put(event)

    def close(self) -> None:
        """Wait for the upload, up to a minute."""
        self._inbox.put(None)
        self._thread.join(_INIT_TIMEOUT_S + _FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            folder = self._run_dir / "wandb"
            logger.warning("W&B is still uploading; send what is missing later: wandb sync %s/*run-*", folder)

    def _work(self) -> None:
        try:
            run = self._start()
            while (event := self._inbox.get()) is not None:
                if isinstance(event, StepLogged):
                    run.log(metrics_of(event), step=event.step)
                elif isinstance(event, RunFinished):
                    run.summary.update(plain(event.summary))
            run.finish()
            # An offline run is complete on disk only when W&B's service process has ended. Do not end it while another run in
            # this process uses it.
            if self._wandb.run is None:
                self._wandb.teardown()
        # This thread has no caller: the next `handle` raises the error, and the observer drops this sink.
        except Exception as error:  # noqa: BLE001
            logger.error("W&B stopped: %s: %s", type(error).__name__, error)
            self._error = error

    def _start(self) -> Any:
        """Open the run, offline without a login or if the server cannot be reached."""
        mode = None if os.environ.get("WANDB_MODE") else ("online" if has_login() else "offline")
        try:
            return self._wandb.init(**self._arguments, mode=mode, settings=self._settings())
        except self._wandb.Error as error:
            if mode == "offline":
                raise
            logger.warning("W&B did not accept the run, so it is kept offline: %s", error)
            return self._wandb.init(**self._arguments, mode="offline", settings=self._settings())

    def _settings(self) -> Any:
        """Return quiet settings that leave stdout and stderr to the launcher."""
        settings = {"silent": True, "console": "off", "init_timeout": _INIT_TIMEOUT_S}
        if "finish_timeout" in getattr(self._wandb.Settings, "model_fields", {}):  # not in the oldest supported version
            settings["finish_timeout"] = _FINISH_TIMEOUT_S
        return self._wandb.Settings(**settings)


def has_login() -> bool:
    """Return whether W&B finds a key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    home = Path.home()
    candidates = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):  # no file, or one that W&B cannot read either
            continue
    return False
