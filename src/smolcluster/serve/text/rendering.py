"""Chat templates are rendered in child processes, with a deadline and, except on Windows, a memory limit.

A template comes with the weights, and Jinja's sandbox bounds neither its time nor its memory. The children have none of this
process's environment, and are reused: a conversation is one line of JSON there and one back. Linux refuses memory beyond the
limit. macOS has no such limit: there the parent measures a child that takes long, and kills it.

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

RENDER_S = 5.0  # usually milliseconds
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
    asked = {
        "source": source,
        "messages": [dict(message) for message in messages],
        "names": dict(names),
        "timeout_s": RENDER_S,
    }
    answer = _POOL.ask(asked)
    if "text" not in answer:
        raise TemplateFailed(str(answer.get("error")))
    return str(answer["text"])


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

    def ask(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer, None if the child died."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        answered = threading.Event()
        deadline_s = asked["timeout_s"] + KILL_S + (0.0 if self._started else START_S)
        killer = threading.Thread(target=self._kill_at_limit, args=(answered, deadline_s), daemon=True)
        killer.start()
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            return None
        finally:
            answered.set()
            killer.join()
        self._started = True
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def _kill_at_limit(self, answered: threading.Event, deadline_s: float) -> None:
        """Kill the child at the deadline, or when it has too much memory where the system does not prevent that."""
        end = time.monotonic() + deadline_s
        while not answered.wait(max(0.0, min(MEASURE_S if MEASURED else deadline_s, end - time.monotonic()))):
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

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        process = self._idle.get()
        try:
            if process is not None and not process.alive:
                process.end()
                process = None
            process = process or _Process()
            answer = process.ask(asked)
            if answer is None:
                process.end()
                process = None
                limits = f"longer than {asked['timeout_s']:g} s, or more than {MEMORY_BYTES >> 20} MB"
                raise TemplateFailed(f"it takes {limits}")
            return answer
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


def _answer(asked: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(asked["source"], asked["messages"], names=asked["names"])}
    except TemplateFailed as failed:
        answer = {"error": failed.detail}
    gc.collect()  # what the traceback kept counts in the limit of the next conversation
    return answer


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
            asked = json.loads(line)
            faulthandler.dump_traceback_later(asked["timeout_s"], exit=True, file=nowhere)
            answer = _answer(asked)
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
