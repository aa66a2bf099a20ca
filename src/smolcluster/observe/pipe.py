"""Events over a pipe: how a worker process reports to the launcher."""

from __future__ import annotations

import errno
import threading
from typing import IO

from smolcluster.observe.events import Event, to_json
from smolcluster.observe.observer import Sink

# Errors of a pipe without a reader; EINVAL on Windows.
_READER_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN, errno.EBADF, errno.EINVAL}


class PipeSink(Sink):
    """Writes each event as one line of JSON and flushes it. The caller closes the stream.

    A broken pipe is ignored: the control channel handles a launcher that is gone.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._gone = False

    def handle(self, event: Event) -> None:
        line = to_json(event).encode("ascii") + b"\n"
        with self._lock:
            if self._gone or self._stream.closed:
                return
            try:
                rest = memoryview(line)
                while rest:  # an unbuffered stream may write only part of it
                    rest = rest[self._stream.write(rest) or 0 :]
                self._stream.flush()
            except OSError as error:
                if error.errno not in _READER_GONE:
                    raise
                self._gone = True
