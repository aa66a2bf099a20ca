"""`smolcluster logs up` against a docker that only writes down what it was asked; and the files that it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch import logstack
from smolcluster.launch.logstack import PROJECT, packaged, start, stop, write_files
from smolcluster.observe.log_queue import PRINTED
from smolcluster.observe.loki import labels_of
from smolcluster.observe.prometheus import METRICS, port_of

PORTS = ("LOKI_PORT", "GRAFANA_PORT", "PROMETHEUS_PORT")
LABELS = {*labels_of(role="worker", rank=0, host="worker-rank0-mini2"), "level"}

# Starting and stopping

DOCKER = f"""#!{sys.executable}
import json, os, sys
calls = os.environ["CALLS"]
kept = {{name: os.environ.get(name) for name in ("LOKI_PORT", "LOKI_BIND", "GRAFANA_PASSWORD")}}
with open(calls, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), kept]) + "\\n")
fails = os.environ.get("FAILS", "").split(",")
if any(argument in fails for argument in sys.argv[1:]):
    print("Cannot connect to the Docker daemon", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are written."""
    monkeypatch.setattr(logstack, "data_folder", lambda: tmp_path / "stack")
    return tmp_path / "stack"


@pytest.fixture
def calls(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing but a docker of ours is on the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("LOKI_PORT", "LOKI_BIND", "GRAFANA_PASSWORD", "FAILS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "calls"


def install(calls: Path, *names: str) -> None:
    for name in names:
        path = calls.parent / "bin" / name
        path.write_text(DOCKER)
        path.chmod(0o755)


def called(calls: Path) -> list[tuple[str, list[str], str, dict[str, str]]]:
    return [tuple(json.loads(line)) for line in calls.read_text().splitlines()]


def use(folder: Path, **settings: str) -> dict[str, str]:
    """Write them into the user's `.env`."""
    folder.mkdir(exist_ok=True)
    with (folder / ".env").open("a") as file:
        file.writelines(f"{name}={value}\n" for name, value in settings.items())
    return settings


@pytest.fixture
def ports(folder: Path) -> Iterator[dict[str, str]]:
    """Three containers in one: whatever is asked is ready, the second time."""
    asked: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = self.path not in asked
            asked.add(self.path)
            self.send_response(503 if first else 200 if self.path in ("/ready", "/-/ready", "/api/health") else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield use(folder, **dict.fromkeys(PORTS, str(server.server_address[1])))
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("installed", "command"), [(["docker"], ["docker", "compose"]), (["docker-compose"], ["docker-compose"])]
)
def test_up_and_down(
    installed: list[str], command: list[str], calls: Path, folder: Path, ports: dict[str, str]
) -> None:
    install(calls, *installed)
    told: list[str] = []
    start(tell=told.append)
    name, arguments, cwd, environ = called(calls)[-1]
    assert [name, *arguments] == [*command, "--project-name", PROJECT, "up", "--detach"]
    assert (cwd, environ["LOKI_PORT"], environ["LOKI_BIND"]) == (str(folder), ports["LOKI_PORT"], "127.0.0.1")
    for path in packaged().rglob("*"):
        if path.is_file():
            assert (folder / path.relative_to(packaged())).read_bytes() == path.read_bytes()
    where = f"http://127.0.0.1:{ports['LOKI_PORT']}"
    assert f"\nsmolcluster train --override logging.loki_url={where}\n" in told[-1]
    assert f"Grafana     {where}   user admin, the password is in {folder / '.env'}\n" in told[-1]
    assert not any(environ["GRAFANA_PASSWORD"] in text for text in told)

    stop()
    name, arguments, cwd, again = called(calls)[-1]
    assert ([name, *arguments], cwd) == ([*command, "--project-name", PROJECT, "down"], str(folder))
    assert again == environ


def test_what_is_the_users_stays(tmp_path: Path) -> None:
    use(tmp_path, LOKI_PORT="3101")
    first = write_files(tmp_path)
    assert first["LOKI_PORT"] == "3101"
    (tmp_path / "docker-compose.yml").write_text("damaged")
    (tmp_path / "targets" / "minis.yml").write_text("[]")
    (tmp_path / "docker-compose.override.yml").write_text("{}")
    with (tmp_path / ".env").open("a") as file:
        file.write("# mine\nLOKI_BIND = 192.168.1.10\n")
    second = write_files(tmp_path)
    assert second == first | {"LOKI_BIND": "192.168.1.10"}
    assert len(first["GRAFANA_PASSWORD"]) >= 20
    assert yaml.safe_load((tmp_path / "docker-compose.yml").read_text())["services"]
    assert (tmp_path / "targets" / "minis.yml").read_text() == "[]"
    assert (tmp_path / "docker-compose.override.yml").read_text() == "{}"
    if os.name == "posix":
        assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    use(tmp_path, LOKI_PORT="x")
    with pytest.raises(UserError, match=r"LOKI_PORT=x is not a port"):
        write_files(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="there are other rights elsewhere")
def test_the_users_of_the_containers_can_read_their_files(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_files(tmp_path / "stack")
    finally:
        os.umask(before)
    compose = yaml.safe_load((tmp_path / "stack/docker-compose.yml").read_text())
    for service in compose["services"].values():
        for source in (volume.partition(":")[0] for volume in service["volumes"]):
            for path in (tmp_path / "stack" / source).rglob("*") if source.startswith("./") else ():
                assert path.stat().st_mode & 0o005 == (0o005 if path.is_dir() else 0o004), path
            if source.startswith("./"):
                assert (tmp_path / "stack" / source).stat().st_mode & 0o004
    assert (tmp_path / "stack/.env").stat().st_mode & 0o077 == 0


def test_beyond_loopback_one_is_warned(calls: Path, folder: Path, ports: dict[str, str]) -> None:
    install(calls, "docker")
    use(folder, LOKI_BIND="0.0.0.0")
    told: list[str] = []
    start(tell=told.append)
    assert "without a password" in told[0]
    assert f"Loki        http://127.0.0.1:{ports['LOKI_PORT']}\n" in told[-1]


def test_a_docker_that_cannot_be_used_is_told(calls: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, *, fails: str) -> None:
        monkeypatch.setenv("FAILS", fails)
        with pytest.raises(UserError, match=message):
            start(tell=lambda _: None)

    refused(r"docker is not installed; install it .* logging\.loki_url=", fails="")
    with pytest.raises(UserError, match="nothing was started"):
        stop()
    install(calls, "docker")
    refused("without docker compose; install the plugin", fails="compose")
    refused("docker does not work here: Cannot connect to the Docker daemon; start the", fails="info")
    assert not folder.exists()
    refused(r"`docker compose --project-name smolcluster-logs up --detach` in .* status 1", fails="up")


def test_one_that_never_answers_is_told(calls: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(calls, "docker")
    use(folder, **dict.fromkeys(PORTS, "1"))
    monkeypatch.setattr(logstack, "READY_S", 0.0)
    message = rf"^Loki and Prometheus and Grafana were not ready within 0 s; in {folder} see: docker compose .* logs$"
    with pytest.raises(SmolclusterError, match=message):
        start(tell=lambda _: None)


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert logstack.data_folder() == Path("/data/smolcluster/logging")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert logstack.data_folder() == Path.home() / ".local" / "share" / "smolcluster" / "logging"


# The files


def load(name: str) -> Any:
    return yaml.safe_load((packaged() / name).read_text(encoding="utf-8"))


def test_the_containers_are_pinned_and_listen_on_loopback_only() -> None:
    services = load("docker-compose.yml")["services"]
    assert set(services) == {"loki", "grafana", "prometheus"}
    for service in services.values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["healthcheck"]["test"]
        assert service["ports"]
        for port in service["ports"]:
            assert port.startswith(("127.0.0.1:", "${LOKI_BIND:-127.0.0.1}:"))
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (packaged() / source).exists() or source in load("docker-compose.yml")["volumes"]
    assert not services["grafana"]["ports"][0].startswith("$"), "where a password may be admin, nobody else gets in"


def test_loki_keeps_what_the_pusher_relies_on() -> None:
    config = load("loki-config.yaml")
    limits = config["limits_config"]
    assert (config["ingester"]["max_chunk_age"], config["querier"]["query_ingesters_within"]) == ("336h", "0s")
    assert limits["increment_duplicate_timestamp"] is False
    assert limits["unordered_writes"] is True
    assert limits["reject_old_samples_max_age"] == limits["retention_period"]


def test_prometheus_scrapes_the_ports_that_processes_have() -> None:
    (job,) = load("prometheus.yml")["scrape_configs"]
    ports = {int(target.rpartition(":")[2]) for target in job["static_configs"][0]["targets"]}
    assert ports == {port_of(9464, role="server", local_rank=0)} | {
        port_of(9464, role="worker", local_rank=rank) for rank in range(8)
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_promtool_reads_the_configuration() -> None:
    command = [str(shutil.which("promtool")), "check", "config", str(packaged() / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


# Dashboards


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((packaged() / "grafana" / "dashboards").glob("*.json"))]


def test_dashboards_ask_for_what_is_there() -> None:
    sources = {
        source["uid"]: source["type"]
        for source in load("grafana/provisioning/datasources/smolcluster.yaml")["datasources"]
    }
    assert sources == {"smolcluster-loki": "loki", "smolcluster-prometheus": "prometheus"}
    assert [board["title"] for board in boards()] == ["smolcluster logs", "smolcluster runs"]
    assert len({board["uid"] for board in boards()}) == 2
    for board in boards():
        names = {variable["name"] for variable in board["templating"]["list"]}
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        asked = [target for panel in board["panels"] for target in panel["targets"]]
        for thing in (*asked, *board["panels"], *(v for v in board["templating"]["list"] if v["type"] == "query")):
            assert sources[thing["datasource"]["uid"]] == thing["datasource"]["type"]
        for target in asked:
            expression = target["expr"]
            assert set(re.findall(r"\$(\w+)", expression)) <= names | {"__auto", "__range", "__rate_interval"}
            if target["datasource"]["type"] == "prometheus":
                assert set(re.findall(r"smolcluster_\w+", expression)) <= set(METRICS)
                assert set(re.findall(r"[{,] ?(\w+)=", expression)) <= {"run", "role", "rank", "host"}
            else:
                selector = expression[expression.index("{") : expression.index("}")]
                assert set(re.findall(r"(\w+)=~?\"", selector)) <= LABELS
    asked_metrics = set(re.findall(r"smolcluster_\w+", json.dumps(boards())))
    assert {"smolcluster_loss", "smolcluster_members", "smolcluster_checkpoint_step"} <= asked_metrics


# Shippers


def stages(name: str) -> list[tuple[str, Any]]:
    (job,) = load(name)["scrape_configs"]
    return [next(iter(stage.items())) for stage in job["pipeline_stages"]]


# Of a run by hand, and of one that `up` has started.
LOGS = (
    "/my-run/logs/{role}-rank3-mini2.log",
    "/lab/runs/my-run/logs/{role}-x.log",
    "/lab/logs/my-run/{role}-rank0-pi5.log",
)


def finds(pattern: str, path: str) -> bool:
    """As both agents do: ** is any number of folders, * anything in a name."""
    pattern = pattern.removeprefix("${SMOLCLUSTER_RUNS:-runs}")
    expression = re.escape(pattern).replace(re.escape("**/"), "(?:[^/]+/)*").replace(re.escape("*"), "[^/]*")
    return re.fullmatch(expression, path) is not None


@pytest.mark.parametrize("role", ["server", "worker"])
def test_promtail_gives_the_labels_of_the_pusher(role: str) -> None:
    (job,) = load(f"promtail-{role}.yaml")["scrape_configs"]
    fixed = job["static_configs"][0]["labels"]
    expected = labels_of(role=role, rank=3, host=f"{role}-rank3-mini2" if role == "worker" else "server-mini2")
    assert {name: expected[name] for name in ("job", "component")} == {
        k: v for k, v in fixed.items() if k != "__path__"
    }
    assert all(finds(fixed["__path__"], path.format(role=role)) for path in LOGS)
    steps = stages(f"promtail-{role}.yaml")
    assert [name for name, _ in steps] == ["regex", "static_labels", "json", "timestamp", "labels", "labeldrop"]
    known = dict(steps)
    assert set(known["labels"]) | {"job", "component"} == LABELS
    assert known["static_labels"] == {"level": PRINTED}
    assert known["timestamp"] | {"source": "time", "format": "RFC3339Nano", "location": "UTC"} == known["timestamp"]
    match = re.search(known["regex"]["expression"], f"/home/me/runs/my-run/logs/{expected['host']}.log")
    found = match.groupdict() | ({"rank": "3"} if known["json"]["expressions"].get("rank") == "rank" else {})
    assert found == {"host": expected["host"], "rank": "3"}


def test_alloy_gives_the_labels_of_the_pusher() -> None:
    text = (packaged() / "config.alloy").read_text(encoding="utf-8")
    code = re.sub(r"//[^\n]*", "", re.sub(r'"[^"\n]*"|`[^`]*`', '""', text))
    assert code.count("{") == code.count("}") > 10
    assert code.count("[") == code.count("]")
    for role in ("server", "worker"):
        labels = labels_of(role=role, rank=0, host="x")
        for name in ("job", "component"):
            assert re.search(rf'"{name}" += "{labels[name]}"', text)
        (pattern,) = re.findall(rf'"(/.*/{role}-\*[.]log)"', text)
        assert all(finds(pattern, path.format(role=role)) for path in LOGS)
    order = re.findall(r"stage\.(\w+) \{", text)
    assert order == ["regex", "static_labels", "json", "timestamp", "labels", "label_drop"]
    assert f'values = {{ level = "{PRINTED}" }}' in text
    kept = re.search(r"stage\.labels \{\n +values = \{(.*)\}", text)
    assert {part.partition("=")[0].strip() for part in kept[1].split(",")} | {"job", "component"} == LABELS
    expression = re.search(r"expression = `(.*)`", text)
    assert expression is not None
    for stem, rank in (("worker-rank12-mini2", "12"), ("server-mini1", None)):
        found = re.search(expression[1], f"/runs/server-test/logs/{stem}.log")
        assert found.groupdict() == {"host": stem, "rank": rank}
