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
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from smolcluster.comm.addresses import dial_address, is_loopback
from smolcluster.durable_files import write_private_text
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.folders import user_folder

PROJECT = "smolcluster-logs"
READY_S = 180.0  # after the images are pulled
_POLL_S = 0.5
_YOURS = ("targets",)  # folders whose files are not overwritten

DEFAULTS = {
    "GRAFANA_PORT": "3000",
    "LOKI_PORT": "3100",
    "PROMETHEUS_PORT": "9090",
    "LOKI_BIND": "127.0.0.1",
}
_READY = {"loki": "/ready", "prometheus": "/-/ready", "grafana": "/api/health"}  # paths that return 200 when it is
_INSTRUCTIONS = """\
Grafana     {grafana}   user admin, the password is in {env}
Loki        {loki}
Prometheus  {prometheus}

smolcluster train --override logging.loki_url={loki}
smolcluster train --override logging.prometheus_port=9464   (prometheus.yml there lists the scrape targets)

smolcluster logs down   stops it and keeps the data"""


def data_folder() -> Path:
    """Return the folder for the files."""
    return user_folder("data") / "logging"


@functools.cache
def packaged() -> Path:
    """Return the folder of the packaged files."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "logstack", package.parents[1] / "logging"):  # installed; a source checkout
        if (folder / "docker-compose.yml").is_file():
            return folder
    raise SmolclusterError("the files of the log stack are missing from this installation; reinstall smolcluster")


def start(*, tell: Callable[[str], None]) -> None:
    """Write the files, start the containers, wait until they are ready, and print how to use them."""
    folder, compose = data_folder(), find_compose()
    _check_docker()
    environ = write_files(folder)
    if not is_loopback(environ["LOKI_BIND"]):
        tell(
            f"Loki listens on {environ['LOKI_BIND']} without a password: anyone who reaches it can read and write logs"
        )
    tell(f"starting Grafana, Loki and Prometheus from {folder}; the first time Docker pulls about 500 MB")
    _run([*compose, "up", "--detach"], folder, environ)
    urls = {
        "loki": f"http://{dial_address(environ['LOKI_BIND'], int(environ['LOKI_PORT']))}",
        "prometheus": f"http://127.0.0.1:{environ['PROMETHEUS_PORT']}",
        "grafana": f"http://127.0.0.1:{environ['GRAFANA_PORT']}",
    }
    _wait_until_ready(urls, see=f"in {folder} see: {_shown([*compose, 'logs'])}")
    tell(_INSTRUCTIONS.format(env=folder / ".env", **urls))


def stop() -> None:
    """Stop the containers."""
    folder = data_folder()
    if not (folder / "docker-compose.yml").is_file():
        raise UserError(f"nothing was started from {folder}; smolcluster logs up starts it")
    _run([*find_compose(), "down"], folder, _read(folder))


def find_compose() -> list[str]:
    """Return `docker compose` for our project, or the older `docker-compose`."""
    docker, project = shutil.which("docker"), ["--project-name", PROJECT]
    if docker is not None and _failure(docker, "compose", "version", timeout_s=30) is None:
        return [docker, "compose", *project]
    older = shutil.which("docker-compose")
    if older is not None:
        return [older, *project]
    if docker is not None:
        raise UserError(
            "docker is installed without docker compose; install the plugin: https://docs.docker.com/compose/install/"
        )
    raise UserError(
        "docker is not installed; install it (https://docs.docker.com/get-docker/), or use a Loki that runs elsewhere: "
        "--override logging.loki_url=http://HOST:3100. Without Loki the logs are in the run directory"
    )


def _check_docker() -> None:
    """Raise UserError if the docker daemon does not respond."""
    docker = shutil.which("docker")
    failure = None if docker is None else _failure(docker, "info", timeout_s=60)
    if failure is not None:
        raise UserError(f"docker does not work here: {failure}; start the docker daemon")


def _failure(*command: str, timeout_s: float) -> str | None:
    """Return the last line of a failing command; None on success."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]


def write_files(folder: Path) -> dict[str, str]:
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
        environ = {"GRAFANA_PASSWORD": secrets.token_urlsafe(15)} | DEFAULTS | _read(folder)
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
        raise UserError(f"`{_shown(command)}` in {folder} ended with status {status.returncode}; see its output above")


def _shown(command: list[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def _wait_until_ready(urls: Mapping[str, str], *, see: str) -> None:
    """Wait until all services are ready. `see`: where the user can find out why one does not."""
    deadline, waiting = time.monotonic() + READY_S, list(urls)
    while waiting := [name for name in waiting if not _answers(urls[name] + _READY[name])]:
        if time.monotonic() > deadline:
            names = " and ".join(name.capitalize() for name in waiting)
            raise SmolclusterError(f"{names} were not ready within {READY_S:g} s; {see}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError, http.client.HTTPException), directly.open(url, timeout=3) as response:
        return bool(response.status == 200)
    return False
