"""A real Prometheus scrapes a real run: every process of it answers, and a query gives its numbers."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.command import TINY, Smol, read_rows
from tests.places import free_ports
from tests.world import run_world

from smolcluster.launch.logstack import packaged
from smolcluster.observe.events import Notice

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


class Prometheus:
    def __init__(self, folder: Path, targets: list[str], *, port: int) -> None:
        self.port = port
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [{"job_name": "smolcluster", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._output = (folder / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        answer = self._get(f"/api/v1/query?query={urllib.parse.quote(text)}")
        found = [
            (sample["metric"], sample.get("values") or [sample["value"]]) for sample in (answer or {}).get("result", [])
        ]
        return [(labels, float(value)) for labels, values in found for _, value in values]

    def healthy(self) -> set[str]:
        answer = self._get("/api/v1/targets") or {}
        return {t["labels"]["instance"] for t in answer.get("activeTargets", []) if t["health"] == "up"}

    def _get(self, path: str) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 503:  # 503: it is starting. Anything else: it does not understand
                raise AssertionError(error.read().decode()) from error
            return None
        except OSError:  # not there yet
            return None
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(300)
        self._output.close()


@pytest.fixture
def first_port() -> int:
    return free_ports(4)


@pytest.fixture
def prometheus(tmp_path: Path, first_port: int) -> Iterator[Prometheus]:
    targets = [f"127.0.0.1:{port}" for port in range(first_port, first_port + 3)]
    server = Prometheus(tmp_path, targets, port=first_port + 3)
    yield server
    server.close()


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian package prometheus)")
def test_a_real_prometheus_scrapes_a_run(smol: Smol, prometheus: Prometheus, first_port: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "my-run"
    run = smol.start(
        *("train", "gpt", "--strategy", "syncps", "--workers", "2", "--steps", "100000", "--run-dir", run_dir),
        *(
            "--override",
            *TINY,
            f"logging.prometheus_port={first_port}",
            "training.checkpoint_steps=5",
            "training.eval_steps=5",
            "cluster.standby=false",
        ),
        cwd=tmp_path,
    )
    everyone = {f"127.0.0.1:{port}" for port in range(first_port, first_port + 3)}
    run.until(lambda: prometheus.healthy() == everyone, what="all three processes are scraped")

    def seats(name: str, last: str = "last_over_time({}[30s])") -> dict[tuple[str, str], float]:
        """By role and rank. A busy machine may miss a scrape, so what was scraped last counts."""
        return {(labels["role"], labels["rank"]): value for labels, value in prometheus.query(last.format(name))}

    three = {("server", "2"), ("worker", "0"), ("worker", "1")}
    steps = run.until(
        lambda: len(found := seats("smolcluster_step")) == 3 and min(found.values()) > 3 and found, what="steps"
    )
    assert set(steps) == three
    assert seats("smolcluster_up") == dict.fromkeys(three, 1.0)
    assert seats('smolcluster_members{run="my-run"}') == {("server", "2"): 2.0}
    assert all(0 < loss < 10 for loss in seats("smolcluster_loss").values())
    assert all(count > 0 for count in seats("smolcluster_tokens_total").values())
    assert seats("smolcluster_bytes_sent_total")["worker", "0"] > 0
    run.until(lambda: seats("smolcluster_checkpoint_step").get(("server", "2"), 0) >= 5, what="a checkpoint")
    rates = run.until(lambda: seats("smolcluster_samples_total", "rate({}[10s])"), what="a rate")
    assert max(rates.values()) > 0
    assert {labels["strategy"] for labels, _ in prometheus.query("last_over_time(smolcluster_run_info[30s])")} == {
        "syncps"
    }

    # What was scraped is what the run wrote down.
    losses = prometheus.query('smolcluster_loss{role="server"}[30s]')
    written = {row["loss"] for row in read_rows(run_dir) if row["role"] == "server"}
    assert losses
    assert {loss for _, loss in losses} <= written

    # The dashboard's questions are understood, and answered.
    board = json.loads((packaged() / "grafana" / "dashboards" / "smolcluster-runs.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    unanswered = {target["expr"] for target in targets if target["datasource"]["type"] == "prometheus"}

    def all_answered() -> bool:
        for expression in list(unanswered):
            if prometheus.query(expression.replace("$run", "my-run").replace("$__rate_interval", "10s")):
                unanswered.remove(expression)
        return not unanswered

    run.until(all_answered, what="the dashboard's panels")

    if PROMTOOL is not None:
        for instance in sorted(everyone):
            with urllib.request.urlopen(f"http://{instance}/metrics", timeout=5) as reply:
                linted = subprocess.run(
                    [PROMTOOL, "check", "metrics"], input=reply.read(), capture_output=True, check=False
                )
            assert (linted.returncode, linted.stdout, linted.stderr) == (0, b"", b"")
    run.process.send_signal(signal.SIGINT)
    assert run.end().status == 130


TASK = {"training.steps": 3, "training.batch_size": 8}


def test_a_port_that_is_taken_is_a_warning(first_port: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", first_port + 1)):
        world = run_world(2, tmp_path / "run", TASK | {"logging.prometheus_port": first_port}, task="Tiny")
    assert [rank.status for rank in world.ranks] == [0, 0]
    told = [[event.message for event in rank.events if isinstance(event, Notice)] for rank in world.ranks]
    assert any(f"metrics are not served on 127.0.0.1:{first_port + 1}" in message for message in told[0])
    assert not any("metrics" in message for message in told[1])
    log = tmp_path / "run" / "logs" / "worker-rank1-testhost.log"
    assert f"metrics are served on http://127.0.0.1:{first_port + 2}/metrics" in log.read_text()


def test_a_missing_package_ends_a_run_before_it_begins(first_port: int, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text('raise ModuleNotFoundError("gone", name="prometheus_client")')
    config, environ = TASK | {"logging.prometheus_port": first_port}, {"TEST_PATH": str(tmp_path)}
    (rank,) = run_world(1, tmp_path / "run", config, task="Tiny", strategy="single", environ=environ).ranks
    assert (rank.status, rank.rows()) == (2, [])
    assert rank.failed is not None
    assert "install it with: pip install 'smolcluster[prometheus]'" in rank.failed.message


def test_nothing_listens_unless_it_was_asked_for(tmp_path: Path) -> None:
    run_world(1, tmp_path / "run", TASK | {"logging.prometheus_port": 0}, task="Tiny", strategy="single")
    assert "metrics are served" not in (tmp_path / "run" / "logs" / "worker-rank0-testhost.log").read_text()
