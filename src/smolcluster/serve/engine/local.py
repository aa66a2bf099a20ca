"""Stages on this machine: a process for each, started again when it dies, ended with the front.

A stage reads its standard input to the end: that is how it learns that the front's process is gone, however it ended.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 0.5  # before one that died is started again
STEADY_S = 120.0  # on a small machine half a minute goes by before it has begun
MISTAKE = 2  # the status of one that was asked for something impossible: it has said what
MOST_DEATHS = 5  # in a row, each soon after its start
END_S = 5.0


class LocalStages:
    def __init__(
        self,
        front: str,
        count: int,
        *,
        gave_up: Callable[[str], None],
        options: Sequence[str] = (),
    ) -> None:
        """`gave_up` is called for each that is not started again, with the reason, on a thread of ours."""
        self._front, self._options, self._gave_up = front, list(options), gave_up
        self._threads = max(1, (os.cpu_count() or 1) // max(1, count))
        self._ending = threading.Event()
        self._watches = [
            threading.Thread(target=self._keep, args=(number,), name=f"smolcluster-stage-{number}", daemon=True)
            for number in range(count)
        ]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for watch in self._watches:
            watch.start()

    def expect_the_end(self) -> None:
        """From now on, do not start again what ends."""
        self._ending.set()

    def close(self) -> None:
        """End all: by closing their input, and by killing those that go on."""
        self._ending.set()
        deadline = time.monotonic() + END_S
        for process in list(self.processes.values()):
            if process.stdin is not None:
                process.stdin.close()
        for process in list(self.processes.values()):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for watch in self._watches:
            watch.join(END_S)

    def _keep(self, number: int) -> None:
        deaths = 0
        while not self._ending.is_set():
            began = time.monotonic()
            status = self._live(number)
            if self._ending.is_set():
                return
            deaths = 1 if time.monotonic() - began > STEADY_S else deaths + 1
            if status == MISTAKE:
                self._gave_up(f"stage-{number} cannot be started: its own words are above")
                return
            if deaths >= MOST_DEATHS:
                why = f"stage-{number} died {deaths} times in a row, the last with status {status}"
                log.error("%s; it is not started again", why)
                self._gave_up(why)
                return
            log.warning("stage-%d ended with status %s; it is started again", number, status)
            self._ending.wait(AGAIN_S * deaths)

    def _live(self, number: int) -> int | str:
        """One life of it; its exit status, or why there was none."""
        try:
            process = self.processes[number] = self._start(number)
        except OSError as error:  # no memory for another process, after one was killed for want of it
            return f"none ({error.strerror or error})"
        if self._ending.is_set() and process.stdin is not None:
            process.stdin.close()  # `close` may not have seen it
        status = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        return status

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "smolcluster", "stage", "--server", self._front, "--name", f"stage-{number}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        apart: dict[str, Any] = {} if sys.platform == "win32" else {"start_new_session": True}  # Ctrl-C is the front's
        return subprocess.Popen(
            [*command, "--with-parent", "--local-rank", str(number), *self._options],
            stdin=subprocess.PIPE,
            env=environment,
            **apart,
        )
