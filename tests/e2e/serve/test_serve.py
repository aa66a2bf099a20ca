"""`smolcluster serve` as a user meets it: processes, a real model on disk, the API, the terminal, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.network import check_possible, hosts
from tests.e2e.command import TINY, Running, Smol, children
from tests.places import eventually, free_port

from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.errors import UserError
from smolcluster.serve.engine.sources import find_source

GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def run(smol: Smol, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT that has seen enough of the embedded text to say more than blanks."""
    folder = tmp_path_factory.mktemp("served")
    settings = (*TINY, "training.batch_size=16", "training.learning_rate=0.02", "logging.log_interval=100")
    smol.run(
        "train", "gpt", "--workers", "1", "--steps", "300", "--run-dir", "run", "--override", *settings, cwd=folder
    ).ok()
    return folder / "run"


@pytest.fixture(scope="module")
def expected(run: Path) -> str:
    """What one process says to "The "."""
    import torch

    from smolcluster.models import GPT

    source = find_source(str(run))
    model = GPT(source.config)
    whole = range(source.config.num_layers)
    model.load_state_dict(source.load(whole, first=True, last=True, dtype=torch.float32, device="cpu"))
    text = source.text()
    prompt = text.prompt("The ")
    made = model.eval().generate(torch.tensor([prompt]), GREEDY["max_tokens"], temperature=0.0)
    said = text.decode(made[0, len(prompt) :].tolist())
    assert said.strip(), "blanks would be a weak witness"
    return said


def address(serving: Running) -> str:
    found = eventually(lambda: re.search(r"chat  (http://\S+?)/", serving.output), what="the address", timeout_s=60)
    return str(found[1])


@pytest.fixture(scope="module")
def served(smol: Smol, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--stages", "1", "--port", "0", "--no-browser", "--device", "cpu")
    serving = smol.start("serve", str(run), *options, cwd=tmp_path_factory.mktemp("serve"))
    yield address(serving)
    serving.process.send_signal(signal.SIGINT)
    assert serving.end(timeout_s=60).status == 0


def post(url: str, body: dict[str, Any]) -> Any:
    wanted = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(wanted, timeout=300) as answer:
        return json.load(answer)


def complete(url: str, **said: Any) -> str:
    return str(post(f"{url}/v1/completions", {"prompt": "The ", **GREEDY, **said})["choices"][0]["text"])


def test_a_run_is_served(served: str, expected: str, run: Path) -> None:
    assert complete(served) == expected
    with urllib.request.urlopen(f"{served}/v1/models") as answer:
        (model,) = json.load(answer)["data"]
    assert model["id"] == "run"


def test_generate_and_chat_in_a_pipe(served: str, expected: str, smol: Smol, tmp_path: Path) -> None:
    ended = smol.run("generate", "The ", "--url", served, "--temperature", "0", "--max-tokens", "24", cwd=tmp_path).ok()
    assert ended.out.strip("\n") == expected.strip("\n")
    asked = subprocess.run(
        [sys.executable, "-m", "smolcluster", "chat", served, "--temperature", "0", "--max-tokens", "24"],
        input="The \n",
        capture_output=True,
        text=True,
        env=smol.env,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip("\n") == expected.strip("\n")  # it has no chat template: the text is continued
    with urllib.request.urlopen(f"{served}/config") as answer:
        config = json.load(answer)
    assert config["chat"] is False
    assert len(config["openings"]) == 3  # of the embedded text


def test_a_killed_stage_is_started_again_and_nothing_is_left(
    smol: Smol, run: Path, expected: str, tmp_path: Path
) -> None:
    options = ("--stages", "1", "--workers", "2", "--port", "0", "--no-browser", "--device", "cpu")
    serving = smol.start("serve", str(run), *options, cwd=tmp_path)
    url = address(serving)
    eventually(lambda: _state(url)["spares"], what="the spare")
    stages = serving.workers(2)
    for stage in stages:
        stage.kill()
        assert complete(url) == expected
        eventually(lambda: _state(url)["spares"], what="it to be started again", timeout_s=60)
    again = children(serving.process.pid)
    serving.process.send_signal(signal.SIGINT)
    assert serving.end(timeout_s=60).status == 0
    assert not any(process.alive() for process in (*stages, *again))


def test_whoever_asks_while_it_loads_is_told_so_and_it_can_be_ended_then(smol: Smol, run: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    # With a PYTHONPATH of its own it starts from nothing, which takes seconds: the stage is stopped long before it is ready.
    serving = smol.start(
        *("serve", str(run), "--port", str(port), "--no-browser", "--device", "cpu"),
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([smol.env.get("PYTHONPATH", ""), str(tmp_path)]).strip(os.pathsep)},
    )
    (stage,) = serving.workers(1)
    stage.kill(signal.SIGSTOP)
    for path, body in (("/health", None), ("/v1/completions", {"prompt": "The "})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url + path, body) if body else urllib.request.urlopen(url + path, timeout=300)
        with contextlib.closing(refused.value) as answer:
            assert answer.code == 503
            assert int(answer.headers["Retry-After"]) > 0
    assert "chat  " not in serving.output
    stage.kill(signal.SIGCONT)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end(timeout_s=60).status == 128 + signal.SIGTERM
    assert not stage.alive()


def test_a_stream_over_http_goes_on_when_its_stage_is_killed(smol: Smol, tmp_path: Path) -> None:
    shape = {"num_layers": 6, "model_dim": 128, "max_seq_len": 256}  # large enough to be in the middle for a while
    settings = [*TINY, *(f"model.{key}={value}" for key, value in shape.items())]
    smol.run(
        "train", "gpt", "--workers", "1", "--steps", "2", "--run-dir", "run", "--override", *settings, cwd=tmp_path
    ).ok()
    machines = ("--stages", "2", "--workers", "3", "--port", "0", "--no-browser", "--device", "cpu")
    serving = smol.start("serve", "run", *machines, cwd=tmp_path)
    url = address(serving)
    eventually(lambda: _state(url)["spares"], what="the spare")
    expected = complete(url, max_tokens=240)
    body = {"prompt": "The ", "temperature": 0, "max_tokens": 240, "stream": True}
    wanted = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    stages, pieces = serving.workers(3), []
    with urllib.request.urlopen(wanted, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) in (1, 60):  # two of the three: one of them holds layers
                with urllib.request.urlopen(f"{url}/metrics", timeout=300) as told:
                    assert b"smolcluster_serve_running 1" in told.read(), "it was over before it could be disturbed"
                stages.pop().kill()
    assert "".join(pieces) == expected
    serving.process.send_signal(signal.SIGINT)
    ended = serving.end(timeout_s=60)
    assert (ended.status, len(re.findall(r"lost stage-\d", ended.err))) == (0, 2)


def _state(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/config", timeout=300) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch",), "nosuch"),
        (("RUN", "--stages", "9"), "--stages 9: the model has 1 layers"),
        (("RUN", "--layers", "a,b"), "--layers a,b: give the number of layers of each stage"),
        (("RUN", "--codec", "zip"), "unknown codec 'zip'"),
        (("RUN", "--stages", "2", "--workers", "1"), "--workers 1 is too few for 2 stage(s) of 1"),
        (("RUN", "--device", "abacus"), "--device 'abacus'"),
        (("RUN", "--bind", "203.0.113.7"), "--bind must be an address of this machine"),
        (("RUN", "--listen", "0.0.0.0:65433"), "cluster token"),
        (("RUN", "--api-key", "short"), "--api-key"),
        (("RUN", "--dtype", "fp8"), "unknown dtype 'fp8'"),
    ],
)
def test_mistakes_are_told(smol: Smol, run: Path, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    said = [str(run) if word == "RUN" else word for word in arguments]
    ended = smol.run("serve", *said, "--no-browser", cwd=tmp_path)
    assert ended.status == 2, ended
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_generate_without_a_server(smol: Smol, run: Path, expected: str, tmp_path: Path) -> None:
    asked = ("generate", str(run), "The ", "--temperature", "0", "--max-tokens", "24", "--device", "cpu")
    for how in ("--stream", "--no-stream"):
        assert smol.run(*asked, how, cwd=tmp_path).ok().out.strip("\n") == expected.strip("\n")
    wrong = smol.run(*asked[:2], "--from", "nosuch", cwd=tmp_path)
    assert (wrong.status, "nosuch" in wrong.err, "Traceback" in wrong.err) == (2, True, False)
    wrong = smol.run(*asked, "--stop", "", cwd=tmp_path)
    assert wrong.status != 0
    assert "stop: each string has 1 to" in wrong.err


def test_stages_of_two_machines_find_each_other(smol: Smol, tmp_path: Path) -> None:
    """The front is open to all, with a token, and holds layers itself: the other machine must find that stage, too."""
    pytest.importorskip("cryptography")
    try:
        check_possible()
    except UserError as error:
        pytest.skip(str(error))
    layers = [word.replace("num_layers=1", "num_layers=2") for word in TINY]
    smol.run(
        "train", "gpt", "--workers", "1", "--steps", "2", "--run-dir", "run", "--override", *layers, cwd=tmp_path
    ).ok()
    with hosts(2, rate=None) as network:
        port, token = free_port(), {"SMOLCLUSTER_TOKEN": new_token()}
        where = [{"cwd": tmp_path, "env": token, "inside": network.namespace(host)} for host in range(2)]
        machines = ("--stages", "2", "--workers", "1", "--listen", f"0.0.0.0:{port}")
        serving = smol.start("serve", "run", *machines, "--port", "0", "--no-browser", "--device", "cpu", **where[0])
        # By its name it comes first, so its activations go to the machine that it has dialled.
        dial = ("stage", "--server", f"{network.address(0)}:{port}", "--name", "alpha", "--device", "cpu")
        other = smol.start(*dial, **where[1])
        url = address(serving)

        def answer() -> str | None:
            asked = ("generate", "The ", "--url", url, "--temperature", "0", "--max-tokens", "8")
            ended = smol.run(*asked, **where[0])
            return ended.out if ended.status == 0 else None

        assert eventually(answer, what="an answer", timeout_s=60)
        serving.process.send_signal(signal.SIGINT)
        assert serving.end(timeout_s=60).status == 0
        ended = other.end(timeout_s=60)  # it was told that it is over
        assert ended.status == 0
        assert "loaded layers 0 to 0" in ended.err
        assert "the server has stopped" in ended.err


def in_a_terminal() -> tuple[str, ...]:
    """The command with SIGHUP as a terminal leaves it: tests under nohup ignore it, and so does what they start."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        return ("-m", "smolcluster")
    hears = "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    return ("-c", f"{hears}; runpy.run_module('smolcluster', run_name='__main__', alter_sys=True)")


def test_a_stage_that_is_refused_ends_and_one_that_is_not_hears_of_the_end(
    smol: Smol, run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    port, token = free_port(), {"SMOLCLUSTER_TOKEN": new_token()}
    server = f"127.0.0.1:{port}"
    machines = ("--stages", "1", "--workers", "0", "--listen", server)
    page = ("--port", "0", "--no-browser")
    serving = smol.start("serve", str(run), *machines, *page, cwd=tmp_path, env=token, python=in_a_terminal())
    url = address(serving)
    stranger = smol.run("stage", "--server", server, cwd=tmp_path, env={"SMOLCLUSTER_TOKEN": new_token()})
    assert stranger.status == 2, stranger
    assert f"{server} refused this stage: " in stranger.err
    lost = smol.run("stage", "--server", "nosuch.invalid:65433", cwd=tmp_path, env=token)
    assert lost.status == 2, lost
    assert "no route from this machine to nosuch.invalid:65433" in lost.err
    own = free_port()
    stage = smol.start("stage", "--server", server, "--device", "cpu", "--port", str(own), cwd=tmp_path, env=token)
    assert eventually(lambda: ready(url), what="the stage to join")
    with socket.create_connection(("127.0.0.1", own), timeout=300):
        pass
    other = ("--device", "cpu", "--name", "b")
    hung_up = smol.start("stage", "--server", server, *other, cwd=tmp_path, env=token, python=in_a_terminal())
    eventually(lambda: _state(url)["spares"], what="another stage")
    hung_up.process.send_signal(signal.SIGHUP)
    assert hung_up.end(timeout_s=60).status == 130
    serving.process.send_signal(signal.SIGHUP)
    assert serving.end(timeout_s=60).status == 128 + signal.SIGHUP
    ended = stage.end(timeout_s=60)
    assert (ended.status, "the server has stopped" in ended.err) == (0, True)


@pytest.mark.usual(when=lambda listening: not listening)  # otherwise: the test above
@pytest.mark.parametrize("listening", [True, False])
def test_a_token_on_this_machine_is_in_nobodys_way(
    smol: Smol, run: Path, expected: str, tmp_path: Path, listening: bool
) -> None:
    pytest.importorskip("cryptography")
    token = {"SMOLCLUSTER_TOKEN": new_token()}
    machines = ("--stages", "1", *(["--listen", f"127.0.0.1:{free_port()}"] if listening else []))
    serving = smol.start("serve", str(run), *machines, "--port", "0", "--no-browser", cwd=tmp_path, env=token)
    url = address(serving)
    assert eventually(lambda: ready(url), what="the stage to join")
    assert complete(url) == expected


def ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=300) as answer:
        return bool(json.load(answer)["ready"])
    return False
