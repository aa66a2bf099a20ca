"""Stages on this machine: one process each, restarted when it dies, stopped with the front.

A stage stops when its standard input is closed, which happens however the front's process ends.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from smolcluster.launch.local.processes import end_by_closing

log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.5  # before a restart
STEADY_S = 120.0  # uptime that resets the count of deaths; a small machine takes half a minute to start
USER_ERROR = 2  # exit status for invalid options, after an error message
MAX_DEATHS = 5  # in a row
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
        """`gave_up` is called with the reason for each stage that is not restarted, on another thread."""
        self._front, self._options, self._gave_up = front, list(options), gave_up
        self._threads = max(1, (os.cpu_count() or 1) // max(1, count))
        self._ending = threading.Event()
        self._supervisors = [
            threading.Thread(target=self._supervise, args=(number,), name=f"smolcluster-stage-{number}", daemon=True)
            for number in range(count)
        ]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for supervisor in self._supervisors:
            supervisor.start()

    def stop_restarting(self) -> None:
        """Do not restart stages from now on."""
        self._ending.set()

    def close(self) -> None:
        """Stop all stages by closing their input; kill those that do not stop."""
        self._ending.set()
        end_by_closing(list(self.processes.values()), timeout_s=END_S)
        for supervisor in self._supervisors:
            supervisor.join(END_S)

    def _supervise(self, number: int) -> None:
        deaths = 0
        while not self._ending.is_set():
            began = time.monotonic()
            status = self._run_once(number)
            if self._ending.is_set():
                return
            deaths = 1 if time.monotonic() - began > STEADY_S else deaths + 1
            if status == USER_ERROR:
                self._gave_up(f"stage-{number} cannot start: see its error message above")
                return
            if deaths >= MAX_DEATHS:
                why = f"stage-{number} died {deaths} times in a row, the last with status {status}"
                log.error("%s; not restarting it", why)
                self._gave_up(why)
                return
            log.warning("stage-%d exited with status %s; restarting it", number, status)
            self._ending.wait(RESTART_DELAY_S * deaths)

    def _run_once(self, number: int) -> int | str:
        """Run the process once. Return its exit status, or why it did not start."""
        try:
            process = self.processes[number] = self._start(number)
        except OSError as error:  # such as out of memory
            return f"none ({error.strerror or error})"
        if self._ending.is_set() and process.stdin is not None:
            process.stdin.close()  # `close` may have missed it
        status = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        return status

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "smolcluster", "stage", "--server", self._front, "--name", f"stage-{number}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        return subprocess.Popen(
            [*command, "--with-parent", "--local-rank", str(number), *self._options],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # on POSIX: Ctrl-C goes to the front alone
        )
