"""The life of a process that serves: a front with its page, or a stage. What is checked, in which order, and how it ends."""

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

from smolcluster.comm.addresses import is_loopback
from smolcluster.comm.elastic.transport.security import Keyring, check_bind, check_dial, load_keyring
from smolcluster.comm.elastic.transport.sockets import own_host, split_address
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
from smolcluster.serve.engine.sources import find_source
from smolcluster.serve.engine.stage import StageWorker
from smolcluster.serve.engine.types import SamplingParams
from smolcluster.serve.http import server as http
from smolcluster.serve.http.service import Service, ServiceLimits
from smolcluster.serve.in_process import InProcessClient, InProcessEngine
from smolcluster.stopping import stop_signals

log = logging.getLogger(__name__)

PORT = 65433  # where stages on other machines find the front
READY_S = 600.0
TEMPERATURE, TOP_P = 0.6, 0.9  # where neither the command nor a request gives one


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `smolcluster serve` was asked for."""

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
    temperature: float = TEMPERATURE  # where a request does not say
    top_p: float = TOP_P


def parse_distribution(text: str | None) -> tuple[int, ...] | str | None:
    """`10,10,10`, `auto`, or nothing."""
    if text is None or text == "auto":
        return text
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--layers {text}: give the layers of each stage, such as 10,10,10; or auto")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """How many stages there are to be, and how many of their processes are ours."""

    stages: int
    replicas: int
    workers: int
    distribution: tuple[int, ...] | str | None

    @property
    def missing(self) -> int:
        """Processes that must come from elsewhere."""
        return max(0, self.stages * self.replicas - self.workers)


def count_stages(wanted: ServeOptions) -> StageCounts:
    distribution = parse_distribution(wanted.layers)
    stages = wanted.stages or (len(distribution) if isinstance(distribution, tuple) else None)
    workers = wanted.workers if wanted.workers is not None else (stages or 1) * wanted.replicas
    stages = stages or max(1, workers // wanted.replicas)
    shape = StageCounts(stages=stages, replicas=wanted.replicas, workers=workers, distribution=distribution)
    if shape.missing and wanted.listen is None:
        raise UserError(
            f"--workers {workers} is too few for {stages} stage(s) of {wanted.replicas}: leave --workers out, or let other "
            f"machines join with --listen 0.0.0.0:{PORT}"
        )
    return shape


def run_front(wanted: ServeOptions, *, tell: Callable[[str], None], ready: Callable[[str], None]) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. Everything that can be wrong without the model is reported before it is loaded."""
    shape = count_stages(wanted)
    dtype_of(wanted.dtype)
    # Without --listen only our own processes connect, and nothing leaves this machine: no token is needed for that.
    keyring = None if wanted.listen is None else load_keyring(None, os.environ)
    listen = ("127.0.0.1", 0) if wanted.listen is None else split_address(wanted.listen)
    check_bind(listen[0], keyring)
    place = http.HttpSettings(
        bind=wanted.bind, port=wanted.port, key=wanted.api_key, allow_hosts=wanted.allow_hosts
    ).checked()
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, _terminated)
    with contextlib.closing(http.open_port(place)) as opened:
        number = opened.getsockname()[1]
        with _front(wanted, shape, keyring, listen, tell) as (front, service):
            if wanted.port is None and number != http.PORT:
                tell(f"port {http.PORT} is taken: this page has {number}")
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
    """While the model is loaded, clients get a 503 that says so. With `alone` no other machine will join: a failure of our own
    stages ends it."""
    failed = asyncio.Event()
    loading: list[asyncio.Task[None]] = []

    async def load(url: str) -> None:
        try:
            if alone:
                await wait_until_loaded(front)
        except Exception:  # whatever it is: it would look as if it still loaded
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
    wanted: ServeOptions,
    shape: StageCounts,
    keyring: Keyring | None,
    listen: tuple[str, int],
    tell: Callable[[str], None],
) -> Iterator[tuple[Front, Service]]:
    """The model, which its stages begin to load."""
    if shape.workers:
        choose_device(wanted.device, asked_by="--device")
    source = find_source(wanted.model)
    text = source.text()
    transport = TcpTransport(new_peer(role="front", rank=0, host=socket.gethostname()), keyring=keyring, limits=LINKS)
    with contextlib.ExitStack() as stack:
        try:
            front = Front(
                transport,
                source,
                options=LayoutOptions(stages=shape.stages, replicas=shape.replicas, distribution=shape.distribution),
                codec=wanted.codec,
                dtype=dtype_of(wanted.dtype),
                limits=scheduler.SchedulerLimits(
                    running=wanted.concurrency,
                    waiting=max(scheduler.SchedulerLimits().waiting, service_limits(wanted).sequences),
                ),
                listen=listen,
            )
        except BaseException:
            transport.close()
            raise
        host, port = listen[0], front.address.rpartition(":")[2]
        options = [
            *(["--device", wanted.device] if wanted.device else []),
            *(["--dtype", wanted.dtype] if wanted.dtype else []),
            *(["--bind", host] if not is_loopback(host) else []),
            *(["--no-token"] if keyring is None else []),
            *(["--model", source.reference["path"]] if source.reference["kind"] != "package" else []),
        ]
        local = f"127.0.0.1:{port}" if host in ("0.0.0.0", "::") else front.address
        children = LocalStages(local, shape.workers, gave_up=front.note_problem, options=options)
        stack.callback(children.close)
        stack.callback(front.close)  # before that: it sends them a stop
        stack.callback(children.expect_the_end)
        tell(f"{source.name}: {source.config.num_layers} layers, {shape.stages} stage(s)")
        if wanted.listen is not None:
            where, server = (
                ("other machines", f"HOST:{port}") if not is_loopback(host) else ("this machine", front.address)
            )
            needed = f"; {shape.missing} more needed" if shape.missing else ""
            tell(f"stages on {where}: smolcluster stage --server {server}{needed}")
        defaults = SamplingParams(temperature=wanted.temperature, top_p=wanted.top_p)
        yield (
            front,
            Service(
                front,
                text,
                model_name=client_model_name(wanted.model),
                defaults=defaults,
                limits=service_limits(wanted),
                chats=text.has_template,
                openings=source.openings(),
            ),
        )


def service_limits(wanted: ServeOptions) -> ServiceLimits:
    """As many wait as are answered at once, whatever that number is."""
    usual = ServiceLimits()
    sequences = max(usual.sequences, 2 * wanted.concurrency)
    return replace(usual, sequences=sequences, requests=max(usual.requests, sequences))


def load_in_process(model: str, device: str | None) -> InProcessClient:
    """A model for this process alone."""
    source, chosen = find_source(model), choose_device(device, asked_by="--device")
    text = source.text()
    dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
    engine = InProcessEngine(source, device=chosen, dtype=dtype)
    defaults = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
    return InProcessClient(Service(engine, text, model_name=client_model_name(model), defaults=defaults))


def client_model_name(model: str) -> str:
    """What clients call it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"


async def wait_until_loaded(front: Front) -> None:
    """Until all layers are held. Raises SmolclusterError with what is in the way."""
    until = time.monotonic() + READY_S
    while not front.wait_ready(0.0):
        problems = [] if front.coming else front.problems()  # a spare may have taken over
        if problems or time.monotonic() > until:
            raise SmolclusterError("; ".join(problems) or f"the model was not loaded in {READY_S:g} s")
        await asyncio.sleep(0.1)


def dtype_of(name: str | None) -> torch.dtype:
    if name is not None and name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name or "fp32"]


def run_stage(
    server: str,
    *,
    name: str | None,
    device: str | None,
    dtype: str | None,
    memory: str | None,
    files: Path | None,
    threads: int | None,
    bind: str | None,
    port: int,
    no_token: bool,
    local_rank: int,
    stop: threading.Event,
) -> int:
    """Hold layers until `stop`, Ctrl-C, or a stop from the front."""
    split_address(server)
    keyring = None if no_token else load_keyring(None, os.environ)
    check_dial(server, keyring)
    here = own_host(server)
    check_bind(bind or here, keyring)
    chosen = choose_device(device, local_rank=local_rank, asked_by="--device")
    kind = None if dtype is None else dtype_of(dtype)
    if chosen.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length: 40 ms a token
    limit = None if memory is None else parse_size(memory, what="--memory")
    if threads is not None:
        torch.set_num_threads(threads)
    name = name or socket.gethostname().partition(".")[0] or "here"
    transport = TcpTransport(new_peer(role="stage", rank=0, host=name), keyring=keyring, limits=LINKS)
    try:
        holder = StageWorker(
            transport,
            server,
            name=name,
            host=this_machine(),
            listen=(bind or here, port),
            advertise=here,
            device=chosen,
            dtype=kind,
            memory_bytes=limit,
            files=None if files is None else files.expanduser(),
        )
    except BaseException:
        transport.close()
        raise
    interrupted = threading.Event()

    def end(*_: object) -> None:
        interrupted.set()
        holder.stop()

    for number in stop_signals():
        signal.signal(number, end)

    def watch() -> None:
        stop.wait()
        holder.stop()

    threading.Thread(target=watch, daemon=True).start()
    try:
        holder.run()
    finally:
        transport.close()
    if holder.refusal is not None:
        raise UserError(f"{server} would not have this stage: {holder.refusal}")
    return 130 if interrupted.is_set() and not stop.is_set() else 0
