"""Serve the metrics of every process of a run to Prometheus, at `http://HOST:PORT/metrics` (extra `prometheus`).

    logging.prometheus_port = 9464      on every machine:  9464  the server
                                                           9465  its worker with local rank 0
                                                           9466  its worker with local rank 1, and so on

A sink keeps the latest values and is a collector of `prometheus_client`, which formats them. A small HTTP server in a thread
serves GET /metrics and GET /health, only for Host headers that name this machine, which prevents DNS rebinding. The server of
`prometheus_client` lacks that check, a limit of clients and an idle timeout. This one listens on loopback unless
`logging.prometheus_host` is set; anyone who can connect can read the numbers, and change nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from smolcluster.errors import needed
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved, Event, RunStarted, StepLogged

with needed(extra="prometheus", purpose="logging.prometheus_port"):
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

MAX_METRICS = 64  # of the task, from one evaluation
_MAX_CLIENTS = 8  # concurrent; Prometheus is one
_IDLE_S = 5.0  # timeout of a client that sends nothing
_POLL_S = 0.1  # interval at which the server checks for a shutdown

# Name -> description, and field of StepLogged if it is one. Names of counters end in _total; the others are gauges.
METRICS = {
    "smolcluster_up": ("1 while the process runs.", ""),
    "smolcluster_run_info": ("1, with labels that describe the run.", ""),
    "smolcluster_planned_steps": ("Steps of the run.", ""),
    "smolcluster_step": ("The last step that was logged.", "step"),
    "smolcluster_last_step_timestamp_seconds": ("Time of that step, in seconds since 1970.", "time"),
    "smolcluster_loss": ("Training loss.", "loss"),
    "smolcluster_val_loss": ("Loss of the last evaluation.", "val_loss"),
    "smolcluster_val_accuracy": ("Accuracy of the last evaluation.", "val_accuracy"),
    "smolcluster_val_metric": ("Any other metric of the last evaluation, by the label metric.", ""),
    "smolcluster_learning_rate": ("Learning rate.", "lr"),
    "smolcluster_grad_norm": ("Norm of the gradient before clipping.", "grad_norm"),
    "smolcluster_samples_total": ("Samples since the start of training.", "samples"),
    "smolcluster_tokens_total": ("Tokens since the start of training.", "tokens"),
    "smolcluster_tokens_per_second": ("Tokens per second, since the row before.", "tokens_per_s"),
    "smolcluster_samples_per_second": ("Samples per second, since the row before.", "samples_per_s"),
    "smolcluster_step_seconds": ("Duration of a step, mean since the row before.", "step_time_s"),
    "smolcluster_compute_seconds": ("Of that, computing.", "compute_s"),
    "smolcluster_comm_seconds": ("Of that, waiting for others.", "comm_s"),
    "smolcluster_bytes_sent_total": ("Bytes sent since the start of the process.", "bytes_sent"),
    "smolcluster_bytes_received_total": ("Bytes received since then.", "bytes_received"),
    "smolcluster_staleness": ("Age of gradients in steps, mean since the row before.", "staleness"),
    "smolcluster_stale_rejected_total": ("Gradients refused as too old.", "stale_rejected"),
    "smolcluster_skipped_total": ("Steps whose gradient was not finite, not applied.", "skipped"),
    "smolcluster_members": ("Workers that take part now, from the server.", ""),
    "smolcluster_checkpoint_step": ("Step of the last checkpoint that was saved.", ""),
    "smolcluster_checkpoint_seconds": ("Duration of writing it, in parallel with training.", ""),
    "smolcluster_checkpoint_stall_seconds": ("How long training was paused for it.", ""),
    "smolcluster_checkpoint_failures_total": ("Checkpoints that could not be saved.", ""),
}


def port_of(port: int, *, role: str, local_rank: int) -> int:
    """Return the port of a process for `logging.prometheus_port` = `port`."""
    return port if role == "server" else port + 1 + local_rank


class PrometheusSink:
    """The metrics of one process. Raises OSError if the port is not available.

    `run` is a label; `members` is called at every scrape.
    """

    def __init__(
        self, started: RunStarted, *, host: str, port: int, run: str, members: Callable[[], int] | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise OSError(f"port {port} is not in 0..65535")
        self._labels = {"role": started.role, "rank": str(started.rank), "host": started.host, "run": run}
        self._about = {"strategy": started.strategy, "task": started.task, "device": started.device}
        self._members = members
        self._values: dict[str, float] = {
            "smolcluster_up": 1,
            "smolcluster_planned_steps": started.steps,
            "smolcluster_checkpoint_failures_total": 0,
        }
        self._named: dict[str, float] = {}  # metrics of the task
        self._lock = threading.Lock()
        self._server = _Server(host, port, sink=self, names={started.host, socket.gethostname()})
        self.port = int(self._server.server_address[1])
        serve = {"poll_interval": _POLL_S}
        threading.Thread(target=self._server.serve_forever, kwargs=serve, name="prometheus", daemon=True).start()

    def handle(self, event: Event) -> None:
        match event:
            case StepLogged():
                self._row(event)
            case CheckpointSaved():
                self._set(
                    {
                        "smolcluster_checkpoint_step": event.step,
                        "smolcluster_checkpoint_seconds": event.write_s,
                        "smolcluster_checkpoint_stall_seconds": event.stall_s,
                    }
                )
            case CheckpointFailed():
                failures = "smolcluster_checkpoint_failures_total"
                self._set({failures: self._values[failures] + 1})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every metric that has a value."""
        with self._lock:
            values, named = dict(self._values), dict(self._named)
        if self._members is not None:
            values["smolcluster_members"] = self._members()
        samples = {name: [(self._labels, value)] for name, value in values.items()}
        samples["smolcluster_run_info"] = [(self._labels | self._about, 1)]
        samples["smolcluster_val_metric"] = [
            (self._labels | {"metric": label}, value) for label, value in named.items()
        ]
        for name, labelled in samples.items():
            if labelled:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(name, METRICS[name][0], labels=list(labelled[0][0]))
                for labels, value in labelled:
                    family.add_metric(list(labels.values()), value)
                yield family

    def _row(self, row: StepLogged) -> None:
        """Record a row. If it arrives after later rows, it has a late evaluation, and its other fields are outdated."""
        late = row.step < self._values.get("smolcluster_step", 0)
        named = {name: field for name, (_, field) in METRICS.items() if field}
        values = {name: getattr(row, field) for name, field in named.items() if not late or field.startswith("val_")}
        self._set({name: value for name, value in values.items() if value is not None})
        if row.val_extra:
            with self._lock:
                self._named = dict(list(row.val_extra.items())[:MAX_METRICS])

    def _set(self, values: Mapping[str, float]) -> None:
        with self._lock:
            self._values.update(values)


def run_name_of(started: RunStarted, *, server: str) -> str:
    """Return the name of the run directory; for a worker without one, the server it joined."""
    return Path(started.run_dir).name or server


class _Server(socketserver.ThreadingTCPServer):
    """A few concurrent clients, a thread each. Not an HTTPServer, which looks up this machine's full name."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
    allow_reuse_address = sys.platform != "win32"  # on Windows it would allow two processes on one port

    def __init__(self, host: str, port: int, *, sink: PrometheusSink, names: set[str]) -> None:
        self.sink, self.names = sink, _names_of(host, names)
        self.any_address = host in ("0.0.0.0", "::", "")
        self._clients = threading.Semaphore(_MAX_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._clients.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""

    def knows(self, header: str | None) -> bool:
        """Return whether a Host header names this machine."""
        name = (header or "").rstrip(".").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in self.names:
            return True
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(name)
            return address.is_loopback or self.any_address  # only names can be rebound
        return False


def _names_of(host: str, names: set[str]) -> set[str]:
    """Return the valid Host names: those of loopback, also from a container, and on other addresses the machine's name."""
    always = {"localhost", "host.docker.internal", host.lower()}
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return always
    names = {name.lower() for name in names}
    return always | names | {f"{name}.local" for name in names}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S
    server_version, sys_version = "smolcluster", ""

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get("Host")):
            self._respond(HTTPStatus.MISDIRECTED_REQUEST, b"this machine does not have that name\n")
        elif self.path == "/metrics":
            self._respond(HTTPStatus.OK, generate_latest(self.server.sink), CONTENT_TYPE_PLAIN_0_0_4)
        elif self.path == "/health":
            self._respond(HTTPStatus.OK, b"ok\n")
        else:
            self._respond(HTTPStatus.NOT_FOUND, b"only /metrics and /health exist\n")

    def _respond(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log scrapes."""
