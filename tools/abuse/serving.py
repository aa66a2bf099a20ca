"""A model that is served, and a thread that sends it the same requests all the time.

    run            processes                                  listening sockets
    serve          a front, a stage of its own, another one   the front's, one of each stage, HTTP's
    serve-token    the same                                   the same behind TLS, and a key for HTTP

Text is greedy, so the same prompt must have the same answer before, during and after an attack: that of one process with all
the weights. Log probabilities are compared with the first ones: a corrupted cache shows there first.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness.processes import free_port

from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.security import Keyring, new_token
from smolcluster.config import dump, load_config
from smolcluster.config.shape import shape_of
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.run_dir import RunDir
from smolcluster.models import GPT
from smolcluster.models.registry import build
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.sources import find_source
from smolcluster.serve.engine.stage_model import Row
from smolcluster.serve.engine.types import SamplingParams, Token
from smolcluster.serve.engine.wire import Assignment, HopTiming, SamplingState, StageBatch, StageOffer
from smolcluster.web.connections import HttpLimits
from tools.abuse.doors import HANG_S, Door, Ended, Guest, alive, listening_ports, until_the_end
from tools.abuse.elastic import Abuse, Speech, harm
from tools.abuse.report import QUIET_S, Report, Result, Target, besiege, hold_times
from tools.abuse.web import Site, Web

RUNS = ("serve", "serve-token")
DOORS = ("front", "stage", "by-hand", "http")
PROMPTS = ("The ", "It is a truth", "And then ")
TOKENS = 24  # of an answer
PACE_S = 0.02  # between questions
CLOSE = 1e-3  # log probabilities: sums in another order differ by 1e-6
START_S = 120.0
DIM = 32
VOCAB = 256
MODEL = {"model_dim": DIM, "num_layers": 2, "num_heads": 2, "max_seq_len": 64, "vocab_size": VOCAB}
SITE = Site(
    gets=("/", "/health", "/config", "/metrics", "/events", "/v1/models"),
    posts=("/v1/chat/completions", "/v1/completions", "/chat", "/query", "/login"),
    pages=("/",),
    body={"prompt": "The ", "max_tokens": 2, "temperature": 0},
    open=("/health", "/login"),
)
HOP = ("0123456789abcdef", "127.0.0.1:1")


# Messages


def _rows(sequence: int, *, activations: bool, route: tuple[tuple[str, str], ...] = ()) -> Message:
    opening = SamplingState(sampling=SamplingParams(temperature=0.0), position=2)
    batch = StageBatch(
        rows=(Row(sequence=sequence, start=0, count=2, logits=True),), route=route, samplings={sequence: opening}
    )
    payload = torch.ones(2, DIM) if activations else torch.tensor([1, 2])
    return Message(kind=Kind.ROWS, step=1, meta=wire.meta_of(batch), payload=payload)


def _offer() -> Message:
    offer = StageOffer(
        name="x",
        host="x",
        address="127.0.0.1:1",
        device="cpu",
        cores=1,
        host_cores=1,
        memory_bytes=1 << 33,
        layer_s=0.001,
    )
    return Message(kind=Kind.JOIN, meta=wire.meta_of(offer))


def _chosen(batch: int, sequences: Sequence[int]) -> Message:
    spent = (HopTiming(name="x", waited_s=0.0, computed_s=0.1),)
    return Message(
        kind=Kind.CHOSEN, step=batch, meta=wire.chosen_meta({n: Token(token=0, logprob=-1.0) for n in sequences}, spent)
    )


def speech(canary: Path) -> Speech:
    """Return messages as fronts and stages send them."""
    assignment = Assignment(first_layer=0, num_layers=1, first=True, last=False, secret="", name="x", next=(HOP,))
    command = harm(canary)
    weights = {"count": 1, "meta": {"assignment": 1}}
    honest = [
        Message(kind=Kind.BEAT),
        Message(kind=Kind.ASK),
        _offer(),
        Message(kind=Kind.HELD, step=1, meta={"room": 100}),
        Message(kind=Kind.HELD, step=1, meta={"need": "float32"}),
        _chosen(1, (1, 2)),
        Message(kind=Kind.FAILED, step=1, meta={"why": command.decode()}),
        _rows(1, activations=True),
        _rows(1, activations=False, route=(HOP,)),
        Message(kind=Kind.LAYERS, step=1, meta=wire.meta_of(assignment)),
        Message(kind=Kind.FORGET, meta={"sequences": list(range(20))}),
        Message(kind=Kind.STATE, meta=weights),
        Message(kind=Kind.STATE, payload=torch.frombuffer(bytearray(command), dtype=torch.uint8)),
        Message(kind=Kind.PLAN, meta={"name": "x", "config": {}, "reference": {"__reduce__": command.decode()}}),
        Message(kind=Kind.STOP),
    ]
    return Speech(
        honest=honest,
        large=_rows(1, activations=True),
        written=(Kind.ASK, Kind.JOIN, Kind.CHOSEN, Kind.FAILED, Kind.LAYERS, Kind.FORGET, Kind.STATE, Kind.ROWS),
        tensors=(Kind.ROWS, Kind.STATE),
        hoards=(
            lambda n: _rows(10**6 + n, activations=True),
            lambda n: _rows(10**6 + n, activations=False, route=(HOP,)),
            lambda _: Message(kind=Kind.STATE, meta={"count": 0, "meta": {"a": "x" * 500_000}}),
            lambda _: _offer(),
            lambda _: Message(kind=Kind.ASK),
        ),
    )


class Forger(Abuse):
    """All attacks on the elastic plane, and one that forges messages about batches in flight."""

    names = (*Abuse.names, "forge")

    def __init__(self, canary: Path, answers: Callable[[], int]) -> None:
        """`answers`: the number of answers so far, from which follow the numbers in use."""
        super().__init__(canary, speech(canary))
        self._answers = answers

    def forge(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        for _ in range(min(40, max(2, count // 50))):
            done = self._answers()
            sequences = range(max(1, done - 3), done + 6)
            forged: list[Message] = []
            for number in sequences:
                forged += [_rows(number, activations=True), _rows(number, activations=False, route=(HOP,))]
            for batch in range(max(1, done * TOKENS - 2 * TOKENS), (done + 3) * TOKENS):
                forged += [_chosen(batch, sequences), Message(kind=Kind.FAILED, step=batch, meta={"why": "x"})]
            forged += [Message(kind=Kind.FORGET, meta={"sequences": list(sequences)}), Message(kind=Kind.STOP)]
            for start in range(0, len(forged), 10):  # the connection is closed at the first that is refused
                result.count += len(forged[start : start + 10])
                self._say(door, result, forged[start : start + 10])

    def _say(self, door: Door, result: Result, messages: Sequence[Message]) -> None:
        try:
            guest = Guest(door).greet()
            opening = [Message(kind=Kind.ASK)] if door.asks else []
            guest.sock.sendall(b"".join(guest.encoded(message) for message in (*opening, *messages)))
            until_the_end(guest.sock)
        except TimeoutError:
            result.wrong.append(f"no end within {HANG_S:g} s of forged messages")
        except (ConnectionError, ssl.SSLError, Ended):
            pass  # closed before all was sent


# Requests that must be answered


class Witness(threading.Thread):
    """Sends the same requests in turn, each on a connection of its own, and checks the answers."""

    def __init__(self, door: Door, expected: Mapping[str, str]) -> None:
        super().__init__(name="witness", daemon=True)
        self._door, self._expected = door, expected
        self._logprobs: dict[str, list[float]] = {}
        self._stopped = threading.Event()
        self.times: list[float] = []  # of answers, by the wall clock
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self._stopped.wait(PACE_S) and len(self.wrong) < 5:
            self.ask(PROMPTS[len(self.times) % len(PROMPTS)])

    def stop(self) -> None:
        self._stopped.set()
        self.join(HANG_S + START_S)

    def ask(self, prompt: str) -> None:
        try:
            text, logprobs = self._asked(prompt)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.wrong.append(f"no answer after {len(self.times)} answers: {error!r}")
            return
        self.times.append(time.time())
        first = self._logprobs.setdefault(prompt, logprobs)
        if text != self._expected[prompt]:
            self.wrong.append(f"the answer was {text!r}, expected was {self._expected[prompt]!r}")
        elif max(abs(a - b) for a, b in zip(first, logprobs, strict=True)) > CLOSE:
            self.wrong.append(f"log probabilities of {text!r} were {first} and are {logprobs}")

    def _asked(self, prompt: str) -> tuple[str, list[float]]:
        line = http.client.HTTPConnection("127.0.0.1", self._door.port, timeout=HANG_S)
        fields = {"Content-Type": "application/json"}
        if self._door.key is not None:
            fields["Authorization"] = f"Bearer {self._door.key}"
        body = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "logprobs": 1}
        with contextlib.closing(line):
            line.request("POST", "/v1/completions", json.dumps(body), fields)
            answer = line.getresponse()
            said = answer.read()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {said[:300]!r}")
        choice = json.loads(said)["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]


# A model that is served


@dataclass(frozen=True)
class Served:
    """Its processes and their sockets."""

    doors: Mapping[str, Door]
    log: Path

    @property
    def pids(self) -> dict[str, int]:
        return {name: door.pid for name, door in self.doors.items() if name != "http"}


def written(folder: Path) -> Path:
    """Write a run of a tiny model with random weights from a fixed seed."""
    run = folder / "run"
    if run.exists():
        return run
    config = load_config(
        ["gpt"], overrides={"data.tokenizer": "bytes", **{f"model.{name}": n for name, n in MODEL.items()}}
    )
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.3 * torch.randn(shape, generator=generator) + float(name.endswith("norm.weight"))
        for name, shape in shape_of(config.model, vocab_size=VOCAB).shapes().items()
    }
    RunDir(run).create(dump(config), resume=False)
    CheckpointStore(RunDir(run).checkpoints, keep=1).save(Snapshot(step=1, weights=weights))
    return run


def expected_of(run: Path) -> dict[str, str]:
    """Return the answers of one process with all the weights."""
    source = find_source(str(run))
    model = build(source.config)
    assert isinstance(model, GPT)
    whole = range(source.config.num_layers)
    model.load_state_dict(source.load(whole, first=True, last=True, dtype=torch.float32, device="cpu"))
    model.eval()
    text, answers = source.text(), {}
    for prompt in PROMPTS:
        tokens = text.prompt(prompt)
        made = model.generate(torch.tensor([tokens]), TOKENS, temperature=0.0)
        answers[prompt] = text.decode(made[0, len(tokens) :].tolist())
    return answers


def _environment(folder: Path, **said: str) -> dict[str, str]:
    """Return an environment without settings of this user."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOLCLUSTER_")}
    return kept | {"XDG_CONFIG_HOME": str(folder / "no-token"), "OMP_NUM_THREADS": "1"} | said


@contextlib.contextmanager
def served(folder: Path, run: Path, *, token: str) -> Iterator[Served]:
    """Start a front with one stage of its own, and another stage by hand; wait until they are ready."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = _environment(folder, **({"SMOLCLUSTER_TOKEN": token} if token else {}))
    keyring, key = (Keyring([token]), new_token()) if token else (None, None)
    log, processes = folder / "serving.log", list[subprocess.Popen[bytes]]()
    log.write_bytes(b"")

    def start(*arguments: str) -> int:
        with log.open("ab") as out:
            command = [sys.executable, "-m", "smolcluster", *arguments, "--device", "cpu"]
            process = subprocess.Popen(
                command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        processes.append(process)
        return process.pid

    try:
        port = free_port()
        options = ["--stages", "2", "--workers", "1", "--listen", f"127.0.0.1:{port}", "--codec", "fp32", "--port", "0"]
        front = start("serve", str(run), *options, "--no-browser", *(["--api-key", key] if key else []))
        page = int(_told(log, front, r"chat  http://127.0.0.1:(\d+)/"))
        by_hand = start("stage", "--server", f"127.0.0.1:{port}", "--name", "by-hand")
        http_door = Door("http", front, page, gone_s=HttpLimits().request_s, key=key)
        _until(lambda: _ready(http_door), "the model is served", log)
        (stage,) = _children(front)
        doors = {
            "front": Door("front", front, port, keyring, role="stage", asks=True),
            "stage": Door("stage", stage, _port_of(stage), keyring, role="stage"),
            "by-hand": Door("by-hand", by_hand, _port_of(by_hand), keyring, role="stage"),
            "http": http_door,
        }
        yield Served(doors, log)
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _told(log: Path, pid: int, words: str) -> str:
    def found() -> re.Match[str] | None:
        if not alive(pid):
            raise RuntimeError(f"it has ended: {log.read_text()[-2000:]}")
        return re.search(words, log.read_text())

    return str(_until(found, words, log)[1])


def _port_of(pid: int) -> int:
    (port,) = listening_ports(pid)
    return port


def _until(question: Callable[[], Any], what: str, log: Path) -> Any:
    """Return the first answer that is not empty."""
    deadline = time.monotonic() + START_S
    while not (answer := question()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {START_S:g} s\n{log.read_text()[-2000:]}")
        time.sleep(0.02)
    return answer


def _ready(door: Door) -> bool:
    line = http.client.HTTPConnection("127.0.0.1", door.port, timeout=HANG_S)
    with contextlib.closing(line):
        line.request("GET", "/health")
        return line.getresponse().status == 200


def _children(pid: int) -> list[int]:
    """Return the children of a process."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(folder.name))
    return found


# An attack


def attack(
    run: str,
    folder: Path,
    *,
    attacks: Sequence[str],
    frames_each: int,
    seed: int,
    quiet_s: float = QUIET_S,
    doors: Sequence[str] = DOORS,
    most_s: float = math.inf,
) -> Report:
    """Attack a model that is served.

    `frames_each`: damaged frames at each listening socket, or as many as fit into `most_s`. `quiet_s`: between attacks, for
    comparison.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report, canary = Report(run), folder / f"{run}-canary"
    model = written(folder)
    with served(folder / run, model, token=new_token() if run.endswith("-token") else "") as world:
        witness = Witness(world.doors["http"], expected_of(model))
        for prompt in PROMPTS:
            witness.ask(prompt)
        forger, web = Forger(canary, lambda: len(witness.times)), Web(canary, SITE)
        forger.most_s = web.most_s = most_s
        targets: list[Target] = [(web if name == "http" else forger, world.doors[name]) for name in doors]
        witness.start()
        try:
            quiet = besiege(
                report, targets, world.pids, attacks=attacks, frames_each=frames_each, seed=seed, quiet_s=quiet_s
            )
        finally:
            witness.stop()
        for prompt in PROMPTS:
            witness.ask(prompt)
        report.wrong += witness.wrong
        report.steps = len(witness.times)
        _judge(report, world)
    hold_times(report, witness.times, quiet, what="answering")
    return report


def _judge(report: Report, world: Served) -> None:
    said = world.log.read_text(errors="replace")
    if "Traceback" in said:
        at = said.index("Traceback")
        report.wrong.append(f"an unexpected error: {said[max(0, at - 300) : at + 1500]}")
    report.silences = len(re.findall(r"lost \S+: silent for", said))
    lost = re.findall(r"lost (?:stage-0|by-hand): .*", said)
    if len(lost) > report.silences:
        report.wrong.append(f"the front has lost stages: {lost[:3]}")
