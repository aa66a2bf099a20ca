"""Connect to a machine of a cluster, over ssh or locally, and call the agent on it.

When `connect` fails, its HostError names the layer: name, route, port, ssh, Python. Host keys are checked as ssh
does, against ~/.ssh/known_hosts; an unknown key is only accepted with --accept-new.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from smolcluster.errors import MissingExtra, SmolclusterError
from smolcluster.launch.cluster.layout import ClusterMachine
from smolcluster.observe.text import printable

CONNECT_S = 10.0
KNOWN_HOSTS = "~/.ssh/known_hosts"
OLDEST_PYTHON = (3, 11)
GREETING_LINES = 1000  # limits for what a login shell prints before Python starts
GREETING_S = 30.0
# The modules of the agent, each after those that it imports.
_MODULES = (
    *("keeper", "agent.base", "agent.processes", "agent.files", "agent.environment", "agent.machine"),
    *("agent.following", "agent.main"),
)
# Prints its version in two forms, so that no shell greeting is taken for it, then runs the code it receives. No new syntax, for
# old Pythons; no quotes inside, for any shell.
_BOOT = (
    "import sys; print(*sys.version_info[:3], sys.hexversion); sys.stdout.flush(); "
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
)
# Names to try for Python; Homebrew's folder is not in the PATH of a non-login shell.
_PYTHONS = (
    *("python3", "python3.13", "python3.12", "python3.11", "/opt/homebrew/bin/python3", "/usr/local/bin/python3"),
    *("python", "py"),
)


class HostError(SmolclusterError):
    """A problem of one machine. `layer`: where it is, by the names of `doctor/layers.py`."""

    exit_code = 2

    def __init__(self, host: str, what: str, remedy: str = "", *, layer: str = "ssh") -> None:
        super().__init__(f"{host}: {what}" + (f"; {remedy}" if remedy else ""))
        self.host, self.what, self.remedy, self.layer = host, what, remedy, layer


class Host:
    """A connected machine. Each `agent` is a separate process there."""

    def __init__(self, machine: ClusterMachine, connection: Any | None) -> None:
        self.machine, self.connection = machine, connection
        self.python = machine.python

    @property
    def name(self) -> str:
        return self.machine.name

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[Agent]:
        try:
            agent = await self._start_agent()
        except OSError as error:
            raise HostError(self.name, f"the agent cannot be started: {error}", layer="route") from error
        try:
            yield agent
        finally:
            await agent.close()

    async def call(self, op: str, **arguments: Any) -> Any:
        """Call an operation of a fresh agent, as `Agent.call` does."""
        async with self.agent() as agent:
            return await agent.call(op, **arguments)

    async def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self.connection.wait_closed(), 2.0)

    async def _start_agent(self) -> Agent:
        tried = [self.python] if self.python is not None else list(_PYTHONS)
        problem = old = ""
        for python in tried:
            try:
                stream = await self._run(python)
            except OSError as error:
                problem = problem or error.strerror or str(error)
                continue
            version, greeting = await _first_line(stream)
            if version is None:
                problem = problem or await stream.stderr() or greeting
                continue
            if version < OLDEST_PYTHON:
                await stream.close()
                old = old or f"{python} is Python {'.'.join(map(str, version))}"
                continue
            self.python = python
            agent = Agent(self, stream)
            await agent.boot()
            return agent
        need = ".".join(map(str, OLDEST_PYTHON))
        reason = problem.splitlines()[0][:200] if problem else "no response"
        what = f"there is no Python ({self.python or 'python3'}): {reason}"
        if old:
            what = f"{old} there, and {need} or newer is needed"
        remedy = f"install Python {need} there, or name one as hosts.{self.name}.python in the cluster file"
        raise HostError(self.name, what, remedy, layer="Python")

    async def _run(self, python: str) -> Stream:
        """Start Python there. Raises OSError if this machine does not have it, HostError for a lost connection."""
        if self.connection is None:
            named = str(Path(python).expanduser()) if python.startswith("~") else python
            here = sys.executable if python in _PYTHONS else named
            command, pipe = [here, "-u", "-c", _BOOT], asyncio.subprocess.PIPE
            return Stream(
                await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 26)
            )
        import asyncssh

        line = f'{_quote(python)} -u -c "{_BOOT}"'
        try:
            return _SshStream(await self.connection.create_process(line, encoding=None, window=1 << 22))
        except (OSError, asyncssh.Error) as error:
            raise HostError(self.name, f"the connection was lost: {error}", layer="route") from error


def _quote(python: str) -> str:
    """Quote a path for an unknown shell, only where needed."""
    if "\\" in python:  # of Windows
        return f'"{python}"' if " " in python else python
    home, slash, rest = python.partition("/")
    if home.startswith("~") and re.fullmatch(r"~[\w.-]*", home):  # for the shell to fill in
        return f"{home}{slash}{shlex.quote(rest)}"
    return shlex.quote(python)


async def _first_line(stream: Stream) -> tuple[tuple[int, ...] | None, str]:
    """Skip what a login shell prints. Return the version that Python printed, and the last line before it."""
    greeting, until = "", time.monotonic() + GREETING_S
    for _ in range(GREETING_LINES):
        try:
            line = await asyncio.wait_for(stream.line(), until - time.monotonic())
        except TimeoutError:
            return None, greeting or f"no response in {GREETING_S:g} s"
        if not line:
            break
        version = _version(line)
        if version is not None:
            return version, greeting
        greeting = line.decode("utf-8", "replace").strip() or greeting
    return None, greeting


def _version(line: bytes) -> tuple[int, ...] | None:
    with contextlib.suppress(ValueError):
        *version, hexversion = (int(part) for part in line.split())
        if len(version) == 3 and list((hexversion >> 8).to_bytes(3)) == version:
            return tuple(version)
    return None


class Agent:
    def __init__(self, host: Host, stream: Stream) -> None:
        self._host, self._stream = host, stream

    async def boot(self) -> None:
        """Send the source of agent and keeper, as modules with the names that they have here."""
        here = Path(__file__).parent
        paths = {f"{__package__}.{name}": f"{name.replace('.', '/')}.py" for name in _MODULES}
        sent = [(name, path, (here / path).read_text(encoding="utf-8")) for name, path in paths.items()]
        text = (
            "import sys, types\n"
            f"for name, path, text in {sent!r}:\n"
            "    module = sys.modules[name] = types.ModuleType(name)\n"
            "    exec(compile(text, path, 'exec'), module.__dict__)\n"
            "module.main()\n"
        ).encode()
        await self._stream.send(b"%d\n" % len(text) + text)

    async def call(
        self, op: str, *, on_line: Callable[[str], None] | None = None, data: bytes | None = None, **arguments: Any
    ) -> Any:
        """Send a request and return its result. `on_line` is called with each line of progress."""
        async for reply in self.stream_call(op, data=data, **arguments):
            if "say" in reply and on_line is not None:
                on_line(reply["say"])
            if "result" in reply:
                return reply["result"]
        raise await self._lost(op)

    async def stream_call(
        self, op: str, *, data: bytes | None = None, **arguments: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Send a request, with the machine's folder, and yield all its replies."""
        request = {
            "op": op,
            "folder": self._host.machine.folder,
            **arguments,
            **({} if data is None else {"bytes": len(data)}),
        }
        try:
            await self._stream.send(json.dumps(request).encode() + b"\n" + (data or b""))
            while line := await self._stream.line():
                reply: dict[str, Any] = json.loads(line)
                if "error" in reply:
                    raise HostError(self._host.name, reply["error"], reply.get("remedy", ""))
                yield reply
                if "result" in reply:
                    return
        except (OSError, ValueError) as error:
            raise await self._lost(op, str(error)) from error
        raise await self._lost(op)

    async def _lost(self, op: str, why: str = "") -> HostError:
        text = await self._stream.stderr() or why
        lines = [line for line in text.splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else "the connection was lost"
        return HostError(self._host.name, f"no reply to '{op}': {reason}", layer="route")

    async def close(self) -> None:
        await self._stream.close()


class Stream:
    """The pipes of a process, local or remote: asyncio's and asyncssh's have the same methods."""

    _lost: tuple[type[Exception], ...] = ()  # what the library raises when the connection is lost

    def __init__(self, process: Any) -> None:
        self._process = process

    async def send(self, data: bytes) -> None:
        with self._as_oserror():
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def line(self) -> bytes:
        with self._as_oserror():
            line: bytes = await self._process.stdout.readline()
            return line

    async def stderr(self) -> str:
        """Return its standard error, once it has ended."""
        text = b""
        with contextlib.suppress(TimeoutError, OSError), self._as_oserror():
            text = await asyncio.wait_for(self._process.stderr.read(), 2.0)
        return bytes(text).decode("utf-8", "replace")

    async def close(self) -> None:
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            try:
                await asyncio.wait_for(self._process.wait(), 1.0)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    @contextlib.contextmanager
    def _as_oserror(self) -> Iterator[None]:
        """Raise OSError for a lost connection, whichever library raises."""
        try:
            yield
        except self._lost as error:
            raise ConnectionResetError(f"the connection was lost: {error}") from error


class _SshStream(Stream):
    def __init__(self, process: Any) -> None:
        import asyncssh

        super().__init__(process)
        self._lost = (asyncssh.Error,)

    async def close(self) -> None:
        with contextlib.suppress(OSError), self._as_oserror():
            self._process.stdin.write_eof()
            self._process.close()


# Connecting


async def connect(machine: ClusterMachine, *, through: Host | None = None, accept_new: bool = False) -> Host:
    """Connect over ssh, or to this machine. Raises HostError with the layer that fails."""
    if machine.local:
        return Host(machine, None)
    try:
        import asyncssh
    except ImportError:
        raise MissingExtra("asyncssh", extra="launch", purpose="other machines") from None
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "login_timeout": CONNECT_S * 2,
        "keepalive_interval": 5,
        "keepalive_count_max": 3,
    }
    given = {
        "port": machine.port,
        "username": machine.user,
        "client_keys": None if machine.key is None else [_full_path(machine.key)],
        "tunnel": None if through is None else through.connection,
    }
    options |= {name: value for name, value in given.items() if value is not None}
    with _known_hosts_file(machine, "read"):
        known = KnownHosts(accept_new=accept_new)
    try:
        options |= {"known_hosts": known.trusted, "client_factory": known.client}
        connection = await asyncssh.connect(machine.address, **options)
    except (asyncssh.Error, OSError, ValueError, TimeoutError) as error:
        raise explain(machine, error, known) from error
    try:
        with _known_hosts_file(machine, "written"):
            known.remember()
    except HostError:
        connection.close()
        raise
    return Host(machine, connection)


@contextlib.contextmanager
def _known_hosts_file(machine: ClusterMachine, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or KNOWN_HOSTS} cannot be {what}: {error.strerror or error}"
        remedy = f"ssh keeps host keys there: make it a file that you own (ls -ld {KNOWN_HOSTS})"
        raise HostError(machine.name, problem, remedy) from error


class KnownHosts:
    """The host keys in ~/.ssh/known_hosts, and whether to accept new ones. Invalid lines are skipped, as ssh does."""

    def __init__(self, *, accept_new: bool = False) -> None:
        import asyncssh

        self.path = Path(KNOWN_HOSTS).expanduser()
        self._known = asyncssh.import_known_hosts("")
        for number, line in enumerate(self._lines(), 1):
            try:
                self._known.load(line.decode("utf-8", "backslashreplace"))  # a comment may be in any encoding
            except ValueError:
                _warn_once(f"{self.path}, line {number} is not a host key: skipped")
        self._accept_new = accept_new
        self._taken: list[str] = []
        self.changed = False  # the host's key differs from the known one
        self.shown = ""  # fingerprint of an unknown key

    def trusted(self, host: str, address: str, port: int | None) -> Any:
        return self._known.match(host, address, port)

    def client(self) -> Any:
        """Return an asyncssh client that decides about unknown keys."""
        import asyncssh

        outer = self

        class Client(asyncssh.SSHClient):
            def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
                return outer._judge(host, addr, port, key)

        return Client()

    def _judge(self, host: str, address: str, port: int, key: Any) -> bool:
        self.shown = key.get_fingerprint()
        self.changed = bool(self._known.match(host, address, port)[0])
        if self.changed or not self._accept_new:
            return False
        name = host if port == 22 else f"[{host}]:{port}"
        self._taken.append(f"{name} {key.export_public_key().decode().strip()}")
        return True

    def remember(self) -> None:
        """Append the accepted keys to the file."""
        if self._taken:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            ended = self._lines()[-1] == b""  # else complete the last line first
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in ([] if ended else [""]) + self._taken)

    def _lines(self) -> list[bytes]:
        try:
            return self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [b""]


@functools.cache
def _warn_once(text: str) -> None:
    print("smolcluster:", printable(text), file=sys.stderr)


def explain(machine: ClusterMachine, error: BaseException, known: KnownHosts) -> HostError:
    """Translate a connection error into a HostError with layer and remedy."""
    import asyncssh

    name, place = machine.name, machine.place
    port = machine.port or 22
    wrong = functools.partial(HostError, name)
    match error:
        case socket.gaierror():
            remedy = f"give its address as hosts.{name}.address, or put it into ~/.ssh/config"
            return wrong(f"the name {machine.address} does not resolve", remedy, layer="name")
        case ConnectionRefusedError():
            remedy = "start an ssh server there, on this port (macOS: Remote Login; Linux: apt install openssh-server)"
            what = f"{place} refuses connections" + ("" if machine.port else f" on port {port}")
            return wrong(what, remedy, layer="port")
        case asyncssh.HostKeyNotVerifiable() if known.changed:
            known_as = machine.address if port == 22 else f"'[{machine.address}]:{port}'"
            remedy = f"if the machine was reinstalled, remove the old key: ssh-keygen -R {known_as}"
            return wrong(f"the host key of {place} has CHANGED since it was last seen", remedy)
        case asyncssh.HostKeyNotVerifiable():
            remedy = f"connect once by hand (ssh {_by_hand(machine)}), or use --accept-new"
            what = f"{place} is not in {known.path}; its key is {known.shown}"
            return wrong(what, remedy)
        case asyncssh.PermissionDenied():
            hand = _by_hand(machine)
            remedy = f"put your key there: ssh-copy-id {hand}; or name another as hosts.{name}.key or .user"
            return wrong(f"{place} does not accept your key ({error.reason})", remedy)
        case asyncssh.KeyEncryptionError():
            remedy = "add it to the agent first: ssh-add " + (machine.key or "")
            return wrong(f"the key {machine.key} has a passphrase", remedy.strip())
        case FileNotFoundError() if machine.key is not None:
            return wrong(f"the key {machine.key} does not exist", f"check hosts.{name}.key")
        case OSError(filename=str() as path) if machine.key is not None and path == _full_path(machine.key):
            what = f"the key {machine.key} cannot be read: {error.strerror}"
            return wrong(what, f"check hosts.{name}.key")
        case asyncssh.KeyImportError():
            return wrong(f"{machine.key} is no private key: {error}", f"check hosts.{name}.key")
        case TimeoutError():
            remedy = f"check that it is on, the address, and that its firewall lets port {port} through"
            return wrong(f"{place} did not respond within {CONNECT_S:g} s", remedy, layer="route")
        case OSError():
            remedy = "check that it is on, and on a network that this machine is on, too"
            return wrong(f"{place} cannot be reached: {error.strerror or error}", remedy, layer="route")
    remedy = f"see its messages: ssh -v {_by_hand(machine)}"
    return wrong(f"ssh to {place} failed: {error}", remedy)


def _full_path(key: str) -> str:
    path = Path(key)
    with contextlib.suppress(RuntimeError):  # `~` of an unknown user
        path = path.expanduser()
    return str(path.absolute())


def _by_hand(machine: ClusterMachine) -> str:
    user = f"{machine.user}@" if machine.user else ""
    port = f"-p {machine.port} " if machine.port else ""
    return f"{port}{user}{machine.address}"
