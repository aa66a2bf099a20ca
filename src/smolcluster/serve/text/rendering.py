"""Render chat templates in child processes, with a deadline and, except on Windows, a memory limit.

A template comes with the weights, and Jinja's sandbox limits neither its time nor its memory. The children get only a few
variables of this process's environment, and are reused: request and response are one line of JSON each. Linux enforces the
memory limit. macOS does not: there the parent polls the memory of a child, and kills it above the limit.

    parent -> child    {"source", "messages", "names", "timeout_s"}
    child  -> parent   {"text"}, or {"error"}
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smolcluster.serve.text.chat_template import TemplateFailed, check_template, render

RENDER_S = 5.0  # typically milliseconds
START_S = 60.0  # to import Jinja on a busy machine
KILL_S = 2.0  # after the deadline, at which the child exits by itself
MAX_PROCESSES = 4
MEMORY_BYTES = 1 << 30  # in addition to what the child has at its start
MEASURE_S = 0.1
MEASURED = os.name == "posix" and sys.platform != "linux"  # by the parent
_KEPT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONUSERBASE"),
    *("SYSTEMROOT", "APPDATA", "USERPROFILE", "TEMP", "TMP"),
)


def resident_bytes(pid: int) -> int:
    """Return the memory of a process, 0 if it has ended. On all systems but Windows."""
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return int(shown.strip() or 0) << 10


def render_in_child(source: str, messages: Sequence[Mapping[str, str]], *, names: Mapping[str, str]) -> str:
    """Return the prompt of a conversation. Raises TemplateFailed if the template refuses it or exceeds its limits.

    Thread-safe.
    """
    request = {
        "source": source,
        "messages": [dict(message) for message in messages],
        "names": dict(names),
        "timeout_s": RENDER_S,
    }
    response = _POOL.request(request)
    if "text" not in response:
        raise TemplateFailed(str(response.get("error")))
    return str(response["text"])


class _Process:
    """One child process."""

    def __init__(self) -> None:
        from smolcluster.launch.local.processes import NEW_GROUP  # the child imports this module, and does not need it

        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smolcluster.serve.text.rendering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            **NEW_GROUP,  # Ctrl-C goes to the parent
        )
        self._started = False

    def request(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the response, None if the child died."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        responded = threading.Event()
        deadline_s = request["timeout_s"] + KILL_S + (0.0 if self._started else START_S)
        killer = threading.Thread(target=self._kill_at_limit, args=(responded, deadline_s), daemon=True)
        killer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            return None
        finally:
            responded.set()
            killer.join()
        self._started = True
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def _kill_at_limit(self, responded: threading.Event, deadline_s: float) -> None:
        """Kill the child at the deadline, or when it exceeds the memory limit where the system does not enforce it."""
        end = time.monotonic() + deadline_s
        while not responded.wait(max(0.0, min(MEASURE_S if MEASURED else deadline_s, end - time.monotonic()))):
            if time.monotonic() >= end or (MEASURED and resident_bytes(self._process.pid) > MEMORY_BYTES):
                self._process.kill()
                return

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        from smolcluster.launch.local.processes import close_pipes

        self._process.kill()
        self._process.wait()
        close_pipes(self._process)


class _Pool:
    """At most MAX_PROCESSES children, the last used first."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # None: not started
        for _ in range(MAX_PROCESSES):
            self._idle.put(None)

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._idle.get()
        try:
            if process is not None and not process.alive:
                process.end()
                process = None
            process = process or _Process()
            response = process.request(request)
            if response is None:
                process.end()
                process = None
                limits = f"longer than {request['timeout_s']:g} s, or more than {MEMORY_BYTES >> 20} MB"
                raise TemplateFailed(f"it takes {limits}")
            return response
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in [self._idle.get() for _ in range(self._idle.qsize())]:
            if process is not None:
                process.end()
            self._idle.put(None)


_POOL = _Pool()
atexit.register(_POOL.close)


# The child


def _respond(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(request["source"], request["messages"], names=request["names"])}
    except TemplateFailed as failed:
        response = {"error": failed.detail}
    gc.collect()  # objects held by the traceback would count against the limit of the next conversation
    return response


def _bound_memory() -> None:
    if sys.platform == "linux":
        import resource

        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY_BYTES, has + MEMORY_BYTES))


def main() -> None:
    """Serve until the parent closes the pipe. faulthandler's watchdog exits at the deadline, even while the GIL is held."""
    check_template("")  # imports Jinja
    _bound_memory()
    with Path(os.devnull).open("w") as nowhere:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=nowhere)
            response = _respond(request)
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.buffer.write(json.dumps(response).encode() + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
