"""P8: inference over 1, 2 and 4 stages, 1 and 8 streams, against the same weights in one process.

Every stage is a process with one thread, on loopback, or each on a host of its own behind a limited link (network
namespaces; then with a token and TLS). Peers have one thread too: our own GPT with its cache in one process,
`transformers` generate where it is installed, and as many processes with bare sockets and nothing around them, which show
the cost of a process that sleeps while another computes. Greedy, the same prompts; activations are sent in fp16.

    one stream      seconds per token, after the first
    eight streams   the same, of all together
    first token     of a prompt of 256 tokens

Beside it, for one stream: the part of a token's round trip in which no stage computed, by the stages' own clocks. It is the
cost of sockets and of our code around the layers, without the layers' time, which differs from sample to sample.

Limit for S stages and one stream: the time of one process, and S + 1 hops of a plain TCP message of the activations' size,
to a process that has slept for 20 ms, as a stage has between two tokens (waking up takes longer than the transfer).
Here all stages share this machine's cores: with one stream they work one after the other, as on machines of their own; with
eight at most as many at once as there are cores.

Target: one stream at 95 % of the limit or more; eight streams at least 0.9 S times one stream's tokens per second.

With --device, another measurement: one stage on that device (bf16 on a GPU), one stream, tokens per second.

    repeated lengths    every sample has the same lengths of the cache
    fresh lengths       no two samples share a length: a kernel that is planned for each length shows here
    bare loop           the same model in one process, nothing around it

Target: fresh lengths at 90 % of repeated ones or more.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Comparison, Measured, Session, Variant
from benchmarks.harness.network import Network, hosts
from benchmarks.harness.pipes import ask, receive
from benchmarks.harness.processes import free_port, started
from benchmarks.programs.p8_front import PROMPT
from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.engine.checkpoint.export_hf import write_folder
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.models import GPT, GPTConfig
from smolcluster.models.hugging_face import export_config, export_weights
from smolcluster.serve.engine.sources import find_source

EXAMPLE = "python -m benchmarks p8 --model smollm2 --link 100mbit"
PORT = 29700
HOPS = 100
START_S = 180.0

Process = subprocess.Popen[bytes]  # that answers the messages of `programs/p8_front.py`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=["smollm2", "gpt2"], default="smollm2", help="gpt2: its shape, random weights"
    )
    parser.add_argument("--link", default="loopback", help="loopback, or a rate such as 100mbit (needs root)")
    parser.add_argument("--stages", default="1,2,4", help="(default: 1,2,4; quick: 1,2)")
    parser.add_argument("--count", type=int, help="tokens of a sample (default: 48; quick: 6)")
    parser.add_argument(
        "--device", help="cuda, ...: fresh against repeated lengths on one stage (default: not measured)"
    )


def run(session: Session, arguments: argparse.Namespace) -> None:
    count = arguments.count or (6 if session.quick else 48)
    if arguments.device is None:
        _over_stages(session, arguments, count=count)
    else:
        _on_device(session, arguments.model, arguments.device, count=count)


def _over_stages(session: Session, arguments: argparse.Namespace, *, count: int) -> None:
    numbers = [1, 2] if session.quick else [int(word) for word in arguments.stages.split(",")]
    session.name = f"p8-{arguments.model}-{arguments.link}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = _model(folder, arguments.model, quick=session.quick)
        network = None
        if arguments.link != "loopback":
            network = stack.enter_context(hosts(1 + max(numbers), rate=arguments.link))
        clusters = {n: stack.enter_context(_cluster(model, n, network)) for n in numbers}
        peers = {"one process": stack.enter_context(_peer(model, "ours"))}
        with contextlib.suppress(SmolclusterError):
            peers["transformers"] = stack.enter_context(_peer(model, "transformers"))
        bare = {_bare_name(n): stack.enter_context(_bare(model, n, network)) for n in numbers}
        config = find_source(model).config
        hop_s = _hop_s(network, size=2 * config.model_dim + 400)
        session.parameters = {"config": asdict(config), "link": arguments.link, "count": count, "hop_s": hop_s}
        length = min(256, config.max_seq_len - 8)
        tokens, first = {"what": "tokens", "count": count}, {"what": "first", "prompt": length}
        alone = session.compare(
            _compare("1 stream: seconds per token", clusters, peers | bare, session, streams=1, **tokens)
        )
        together = session.compare(
            _compare("8 streams: seconds per token", clusters, peers, session, streams=8, **tokens)
        )
        name = f"a prompt of {length} tokens: seconds to the first token"
        session.compare(_compare(name, clusters, peers | bare, session, **first))
        _judge(session, alone, together, numbers, hop_s)


def _on_device(session: Session, name: str, device: str, *, count: int) -> None:
    """Compare one stage and a bare loop on this device, over fresh lengths of the cache and over repeated ones."""
    session.name = f"p8-{name}-{device}"
    rounds = 1 if session.quick else 2
    samples = 1 + session.repeats * rounds  # warm-up too
    with contextlib.ExitStack() as stack:
        model = _model(Path(stack.enter_context(tempfile.TemporaryDirectory())), name, quick=session.quick)
        config = find_source(model).config
        needed = PROMPT + (1 + samples) * count
        if needed > config.max_seq_len:
            raise UserError(
                f"--count {count}: {needed} lengths are needed, the model has {config.max_seq_len}; lower it"
            )
        bare = stack.enter_context(_peer(model, "ours", device=device))
        served = stack.enter_context(_cluster(model, 1, None, device=device))
        session.parameters = {"config": asdict(config), "device": device, "count": count}
        variants = [
            Variant(name="bare loop, repeated lengths", run=_rate(bare, repeat(0), count), role="peer"),
            Variant(name="bare loop, fresh lengths", run=_rate(bare, range(1, 1 + samples), count)),
            Variant(name="served, repeated lengths", run=_rate(served, repeat(0), count)),
            Variant(name="served, fresh lengths", run=_rate(served, range(1, 1 + samples), count)),
            Variant(name="bare loop again", run=_rate(bare, repeat(0), count), role="noise"),
        ]
        comparison = Comparison(name="1 stream: tokens per second", variants=variants, unit="1/s", rounds=rounds)
        measured = session.compare(comparison)
    for who in ("bare loop", "served"):
        share = measured.ratio(f"{who}, fresh lengths", f"{who}, repeated lengths")
        verdict = "met" if share >= 0.9 else "missed"
        print(f"{who}: fresh lengths at {share:.1%} of repeated ones (target 90 %: {verdict})")


def _rate(process: Process, places: Iterable[int], count: int) -> Callable[[], float]:
    """Measure tokens per second of one stream. A sample at place p begins where p samples one after the other would end."""
    waiting = iter(places)

    def sample() -> float:
        answer = ask(process, what="tokens", streams=1, count=count, prompt=PROMPT + next(waiting) * count)
        return float(answer["tokens"] / answer["seconds"])

    return sample


# What is compared


def _compare(
    name: str, clusters: dict[int, Process], peers: dict[str, Process], session: Session, **message: Any
) -> Comparison:
    """Compare the answers to a message: seconds, or seconds per token, and the time outside the layers beside it."""

    def timed(process: Process) -> Callable[[], tuple[float, float | None]]:
        def sample() -> tuple[float, float | None]:
            answer = ask(process, **message)
            return answer["seconds"] / answer.get("tokens", 1), answer.get("outside_s")

        return sample

    first, *others = peers.items()
    variants = [Variant(name=first[0], run=timed(first[1]), role="peer")]
    variants += [Variant(name=_name(n), run=timed(process)) for n, process in clusters.items()]
    variants += [Variant(name=other, run=timed(process), role="extra") for other, process in others]
    variants += [Variant(name=f"{first[0]} again", run=timed(first[1]), role="noise")]
    return Comparison(name=name, variants=variants, rounds=1 if session.quick else 2)


def _name(stages: int) -> str:
    return f"{stages} stage{'s' * (stages > 1)}"


def _judge(session: Session, alone: Measured, together: Measured, numbers: list[int], hop_s: float) -> None:
    rows, base = [], alone.comparison.peers[0].name
    for n in numbers:
        name = _name(n)
        pairs = zip(alone.medians(base), alone.medians(name), strict=True)
        share = statistics.median((one + (n + 1) * hop_s) / ours for one, ours in pairs)
        pairs = zip(alone.medians(_bare_name(n)), alone.medians(name), strict=True)
        of_bare = statistics.median(bare / ours for bare, ours in pairs)
        ratios = zip(alone.medians(name), together.medians(name), strict=True)
        gain = statistics.median(single / eight for single, eight in ratios)
        outside_s = statistics.median(alone.beside[name])
        figures = {
            "share_of_limit": share,
            "share_of_bare": of_bare,
            "outside_s": outside_s,
            "eight_over_one": gain,
        }
        rows.append({"stages": n, **figures})
        print(
            f"{name}: {share:.1%} of the limit (target 95 %: {'met' if share >= 0.95 else 'missed'}), "
            f"{of_bare:.1%} of bare sockets between the same processes, {outside_s * 1e3:.2f} ms outside the layers, "
            f"8 streams {gain:.2f} x one (target {0.9 * n:g}: {'met' if gain >= 0.9 * n else 'missed'})"
        )
    print(f"a hop of a plain TCP message: {hop_s * 1e3:.3f} ms\n")
    session.parameters["tables"] = rows


# Processes


@contextlib.contextmanager
def _cluster(model: str, stages: int, network: Network | None, *, device: str = "cpu") -> Iterator[Process]:
    environ = {} if network is None else {"SMOLCLUSTER_TOKEN": new_token()}
    address = f"{_host(network, 0)}:{PORT + stages}"
    front = [sys.executable, "-m", "benchmarks.programs.p8_front", model, str(stages), address]
    stage = [sys.executable, "-m", "smolcluster", "stage", "--server", address, "--device", device, "--threads", "1"]
    commands = [front, *([*stage, "--name", f"s{number}", "--with-parent"] for number in range(stages))]
    with _ready(commands, network, environ) as process:
        yield process


def _bare_name(stages: int) -> str:
    return f"{stages} bare"


@contextlib.contextmanager
def _bare(model: str, stages: int, network: Network | None) -> Iterator[Process]:
    """Start bare stages in a ring. The front is the first process, as in ours."""
    port = PORT + 100 + 10 * stages
    addresses = [f"{_host(network, host)}:{port + host}" for host in range(stages + 1)]
    command = [sys.executable, "-m", "benchmarks.peers.bare_stages", model, str(stages)]
    ends = zip(addresses, [*addresses[1:], addresses[0]], strict=True)
    commands = [[*command, str(place), *pair] for place, pair in enumerate(ends, start=-1)]
    with _ready(commands, network) as process:
        yield process


def _peer(model: str, kind: str, *, device: str = "cpu") -> contextlib.AbstractContextManager[Process]:
    return _ready([[sys.executable, "-m", "benchmarks.peers.one_process", model, kind, device]], None)


@contextlib.contextmanager
def _ready(
    commands: Sequence[Sequence[str]], network: Network | None, environ: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Start each command on a host of its own. Yield the first process, once it reports that it is ready."""
    with contextlib.ExitStack() as stack:
        first, *_ = [
            stack.enter_context(started(command, listen=True, environ=environ, network=network, host=host))
            for host, command in enumerate(commands)
        ]
        receive(first, timeout_s=START_S)
        yield first


def _host(network: Network | None, number: int) -> str:
    return "127.0.0.1" if network is None else network.address(number)


_ECHO = """
import socket, sys
door = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
line, _ = door.accept()
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while True:
    data = b""
    while len(data) < int(sys.argv[3]):
        more = line.recv(65536)
        if not more: sys.exit()
        data += more
    line.sendall(data)
"""
_CALL = """
import socket, statistics, sys, time
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
size, times = int(sys.argv[3]), []
for _ in range(int(sys.argv[4])):
    time.sleep(0.02)
    began = time.perf_counter()
    line.sendall(bytes(size))
    got = 0
    while got < size:
        got += len(line.recv(65536))
    times.append(time.perf_counter() - began)
print(statistics.median(times) / 2)
"""


def _hop_s(network: Network | None, *, size: int) -> float:
    """Return the time of a plain TCP message of this size, one way, between two hosts or on loopback."""
    end = [_host(network, 0), str(free_port()), str(size)]
    with started([sys.executable, "-c", _ECHO, *end], listen=True, network=network, host=0) as echo:
        assert echo.stdout is not None
        echo.stdout.readline()
        call = [sys.executable, "-c", _CALL, *end, str(HOPS)]
        with started(call, listen=True, network=network, host=1) as calling:
            assert calling.stdout is not None
            return float(calling.stdout.read())


# Models


def _model(folder: Path, name: str, *, quick: bool) -> str:
    if name == "smollm2" and not quick:
        return name
    tiny = GPTConfig(model_dim=64, num_layers=4, num_heads=4, vocab_size=256, max_seq_len=128)
    config = tiny if quick else GPTConfig.gpt2("small")
    torch.manual_seed(0)
    path = folder / "random"
    write_folder(path, export_config(config), export_weights(config, GPT(config).state_dict()))
    return str(path)
