"""Start, list and stop processes and their keepers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from smolcluster.launch.cluster.agent.base import AgentError, home_of, private_home, read_object, root_of, write_private
from smolcluster.launch.cluster.keeper import identity, kill, lock_file

BEGIN_S = 10.0  # limit for a keeper's first state


def begin(folder: str, name: str, mark: str, **_: Any) -> None:
    """Mark that an `up` is in progress. `stop` removes the mark, and then that `up` starts nothing more."""
    place = private_home(folder, name) / "ups"
    place.mkdir(parents=True, exist_ok=True)
    (place / mark).write_text("", encoding="utf-8")


def start(
    folder: str,
    name: str,
    processes: list[dict[str, Any]],
    python: str,
    code: str,
    fingerprint: str,
    panes: bool,
    mark: str,
    **_: Any,
) -> Any:
    """Start processes that do not run yet, each with a keeper. `fingerprint`: of their code and files."""
    home = private_home(folder, name)
    keeper = root_of(folder) / "code" / code / "smolcluster" / "launch" / "cluster" / "keeper.py"
    begun = []
    for process in processes:
        place = home / "processes" / process["name"]
        place.mkdir(parents=True, exist_ok=True)
        if is_alive(place):
            continue
        _end_orphan(place)
        for old in ("stop", "state.json", "output.log", "output.log.1"):
            (place / old).unlink(missing_ok=True)
        call = [python, "-m", "smolcluster"]
        token = {"SMOLCLUSTER_TOKEN_FILE": str(home / "token")} if (home / "token").exists() else {}
        order = {
            "argv": [*call, *process["arguments"]],
            "again": [*call, *process["again"]] if process["again"] else None,
            "restart": process["restart"],
            "cwd": str(home),
            "code": code,
            "fingerprint": fingerprint,
            "mark": mark,
            "grace_s": 60.0,
            "environment": {
                "PYTHONUNBUFFERED": "1",
                "PYTHONIOENCODING": "utf-8",
                "SMOLCLUSTER_CLUSTER": name,
                **token,
                **process["environment"],
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(keeper.parents[3]), process["environment"].get("PYTHONPATH")])
                ),
            },
        }
        write_private(place / "order.json", json.dumps(order).encode())  # its environment may hold secrets
        if not (home / "ups" / mark).exists():  # `stop` removes it before it looks for orders
            (place / "order.json").unlink()
            raise AgentError("a `down` stopped this `up`", "run `smolcluster up` again if that was not intended")
        _start_keeper(
            [python, str(keeper), str(place)], session=f"smolcluster-{name}", window=process["name"], panes=panes
        )
        begun.append(process["name"])
    return begun


def _start_keeper(command: list[str], *, session: str, window: str, panes: bool) -> None:
    tmux = shutil.which("tmux")
    if tmux is not None:
        line = shlex.join(command)
        if _tmux(tmux, "has-session", "-t", f"={session}") != 0:
            made = _tmux(tmux, "new-session", "-d", "-s", session, "-n", window, "-x", "200", "-y", "50", line)
        elif panes:
            made = _tmux(tmux, "split-window", "-t", f"={session}:", line)
            _tmux(tmux, "select-layout", "-t", f"={session}:", "tiled")
        else:
            made = _tmux(tmux, "new-window", "-d", "-t", f"={session}:", "-n", window, line)
        if made == 0:
            _tmux(tmux, "set-option", "-t", f"={session}:", "remain-on-exit", "on")
            return
    new_session: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        new_session = {"creationflags": 0x00000008 | 0x00000200}  # detached, in a separate group
    nothing = subprocess.DEVNULL
    subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, close_fds=True, **new_session)


def _tmux(tmux: str, *arguments: str) -> int:
    return subprocess.run([tmux, *arguments], capture_output=True, check=False).returncode


def is_alive(place: Path) -> bool:
    """Return whether its keeper lives: it holds the lock."""
    if not (place / "lock").exists():
        return False
    lock = lock_file(place / "lock", shared=True, timeout_s=0.05 if os.name == "nt" else 0.0)
    if lock is not None:
        lock.close()
    return lock is None


def _begins(place: Path) -> bool:
    """Return whether its keeper was just started and has written no state yet; it will still see a stop file."""
    with contextlib.suppress(OSError):
        return not (place / "state.json").exists() and time.time() - (place / "order.json").stat().st_mtime < BEGIN_S
    return False


def _end_orphan(place: Path) -> bool:
    """Kill the process of a keeper that was itself killed. Return whether there was one."""
    state = read_object(place / "state.json")
    pid, known = state.get("pid"), state.get("identity")
    if isinstance(pid, int) and known is not None and identity(pid) == known:
        kill(pid)
        return True
    return False


def states(folder: str, name: str, **_: Any) -> dict[str, Any]:
    """Return the state of each process, by name."""
    found = {}
    processes = home_of(folder, name) / "processes"
    for place in sorted(processes.iterdir()) if processes.is_dir() else []:
        if not (place / "order.json").exists():
            continue
        state: dict[str, Any] = {"state": "starting", "pid": None, "restarts": 0, "status": None}
        state |= {
            "fingerprint": read_object(place / "order.json").get("fingerprint"),
            **read_object(place / "state.json"),
        }
        alive = is_alive(place)
        if not alive and state["state"] not in ("finished", "failed", "stopped") and not _begins(place):
            state["state"] = "gone"  # the keeper itself was killed, or the machine went down
        found[place.name] = state | {"alive": alive, "last": _last_line(place / "output.log")}
    return found


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""
    return ""


def stop(
    folder: str,
    name: str,
    processes: list[str] | None = None,
    mark: str | None = None,
    now: bool = False,
    timeout_s: float = 90.0,
    **_: Any,
) -> dict[str, Any]:
    """Request that keepers end their processes, wait, and kill those that do not end in time.

    Which: the named `processes`, those started by the `up` with this `mark`, or all; the last also cancels an `up` in progress.
    """
    home = home_of(folder, name)
    found = [place for place in sorted((home / "processes").glob("*")) if place.is_dir()]
    places = [place for place in found if processes is None or place.name in processes]
    if mark is not None:
        places = [place for place in places if read_object(place / "order.json").get("mark") == mark]
    elif processes is None:
        shutil.rmtree(home / "ups", ignore_errors=True)
    running = [place for place in places if is_alive(place) or _begins(place)]
    for place in running:
        (place / "stop").write_text("now" if now else "", encoding="utf-8")
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in running if is_alive(p) or _begins(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for place in left:
        state = read_object(place / "state.json")
        keeper, known = state.get("keeper"), state.get("keeper_identity")
        if isinstance(keeper, int) and known is not None and identity(keeper) == known:
            with contextlib.suppress(OSError):
                os.kill(keeper, getattr(signal, "SIGKILL", signal.SIGTERM))
    killed = [place.name for place in places if _end_orphan(place)]
    if not any(map(is_alive, found)):
        tmux = shutil.which("tmux")
        if tmux is not None:
            _tmux(tmux, "kill-session", "-t", f"=smolcluster-{name}")
        (home / "token").unlink(missing_ok=True)
    return {"stopped": [place.name for place in running], "killed": killed}
