"""Find a Python that has the package's requirements, or create a virtual environment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smolcluster.launch.cluster.agent.base import FREE_SPACE, AgentError, disk_error, root_of, run_briefly, say
from smolcluster.launch.cluster.keeper import lock_file


def environment(
    folder: str, requirements: list[str], key: str, python: str | None, variables: dict[str, str], **_: Any
) -> dict[str, Any]:
    """Return a Python with the requirements: the named one (default: this one) if it has them, else one in an environment."""
    os.environ.update(variables)
    ready = ready_python(folder, requirements, key, python)
    if ready is not None:
        return {"python": ready, "made": False}
    given = named_python(python)
    root, inside = _environment_paths(folder, key, given)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(root):
            if (ready := ready_python(folder, requirements, key, python)) is not None:  # another client made it
                return {"python": ready, "made": False}
            began = time.monotonic()
            shutil.rmtree(root, ignore_errors=True)
            _make(given, root, inside, requirements)
    except OSError as error:
        raise disk_error(error, root) from error
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


def _uv() -> str | None:
    candidates = [Path.home() / ".local/bin/uv", Path.home() / ".cargo/bin/uv", Path("/opt/homebrew/bin/uv")]
    return shutil.which("uv") or next((str(path) for path in candidates if path.exists()), None)


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Lock an environment while it is made: an `up` of another cluster may need the same one."""
    lock, reported = None, False
    while (lock := lock_file(root.with_name(root.name + ".lock"), timeout_s=0.5)) is None:
        if not reported:
            say(say="another `up` is making this environment; waiting for it")
            reported = True
    try:
        yield
    finally:
        lock.close()


def named_python(python: str | None) -> str:
    """Return the named Python, or the one that runs this."""
    return str(Path(python).expanduser()) if python is not None and python.startswith("~") else python or sys.executable


def _environment_paths(folder: str, key: str, given: str) -> tuple[Path, Path]:
    """Return the folder of the environment made with that Python, and the Python inside it."""
    root = root_of(folder) / "env" / f"{key}-{hashlib.sha256(given.encode()).hexdigest()[:8]}"
    return root, root / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ready_python(folder: str, requirements: list[str], key: str, python: str | None) -> str | None:
    """Return a Python that has all requirements now: the named one, or that of an existing environment; else None."""
    given = named_python(python)
    root, inside = _environment_paths(folder, key, given)
    if not _missing(given, requirements):
        return given
    return str(inside) if (root / "made").exists() and not _missing(str(inside), requirements) else None


# For any Python, with or without pip. Compares only the numbers of versions, which is enough for our own bounds.
_ASK = """
import importlib.metadata, json, operator, re, sys
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne}
def numbers(version):
    found = [int(part) for part in re.match(r"[0-9]+([.][0-9]+)*", version)[0].split(".")]
    return found + [0] * (8 - len(found))
def fits(version, bounds):
    limits = re.findall(r"(>=|<=|==|!=|>|<)\\s*([0-9][0-9.]*)", bounds)
    return all(COMPARE[how](numbers(version), numbers(bound)) for how, bound in limits)
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
    """Return the requirements that this Python lacks."""
    result = run_briefly(python, "-c", _ASK, json.dumps(requirements), timeout_s=60)
    if result is None or result.returncode != 0:
        return requirements
    found: list[str] = json.loads(result.stdout)
    return found


def _run(command: list[str]) -> None:
    """Run a long command and send its output as progress."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    lines: list[str] = []
    for raw in process.stdout:
        lines.append(raw.decode("utf-8", "replace").rstrip())
        say(say=lines[-1])
    if process.wait() != 0:
        text = " ".join(lines[-3:])
        if "No space left" in text or "Errno 28" in text:
            raise AgentError("the disk is full", FREE_SPACE)
        reason = "; ".join(lines[-3:]) or f"status {process.returncode}"
        raise AgentError(
            f"making the environment failed: {reason}",
            "check that the machine reaches a package index, or name a Python that has torch as `python` of the host",
        )


def version_of(folder: str, package: str, wanted: dict[str, Any], **_: Any) -> dict[str, str | None]:
    """Return a package's version: `used` in the Python that has all of `wanted`, else `there` in the named Python."""
    ready = ready_python(folder, **wanted)
    if ready is not None:
        return {"used": _version(ready, package), "there": None}
    return {"used": None, "there": _version(named_python(wanted["python"]), package)}


def _version(python: str, package: str) -> str | None:
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    result = run_briefly(python, "-c", ask, package, timeout_s=60)
    return None if result is None else result.stdout.strip() or None
