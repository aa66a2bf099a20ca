"""Deliver events to sinks. A failing sink cannot stop training."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from smolcluster.observe.events import Event, Notice

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A receiver of events: a console, a file, a tracker. The observer never calls it concurrently."""

    def handle(self, event: Event) -> None:
        """Handle one event; ignore unknown kinds."""
        return

    def close(self) -> None:
        """Flush and release resources. Called once, also after `handle` has failed."""
        return


class Observer:
    """Delivers each event to every sink, in order, on the thread that emits it.

    A sink that fails is closed and dropped: one error in the log, one Notice to the other sinks, and training continues.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)
        # Reentrant, with a queue: a sink or a signal handler may emit during an event. Such events are queued, so that sinks
        # need not be reentrant.
        self._lock = threading.RLock()
        self._waiting: deque[Event] = deque()
        self._busy = False

    def add(self, sink: Sink) -> None:
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        with self._lock:
            self._waiting.append(event)
            if self._busy:
                return
            self._busy = True
            try:
                while self._waiting:
                    self._deliver(self._waiting.popleft())
            finally:
                self._busy = False

    def notice(self, level: str, message: str, rank: int | None = None) -> None:
        """Emit a message for the user. `level` is INFO, WARNING or ERROR."""
        self.emit(Notice(level=level, message=message, rank=rank))

    def close(self) -> None:
        """Close every sink. Later events are dropped."""
        with self._lock:
            while self._sinks:
                _close(self._sinks.pop(0))

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deliver(self, event: Event) -> None:
        for sink in list(self._sinks):
            try:
                sink.handle(event)
            # A tracker may raise anything, and its failure must not end the training.
            except Exception as error:  # noqa: BLE001
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        name, reason = type(sink).__name__, f"{type(error).__name__}: {error}"
        logger.error("%s failed and was disabled; training continues. %s", name, reason, exc_info=error)
        _close(sink)
        self.notice("ERROR", f"{name} failed and was disabled; training continues. {reason}")


def _close(sink: Sink) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001  (for the same reason as in emit)
        logger.error("%s could not be closed: %s: %s", type(sink).__name__, type(error).__name__, error)


class NoticesOnly:
    """Passes only notices to a sink: on machines other than the leader's, which shows the run."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def handle(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._sink.handle(event)

    def close(self) -> None:
        self._sink.close()


class NoticeHandler(logging.Handler):
    """Turns warnings and errors that the package logs into notices for the user.

    A record with `extra={"event": ...}` is about an event that sinks receive anyway.
    """

    def __init__(self, observer: Observer, *, rank: int | None) -> None:
        super().__init__(logging.WARNING)
        self._observer, self._rank = observer, rank
        # The observer emits notices of its errors directly.
        self.addFilter(
            lambda record: not record.name.startswith("smolcluster.observe") and not hasattr(record, "event")
        )

    def emit(self, record: logging.LogRecord) -> None:
        self._observer.notice(record.levelname, record.getMessage(), self._rank)
