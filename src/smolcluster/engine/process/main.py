"""The process around a worker: its channel to the launcher, its final event, its exit status.

The same code runs under our launcher (`python -m smolcluster.engine.process.main`, controlled by JSON lines on standard input)
and on its own, under torchrun or as one rank started by hand (`run_worker`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from smolcluster.comm.group import PeerLost
from smolcluster.comm.mesh.torch_group import lost_peer
from smolcluster.engine.channel import ControlChannel, PipeChannel
from smolcluster.engine.process.title import set_title, title_of
from smolcluster.engine.role import INTERRUPTED, Role
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import UserError
from smolcluster.observe.events import Failed, Notice, Phase
from smolcluster.observe.logs import LogSink
from smolcluster.observe.observer import Sink
from smolcluster.observe.pipe import PipeSink
from smolcluster.observe.tracebacks import user_traceback

# Not below "smolcluster", whose warnings are shown as they come: the reason of a failed run is an event, emitted once.
log = logging.getLogger("worker")
log.addHandler(logging.NullHandler())  # else Python prints to stderr where no log is open yet


def run_worker(
    spec: WorkerSpec, channel: ControlChannel, sinks: list[Sink], *, cut_off: Callable[[], None] | None = None
) -> int:
    """Run one rank; return its exit status. A failure is reported as an event.

    `cut_off` ends the process, on another thread, when the rank waits forever in a backend for a rank that is lost.
    """
    worker = _role(spec)(spec, channel, [*sinks, LogSink()])
    worker.cut_off = cut_off or (lambda: leave(1))
    try:
        log.info("%s, rank %d, starts as process %d", spec.role, spec.rank, os.getpid())
        status = worker.run()
        log.info("rank %d ends with status %d", spec.rank, status)
        return status
    except UserError as error:
        worker.notify_peers(str(error))
        worker.observer.emit(Failed(rank=spec.rank, kind="user", message=str(error)))
        log.error("%s", error)
        return error.exit_code
    except Exception as error:
        reason = str(error) if isinstance(error, PeerLost) else lost_peer(error)
        if reason is not None:
            if channel.stop_requested():
                return INTERRUPTED
            message = worker.explain_loss(reason)
            worker.observer.emit(Failed(rank=spec.rank, kind="peer", message=message))
            log.error("lost another rank: %s", message)
            return 1
        message = f"{type(error).__name__}: {error}"
        worker.notify_peers(message)
        worker.observer.emit(Failed(rank=spec.rank, kind="error", message=message, traceback=user_traceback(error)))
        log.exception("failed")
        return 1
    finally:
        worker.observer.close()


def _role(spec: WorkerSpec) -> type[Role]:
    """Return the role of this process; import only what it needs."""
    if spec.plane == "mesh":
        from smolcluster.engine.worker import Worker

        return Worker
    if spec.role == "server":
        from smolcluster.engine.elastic.server import Server

        return Server
    from smolcluster.engine.elastic.worker import ElasticWorker

    return ElasticWorker


class _PrintedLines(io.TextIOBase):
    """Turn what a task prints into notices: standard output belongs to the launcher."""

    def __init__(self, sink: Sink, rank: int) -> None:
        self._sink, self._rank, self._line = sink, rank, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._sink.handle(Notice(level="PRINT", message=line, rank=self._rank))
        return len(text)


def main() -> None:
    """Run under the launcher: events on standard output, messages on standard input."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what C code prints goes to the log
    buffer = b""
    while b"\n" not in buffer:
        chunk = os.read(0, 65536)
        if not chunk:
            sys.exit(1)
        buffer += chunk
    line, rest = buffer.split(b"\n", 1)
    spec = WorkerSpec.from_json(line.decode())
    set_title(title_of(spec))
    sink = PipeSink(events)
    sys.stdout = _PrintedLines(sink, spec.rank)
    channel = PipeChannel(rest, announce=lambda port: sink.handle(Phase(rank=spec.rank, name="port", detail=str(port))))
    leave(run_worker(spec, channel, [sink]))


def leave(status: int) -> NoReturn:
    """End this process now. Threads of a backend may still be waiting for a dead peer, or abort in a destructor."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has exited
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
