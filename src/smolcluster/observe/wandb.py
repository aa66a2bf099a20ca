"""Weights & Biases (extra `wandb`).

Everything that can wait for a network happens on a thread of its own: training hands over a row and goes on. Without a
login the run is kept offline in the run directory, and `wandb sync` uploads it later.
"""

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
from smolcluster.observe.events import Event, RunFinished, StepLogged, plain
from smolcluster.observe.tracking import metrics_of

logger = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 30.0  # a server that does not answer by then makes the run an offline one
_FINISH_TIMEOUT_S = 30.0  # the upload that is left at the end; the rest stays on disk


class WandbSink:
    """One W&B run, for the rows of one rank."""

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
        """Wait for the rest to be written, but not for ever."""
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
            # W&B writes through a process of its own, and an offline run is on disk for certain only when that process
            # has ended. It is left alone while another run in this process still needs it.
            if self._wandb.run is None:
                self._wandb.teardown()
        # W&B has a tree of exceptions of its own, and this thread has no caller: the error is kept, and the next
        # `handle` raises it where the observer can drop this sink.
        except Exception as error:  # noqa: BLE001
            logger.error("W&B stopped: %s: %s", type(error).__name__, error)
            self._error = error

    def _start(self) -> Any:
        """Open the run: offline without a login, and offline as well when the server cannot be reached."""
        mode = None if os.environ.get("WANDB_MODE") else ("online" if has_login() else "offline")
        try:
            return self._wandb.init(**self._arguments, mode=mode, settings=self._settings())
        except self._wandb.Error as error:
            if mode == "offline":
                raise
            logger.warning("W&B does not take the run, so it is kept offline: %s", error)
            return self._wandb.init(**self._arguments, mode="offline", settings=self._settings())

    def _settings(self) -> Any:
        """Quiet, and with hands off stdout and stderr: those belong to the launcher."""
        settings = {"silent": True, "console": "off", "init_timeout": _INIT_TIMEOUT_S}
        if "finish_timeout" in getattr(self._wandb.Settings, "model_fields", {}):  # not in the oldest version we accept
            settings["finish_timeout"] = _FINISH_TIMEOUT_S
        return self._wandb.Settings(**settings)


def has_login() -> bool:
    """Whether W&B would find a key without asking: in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    home = Path.home()
    candidates = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):  # no such file, or one W&B could not read either
            continue
    return False
