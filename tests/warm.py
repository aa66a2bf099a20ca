"""`python -m smolcluster ...` in a process that has torch imported already.

Importing torch and what its optimizers import takes seconds of a core, and a command with two workers does it three times:
most of what hundreds of end-to-end tests would do. So they ask a process that has done it once, and has done nothing else, to
fork. What comes of it is what `subprocess.Popen` was asked for, as far as our code can see: a child of whoever asked, with the
environment, folder, descriptors, session and signals it was to have, its own copy of every module of ours (but those of the
configuration, which keep nothing), and `__main__` run from its first line. The processes that it starts in turn are forked as
well.

It works below `Popen`, where that calls the system (`subprocess._fork_exec`), for `[sys.executable, "-m", "smolcluster..."]`,
also in another network namespace (`ip netns exec`). What runs under ssh, Slurm, in containers, from a shell or with another
PYTHONPATH starts from nothing, as everything does with SMOLCLUSTER_TESTS_COLD=1 and where this cannot be done.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

COLD = "SMOLCLUSTER_TESTS_COLD"
ADDS = "SMOLCLUSTER_TESTS_PATH"  # a PYTHONPATH that names packages of a test, and none that is imported here already
OURS = ("smolcluster", "benchmarks")
PRELOAD = (
    *("torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.distributed.tensor.parallel", "numpy", "safetensors.torch", "yaml"),
    *("pydantic", "typer", "typer.rich_utils", "rich.console", "rich.live", "rich.markup", "rich.progress"),
    *(
        "pydantic.main",
        "pydantic.type_adapter",
        "pydantic.types",
        "annotated_types",
        "numpy.typing",
        "xml.sax.saxutils",
    ),
    *("rich.table", "asyncssh", "cryptography", "uvloop", "starlette.applications", "uvicorn", "jinja2", "tokenizers"),
)
# What is read when torch is imported, or by what it loads: as tests set it, and as commands do.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MOST = 1 << 20

PURE = (
    "smolcluster.config"  # it and what it imports keep no state, and take a third of the time that modules of ours take
)
_pure: set[str] = set()

_fork_exec: Callable[..., int] | None = getattr(subprocess, "_fork_exec", None)


class Warm:
    """The process that others fork from, for those who ask. Its children become children of the one that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock, _taking_orphans():
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
            answer = self._socket.recv(_MOST)
        if not answer:
            raise OSError("the process that others fork from has died")
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    """Processes below this one whose parent ends become its children. Not for longer than it takes: it would never ask how the
    others have ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def install() -> Warm | None:
    """From now on commands of ours that this process starts are forked; None where they cannot be."""
    if os.environ.get(COLD) or _fork_exec is None or sys.platform != "linux":
        return None
    warm = Warm()
    _hook(warm.fork)
    return warm


def uninstall(warm: Warm | None) -> None:
    if warm is not None:
        subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]
        warm.close()


def _hook(fork: Callable[[dict[str, Any], list[int]], int]) -> None:
    """Let `fork` start what is ours. It is given what to run, and standard input, output and error."""
    cold = _fork_exec
    assert cold is not None

    def start(
        args: list[Any], executables: Any, close_fds: bool, keep: tuple[int, ...], cwd: Any, env: Any, *rest: Any
    ) -> int:
        (p2cread, _, _, c2pwrite, _, errwrite), (_, errpipe), (restore_signals, session, group) = (
            rest[:6],
            rest[6:8],
            rest[8:11],
        )
        others = rest[11:16]  # user, groups, mask, and what to call before
        words = [os.fsdecode(word) for word in args]
        inside = words[3] if words[:3] == ["ip", "netns", "exec"] else None
        words = words if inside is None else words[4:]
        ours = words[:2] == [sys.executable, "-m"] and words[2].partition(".")[0] in OURS
        plain = close_fds and keep == (errpipe,) and restore_signals and others == (None, None, None, -1, None)
        environ = dict(os.environ) if env is None else dict(os.fsdecode(line).partition("=")[::2] for line in env)
        path = environ.get("PYTHONPATH")  # what it names may change what is imported
        same = path in (os.environ.get("PYTHONPATH"), environ.get(ADDS))
        if not (ours and plain and same):
            return cold(args, executables, close_fds, keep, cwd, env, *rest)
        folder = os.fsdecode(cwd or Path.cwd())
        request = {"words": words[2:], "cwd": folder, "environ": environ, "session": bool(session), "group": group}
        request["namespace"] = inside
        request["held"] = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        given = (p2cread, c2pwrite, errwrite)
        return fork(request, [place if number == -1 else number for place, number in enumerate(given)])

    subprocess._fork_exec = start  # type: ignore[attr-defined]


def _fork_here(request: dict[str, Any], descriptors: list[int]) -> int:
    """A command starts a process of its own: a child of the command, as `Popen` would make it."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until it is what it should be
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads; what they hold is not used again
            child = os.fork()
        if child == 0:
            _become(request, descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return child


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that was asked for, and never return. All signals are blocked so far, and stay so where they were held."""
    status = 1
    try:
        if request["session"]:
            os.setsid()
        if request["group"] >= 0:
            os.setpgid(0, request["group"])
        _forget()
        _take_over(request, descriptors)
        _hook(_fork_here)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["held"])
        module, *arguments = request["words"]
        sys.argv = [module, *arguments]
        status = _run(module)
    except BaseException:  # noqa: BLE001  nothing may return from here
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


def _forget() -> None:
    """What a new interpreter would not have: what runs at exit, handlers of signals and logs, our modules."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and (logger is logging.root or _is_ours(logger.name)):
            logger.handlers.clear()
            logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
            logger.propagate = True
    for name in [name for name in sys.modules if _is_ours(name) and name not in _pure]:
        del sys.modules[name]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in (*OURS, "worker")


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    kept = [os.dup(number) for number in descriptors]
    high = [os.dup2(number, 1000 + place, inheritable=False) for place, number in enumerate(kept)]
    for place, number in enumerate(high):
        os.dup2(number, place)
    os.closerange(3, 65536)
    if request["namespace"] is not None:
        enter_namespace(request["namespace"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.path[0] = str(Path.cwd())
    if (added := os.environ.get(ADDS)) and added not in sys.path:
        sys.path.insert(1, added)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        sys.modules["torch"].set_num_threads(int(threads))


def enter_namespace(name: str) -> None:
    """From here on this process is on another host, as far as the network goes."""
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def _stream(number: int) -> io.TextIOWrapper:
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = io.FileIO(number, "wb", closefd=False)
    errors = "backslashreplace" if number == 2 else "strict"
    buffer: Any = raw if at_once else io.BufferedWriter(raw)
    lines = number == 2 or raw.isatty()
    return io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, line_buffering=lines, write_through=at_once)


def _serve(number: int) -> None:
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            __import__(name)
    __import__(PURE)
    _pure.update(name for name in sys.modules if _is_ours(name))
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who run the tests
    asked = socket.socket(fileno=number)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(asked, _MOST, 3)
        except OSError:
            return
        if not message:
            return
        asked.send(str(_fork_away(json.loads(message), list(descriptors))).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_away(request: dict[str, Any], descriptors: list[int]) -> int:
    """A grandchild whose parent is gone, and so a child of the one who asked: by the time its number is told."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        child = os.fork()
        if child == 0:
            _become(request, descriptors)
        os.write(writing, str(child).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    told = os.read(reading, 32)
    os.close(reading)
    return int(told)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
