"""Run a front with its HTTP service, or a stage: checks, start and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from smolcluster.comm.addresses import dial_address, is_loopback, local_address_towards, split_address
from smolcluster.comm.elastic.transport.security import Keyring, check_bind, check_dial, load_keyring
from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.compute.device import choose_device
from smolcluster.compute.memory import parse_size
from smolcluster.compute.precision import DTYPES
from smolcluster.engine.identity import new_peer, this_machine
from smolcluster.errors import SmolclusterError, UserError, unknown_name
from smolcluster.serve.engine import scheduler
from smolcluster.serve.engine.front import LINKS, Front
from smolcluster.serve.engine.layout import LayoutOptions
from smolcluster.serve.engine.local import LocalStages
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.sources import find_source
from smolcluster.serve.engine.stage import StageWorker
from smolcluster.serve.engine.types import SamplingParams
from smolcluster.serve.http import server as http
from smolcluster.serve.http.service import Service, ServiceLimits
from smolcluster.serve.in_process import InProcessClient, InProcessEngine
from smolcluster.stopping import stop_signals

log = logging.getLogger(__name__)

PORT = 65433  # of the front, for stages on other machines
LOAD_TIMEOUT_S = 600.0
TEMPERATURE, TOP_P = 0.6, 0.9  # defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `smolcluster serve`."""

    model: str
    stages: int | None = None
    replicas: int = 1
    layers: str | None = None
    workers: int | None = None  # stages on this machine
    listen: str | None = None  # host:port for stages on other machines
    codec: str = "fp16"
    device: str | None = None
    dtype: str | None = None
    bind: str = "127.0.0.1"
    port: int | None = None
    api_key: str | None = None
    allow_hosts: tuple[str, ...] = ()
    concurrency: int = 32
    temperature: float = TEMPERATURE  # default of requests
    top_p: float = TOP_P


def parse_distribution(text: str | None) -> tuple[int, ...] | str | None:
    """Parse `10,10,10` or `auto`."""
    if text is None or text == "auto":
        return text
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--layers {text}: give the number of layers of each stage, such as 10,10,10, or auto")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Stages, and how many of their processes run on this machine."""

    stages: int
    replicas: int
    workers: int
    distribution: tuple[int, ...] | str | None

    @property
    def missing(self) -> int:
        """Stage processes that must join from other machines."""
        return max(0, self.stages * self.replicas - self.workers)


def count_stages(options: ServeOptions) -> StageCounts:
    distribution = parse_distribution(options.layers)
    stages = options.stages or (len(distribution) if isinstance(distribution, tuple) else None)
    workers = options.workers if options.workers is not None else (stages or 1) * options.replicas
    stages = stages or max(1, workers // options.replicas)
    shape = StageCounts(stages=stages, replicas=options.replicas, workers=workers, distribution=distribution)
    if shape.missing and options.listen is None:
        raise UserError(
            f"--workers {workers} is too few for {stages} stage(s) of {options.replicas}: leave out --workers, or let other "
            f"machines join with --listen 0.0.0.0:{PORT}"
        )
    return shape


def run_front(options: ServeOptions, *, report: Callable[[str], None], ready: Callable[[str], None]) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. Options are checked before the model is loaded."""
    shape = count_stages(options)
    dtype_of(options.dtype)
    # Without --listen only processes of this machine connect: no token is needed.
    keyring = None if options.listen is None else load_keyring(None, os.environ)
    listen = ("127.0.0.1", 0) if options.listen is None else split_address(options.listen)
    check_bind(listen[0], keyring)
    place = http.HttpSettings(
        bind=options.bind, port=options.port, key=options.api_key, allow_hosts=options.allow_hosts
    ).checked()
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, _terminated)
    with contextlib.closing(http.open_port(place)) as opened:
        number = opened.getsockname()[1]
        with _front(options, shape, keyring, listen, report) as (front, service):
            if options.port is None and number != http.PORT:
                report(f"port {http.PORT} is in use: serving on {number}")
            asyncio.run(_serve(front, service, place, opened, ready, alone=not shape.missing))
    return 0


def _terminated(number: int, _: object) -> None:
    """Exit through the context managers, which stop the stages."""
    raise SystemExit(128 + number)


async def _serve(
    front: Front,
    service: Service,
    place: http.HttpSettings,
    opened: socket.socket,
    ready: Callable[[str], None],
    *,
    alone: bool,
) -> None:
    """Serve; clients get 503 until the model is loaded. With `alone` no other machine will join: stop if local stages fail."""
    failed = asyncio.Event()
    loading: list[asyncio.Task[None]] = []

    async def load(url: str) -> None:
        try:
            if alone:
                await wait_until_loaded(front)
        except Exception:  # of any kind: else the server would seem to load forever
            failed.set()
            raise
        ready(url)

    def listening(url: str) -> None:
        loading.append(asyncio.create_task(load(url)))

    try:
        await http.serve(service, place, ready=listening, opened=opened, until=failed)
        if failed.is_set():
            await loading[0]
    finally:
        for task in loading:
            task.cancel()


@contextlib.contextmanager
def _front(
    options: ServeOptions,
    shape: StageCounts,
    keyring: Keyring | None,
    listen: tuple[str, int],
    report: Callable[[str], None],
) -> Iterator[tuple[Front, Service]]:
    """Start the front and its local stages, which begin to load the model."""
    if shape.workers:
        choose_device(options.device, asked_by="--device")
    source = find_source(options.model)
    text = source.text()
    transport = TcpTransport(new_peer(role="front", rank=0, host=socket.gethostname()), keyring=keyring, limits=LINKS)
    with contextlib.ExitStack() as stack:
        try:
            front = Front(
                transport,
                source,
                options=LayoutOptions(stages=shape.stages, replicas=shape.replicas, distribution=shape.distribution),
                codec=options.codec,
                dtype=dtype_of(options.dtype),
                limits=scheduler.SchedulerLimits(
                    running=options.concurrency,
                    waiting=max(scheduler.SchedulerLimits().waiting, service_limits(options).sequences),
                ),
                listen=listen,
            )
        except BaseException:
            transport.close()
            raise
        host, port = listen[0], front.address.rpartition(":")[2]
        arguments = _stage_arguments(options, source, host, token=keyring is not None)
        children = LocalStages(
            dial_address(host, int(port)), shape.workers, gave_up=front.note_problem, options=arguments
        )
        stack.callback(children.close)
        stack.callback(front.close)  # first: it sends STOP
        stack.callback(children.stop_restarting)
        report(f"{source.name}: {source.config.num_layers} layers, {shape.stages} stage(s)")
        if options.listen is not None:
            where, server = (
                ("other machines", f"HOST:{port}") if not is_loopback(host) else ("this machine", front.address)
            )
            needed = f"; {shape.missing} more needed" if shape.missing else ""
            report(f"stages on {where}: smolcluster stage --server {server}{needed}")
        defaults = SamplingParams(temperature=options.temperature, top_p=options.top_p)
        yield (
            front,
            Service(
                front,
                text,
                model_name=client_model_name(options.model),
                defaults=defaults,
                limits=service_limits(options),
                example_prompts=source.example_prompts(),
            ),
        )


def _stage_arguments(options: ServeOptions, source: ModelSource, host: str, *, token: bool) -> list[str]:
    return [
        *(["--device", options.device] if options.device else []),
        *(["--dtype", options.dtype] if options.dtype else []),
        *(["--bind", host] if not is_loopback(host) else []),
        *(["--no-token"] if not token else []),
        *(["--model", source.reference["path"]] if source.reference["kind"] != "package" else []),
    ]


def service_limits(options: ServeOptions) -> ServiceLimits:
    """Return limits with room for the running sequences and the same number of queued ones."""
    defaults = ServiceLimits()
    sequences = max(defaults.sequences, 2 * options.concurrency)
    return replace(defaults, sequences=sequences, requests=max(defaults.requests, sequences))


def load_in_process(model: str, device: str | None) -> InProcessClient:
    source, chosen = find_source(model), choose_device(device, asked_by="--device")
    text = source.text()
    dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
    engine = InProcessEngine(source, device=chosen, dtype=dtype)
    defaults = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
    return InProcessClient(Service(engine, text, model_name=client_model_name(model), defaults=defaults))


def client_model_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"


async def wait_until_loaded(front: Front) -> None:
    """Wait until all layers are loaded. Raises SmolclusterError with the problems."""
    until = time.monotonic() + LOAD_TIMEOUT_S
    while not front.wait_ready(0.0):
        problems = [] if front.loading else front.problems()  # else a spare may take over
        if problems or time.monotonic() > until:
            raise SmolclusterError("; ".join(problems) or f"the model was not loaded in {LOAD_TIMEOUT_S:g} s")
        await asyncio.sleep(0.1)


def dtype_of(name: str | None) -> torch.dtype:
    if name is not None and name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name or "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProcessOptions:
    """Options of `smolcluster stage`."""

    name: str | None = None
    device: str | None = None
    dtype: str | None = None
    memory: str | None = None
    files: Path | None = None  # from which the front may request weights
    threads: int | None = None
    bind: str | None = None
    port: int = 0
    no_token: bool = False
    local_rank: int = 0


def run_stage(server: str, options: StageProcessOptions, stop: threading.Event) -> int:
    """Run a stage until `stop`, Ctrl-C, or STOP from the front. Return the exit status."""
    worker, transport = _open_stage(server, options)
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        worker.stop()

    for number in stop_signals():
        signal.signal(number, interrupt)

    def watch() -> None:
        stop.wait()
        worker.stop()

    threading.Thread(target=watch, daemon=True).start()
    try:
        worker.run()
    finally:
        transport.close()
    if worker.refusal is not None:
        raise UserError(f"{server} refused this stage: {worker.refusal}")
    return 130 if interrupted.is_set() and not stop.is_set() else 0


def _open_stage(server: str, options: StageProcessOptions) -> tuple[StageWorker, TcpTransport]:
    split_address(server)
    keyring = None if options.no_token else load_keyring(None, os.environ)
    check_dial(server, keyring)
    here = local_address_towards(server)
    check_bind(options.bind or here, keyring)
    device = choose_device(options.device, local_rank=options.local_rank, asked_by="--device")
    dtype = None if options.dtype is None else dtype_of(options.dtype)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN replans for every length: 40 ms a token
    memory_bytes = None if options.memory is None else parse_size(options.memory, what="--memory")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    name = options.name or socket.gethostname().partition(".")[0] or "here"
    transport = TcpTransport(new_peer(role="stage", rank=0, host=name), keyring=keyring, limits=LINKS)
    try:
        worker = StageWorker(
            transport,
            server,
            name=name,
            host=this_machine(),
            listen=(options.bind or here, options.port),
            advertise=here,
            device=device,
            dtype=dtype,
            memory_bytes=memory_bytes,
            files=None if options.files is None else options.files.expanduser(),
        )
    except BaseException:
        transport.close()
        raise
    return worker, transport
