"""What a machine of a cluster does for us while we are connected: sent over ssh as text, run by whatever Python is there.

    stdin    one request a line, as JSON: {"op": "start", ...}; "bytes": N means that N raw bytes follow
    stdout   {"say": ...} while it works, then {"result": ...} or {"error": what is wrong, "remedy": what to do}

It needs the standard library and keeper.py, which is sent along. It changes nothing outside `folder`, and what it starts does
not need it any more. In `folder`:

    code/HASH/                the package, the same for all clusters
    env/HASH/                 an environment with what the package needs
    clusters/NAME/            where processes run: the user's files, config.yaml, token, runs/, logs/
    clusters/NAME/processes/  a folder for each process
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from smolcluster.launch.cluster.keeper import hold, identity, kill

FOLLOW_S = 0.1  # between looks at a log that is followed
BEAT_S = 2.0  # silence in which whoever follows is told that nothing is new
CHUNK_BYTES = 256 << 10
PAST_BYTES = 64 << 10  # of a log, shown when one begins to follow it


class Wrong(Exception):
    """Something the user can mend."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


# Looking


def look(
    folder: str, name: str, listens: list[Any] | None = None, wanted: dict[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    """What this machine is and has. Changes nothing. `wanted`: for which environment, if one is asked for."""
    root = _root(folder)
    above = next(path for path in (root, *root.parents) if path.exists())
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "hostname": socket.gethostname(),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "time": time.time(),
        "disk_free": shutil.disk_usage(above).free,
        "writable": os.access(above, os.W_OK),
        "cpus": os.cpu_count() or 1,
        "memory": _memory(),
        "gpus": _gpus(),
        "tmux": shutil.which("tmux"),
        "uv": _uv(),
        "port_problem": _port_problem(*listens) if listens else None,
        "lacks_environment": wanted is not None and _ready_python(folder, **wanted) is None,
        "processes": states(folder, name),
    }


def _root(folder: str) -> Path:
    return Path(folder).expanduser()


def _home(folder: str, name: str) -> Path:
    return _root(folder) / "clusters" / name


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return None


def _gpus() -> list[str]:
    """Names of NVIDIA GPUs. One that is there but does not answer is told as the driver says it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
        )
        lines = (asked.stdout if asked.returncode == 0 else asked.stdout + asked.stderr).strip().splitlines()
        return lines if asked.returncode == 0 else [f"driver: {lines[0] if lines else 'no answer'}"]
    return []


def _uv() -> str | None:
    usual = [Path.home() / ".local/bin/uv", Path.home() / ".cargo/bin/uv", Path("/opt/homebrew/bin/uv")]
    return shutil.which("uv") or next((str(path) for path in usual if path.exists()), None)


def _port_problem(bind: str, port: int) -> str | None:
    try:
        _door(bind, port).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _door(bind: str, port: int) -> socket.socket:
    """A socket at that port, as a server would open it. Raises OSError."""
    door = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((bind, port))
    except OSError:
        door.close()
        raise
    return door


def version_of(package: str, python: str | None, **_: Any) -> str | None:
    """Of a package, for the Python that would be used."""
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [python or sys.executable, "-c", ask, package], capture_output=True, text=True, timeout=60, check=False
        )
        return asked.stdout.strip() or None
    return None


def listen(bind: str, port: int, within_s: float, **_: Any) -> None:
    """Let others knock at a port for a while, or until whoever asked for it is gone."""
    try:
        door = _door(bind, port)
    except OSError as error:
        say(taken=error.strerror or str(error))
        return
    with door:
        door.listen()
        say(listening=True)
        until = time.monotonic() + within_s
        door.settimeout(0.5)
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                door.accept()[0].close()
            say(beat=True)


def knock(address: str, port: int, within_s: float = 5.0, **_: Any) -> dict[str, Any]:
    """Whether that port can be reached from here, and if not, how it fails."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=within_s):
            return {"ok": True, "seconds": time.monotonic() - began}
    except socket.gaierror as error:
        return {"ok": False, "kind": "name", "words": error.strerror or str(error)}
    except ConnectionRefusedError:
        return {"ok": False, "kind": "refused", "words": "connection refused"}
    except TimeoutError:
        return {"ok": False, "kind": "silent", "words": f"no answer in {within_s:g} s"}
    except OSError as error:
        return {"ok": False, "kind": "route", "words": error.strerror or str(error)}


# Sending


def unpack(folder: str, place: str, data: bytes, fresh: bool = False, **_: Any) -> dict[str, Any]:
    """An archive into a folder below ours; `fresh`: the folder then holds this and nothing else, or is left as it was."""
    target = _root(folder) / place
    target.parent.mkdir(parents=True, exist_ok=True)
    into = target.with_name(target.name + ".new") if fresh else target
    try:
        if fresh and into.exists():
            shutil.rmtree(into)
        into.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(into, filter="data")
        if fresh:
            if target.exists():
                shutil.rmtree(target)
            into.rename(target)
    except OSError as error:
        if fresh:
            shutil.rmtree(into, ignore_errors=True)
        raise _disk(error, target) from error
    return {"bytes": len(data)}


def has(folder: str, places: list[str], **_: Any) -> list[bool]:
    """Which of these are there already."""
    return [(_root(folder) / place).exists() for place in places]


def keep_secret(folder: str, name: str, data: bytes, **_: Any) -> None:
    """The token, for nobody else's eyes."""
    home = _home(folder, name)
    home.mkdir(parents=True, exist_ok=True)
    path = home / "token"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def read(folder: str, place: str, most: int = 1 << 20, **_: Any) -> str | None:
    """A small text file."""
    with contextlib.suppress(OSError), (_root(folder) / place).open("rb") as file:
        return file.read(most).decode("utf-8", "replace")
    return None


def tail(folder: str, place: str, **_: Any) -> str | None:
    """The last line of a text file."""
    return _last_line(_root(folder) / place, most=4000) or None


# The environment


def environment(
    folder: str, requirements: list[str], key: str, python: str | None, variables: dict[str, str], **_: Any
) -> dict[str, Any]:
    """A Python that has what is required: the one that was named or runs this, if it does; else an environment, made now."""
    os.environ.update(variables)
    ready = _ready_python(folder, requirements, key, python)
    if ready is not None:
        return {"python": ready, "made": False}
    given, (root, inside) = python or sys.executable, _place_of(folder, key)
    began = time.monotonic()
    try:
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _disk(error, root) from error
    uv = _uv()
    if uv is not None:
        _run([uv, "venv", "--quiet", "--python", given, str(root)])
        _run([uv, "pip", "install", "--python", str(inside), *requirements])
    else:
        _run([given, "-m", "venv", str(root)])
        _run(
            [str(inside), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", *requirements]
        )
    (root / "made").write_text("", encoding="utf-8")
    return {"python": str(inside), "made": True, "seconds": time.monotonic() - began}


def _place_of(folder: str, key: str) -> tuple[Path, Path]:
    """An environment of ours, and its Python."""
    root = _root(folder) / "env" / key
    return root, root / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _ready_python(folder: str, requirements: list[str], key: str, python: str | None) -> str | None:
    """One that has all of it: the one that was named or runs this, or that of an environment made before."""
    given, (root, inside) = python or sys.executable, _place_of(folder, key)
    if not _missing(given, requirements):
        return given
    return str(inside) if (root / "made").exists() and not _missing(str(inside), requirements) else None


_ASK = """
import importlib.metadata, json, re, sys
missing = []
for wanted in json.loads(sys.argv[1]):
    if "sys_platform != 'win32'" in wanted and sys.platform == "win32":
        continue
    try:
        importlib.metadata.version(re.match(r"[A-Za-z0-9._-]+", wanted)[0])
    except importlib.metadata.PackageNotFoundError:
        missing.append(wanted)
print(json.dumps(missing))
"""


def _missing(python: str, requirements: list[str]) -> list[str]:
    """What that Python does not have."""
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, json.dumps(requirements)], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return requirements
    if asked.returncode != 0:
        return requirements
    found: list[str] = json.loads(asked.stdout)
    return found


def _run(command: list[str]) -> None:
    """A long command whose lines are passed on."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    lines: list[str] = []
    for raw in process.stdout:
        lines.append(raw.decode("utf-8", "replace").rstrip())
        say(say=lines[-1])
    if process.wait() != 0:
        text = " ".join(lines[-3:])
        if "No space left" in text or "Errno 28" in text:
            raise Wrong("the disk is full", "make room, or set folder in the cluster file to another disk")
        words = "; ".join(lines[-3:]) or f"status {process.returncode}"
        raise Wrong(
            f"the environment could not be made: {words}",
            "can that machine reach a package index? Or name a Python that has torch, as `python` of the host",
        )


def _disk(error: OSError, path: Path) -> Wrong:
    if error.errno == 28:
        return Wrong(f"the disk is full ({path})", "make room, or set folder in the cluster file to another disk")
    return Wrong(
        f"cannot write {path}: {error.strerror or error}", "set folder in the cluster file to one you may write"
    )


# Processes


def start(folder: str, name: str, seats: list[dict[str, Any]], python: str, code: str, panes: bool, **_: Any) -> Any:
    """Start these, each with its keeper; one that runs already is left as it is."""
    home = _home(folder, name)
    keeper = _root(folder) / "code" / code / "smolcluster" / "launch" / "cluster" / "keeper.py"
    begun = []
    for seat in seats:
        place = home / "processes" / seat["name"]
        place.mkdir(parents=True, exist_ok=True)
        if _alive(place):
            continue
        _end_orphan(place)
        with contextlib.suppress(FileNotFoundError):
            (place / "stop").unlink()
        for old in ("state.json", "output.log", "output.log.1"):
            with contextlib.suppress(FileNotFoundError):
                (place / old).unlink()
        call = [python, "-m", "smolcluster"]
        token = {"SMOLCLUSTER_TOKEN_FILE": str(home / "token")} if (home / "token").exists() else {}
        order = {
            "argv": [*call, *seat["arguments"]],
            "again": [*call, *seat["again"]] if seat["again"] else None,
            "restart": seat["restart"],
            "cwd": str(home),
            "grace_s": 60.0,
            "environment": {
                "PYTHONPATH": str(keeper.parents[3]),
                "PYTHONUNBUFFERED": "1",
                "PYTHONIOENCODING": "utf-8",
                **token,
                **seat["environment"],
            },
        }
        (place / "order.json").write_text(json.dumps(order), encoding="utf-8")
        _start_keeper(
            [python, str(keeper), str(place)], session=f"smolcluster-{name}", window=seat["name"], panes=panes
        )
        begun.append(seat["name"])
    return begun


def _start_keeper(command: list[str], *, session: str, window: str, panes: bool) -> None:
    tmux = shutil.which("tmux")
    if tmux is not None:
        line = " ".join("'" + part.replace("'", "'\\''") + "'" for part in command)
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
    apart: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        apart = {"creationflags": 0x00000008 | 0x00000200}  # detached, in a group of its own
    nothing = subprocess.DEVNULL
    subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, close_fds=True, **apart)


def _tmux(tmux: str, *arguments: str) -> int:
    return subprocess.run([tmux, *arguments], capture_output=True, check=False).returncode


def _alive(place: Path) -> bool:
    """Whether its keeper lives: it holds the lock."""
    if not (place / "lock").exists():
        return False
    lock = hold(place / "lock")
    if lock is not None:
        lock.close()
    return lock is None


def _end_orphan(place: Path) -> bool:
    """A keeper that was killed leaves its process behind. Whether there was one."""
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        pid, known = state.get("pid"), state.get("identity")
        if pid and known is not None and identity(pid) == known:
            kill(pid)
            return True
    return False


def states(folder: str, name: str, **_: Any) -> dict[str, Any]:
    """What is known of each process."""
    found = {}
    processes = _home(folder, name) / "processes"
    for place in sorted(processes.iterdir()) if processes.is_dir() else []:
        if not (place / "order.json").exists():
            continue
        state: dict[str, Any] = {"state": "starting", "pid": None, "restarts": 0, "status": None}
        with contextlib.suppress(OSError, ValueError):
            state |= json.loads((place / "state.json").read_text(encoding="utf-8"))
        alive = _alive(place)
        if not alive and state["state"] not in ("finished", "failed", "stopped"):
            fresh = time.time() - (place / "order.json").stat().st_mtime < 10
            if state["state"] != "starting" or not fresh:
                state["state"] = "gone"  # the keeper itself was killed, or the machine went down
        found[place.name] = state | {"alive": alive, "last": _last_line(place / "output.log")}
    return found


def _last_line(path: Path, most: int = 300) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:most] if lines else ""
    return ""


def follow(folder: str, name: str, seats: list[str] | None = None, past: int = 20, on: bool = True, **_: Any) -> None:
    """What processes print, line by line, from the last `past` lines on. `on`: until all have ended, else what is there."""
    processes = _home(folder, name) / "processes"
    at: dict[str, tuple[int, int]] = {}  # inode and offset
    beat = time.monotonic()
    while True:
        found = states(folder, name)
        chosen = [seat for seat in found if seats is None or seat in seats]
        for seat in chosen:
            for line in _new_lines(processes / seat, seat, at, past):
                say(line=line, seat=seat)
                beat = time.monotonic()
        if not on or (
            chosen and not any(found[seat]["alive"] or found[seat]["state"] == "starting" for seat in chosen)
        ):
            return
        if time.monotonic() - beat > BEAT_S:
            say(beat=True)
            beat = time.monotonic()
        time.sleep(FOLLOW_S)


def _new_lines(place: Path, seat: str, at: dict[str, tuple[int, int]], past: int) -> list[str]:
    path = place / "output.log"
    try:
        with path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            known, offset = at.get(seat, (number, -1))
            if offset < 0:
                offset = max(0, os.fstat(file.fileno()).st_size - PAST_BYTES)
                file.seek(offset)
                text = file.read(PAST_BYTES)
                whole = text[: text.rfind(b"\n") + 1]
                at[seat] = (number, offset + len(whole))
                lines = whole.decode("utf-8", "replace").splitlines()
                return (lines[1:] if offset else lines)[-past:] if past else []
            rest: list[str] = []
            if known != number:  # it grew long and was put aside: what was not read of it first
                with contextlib.suppress(OSError), (place / "output.log.1").open("rb") as old:
                    old.seek(offset)
                    rest = old.read().decode("utf-8", "replace").splitlines()
                offset = 0
            file.seek(offset)
            text = file.read(CHUNK_BYTES)
            whole = text[: text.rfind(b"\n") + 1]
            at[seat] = (number, offset + len(whole))
            return rest + whole.decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def stop(
    folder: str, name: str, seats: list[str] | None = None, now: bool = False, within_s: float = 90.0, **_: Any
) -> dict[str, Any]:
    """Ask keepers to end their processes, and wait until they have. What does not end in time is killed. All, if none is named:
    then nothing of the cluster is left running here."""
    home = _home(folder, name)
    found = [place for place in sorted((home / "processes").glob("*")) if place.is_dir()]
    places = [place for place in found if seats is None or place.name in seats]
    running = [place for place in places if _alive(place)]
    for place in running:
        (place / "stop").write_text("now" if now else "", encoding="utf-8")
    deadline = time.monotonic() + within_s
    while (left := [place for place in running if _alive(place)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for place in left:
        with contextlib.suppress(OSError, ValueError, KeyError):
            keeper = json.loads((place / "state.json").read_text(encoding="utf-8"))["keeper"]
            os.kill(keeper, getattr(signal, "SIGKILL", signal.SIGTERM))
    killed = [place.name for place in places if _end_orphan(place)]
    if seats is not None:
        return {"stopped": [place.name for place in running], "killed": killed}
    tmux = shutil.which("tmux")
    if tmux is not None:
        _tmux(tmux, "kill-session", "-t", f"=smolcluster-{name}")
    with contextlib.suppress(FileNotFoundError):
        (home / "token").unlink()
    return {"stopped": [place.name for place in running], "killed": killed}


OPERATIONS = {
    operation.__name__: operation
    for operation in (
        look,
        version_of,
        listen,
        knock,
        unpack,
        has,
        keep_secret,
        read,
        tail,
        environment,
        start,
        states,
        follow,
        stop,
    )
}


def main() -> None:
    if os.name == "posix":  # a shell without a login does not look there
        usual = ["/opt/homebrew/bin", "/usr/local/bin", str(Path.home() / ".local/bin")]
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *usual])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        operation = OPERATIONS[request.pop("op")]
        size = request.pop("bytes", None)
        if size is not None:
            request["data"] = sys.stdin.buffer.read(size)
        try:
            say(result=operation(**request))
        except Wrong as error:
            say(error=str(error), remedy=error.remedy)
        except OSError as error:
            say(error=f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else ""), remedy="")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
