"""Run one worker that joins a server, as started by a user on each machine. Imports no torch until the worker runs."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolcluster.comm.addresses import is_loopback
from smolcluster.config import Overrides, list_overrides, load_config, public_dict, resolve
from smolcluster.config.names import known_keys
from smolcluster.config.schema import Config
from smolcluster.config.strategies import check_name
from smolcluster.engine.checks import OWN_TO_A_HOST
from smolcluster.engine.elastic.adopted_config import FROM_SERVER
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import UserError, WorkerFailed, suggest
from smolcluster.launch.local.outcome import Interrupted, Outcome
from smolcluster.launch.prepare import absolute_task, is_task
from smolcluster.observe.events import Event, Notice, Phase, RunStarted
from smolcluster.observe.logs import log_path, setup_logging
from smolcluster.observe.observer import Sink

if TYPE_CHECKING:
    from smolcluster.observe.loki import Pusher

# Configuration keys that a worker may set for its own machine. Everything else comes from the server.
LOCAL_KEYS = OWN_TO_A_HOST | {
    *("training.precision", "training.compile", "training.gradient_checkpointing"),
    *("data.name", "data.tokenizer", "data.download"),
    *(key for key in known_keys() if key.startswith("logging.")),
}


def worker_spec(
    rank: int,
    host: str,
    *,
    server: str | None = None,
    sources: Sequence[str] = (),
    task: str | None = None,
    strategy: str | None = None,
    batch_size: int | None = None,
    overrides: Overrides = (),
    local_rank: int = 0,
    local_world_size: int = 1,
) -> WorkerSpec:
    """Return the spec of one worker. `overrides`: its own keys. A source that is a Python file is its task.

    With configuration files the worker compares them with the server's. Without any it adopts the server's
    (`engine/elastic/adopted_config.py`).
    """
    tasks = [source for source in sources if is_task(source)]
    if len(tasks) + (task is not None) > 1:
        raise UserError(f"one task at a time, not {', '.join([*tasks, *([task] if task else [])])}")
    task = tasks[0] if tasks else task
    sources = [source for source in sources if source not in tasks]
    given = load_config(
        sources, overrides=[*list_overrides(overrides), *([("strategy.name", strategy)] if sources else [])]
    )
    resolved: dict[str, Any] = {}
    if sources:
        config = resolve(given)
        resolved = config.model_dump(mode="json")
        _check_host(config, rank, host)
        server = server or _server_of(config)
    else:
        _check_local(given)
    if server is None:
        raise UserError("give --server HOST:PORT, as the server prints it when it starts")
    _check_address(server)
    local = _values(given.model_dump(mode="json"), [key for key in _given_keys(given) if key in LOCAL_KEYS])
    if sources:  # the configuration itself has them, resolved
        local = {key: value for key, value in local.items() if key not in ("data.name", "data.tokenizer")}
    if batch_size is not None:
        local["cluster.batch_size"] = {host: batch_size}
    if task is not None:
        local["task"] = absolute_task(task)
    return WorkerSpec(
        config=resolved,
        rank=rank,
        world_size=1,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=host,
        run_dir="",
        plane="elastic",
        server=server,
        overrides=local,
        strategy=check_name(strategy) if strategy is not None else "",
    )


def _check_host(config: Config, rank: int, host: str) -> None:
    cluster = config.cluster
    known = cluster.workers or sorted(set(cluster.host_ip) - {cluster.server})
    if known and host not in known:
        raise UserError(f"'{host}' is not among the workers of this configuration; {suggest(host, known)}")
    limit = cluster.num_workers or 1
    if rank > limit:
        raise UserError(f"rank {rank} is too high: this configuration has {limit} workers, counted from 0 or 1")


def _server_of(config: Config) -> str | None:
    """Return `host_ip[server]:port`; None if the cluster file has no such entry."""
    cluster = config.cluster
    address = cluster.host_ip.get(cluster.server or "")
    return f"{address}:{cluster.port}" if address else None


def _check_address(server: str) -> None:
    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"--server '{server}' is not HOST:PORT, such as 192.168.1.10:65432")


def _given_keys(config: Config) -> list[str]:
    """Return the dotted names of all keys set in files, overrides and flags."""
    return [
        key
        for key in known_keys()
        for section, _, name in [key.rpartition(".")]
        if name in (getattr(config, section) if section else config).model_fields_set
    ]


def _check_local(config: Config) -> None:
    for key in _given_keys(config):
        if key not in LOCAL_KEYS:
            raise UserError(
                f"--override: {key} is set by the server, which sends it to this worker; "
                f"a worker may set: {', '.join(sorted(LOCAL_KEYS))}"
            )


def local_override_args(config: Config, *, same_machine: bool) -> list[str]:
    """Return the arguments by which a launcher passes `local_overrides` to a worker."""
    local = local_overrides(config, same_machine=same_machine)
    return ["--override", *local] if local else []


def local_overrides(config: Config, *, same_machine: bool) -> list[str]:
    """Return `key=value` for the keys that a worker does not adopt from its server.

    `same_machine`: keep a loopback address of Loki, which only the server's machine reaches.
    """
    values = _values(public_dict(config), sorted((LOCAL_KEYS - FROM_SERVER) | {"data.name"}))
    defaults = _values(public_dict(resolve(Config.model_validate({}))), list(values))
    if (url := config.logging.loki_url) is not None and not same_machine:
        from smolcluster.observe.loki import endpoint_of

        if is_loopback(endpoint_of(url).host):
            del values["logging.loki_url"]
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value != defaults[key]]


def _values(plain: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: plain[section][name] for key in keys for section, _, name in [key.partition(".")]}


def run_joined(spec: WorkerSpec, *, log_dir: Path | None = None) -> int:
    """Run that worker in this process until the run is over. Return 0; raise when it is refused, stopped or fails."""
    from smolcluster.engine.channel import SignalChannel
    from smolcluster.engine.process.main import run_worker
    from smolcluster.observe.console import ConsoleSink

    sinks: list[Sink] = [ConsoleSink(alone=True)]
    pushing = _LogPusher(spec, log_dir, sinks)
    logging.getLogger("smolcluster.comm.elastic.transport.tcp").addFilter(_ShowWaiting(spec.server))
    outcome = Outcome()
    status = run_worker(spec, SignalChannel(), [outcome, pushing, *sinks, _EndNotice(spec, sinks)])
    failed = outcome.failed
    if status == 0:
        return 0
    if failed is None:
        raise Interrupted("interrupted; the run continues without this worker")
    if failed.kind == "user":
        raise UserError(failed.message)
    raise WorkerFailed(f"worker {spec.rank} failed: {failed.message}\n{failed.traceback}".rstrip())


class _LogPusher(Sink):
    """Write this worker's log, and push it to the Loki that its owner set.

    Without a log folder the lines go to a temporary file, which is removed once they are pushed or no Loki is set.
    """

    def __init__(self, spec: WorkerSpec, log_dir: Path | None, sinks: list[Sink]) -> None:
        self._spec, self._sinks = spec, sinks
        self._pusher: Pusher | None = None
        self._temporary: Path | None = None
        loki_url = spec.overrides.get("logging.loki_url")
        if loki_url:
            from smolcluster.observe.loki import endpoint_of

            endpoint_of(loki_url)  # raises before anything is written
        if log_dir is None:
            try:
                log_dir = self._temporary = Path(tempfile.mkdtemp(prefix="smolcluster-log-"))
            except OSError as error:
                if loki_url:
                    raise UserError(f"cannot make a folder for a temporary log ({error}); give --log-dir") from error
        path = None if log_dir is None else log_dir / log_path("", spec.role, spec.rank, spec.host).name
        self._log_to(path)
        if loki_url:
            from smolcluster.observe.loki import start_pushing

            assert path is not None
            self._pusher = start_pushing(path, url=loki_url, role=spec.role, rank=spec.rank, host=spec.host)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted) and self._pusher is None:
            self._forget()

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
            if self._pusher.unsent_bytes and self._temporary is not None:
                text = (
                    f"not all lines of this worker reached Loki; send the rest: smolcluster logs push {self._temporary}"
                )
                for sink in self._sinks:
                    sink.handle(Notice(level="WARNING", message=text))
                return
        self._forget()

    def _log_to(self, path: Path | None) -> None:
        spec = self._spec
        level = spec.overrides.get("logging.level", "INFO")
        setup_logging(path, level=level, role=spec.role, rank=spec.rank, host=spec.host)

    def _forget(self) -> None:
        if self._temporary is not None:
            self._log_to(None)
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


class _EndNotice(Sink):
    """Print that the run is over."""

    def __init__(self, spec: WorkerSpec, sinks: list[Sink]) -> None:
        self._server, self._sinks = spec.server, sinks

    def handle(self, event: Event) -> None:
        if isinstance(event, Phase) and event.name == "finished":
            text = f"the run is over; its results are on the server at {self._server}"
            for sink in self._sinks:
                sink.handle(Notice(level="INFO", message=text))


class _ShowWaiting(logging.Filter):
    """Show the transport's log line about a missing server on the screen."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._server = server

    def filter(self, record: logging.LogRecord) -> bool:
        of_server = isinstance(record.args, tuple) and record.args[:1] == (self._server,)
        if of_server and str(record.msg).startswith("waiting for a peer"):
            record.msg = record.msg.replace("a peer", "the server", 1)
            record.levelno = logging.WARNING  # the console shows warnings; levelname stays
        return True
