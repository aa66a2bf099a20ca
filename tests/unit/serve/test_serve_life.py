"""What `serve` makes of its options before anything is loaded, and what it starts."""

from __future__ import annotations

import asyncio
import errno
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.scripted_engine import ScriptedEngine, service_of

from smolcluster.engine import identity
from smolcluster.errors import SmolclusterError
from smolcluster.serve import main as life
from smolcluster.serve.engine import local
from smolcluster.serve.http import server as http
from smolcluster.serve.main import ServeOptions, StageCounts, count_stages, service_limits
from smolcluster.web.server import names_here

SCRIPTS = Path(__file__).parents[3] / "scripts" / "inference"


@pytest.mark.parametrize(
    ("said", "stages", "replicas", "workers", "distribution"),
    [
        ({}, 1, 1, 1, None),
        ({"stages": 3}, 3, 1, 3, None),
        ({"stages": 2, "replicas": 2}, 2, 2, 4, None),
        ({"replicas": 3}, 1, 3, 3, None),
        ({"workers": 4, "replicas": 2}, 2, 2, 4, None),
        ({"layers": "10,10,12"}, 3, 1, 3, (10, 10, 12)),
        ({"layers": "auto", "stages": 2}, 2, 1, 2, "auto"),
        ({"stages": 3, "workers": 1, "listen": "0.0.0.0:65433"}, 3, 1, 1, None),
    ],
)
def test_stage_counts(said: dict[str, Any], stages: int, replicas: int, workers: int, distribution: Any) -> None:
    shape = count_stages(ServeOptions(model="m", **said))
    assert shape == StageCounts(stages=stages, replicas=replicas, workers=workers, distribution=distribution)
    assert shape.missing == stages * replicas - workers


@pytest.mark.parametrize(("concurrency", "sequences", "requests"), [(1, 64, 128), (32, 64, 128), (500, 1000, 1000)])
def test_service_limits_admit_the_concurrency(concurrency: int, sequences: int, requests: int) -> None:
    limits = service_limits(ServeOptions(model="m", concurrency=concurrency))
    assert (limits.sequences, limits.requests) == (sequences, requests)


def test_local_stages_get_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they spread over the GPUs of the machine."""
    commands: list[list[str]] = []
    started = threading.Semaphore(0)

    def popen(command: list[str], **options: Any) -> Any:
        commands.append(command)
        started.release()
        return real([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)

    real = subprocess.Popen
    monkeypatch.setattr(local.subprocess, "Popen", popen)
    stages = local.LocalStages("127.0.0.1:1", 2, gave_up=lambda words: None, options=["--device", "cuda"])
    for _ in range(2):
        assert started.acquire(timeout=300)
    stages.close()
    places = sorted(
        (command[command.index("--name") + 1], command[command.index("--local-rank") + 1]) for command in commands
    )
    assert places == [("stage-0", "0"), ("stage-1", "1")]
    assert all(command[-2:] == ["--device", "cuda"] for command in commands)


def test_a_stage_that_cannot_be_started_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for another process for a while."""
    tries: list[int] = []
    gave_up: queue.SimpleQueue[str] = queue.SimpleQueue()

    def popen(command: list[str], **options: Any) -> Any:
        tries.append(1)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(local.subprocess, "Popen", popen)
    monkeypatch.setattr(local, "RESTART_DELAY_S", 0.0)
    stages = local.LocalStages("127.0.0.1:1", 1, gave_up=gave_up.put)
    said = gave_up.get(timeout=300)
    assert len(tries) == local.MAX_DEATHS
    assert said == "stage-0 died 5 times in a row, the last with status none (Cannot allocate memory)"
    stages.close()


def test_no_stage_is_restarted_after_stop_restarting(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    there = threading.Semaphore(0)

    def popen(command: list[str], **options: Any) -> Any:
        process = real([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)
        started.append(process)
        there.release()
        return process

    real = subprocess.Popen
    monkeypatch.setattr(local.subprocess, "Popen", popen)
    stages = local.LocalStages("127.0.0.1:1", 1, gave_up=lambda words: None)
    assert there.acquire(timeout=300)
    started[0].kill()
    assert there.acquire(timeout=300), "it was not started again"
    stages.stop_restarting()
    started[1].kill()
    stages.close()
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_the_scripts_are_the_commands() -> None:
    """Two stages that wait, and the page above them; what is said goes on to the command."""
    for name, words, said in (
        (
            "launch_api.sh",
            ["--top-p", "0.5"],
            ["serve gpt2 --stages 3 --workers 0 --listen 127.0.0.1:9 --port 5050 --top-p 0.5"],
        ),
        (
            "launch_mp_inference.sh",
            ["--device", "cpu"],
            [f"stage --server 127.0.0.1:9 --name stage-{n} --device cpu" for n in (1, 2, 3)],
        ),
    ):
        script = SCRIPTS / name
        environ = {
            "SMOLCLUSTER": "echo",
            "STAGES": "3",
            "FRONT": "127.0.0.1:9",
            "MODEL": "gpt2",
            "PATH": "/usr/bin:/bin",
        }
        ended = subprocess.run(["bash", script, *words], env=environ, capture_output=True, text=True, check=True)
        assert sorted(ended.stdout.splitlines()) == said


@pytest.mark.parametrize("alone", [True, False])
def test_failed_local_stages_end_the_server_unless_others_may_join(alone: bool) -> None:
    """Where others may come, it goes on without them."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    front: Any = SimpleNamespace(wait_ready=lambda _: False, loading=False, problems=lambda: ["stage-0: no memory"])
    told: list[str] = []

    def ready(url: str) -> None:
        told.append(url)
        raise KeyboardInterrupt  # as a user would end it

    place = http.HttpSettings(port=0).checked()
    opened = http.open_port(place)
    with pytest.raises(SmolclusterError if alone else KeyboardInterrupt, match="no memory" if alone else None):
        asyncio.run(life._serve(front, service_of(ScriptedEngine()), place, opened, ready, alone=alone))
    assert bool(told) is not alone
    assert opened.fileno() == -1


def test_names_by_which_a_server_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "mini1.example.org")
    assert names_here("127.0.0.1") == names_here("::1") == ()
    for bind in ("0.0.0.0", "192.168.1.10"):
        assert names_here(bind) == ("mini1.example.org", "mini1", "mini1.local")


def test_machines_of_one_name_have_different_identities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "raspberrypi")
    names = set()
    for number in (1, 2, 2):
        monkeypatch.setattr(identity, "BOOT_ID", tmp_path / "nowhere")
        monkeypatch.setattr("uuid.getnode", lambda number=number: number)
        names.add(identity.this_machine())
    assert len(names) == 2
    monkeypatch.undo()
    assert identity.this_machine() == identity.this_machine()
