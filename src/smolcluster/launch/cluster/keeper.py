"""The keeper of one process on a machine of a cluster: starts it, logs its output, restarts it when it dies.

    python keeper.py FOLDER

    FOLDER/order.json     what to run: argv, argv of a restart, whether to restart, folder, environment
    FOLDER/state.json     its state; replaced atomically at every change
    FOLDER/output.log     its output; output.log.1 is the part before rotation
    FOLDER/lock           locked as long as the keeper lives
    FOLDER/stop           written to end the process; `now` in it: without saving

A single file that needs only the standard library and no other process: the agent that started it may be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

POLL_S = 0.1  # polling interval for the stop file
STEADY_S = 60.0  # a process that ran for this time resets the count of deaths
MAX_DEATHS = 10  # in a row
MAX_WAIT_S = 30.0  # before a restart
LOG_BYTES = 16 << 20
LINE_BYTES = 1 << 16  # longer lines are split
LOCK_S = 2.0  # another process may hold the lock for a moment to test it
DONE, USER_ERROR, INTERRUPTED = 0, 2, 130  # exit statuses after which a process is not restarted


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order: dict[str, Any] = json.loads((folder / "order.json").read_text(encoding="utf-8"))
        self.state: dict[str, Any] = {
            "state": "starting",
            "keeper": os.getpid(),
            "keeper_identity": identity(os.getpid()),
            "pid": None,
            "restarts": 0,
            "status": None,
        }
        self.signals = 0
        self.child: subprocess.Popen[bytes] | None = None
        self.log = (folder / "output.log").open("ab")

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            signal.signal(number, self._on_signal)
        deaths = 0
        while True:
            began = time.monotonic()
            status = self._run_once(again=self.state["restarts"] > 0)
            if self._stop_wanted():
                return self._end("stopped", status)
            if status in (DONE, USER_ERROR, INTERRUPTED) or not self.order["restart"]:
                return self._end(
                    "finished" if status == DONE else "stopped" if status == INTERRUPTED else "failed", status
                )
            deaths = 1 if time.monotonic() - began > STEADY_S else deaths + 1
            if deaths >= MAX_DEATHS:
                self._say(f"died {deaths} times in a row; not restarting it")
                return self._end("failed", status)
            wait_s = min(MAX_WAIT_S, 0.25 * 2**deaths)
            self._say(f"ended with status {status}; restarting it in {wait_s:g} s")
            self._write_state("waiting", status=status)
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                if self._stop_wanted():
                    return self._end("stopped", status)
                time.sleep(POLL_S)
            self.state["restarts"] += 1

    def _run_once(self, *, again: bool) -> int:
        argv = self.order["again"] if again and self.order.get("again") else self.order["argv"]
        environment = {**os.environ, **self.order["environment"]}
        new_session: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            new_session = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            self.child = subprocess.Popen(
                argv,
                cwd=self.order["cwd"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                **new_session,
            )
        except OSError as error:
            self._say(f"cannot be started: {error}")
            return USER_ERROR
        assert self.child.stdout is not None
        pid = self.child.pid
        self._write_state("running", pid=pid, identity=identity(pid), started=time.time(), status=None)
        reader = threading.Thread(target=self._copy, args=(self.child.stdout,), daemon=True)
        reader.start()
        self._wait(self.child)
        if self.child.returncode not in (DONE, USER_ERROR, INTERRUPTED):
            kill(pid)  # its children, too: they could hold ports, or report the end of the run
        reader.join(timeout=2.0)  # a grandchild may hold the pipe open
        return self.child.returncode

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        """Wait for its exit; terminate or kill it when a stop is requested."""
        stopping_since: float | None = None
        while child.poll() is None:
            now = self._stop_wanted()
            if now is not None and stopping_since is None:
                stopping_since = time.monotonic()
                self._write_state("stopping")
                _ask_to_end(child)
            if stopping_since is not None and (
                now == "now" or time.monotonic() - stopping_since > self.order["grace_s"]
            ):
                kill(child.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)

    def _stop_wanted(self) -> str | None:
        """Return None, or how to stop: "" to save first, "now" to kill."""
        if self.signals > 1:
            return "now"
        try:
            return (self.folder / "stop").read_text(encoding="utf-8").strip()
        except OSError:
            return "" if self.signals else None

    def _on_signal(self, *_: object) -> None:
        self.signals += 1

    def _copy(self, stream: BinaryIO) -> None:
        while line := stream.readline(LINE_BYTES):
            self._write(line)

    def _say(self, text: str) -> None:
        self._write(f"[keeper] {text}\n".encode())

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk or a deleted folder must not stop training
            if self.log.tell() + len(line) > LOG_BYTES:
                (self.folder / "output.log").replace(self.folder / "output.log.1")
                self.log.close()
                self.log = (self.folder / "output.log").open("ab")
            self.log.write(line)
            self.log.flush()
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    def _end(self, state: str, status: int) -> int:
        self._write_state(state, pid=None, status=status)
        return status

    def _write_state(self, state: str, **fields: Any) -> None:
        self.state |= {"state": state, "updated": time.time(), **fields}
        fresh = self.folder / "state.json.new"
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(self.state), encoding="utf-8")
            fresh.replace(self.folder / "state.json")


def _ask_to_end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            child.send_signal(signal.CTRL_BREAK_EVENT)
        else:
            child.send_signal(signal.SIGINT)


def kill(pid: int) -> None:
    """Kill a process and, on POSIX, its group."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


def identity(pid: int) -> str | None:
    """Return a process's start time, which distinguishes it from a later one with the same pid; None if unknown."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    if platform.system() in ("Windows", "Linux"):
        return None
    listed = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return listed.stdout.strip() or None


def lock_file(path: Path, *, shared: bool = False, timeout_s: float = 0.0) -> Any:
    """Lock a file until the result is closed; None if another process holds it for `timeout_s`. `shared`: a shared lock,
    where the system has one."""
    file = path.open("a+b")
    until = time.monotonic() + timeout_s
    while not _locked(file, shared=shared):
        if time.monotonic() >= until:
            file.close()
            return None
        time.sleep(0.01)
    return file


def _locked(file: BinaryIO, *, shared: bool) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def main() -> int:
    os.umask(0o077)  # logs and files of the process are private
    folder = Path(sys.argv[1])
    lock = lock_file(folder / "lock", timeout_s=LOCK_S)
    if lock is None:
        print("another keeper runs this process", file=sys.stderr)
        return 1
    return Keeper(folder).run()


if __name__ == "__main__":
    sys.exit(main())
