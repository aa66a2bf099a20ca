"""Cost of observing a run that trains.

Dashboard: one run of `edp` on 2 workers continues all the time, with `smolcluster dashboard` on the same machine and a process
with 50 viewers that read its events. Windows of seconds per committed step, in turn: both stopped (SIGSTOP), both running,
both stopped. The cost of the viewers is included; users have them on other machines.

Logs: short runs on 1 worker that log every step, in turn: with a file alone, and with `logging.loki_url` (a server that
accepts everything) and `logging.prometheus_port` (scraped once a second).

Target: at most 1 % over the same run, not watched.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.server
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import Comparison, Session, Target, Variant
from benchmarks.harness.processes import free_port, smolcluster_command, started, train_command, wait_until
from benchmarks.harness.workload import SHAPES
from smolcluster.errors import SmolclusterError

EXAMPLE = "python -m benchmarks watched --only logs"
SHAPE = SHAPES["0.8m"]
LIMIT = Target(limit=1.01)
SETTLE_S = 1.0  # after SIGCONT the page reads what it missed
VIEWERS = """
import os, selectors, socket, sys
os.nice(19)
chosen = selectors.DefaultSelector()
for _ in range(int(sys.argv[2])):
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    line.sendall(b"GET /api/run/watched/events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    chosen.register(line, selectors.EVENT_READ)
while True:
    for key, _ in chosen.select():
        if not key.fileobj.recv(1 << 20):
            sys.exit("the dashboard closed a connection")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["dashboard", "logs"], help="one of the two (default: both)")
    parser.add_argument("--viewers", type=int, default=50, help="of the dashboard (default: 50)")
    parser.add_argument("--window", type=float, help="seconds of a window (default: 8; quick: 1)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    if arguments.only != "logs":
        _dashboard(session, viewers=arguments.viewers, window_s=arguments.window or (1.0 if session.quick else 8.0))
    if arguments.only != "dashboard":
        _logs(session, steps=20 if session.quick else 120)


def _command(run_dir: Path, overrides: dict[str, object], *, strategy: str, workers: int, steps: int) -> list[str]:
    usual = {
        **SHAPE.overrides(),
        "training.device": "cpu",
        "training.eval_steps": 0,
        "training.eval_samples": SHAPE.batch_size,
        "training.checkpoint_steps": 0,
        "data.cache_dir": run_dir.parent / "cache",
    }
    options = ("--strategy", strategy, "--workers", str(workers), "--steps", str(steps))
    return train_command(run_dir, {**usual, **overrides}, *options)


# The dashboard


def _dashboard(session: Session, *, viewers: int, window_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "watched"
        port = free_port()
        endless = _command(folder, {"cluster.standby": False}, strategy="edp", workers=2, steps=10**7)
        page = [*smolcluster_command(), "dashboard", str(folder), "--port", str(port), "--no-browser"]
        audience = [sys.executable, "-c", VIEWERS, str(port), str(viewers)]
        with started(endless) as training:
            history = folder / "history.jsonl"
            wait_until(lambda: history.exists() and _commits(history) > 20, training, what="20 steps")
            with started(page) as shown:
                wait_until(lambda: _listens(port), shown, what="the page")
                with started(audience) as watching:
                    commands = (shown, watching)
                    used = _Used([shown.pid])

                    def window(*, watched: bool) -> Callable[[], float]:
                        def sample() -> float:
                            for command in commands:
                                command.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
                            time.sleep(SETTLE_S)
                            with used.counted(on=watched):
                                first, began = _commits(history), time.monotonic()
                                time.sleep(window_s)
                                steps, took = _commits(history) - first, time.monotonic() - began
                            if any(command.poll() is not None for command in (training, *commands)) or steps < 1:
                                raise SmolclusterError("a process ended while it was measured")
                            return took / steps

                        return sample

                    try:
                        session.compare(
                            Comparison(
                                name=f"edp on 2 workers, the dashboard with {viewers} viewers: time per step",
                                variants=[
                                    Variant(name="alone", run=window(watched=False), role="peer"),
                                    Variant(name="watched", run=window(watched=True), target=LIMIT),
                                    Variant(name="alone again", run=window(watched=False), role="noise"),
                                ],
                                rounds=1 if session.quick else 4,
                                parameters={**SHAPE.overrides(), "window_s": window_s, "viewers": viewers},
                            )
                        )
                    finally:
                        for command in commands:
                            command.send_signal(signal.SIGCONT)
                    session.parameters["dashboard_cpu_of_one_core"] = used.share
                    print(f"the dashboard takes {used.share:.1%} of one core while it is watched\n")


class _Used:
    """CPU seconds of processes per second of the windows that count."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._cpu_s, self._wall_s = pids, 0.0, 0.0

    @contextlib.contextmanager
    def counted(self, *, on: bool) -> Iterator[None]:
        cpu, began = self._cpu(), time.monotonic()
        yield
        if on:
            self._cpu_s += self._cpu() - cpu
            self._wall_s += time.monotonic() - began

    @property
    def share(self) -> float:
        return self._cpu_s / self._wall_s

    def _cpu(self) -> float:
        ticks = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def _commits(history: Path) -> int:
    return history.read_bytes().count(b'"commit"')


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


# Logs and metrics


class _Loki(http.server.BaseHTTPRequestHandler):
    """Accepts everything, and counts the lines."""

    protocol_version = "HTTP/1.1"
    lines = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        type(self).lines += sum(len(stream["values"]) for stream in json.loads(body)["streams"])
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _logs(session: Session, *, steps: int) -> None:
    loki = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Loki)
    threading.Thread(target=loki.serve_forever, daemon=True).start()
    port = free_port()
    pushed = {"logging.loki_url": f"http://127.0.0.1:{loki.server_port}", "logging.prometheus_port": port}
    counter = itertools.count()
    with tempfile.TemporaryDirectory() as name:

        def training(overrides: dict[str, object]) -> Callable[[], float]:
            def sample() -> float:
                folder = Path(name) / f"run{next(counter)}"
                overrides_of_run = {"logging.log_interval": 1, **overrides}
                command = _command(folder, overrides_of_run, strategy="single", workers=1, steps=steps)
                with started(command) as process, _scraped(port) if overrides else contextlib.nullcontext():
                    if process.wait() != 0:
                        raise SmolclusterError("a run failed")
                return _mean_step(folder / "metrics.jsonl")

            return sample

        session.compare(
            Comparison(
                name="one worker that logs every step, to Loki and Prometheus: time per step",
                variants=[
                    Variant(name="files alone", run=training({}), role="peer"),
                    Variant(name="pushed and scraped", run=training(pushed), target=LIMIT),
                    Variant(name="files alone again", run=training({}), role="noise"),
                ],
                parameters={**SHAPE.overrides(), "steps": steps},
            )
        )
    loki.shutdown()
    loki.server_close()
    session.parameters["lines_pushed"] = _Loki.lines
    if not _Loki.lines:
        raise SmolclusterError("no line was pushed to Loki")


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Read the metrics as Prometheus does, but every second."""
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(1.0):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                answer.read()

    threading.Thread(target=scrape, daemon=True).start()
    yield
    done.set()


def _mean_step(metrics: Path) -> float:
    """Return the mean time of a step in the second half of a run, by the clock and not by the loop's own measure."""
    times = [json.loads(line)["time"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    half = times[len(times) // 2 :]
    return float((half[-1] - half[0]) / (len(half) - 1))
