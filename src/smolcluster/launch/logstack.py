"""Grafana, Loki and Prometheus in containers on this machine: `smolcluster logs up` and `smolcluster logs down`.

The packaged files (`logging/` in a source checkout) are copied to a folder of the user, and Docker Compose runs them there:

    docker-compose.yml ...    overwritten at every start; put changes into docker-compose.override.yml
    targets/                  other machines to scrape; never overwritten
    .env                      ports and Grafana's generated password; never overwritten

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from smolcluster.comm.addresses import dial_address, is_loopback
from smolcluster.durable_files import write_private_text
from smolcluster.errors import SmolclusterError, UserError

PROJECT = "smolcluster-logs"
READY_S = 180.0  # after the images are pulled
_LOOK_S = 0.5
_YOURS = ("targets",)  # folders whose files are not overwritten

DEFAULTS = {
    "GRAFANA_PORT": "3000",
    "LOKI_PORT": "3100",
    "PROMETHEUS_PORT": "9090",
    "LOKI_BIND": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses of the running services."""

    folder: Path
    grafana: str
    loki: str
    prometheus: str

    def lines(self) -> list[str]:
        """Return instructions for the user."""
        return [
            f"Grafana     {self.grafana}   user admin, the password is in {self.folder / '.env'}",
            f"Loki        {self.loki}",
            f"Prometheus  {self.prometheus}",
            "",
            f"smolcluster train --override logging.loki_url={self.loki}",
            "smolcluster train --override logging.prometheus_port=9464   (prometheus.yml there lists the scrape targets)",
            "",
            "smolcluster logs down   stops it and keeps the data",
        ]


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default folder for the files."""
    if sys.platform == "win32":
        base = Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "smolcluster" / "logging"


@functools.cache
def packaged() -> Path:
    """Return the folder of the packaged files."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "logstack", package.parents[1] / "logging"):  # installed; a source checkout
        if (folder / "docker-compose.yml").is_file():
            return folder
    raise SmolclusterError("the files of the log stack are missing from this installation; reinstall smolcluster")


def start(
    folder: Path | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    ready_s: float = READY_S,
    tell: Callable[[str], None] = print,
) -> Stack:
    """Write the files, start the containers, wait until they answer, and print how to use them.

    `settings`: changes to `DEFAULTS`; they are kept for later starts.
    """
    folder = folder or data_folder()
    compose = find_compose()
    _check_docker()
    environ = write_files(folder, settings or {})
    if not is_loopback(environ["LOKI_BIND"]):
        tell(
            f"Loki listens on {environ['LOKI_BIND']} without a password: anyone who reaches it can read and write logs"
        )
    tell(f"starting Grafana, Loki and Prometheus from {folder}; the first time Docker pulls about 500 MB")
    _run([*compose, "--project-name", PROJECT, "up", "--detach"], folder, environ)
    stack = _stack(folder, environ)
    _wait_until_ready(stack, compose, within_s=ready_s)
    for line in stack.lines():
        tell(line)
    return stack


def stop(folder: Path | None = None, *, remove_data: bool = False) -> None:
    """Stop the containers. `remove_data`: delete their volumes, too."""
    folder = folder or data_folder()
    if not (folder / "docker-compose.yml").is_file():
        raise UserError(f"nothing was started from {folder}; smolcluster logs up starts it")
    compose = find_compose()
    _run([*compose, "--project-name", PROJECT, "down", *(["--volumes"] if remove_data else [])], folder, _read(folder))


def find_compose() -> list[str]:
    """Return `docker compose`, or the older `docker-compose`."""
    docker = shutil.which("docker")
    if docker is not None and _failure(docker, "compose", "version", within_s=30) is None:
        return [docker, "compose"]
    older = shutil.which("docker-compose")
    if older is not None:
        return [older]
    if docker is not None:
        raise UserError(
            "docker is installed without docker compose; install the plugin: https://docs.docker.com/compose/install/"
        )
    raise UserError(
        "docker is not installed; install it (https://docs.docker.com/get-docker/), or use a Loki that runs elsewhere: "
        "--override logging.loki_url=http://HOST:3100. Without Loki the logs are in the run directory"
    )


def _check_docker() -> None:
    """Raise UserError if the docker daemon does not answer."""
    docker = shutil.which("docker")
    failure = None if docker is None else _failure(docker, "info", within_s=60)
    if failure is not None:
        raise UserError(f"docker does not work here: {failure}; start the docker daemon")


def _failure(*command: str, within_s: float) -> str | None:
    """Return the last line of a failing command; None on success."""
    try:
        asked = subprocess.run(command, capture_output=True, timeout=within_s, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if asked.returncode == 0 else (asked.stderr.strip().splitlines() or ["no output"])[-1]


def write_files(folder: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Write the packaged files and `.env`. Return its contents. The password is generated once."""
    source = packaged()
    try:
        for path in sorted(source.rglob("*")):
            target = folder / path.relative_to(source)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                target.chmod(0o755)  # containers run as other users, who must read this whatever the umask
            elif not (target.exists() and path.relative_to(source).parts[0] in _YOURS):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
                target.chmod(0o644)
        environ = {"GRAFANA_PASSWORD": secrets.token_urlsafe(15)} | DEFAULTS | _read(folder) | dict(settings)
        for name, value in environ.items():
            if name.endswith("_PORT") and not (value.isdigit() and 0 < int(value) < 65536):
                raise UserError(f"{folder / '.env'}: {name}={value} is not a port; give a number from 1 to 65535")
        write_private_text(folder / ".env", "".join(f"{name}={value}\n" for name, value in environ.items()))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
    return environ


def _read(folder: Path) -> dict[str, str]:
    """Return the contents of `.env`; empty without one."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / ".env").read_text(encoding="utf-8").splitlines()
        pairs = [line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#")]
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _run(command: list[str], folder: Path, environ: Mapping[str, str]) -> None:
    """Run docker compose, which prints its progress on standard error."""
    status = subprocess.run(command, cwd=folder, env={**os.environ, **environ}, stdout=2, check=False)
    if status.returncode != 0:
        name = " ".join([Path(command[0]).name, *command[1:]])
        raise UserError(f"`{name}` in {folder} ended with status {status.returncode}; see its output above")


def _stack(folder: Path, environ: Mapping[str, str]) -> Stack:
    return Stack(
        folder,
        grafana=f"http://127.0.0.1:{environ['GRAFANA_PORT']}",
        loki=f"http://{dial_address(environ['LOKI_BIND'], int(environ['LOKI_PORT']))}",
        prometheus=f"http://127.0.0.1:{environ['PROMETHEUS_PORT']}",
    )


def _wait_until_ready(stack: Stack, compose: list[str], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    waiting = {
        "Loki": f"{stack.loki}/ready",
        "Prometheus": f"{stack.prometheus}/-/ready",
        "Grafana": f"{stack.grafana}/api/health",
    }
    while True:
        waiting = {name: url for name, url in waiting.items() if not _answers(url)}
        if not waiting:
            return
        if time.monotonic() > deadline:
            command = " ".join([Path(compose[0]).name, *compose[1:], "--project-name", PROJECT, "logs"])
            raise SmolclusterError(
                f"{' and '.join(waiting)} did not answer within {within_s:g} s; in {stack.folder} see: {command}"
            )
        time.sleep(_LOOK_S)


def _answers(url: str) -> bool:
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError, http.client.HTTPException), directly.open(url, timeout=3) as answer:
        return bool(answer.status == 200)
    return False
