"""Whole runs with `logging.loki_url` at a strict server: every line of every log arrives once, whoever is killed on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.command import TINY, Smol
from tests.unit.strict_loki import StrictLoki, every_line_once
from tests.world import ElasticWorld, run_elastic_world, run_world

from smolcluster.observe.loki import push_unsent

CONFIG = {"training.steps": 6, "training.batch_size": 8, "logging.level": "DEBUG", "logging.log_interval": 2}


@pytest.fixture
def loki() -> Iterator[StrictLoki]:
    with StrictLoki() as server:
        yield server
    assert server.violations == []


def check(loki: StrictLoki, run_dir: Path, hosts: set[str]) -> None:
    logs = sorted((run_dir / "logs").glob("*.log"))
    assert {path.stem for path in logs} == hosts
    for path in logs:
        text = path.read_text(encoding="utf-8", errors="replace")
        assert "ends with status 0" in text
        rows = [json.loads(line) for line in text.splitlines() if ": loss " in line]
        assert rows
        assert all(f"step {row['step']}: loss " in row["message"] and row["loss"] > 0 for row in rows)
        every_line_once(loki, text, path.stem)
    assert {dict(labels)["host"] for labels in loki.streams} == hosts
    jobs = {(dict(labels)["job"], dict(labels)["component"]) for labels in loki.streams}
    assert jobs == {(f"smolcluster-{host.partition('-')[0]}", host.partition("-")[0]) for host in hosts}


def test_a_run_on_the_mesh_plane(loki: StrictLoki, tmp_path: Path) -> None:
    loki.plan += [500, "lose the answer", 429, "hang up"]
    run_world(2, tmp_path / "run", CONFIG | {"logging.loki_url": loki.url}, task="Tiny")
    push_unsent(tmp_path / "run", loki.url)  # of a process whose last try met a fault
    check(loki, tmp_path / "run", {"worker-rank0-testhost", "worker-rank1-testhost"})
    assert not loki.plan


def test_a_run_on_the_elastic_plane_with_a_worker_and_a_server_killed(loki: StrictLoki, tmp_path: Path) -> None:
    def script(world: ElasticWorld) -> None:
        world.wait_for_step(5)
        loki.plan += ["lose the answer", 503]
        world.restart(1)
        world.wait_for_step(12)
        world.restart("server")

    config = CONFIG | {"training.steps": 400, "logging.loki_url": loki.url}
    world = run_elastic_world(2, tmp_path / "run", config, task="Tiny", script=script)
    assert world.statuses == {"server": 0, 0: 0, 1: 0}
    push_unsent(tmp_path / "run", loki.url)
    check(loki, tmp_path / "run", {"server-testhost", "worker-rank0-testhost", "worker-rank1-testhost"})


def test_a_clean_run_leaves_nothing_to_send(loki: StrictLoki, tmp_path: Path) -> None:
    run_world(2, tmp_path / "run", CONFIG | {"logging.loki_url": loki.url}, task="Tiny")
    assert push_unsent(tmp_path / "run", loki.url).lines == 0
    check(loki, tmp_path / "run", {"worker-rank0-testhost", "worker-rank1-testhost"})


def test_training_does_not_wait_for_a_loki_that_is_silent(loki: StrictLoki, tmp_path: Path) -> None:
    loki.always = "say nothing"
    world = run_world(2, tmp_path / "run", CONFIG | {"logging.loki_url": loki.url}, task="Tiny")
    assert [rank.status for rank in world.ranks] == [0, 0]
    assert loki.lines() == []


def test_a_worker_by_hand_without_a_log_of_its_own(loki: StrictLoki, smol: Smol, tmp_path: Path) -> None:
    """Its owner names Loki, and its lines wait in a temporary file that is gone afterwards."""
    (tmp_path / "tmp").mkdir()
    server = smol.start(
        *("server", "gpt", "--strategy", "edp", "--workers", "1", "--port", "0", "--steps", "10", "--run-dir", "run"),
        *("--override", *TINY, "logging.level=DEBUG", f"logging.loki_url={loki.url.replace('//', '//me:topsecret@')}"),
        cwd=tmp_path,
    )
    line = server.until(
        lambda: next((part for part in server.output.split() if part.startswith("127.0.0.1:")), None), what="a port"
    )
    worker = smol.start(
        *("worker", "0", "pi5", "--server", line.rstrip(";")),
        *("--override", "logging.level=DEBUG", f"logging.loki_url={loki.url}"),
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path / "tmp")},
    )
    worker.end(timeout_s=90).ok()
    server.end().ok()
    arrived = [json.loads(text) for text in loki.lines(host="worker-rank0-pi5")]
    assert "worker, rank 0, starts as process" in arrived[0]["message"], "also what was logged before Loki was known"
    assert "ends with status 0" in arrived[-1]["message"]
    assert not list((tmp_path / "tmp").glob("smolcluster-log-*"))
    (log,) = (tmp_path / "run" / "logs").glob("server-*.log")
    every_line_once(loki, log.read_text(), log.stem)
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or b"topsecret" not in file.read_bytes(), file


def test_a_url_that_is_none_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    world = run_world(2, tmp_path / "run", CONFIG | {"logging.loki_url": "me:topsecret@localhost:3100"}, task="Tiny")
    for rank in world.ranks:
        assert rank.status == 2
        assert rank.failed.kind == "user"
        assert "logging.loki_url 'localhost:3100': it does not begin with http:// or https://" in rank.failed.message
        assert rank.rows() == []
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or b"topsecret" not in file.read_bytes(), file
