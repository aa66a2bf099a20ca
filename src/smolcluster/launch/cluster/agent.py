"""What a machine of a cluster does for us while we are connected: sent over ssh as text, run by whatever Python is there.

    stdin    one request a line, as JSON: {"op": "start", ...}; "bytes": N means that N raw bytes follow
    stdout   {"say": ...} while it works, then {"result": ...} or {"error": what is wrong, "remedy": what to do}

It needs the standard library and keeper.py, which is sent along. It changes nothing outside `folder`, and what it starts does
not need it any more. In `folder`:

    code/HASH/                the package, the same for all clusters
    env/HASH/                 an environment with what the package needs, made with one Python
    clusters/NAME/            where processes run: the user's files, config.yaml, token, runs/, logs/
    clusters/NAME/processes/  a folder for each process
    clusters/NAME/ups/        a mark for each time that it was brought up since it was taken down
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from smolcluster.launch.cluster.keeper import hold, identity, kill

BEGIN_S = 10.0  # for a keeper to say something
FOLLOW_S = 0.1  # between looks at a log that is followed
COPY_S = 0.5  # between looks at the files of a run that is copied
BEAT_S = 2.0  # silence after which a client that follows gets a sign of life
CHUNK_BYTES = 256 << 10
SMALL_BYTES = 4 << 20  # of a file that is copied whole
LEFT_S = 86400.0  # after which a partial upload is abandoned
COPIES = 3  # of the package, for one that goes back to former code
PROOF_BYTES = 4096
MAKE_ROOM = "make room, or set folder in the cluster file to another disk"
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
        "python": list(sys.version_info[:3]),
        "time": time.time(),
        "disk_free": shutil.disk_usage(above).free,
        "writable": os.access(above, os.W_OK),
        "cpus": os.cpu_count() or 1,
        "memory": _memory(),
        "gpus": _gpus(),
        "port_problem": _port_problem(*listens) if listens else None,
        "lacks_environment": wanted is not None and _ready_python(folder, **wanted) is None,
        "processes": states(folder, name),
    }


def _root(folder: str) -> Path:
    return Path(folder).expanduser()


def _home(folder: str, name: str) -> Path:
    return _root(folder) / "clusters" / name


def _private_home(folder: str, name: str) -> Path:
    """Make the folder of a cluster, which holds secrets: its token, environments of processes, logs."""
    root, home = _root(folder), _home(folder, name)
    home.mkdir(parents=True, exist_ok=True)
    ours = [root] if root.name == ".smolcluster" else []  # another one is the user's own choice, and may hold more
    for path in (*ours, home.parent, home):
        with contextlib.suppress(OSError):  # another user's, where several share it
            path.chmod(0o700)
    return home


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, also while it is written."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _asked(*command: str, within_s: float) -> subprocess.CompletedProcess[str] | None:
    """How a command ended, and what it said; None where it cannot be run, or says nothing in time."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    return None


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return None


def _gpus() -> list[str]:
    """Names of NVIDIA GPUs. Where the driver fails, its message."""
    asked = _asked("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", within_s=20)
    if asked is None:
        return []
    if asked.returncode == 0:
        return asked.stdout.strip().splitlines()
    lines = (asked.stdout + asked.stderr).strip().splitlines()
    return [f"driver: {lines[0] if lines else 'no answer'}"]


def _uv() -> str | None:
    usual = [Path.home() / ".local/bin/uv", Path.home() / ".cargo/bin/uv", Path("/opt/homebrew/bin/uv")]
    return shutil.which("uv") or next((str(path) for path in usual if path.exists()), None)


def _port_problem(bind: str, port: int) -> str | None:
    try:
        _door(bind, port).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def _door(bind: str, port: int) -> socket.socket:
    return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)


def version_of(folder: str, package: str, wanted: dict[str, Any], **_: Any) -> dict[str, str | None]:
    """Of a package: `used`, for the Python that has what is `wanted`; `there`, for the one that was named, if that has not."""
    ready = _ready_python(folder, **wanted)
    if ready is not None:
        return {"used": _version(ready, package), "there": None}
    return {"used": None, "there": _version(_given(wanted["python"]), package)}


def _version(python: str, package: str) -> str | None:
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    asked = _asked(python, "-c", ask, package, within_s=60)
    return None if asked is None else asked.stdout.strip() or None


def listen(bind: str, port: int, within_s: float, **_: Any) -> None:
    """Accept connections at a port for a while, or until the client is gone."""
    try:
        door = _door(bind, port)
    except OSError as error:
        say(taken=os.strerror(error.errno or 0))
        return
    with door:
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


def unpack(folder: str, place: str, data: bytes, fresh: bool = False, **_: Any) -> None:
    """An archive into a folder below ours; `fresh`: the folder then holds this and nothing else, or is left as it was."""
    target = _root(folder) / place
    target.parent.mkdir(parents=True, exist_ok=True)
    into = _own_name(target, "new") if fresh else target
    try:
        into.mkdir(parents=True, exist_ok=True)
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 on
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(into, **safely)
        if fresh:
            _put(into, target)
            _clear_out(target)
    except OSError as error:
        raise _disk(error, target) from error
    finally:
        if fresh:
            shutil.rmtree(into, ignore_errors=True)


def _own_name(target: Path, what: str) -> Path:
    """Return a unique name beside it: two clients may send the same at once, also from machines that share a home."""
    return target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}.{what}")


def _put(whole: Path, target: Path) -> None:
    """Rename it into place. The same contents that another client has just put there stay: processes may use them."""
    with contextlib.suppress(OSError):
        whole.rename(target)
        return
    sizes = {path.relative_to(whole): path.stat().st_size for path in whole.rglob("*") if path.is_file()}
    with contextlib.suppress(OSError):
        if all((target / path).stat().st_size == size for path, size in sizes.items()):
            return
    old = _own_name(target, "old")
    target.rename(old)
    whole.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _clear_out(newest: Path) -> None:
    """Remove older copies beside it that no process uses. A few are kept, for users who go back to former code."""
    used = {newest.name}
    for order in newest.parents[1].glob("clusters/*/processes/*/order.json"):
        if _alive(order.parent):
            used.add(str(_object(order).get("code")))
    ages: dict[Path, float] = {}
    for path in newest.parent.iterdir():
        with contextlib.suppress(OSError):  # others clear out too
            ages[path] = time.time() - path.stat().st_mtime
    halves = [path for path in ages if path.suffix in (".new", ".old")]  # another client may be sending them now
    copies = sorted(
        (path for path in ages if path not in halves and path.name not in used), key=lambda path: ages[path]
    )
    for path in [*copies[COPIES - 1 :], *(path for path in halves if ages[path] > LEFT_S)]:
        shutil.rmtree(path, ignore_errors=True)


def has(folder: str, places: list[str], **_: Any) -> list[bool]:
    """Which of these are there already."""
    return [(_root(folder) / place).exists() for place in places]


def keep_secret(folder: str, name: str, data: bytes, **_: Any) -> None:
    """Store the token, readable by its owner alone."""
    _write_private(_private_home(folder, name) / "token", data)


def read(folder: str, place: str, most: int = 1 << 20, **_: Any) -> str | None:
    """A small text file."""
    with contextlib.suppress(OSError), (_root(folder) / place).open("rb") as file:
        return file.read(most).decode("utf-8", "replace")
    return None


def tail(folder: str, place: str, **_: Any) -> list[str]:
    """The last whole lines of a text file."""
    with contextlib.suppress(OSError), (_root(folder) / place).open("rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - PAST_BYTES)
        file.seek(begin)
        lines = file.read(PAST_BYTES).decode("utf-8", "replace").split("\n")[:-1]
        return lines[1:] if begin else lines
    return []


# The environment


def environment(
    folder: str, requirements: list[str], key: str, python: str | None, variables: dict[str, str], **_: Any
) -> dict[str, Any]:
    """A Python that has what is required: the one that was named or runs this, if it does; else an environment, made now."""
    os.environ.update(variables)
    ready = _ready_python(folder, requirements, key, python)
    if ready is not None:
        return {"python": ready, "made": False}
    given = _given(python)
    root, inside = _place_of(folder, key, given)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with _alone(root):
            if (ready := _ready_python(folder, requirements, key, python)) is not None:  # another client has made it
                return {"python": ready, "made": False}
            began = time.monotonic()
            shutil.rmtree(root, ignore_errors=True)
            _make(given, root, inside, requirements)
    except OSError as error:
        raise _disk(error, root) from error
    return {"python": str(inside), "made": True, "seconds": time.monotonic() - began}


def _make(given: str, root: Path, inside: Path, requirements: list[str]) -> None:
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


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One at a time makes an environment: an `up` of another cluster may want the same one now."""
    lock, told = None, False
    while (lock := hold(root.with_name(root.name + ".lock"), within_s=0.5)) is None:
        if not told:
            say(say="another `up` is making this environment; waiting for it")
            told = True
    try:
        yield
    finally:
        lock.close()


def _given(python: str | None) -> str:
    """The Python that was named, or that runs this."""
    return str(Path(python).expanduser()) if python is not None and python.startswith("~") else python or sys.executable


def _place_of(folder: str, key: str, given: str) -> tuple[Path, Path]:
    """An environment of ours, made with that Python, and its own Python."""
    root = _root(folder) / "env" / f"{key}-{hashlib.sha256(given.encode()).hexdigest()[:8]}"
    return root, root / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _ready_python(folder: str, requirements: list[str], key: str, python: str | None) -> str | None:
    """One that has all of it: the one that was named or runs this, or that of an environment made before."""
    given = _given(python)
    root, inside = _place_of(folder, key, given)
    if not _missing(given, requirements):
        return given
    return str(inside) if (root / "made").exists() and not _missing(str(inside), requirements) else None


# For any Python, with or without pip. Of versions it compares the numbers alone, which is enough for our own bounds.
_ASK = """
import importlib.metadata, json, operator, re, sys
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne}
def numbers(version):
    found = [int(part) for part in re.match(r"[0-9]+([.][0-9]+)*", version)[0].split(".")]
    return found + [0] * (8 - len(found))
def fits(version, bounds):
    told = re.findall(r"(>=|<=|==|!=|>|<)\\s*([0-9][0-9.]*)", bounds)
    return all(COMPARE[how](numbers(version), numbers(bound)) for how, bound in told)
missing = []
for wanted in json.loads(sys.argv[1]):
    bounds, _, marker = wanted.partition(";")
    if "sys_platform != 'win32'" in marker and sys.platform == "win32":
        continue
    name = re.match(r"[A-Za-z0-9._-]+", bounds)[0]
    try:
        if not fits(importlib.metadata.version(name), bounds[len(name):]):
            missing.append(wanted)
    except importlib.metadata.PackageNotFoundError:
        missing.append(wanted)
print(json.dumps(missing))
"""


def _missing(python: str, requirements: list[str]) -> list[str]:
    """What that Python does not have."""
    asked = _asked(python, "-c", _ASK, json.dumps(requirements), within_s=60)
    if asked is None or asked.returncode != 0:
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
            raise Wrong("the disk is full", MAKE_ROOM)
        words = "; ".join(lines[-3:]) or f"status {process.returncode}"
        raise Wrong(
            f"the environment could not be made: {words}",
            "can that machine reach a package index? Or name a Python that has torch, as `python` of the host",
        )


def _disk(error: OSError, path: Path) -> Wrong:
    if error.errno == 28:
        return Wrong(f"the disk is full ({path})", MAKE_ROOM)
    remedy = "set folder in the cluster file to one you may write"
    return Wrong(f"cannot write {path}: {error.strerror or error}", remedy)


# Processes


def begin(folder: str, name: str, mark: str, **_: Any) -> None:
    """Note that an `up` has begun, which may take minutes. `stop` removes the mark."""
    place = _private_home(folder, name) / "ups"
    place.mkdir(parents=True, exist_ok=True)
    (place / mark).write_text("", encoding="utf-8")


def start(
    folder: str,
    name: str,
    seats: list[dict[str, Any]],
    python: str,
    code: str,
    parcel: str,
    panes: bool,
    mark: str,
    **_: Any,
) -> Any:
    """Start these, each with its keeper; one that runs already is left as it is. `parcel` names the code and files it has."""
    home = _private_home(folder, name)
    keeper = _root(folder) / "code" / code / "smolcluster" / "launch" / "cluster" / "keeper.py"
    begun = []
    for seat in seats:
        place = home / "processes" / seat["name"]
        place.mkdir(parents=True, exist_ok=True)
        if _alive(place):
            continue
        _end_orphan(place)
        for old in ("stop", "state.json", "output.log", "output.log.1"):
            (place / old).unlink(missing_ok=True)
        call = [python, "-m", "smolcluster"]
        token = {"SMOLCLUSTER_TOKEN_FILE": str(home / "token")} if (home / "token").exists() else {}
        order = {
            "argv": [*call, *seat["arguments"]],
            "again": [*call, *seat["again"]] if seat["again"] else None,
            "restart": seat["restart"],
            "cwd": str(home),
            "code": code,
            "parcel": parcel,
            "mark": mark,
            "grace_s": 60.0,
            "environment": {
                "PYTHONUNBUFFERED": "1",
                "PYTHONIOENCODING": "utf-8",
                "SMOLCLUSTER_CLUSTER": name,
                **token,
                **seat["environment"],
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(keeper.parents[3]), seat["environment"].get("PYTHONPATH")])
                ),
            },
        }
        _write_private(place / "order.json", json.dumps(order).encode())  # its environment may hold secrets
        if not (home / "ups" / mark).exists():  # `stop` takes it away before it looks for orders
            (place / "order.json").unlink()
            raise Wrong("it was taken down while it was brought up", "bring it up again, if that was not wanted")
        _start_keeper(
            [python, str(keeper), str(place)], session=f"smolcluster-{name}", window=seat["name"], panes=panes
        )
        begun.append(seat["name"])
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
    lock = hold(place / "lock", shared=True, within_s=0.05 if os.name == "nt" else 0.0)
    if lock is not None:
        lock.close()
    return lock is None


def _begins(place: Path) -> bool:
    """Whether its keeper was started a moment ago and has said nothing yet. It will look for the wish to stop."""
    with contextlib.suppress(OSError):
        return not (place / "state.json").exists() and time.time() - (place / "order.json").stat().st_mtime < BEGIN_S
    return False


def _end_orphan(place: Path) -> bool:
    """A keeper that was killed leaves its process behind. Whether there was one."""
    state = _object(place / "state.json")
    pid, known = state.get("pid"), state.get("identity")
    if isinstance(pid, int) and known is not None and identity(pid) == known:
        kill(pid)
        return True
    return False


def _object(path: Path) -> dict[str, Any]:
    """What a JSON file says; nothing, where it is not there or is no object."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def states(folder: str, name: str, **_: Any) -> dict[str, Any]:
    """What is known of each process."""
    found = {}
    processes = _home(folder, name) / "processes"
    for place in sorted(processes.iterdir()) if processes.is_dir() else []:
        if not (place / "order.json").exists():
            continue
        state: dict[str, Any] = {"state": "starting", "pid": None, "restarts": 0, "status": None}
        state |= {"parcel": _object(place / "order.json").get("parcel"), **_object(place / "state.json")}
        alive = _alive(place)
        if not alive and state["state"] not in ("finished", "failed", "stopped") and not _begins(place):
            state["state"] = "gone"  # the keeper itself was killed, or the machine went down
        found[place.name] = state | {"alive": alive, "last": _last_line(place / "output.log")}
    return found


def _last_line(path: Path, most: int = 300) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:most] if lines else ""
    return ""


def follow(
    folder: str,
    name: str,
    seats: list[str] | None = None,
    past: int = 20,
    on: bool = True,
    at: dict[str, list[int]] | None = None,
    **_: Any,
) -> None:
    """Send what processes print, from the last `past` lines on. `on`: until all have ended, else what is printed so far.

    Each line carries where the next one begins (inode and offset). A client that was cut off sends it back as `at`.
    """
    outputs = {seat: _Output(number, offset) for seat, (number, offset) in (at or {}).items()}
    beat = time.monotonic()
    while True:
        found = states(folder, name)
        chosen = [seat for seat in found if seats is None or seat in seats]
        over = not on or bool(
            chosen and not any(found[seat]["alive"] or found[seat]["state"] == "starting" for seat in chosen)
        )
        for seat in chosen:
            path = _home(folder, name) / "processes" / seat / "output.log"
            if seat not in outputs:
                outputs[seat] = _Output.first_seen(path, past)
                say(seat=seat, at=outputs[seat].at)
            for line in outputs[seat].lines(path, over=over):
                say(line=line, seat=seat, at=outputs[seat].at)
                beat = time.monotonic()
        if over:
            return
        if time.monotonic() - beat > BEAT_S:
            say(beat=True)
            beat = time.monotonic()
        time.sleep(FOLLOW_S)


class _Output:
    """How far the output of one process was read.

    A line ends with a line feed, or before a carriage return that begins the next, as progress bars print them. One that is
    very long is cut.
    """

    _END = re.compile(rb"\r?\n|\r(?=[^\n])")

    def __init__(self, number: int, offset: int) -> None:
        self._number, self._offset = number, offset

    @property
    def at(self) -> list[int]:
        return [self._number, self._offset]

    @classmethod
    def first_seen(cls, path: Path, past: int) -> _Output:
        """Return the position from which the last `past` lines follow."""
        try:
            with path.open("rb") as file:
                seen = os.fstat(file.fileno())
                start = max(0, seen.st_size - PAST_BYTES)
                file.seek(start)
                ends = [end.end() for end in cls._END.finditer(file.read(PAST_BYTES))]
                begins = [0, *ends] if start == 0 else ends or [0]
                return cls(seen.st_ino, start + begins[max(0, len(begins) - 1 - past)])
        except OSError:
            return cls(-1, 0)  # it printed nothing yet

    def lines(self, path: Path, *, over: bool) -> Iterator[str]:
        """Those that are new. `over`: there will be no more, and the last may not have ended."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            seen = os.fstat(file.fileno())
            if seen.st_ino != self._number or seen.st_size < self._offset:
                yield from self._rest(path.with_name(path.name + ".1"))
                self._number, self._offset = seen.st_ino, 0
            yield from self._read(file, over=over)

    def _rest(self, aside: Path) -> Iterator[str]:
        """It grew long and was put aside: what was not read of it. Not so where the process was started anew."""
        with contextlib.suppress(OSError), aside.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._number and self._number >= 0:
                yield "[some lines are missing here: more was printed than is kept]"
                self._offset = 0
            self._number = number
            yield from self._read(file, over=True)

    def _read(self, file: BinaryIO, *, over: bool) -> Iterator[str]:
        while True:
            begin, done = self._offset, 0
            file.seek(begin)
            chunk = file.read(CHUNK_BYTES)
            for end in self._END.finditer(chunk):
                line, bare = chunk[done : end.start()], end.group() == b"\r"
                done = end.end()
                self._offset = begin + done
                if line or not bare:
                    yield line.decode("utf-8", "replace")
            full = len(chunk) == CHUNK_BYTES
            if chunk[done:] and (done == 0 if full else over):
                self._offset = begin + len(chunk)
                yield chunk[done:].decode("utf-8", "replace")
            if not full:
                return


def copy(folder: str, name: str, run: str, have: dict[str, list[Any]], **_: Any) -> None:
    """Send the files of a run as they are written, until the client is gone. `have`: how many bytes of a file are there
    already, and a proof that they are these.

    Of rows and logs what was added, of small files all of it. The logs of its workers lie beside the runs.
    """
    home = _home(folder, name)
    known: dict[str, tuple[int, int]] = {}  # growing files: inode and bytes told; others: time and size
    beat, up_to_date = time.monotonic(), False
    while True:
        new = False
        for place, path in _files_of(home, run):
            with contextlib.suppress(OSError):
                grows = path.suffix in (".jsonl", ".log")
                told = _copy_new(place, path, known, have) if grows else _copy_whole(place, path, known)
                new = new or told
        if new:
            beat = time.monotonic()
            continue
        if not up_to_date or time.monotonic() - beat > BEAT_S:
            say(up_to_date=True)
            beat, up_to_date = time.monotonic(), True
        time.sleep(COPY_S)


def _files_of(home: Path, run: str) -> list[tuple[str, Path]]:
    base = home / "runs" / run
    small = [base / "config.yaml", base / "summary.json", *base.glob("checkpoints/*/manifest.json")]
    grow = [base / "metrics.jsonl", base / "history.jsonl", *base.glob("logs/*.log")]
    found = [(path.relative_to(base).as_posix(), path) for path in (*small, *grow)]
    return [*found, *((f"logs/{path.name}", path) for path in (home / "logs" / run).glob("*.log"))]


def _copy_new(place: str, path: Path, known: dict[str, tuple[int, int]], have: dict[str, list[Any]]) -> bool:
    with path.open("rb") as file:
        seen = os.fstat(file.fileno())
        if place not in known:
            size, proof = have.get(place, [0, ""])
            known[place] = (seen.st_ino, size if size <= seen.st_size and proof_of(file, size) == proof else 0)
        number, at = known[place]
        if number != seen.st_ino or seen.st_size < at:  # it was written anew
            at = 0
        file.seek(at)
        data = file.read(CHUNK_BYTES)
    known[place] = (seen.st_ino, at + len(data))
    if data or (at == 0 and place in have):
        say(file=place, at=at, data=base64.b64encode(data).decode())
        have.pop(place, None)
    return bool(data)


def proof_of(file: BinaryIO, size: int) -> str:
    """Of the first `size` bytes of a file that grows: its last ones tell it from one that was written anew."""
    file.seek(max(0, size - PROOF_BYTES))
    return hashlib.sha256(file.read(min(size, PROOF_BYTES))).hexdigest() if size else ""


def _copy_whole(place: str, path: Path, known: dict[str, tuple[int, int]]) -> bool:
    seen = path.stat()
    if known.get(place) == (seen.st_mtime_ns, seen.st_size) or seen.st_size > SMALL_BYTES:
        return False
    known[place] = (seen.st_mtime_ns, seen.st_size)
    say(file=place, data=base64.b64encode(path.read_bytes()).decode())
    return True


def stop(
    folder: str,
    name: str,
    seats: list[str] | None = None,
    mark: str | None = None,
    now: bool = False,
    within_s: float = 90.0,
    **_: Any,
) -> dict[str, Any]:
    """Ask keepers to end their processes, and wait until they have. What does not end in time is killed.

    Those of `seats`; those that one `up` has started, with its `mark`; or all: then nothing of the cluster is left running, and
    an `up` that is under way starts nothing.
    """
    home = _home(folder, name)
    found = [place for place in sorted((home / "processes").glob("*")) if place.is_dir()]
    places = [place for place in found if seats is None or place.name in seats]
    if mark is not None:
        places = [place for place in places if _object(place / "order.json").get("mark") == mark]
    elif seats is None:
        shutil.rmtree(home / "ups", ignore_errors=True)
    running = [place for place in places if _alive(place) or _begins(place)]
    for place in running:
        (place / "stop").write_text("now" if now else "", encoding="utf-8")
    deadline = time.monotonic() + within_s
    while (left := [p for p in running if _alive(p) or _begins(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for place in left:
        state = _object(place / "state.json")
        keeper, known = state.get("keeper"), state.get("keeper_identity")
        if isinstance(keeper, int) and known is not None and identity(keeper) == known:
            with contextlib.suppress(OSError):
                os.kill(keeper, getattr(signal, "SIGKILL", signal.SIGTERM))
    killed = [place.name for place in places if _end_orphan(place)]
    if not any(map(_alive, found)):  # else others of the cluster go on
        tmux = shutil.which("tmux")
        if tmux is not None:
            _tmux(tmux, "kill-session", "-t", f"=smolcluster-{name}")
        (home / "token").unlink(missing_ok=True)
    return {"stopped": [place.name for place in running], "killed": killed}


OPERATIONS = {
    operation.__name__: operation
    for operation in (
        *(look, version_of, listen, knock, unpack, has, keep_secret, read, tail, environment),
        *(begin, start, states, follow, copy, stop),
    )
}


def main() -> None:
    os.umask(0o077)  # what is kept here is its user's alone
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
        except BrokenPipeError:
            return
        except OSError as error:
            say(error=f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else ""), remedy="")


if __name__ == "__main__":
    main()
