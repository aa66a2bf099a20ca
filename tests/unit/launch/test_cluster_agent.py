"""What runs on a machine of a cluster, without the machine: unpacking, clearing out, copying; and where copies may land."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.places import eventually

from smolcluster.errors import UserError
from smolcluster.launch.cluster import host, keeper, record
from smolcluster.launch.cluster.agent import base, environment, files, following, processes
from smolcluster.launch.cluster.archive import PackedFiles, _pack
from smolcluster.launch.cluster.host import HostError
from smolcluster.launch.cluster.layout import ClusterMachine
from smolcluster.launch.cluster.mirror import put


def packed(**files: str) -> PackedFiles:
    return PackedFiles(_pack((name, text.encode()) for name, text in files.items()))


def test_unpacking_with_a_python_that_has_no_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 3.11.0 to 3.11.3, of Debian 12."""
    monkeypatch.delattr(tarfile, "data_filter")
    plain = tarfile.TarFile.extractall

    def extractall(archive: Any, path: Any) -> None:
        plain(archive, path, filter="fully_trusted")  # what was meant where nothing could be said

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    files.unpack(str(tmp_path), "code/a", packed(one="1").data, fresh=True)
    assert (tmp_path / "code/a/one").read_text() == "1"


def test_what_cannot_be_unpacked_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(tarfile.ReadError):
        files.unpack(str(tmp_path), "code/a", b"no archive", fresh=True)
    assert list((tmp_path / "code").iterdir()) == []


def test_old_copies_go_but_for_those_in_use(tmp_path: Path) -> None:
    place = tmp_path / "clusters/lab/processes/worker-0"
    place.mkdir(parents=True)
    (place / "order.json").write_text(json.dumps({"code": "c0"}))
    lock = keeper.lock_file(place / "lock")
    for number in range(6):
        files.unpack(str(tmp_path), f"code/c{number}", packed(n=str(number)).data, fresh=True)
        os.utime(tmp_path / f"code/c{number}", (number, number))
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["c0", "c3", "c4", "c5"]
    lock.close()


def test_two_that_send_the_same_at_once_leave_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another `up` puts its own there while this one unpacks, and a process uses it already."""
    data = packed(one="1", two="2").data
    plain = tarfile.TarFile.extractall

    def extractall(archive: Any, path: Any, **how: Any) -> None:
        plain(archive, path, **how)
        if not meanwhile:
            meanwhile.append(True)
            monkeypatch.setattr(files.os, "getpid", lambda: 1)
            files.unpack(str(tmp_path), "code/a", data, fresh=True)
            monkeypatch.undo()
            (tmp_path / "code/a/in-use").write_text("")

    meanwhile: list[bool] = []
    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    files.unpack(str(tmp_path), "code/a", data, fresh=True)
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["a"]
    assert sorted(path.name for path in (tmp_path / "code/a").iterdir()) == ["in-use", "one", "two"]


def test_what_lost_a_file_is_replaced(tmp_path: Path) -> None:
    data = packed(one="1", two="2").data
    files.unpack(str(tmp_path), "code/a", data, fresh=True)
    (tmp_path / "code/a/two").unlink()
    files.unpack(str(tmp_path), "code/a", data, fresh=True)
    assert sorted(path.name for path in (tmp_path / "code").rglob("*")) == ["a", "one", "two"]


def test_what_was_sent_in_part_long_ago_is_cleared_out(tmp_path: Path) -> None:
    for name, age in (("a.pi5-7.new", 0.0), ("b.pi5-8.new", files.LEFT_S + 60)):
        (tmp_path / "code" / name).mkdir(parents=True)
        os.utime(tmp_path / "code" / name, (time.time() - age,) * 2)
    files.unpack(str(tmp_path), "code/c", packed(one="1").data, fresh=True)
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["a.pi5-7.new", "c"]


# Looking at a process


def test_those_who_look_do_not_see_each_other_nor_stop_a_keeper(tmp_path: Path) -> None:
    place = tmp_path / "worker-0"
    place.mkdir()
    (place / "lock").touch()
    looking = keeper.lock_file(place / "lock", shared=True)
    assert not processes.is_alive(place)
    assert keeper.lock_file(place / "lock") is None
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(keeper.lock_file, place / "lock", timeout_s=60.0)
        while not starting.running():
            time.sleep(0.001)
        looking.close()
        lock = starting.result()
    assert processes.is_alive(place)
    lock.close()


# What is printed


class Printed:
    """The output of one process, and what somebody who follows it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = folder / "clusters/lab/processes/worker-0"
        self.place.mkdir(parents=True)
        (self.place / "order.json").write_text("{}")
        self.folder, self.at, self.told = folder, {}, []  # type: ignore[var-annotated]
        monkeypatch.setattr(following, "say", self._say)

    def _say(self, **said: Any) -> None:
        self.at[said["process"]] = said["at"]
        if "line" in said:
            self.told.append(said["line"])

    def write(self, data: bytes) -> None:
        with (self.place / "output.log").open("ab") as file:
            file.write(data)

    def follow(self, *, over: bool = False, past: int = 20) -> list[str]:
        """The new lines of one look; `over`: when the process has ended."""
        (self.place / "order.json").write_text("{}")  # just now: it is starting
        (self.place / "state.json").unlink(missing_ok=True)
        if over:
            (self.place / "state.json").write_text(json.dumps({"state": "finished"}))
        self.told = []

        def rest(_: float) -> None:
            raise TimeoutError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(following.time, "sleep", rest)
            with contextlib.suppress(TimeoutError):
                following.follow(str(self.folder), "lab", past=past, at=self.at)
        return self.told


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    return Printed(tmp_path, monkeypatch)


def test_the_last_lines_come_first_and_nothing_is_told_twice(printed: Printed) -> None:
    printed.write(b"".join(b"%d\n" % number for number in range(100)) + b"half")
    assert printed.follow(past=3) == ["97", "98", "99"]
    assert printed.follow() == []
    printed.write(b" a line\nmore\n")
    assert printed.follow() == ["half a line", "more"]


def test_all_that_a_process_printed_before_it_died_is_told(printed: Printed) -> None:
    printed.write(b"begin\n")
    assert printed.follow() == ["begin"]
    lines = [f"line {number} " + "x" * 80 for number in range(8000)]  # more than is read at once
    printed.write("\n".join(lines).encode() + b"\nthe error, without an end")
    assert printed.follow(over=True) == [*lines, "the error, without an end"]
    assert printed.follow(over=True) == []


def test_a_progress_bar_is_shown_as_it_moves_and_hides_nothing(printed: Printed) -> None:
    printed.write(b"begin\r\n")
    assert printed.follow() == ["begin"]
    printed.write(b"\r10%")
    assert printed.follow() == []
    printed.write(b"\r20%\r")
    assert printed.follow() == ["10%"]
    printed.write(b"\nafter\n")
    assert printed.follow() == ["20%", "after"]


def test_a_line_that_never_ends_is_cut_and_hides_nothing(printed: Printed) -> None:
    printed.write(b"begin\n")
    assert printed.follow() == ["begin"]
    printed.write(b"x" * (following.CHUNK_BYTES + 5) + b"\nafter\n")
    assert printed.follow() == ["x" * following.CHUNK_BYTES, "x" * 5, "after"]


def test_what_was_put_aside_is_told_first(printed: Printed) -> None:
    printed.write(b"one\n")
    assert printed.follow() == ["one"]
    printed.write(b"two\nthree")
    (printed.place / "output.log").rename(printed.place / "output.log.1")
    printed.write(b"four\n")
    assert printed.follow() == ["two", "three", "four"]
    (printed.place / "output.log").rename(printed.place / "gone")
    (printed.place / "output.log.1").write_text("six\n")
    printed.write(b"seven\n")
    assert printed.follow() == ["[lines missing: the log was rotated twice since the last read]", "six", "seven"]


def test_one_that_is_started_anew_is_told_from_its_beginning(printed: Printed) -> None:
    assert printed.follow() == []
    printed.write(b"".join(b"%d\n" % number for number in range(100)))
    assert len(printed.follow()) == 100  # it began after we did: all of it is new
    (printed.place / "output.log").write_text("anew\n")  # with the number that the old one had
    assert printed.follow() == ["anew"]


def test_output_without_an_end_does_not_fill_the_keepers_memory(tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text(json.dumps({"argv": []}))
    keeping = keeper.Keeper(tmp_path)
    written: list[int] = []
    keeping._write = lambda line: written.append(len(line))  # type: ignore[method-assign]
    keeping._copy(io.BytesIO(b"x" * (3 * keeper.LINE_BYTES) + b"\nend"))
    keeping.log.close()
    assert max(written) == keeper.LINE_BYTES
    assert sum(written) == 3 * keeper.LINE_BYTES + 4


def test_the_last_whole_lines(tmp_path: Path) -> None:
    assert files.tail(str(tmp_path), "rows") == []
    (tmp_path / "rows").write_text("".join(f"{number}\n" for number in range(20000)) + "hal")
    lines = files.tail(str(tmp_path), "rows")
    assert lines == [str(number) for number in range(20000 - len(lines), 20000)]
    (tmp_path / "rows").write_text("one\ntwo\n")
    assert files.tail(str(tmp_path), "rows") == ["one", "two"]


# Up and down


SEAT = {"name": "w", "arguments": [], "again": [], "restart": True, "environment": {}}


def test_what_is_taken_down_while_it_is_brought_up_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(processes, "_start_keeper", lambda *said, **_: started.append(said))
    processes.begin(str(tmp_path), "lab", "first")
    processes.stop(str(tmp_path), "lab", processes=["w"])  # as of one process: the cluster is wanted all the same
    processes.stop(str(tmp_path), "lab", mark="another")
    assert processes.start(str(tmp_path), "lab", [SEAT], "python3", "c0", "p", False, "first") == ["w"]
    os.utime(tmp_path / "clusters/lab/processes/w/order.json", (1, 1))  # long ago, and its keeper never came
    processes.begin(str(tmp_path), "lab", "second")
    processes.stop(str(tmp_path), "lab")
    with pytest.raises(base.AgentError, match="a `down` stopped this `up`"):
        processes.start(str(tmp_path), "lab", [SEAT], "python3", "c0", "p", False, "second")
    assert len(started) == 1
    assert processes.states(str(tmp_path), "lab") == {}


def test_what_one_up_takes_back_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_start_keeper", lambda *_, **__: None)
    for mark in ("mine", "theirs"):
        processes.begin(str(tmp_path), "lab", mark)
        processes.start(str(tmp_path), "lab", [SEAT | {"name": mark}], "python3", "c0", "p", False, mark)
    assert processes.stop(str(tmp_path), "lab", mark="mine", timeout_s=0.0)["stopped"] == ["mine"]
    assert not (tmp_path / "clusters/lab/processes/theirs/stop").exists()


# The environment


def test_a_version_that_does_not_fit_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("torch", "2.5.1+cu121"), ("numpy", "2.1"), ("rich", "14.0.0rc1")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = ["torch<2.14,>=2.6", "torch<2.14", "numpy>=2.0", "numpy>=2.1.0,!=2.1", "rich>=13; python_version > '3'"]
    wanted += ["no-such-package", "no-such-package; sys_platform != 'win32'"]
    missing = [*(wanted[n] for n in (0, 3)), *wanted[5:]]
    assert environment._missing(sys.executable, wanted) == missing
    assert environment._missing(sys.executable, ["torch>=2.10"]) == ["torch>=2.10"]  # numbers, not letters
    kept = {"requirements": ["torch<2.14"], "key": "k", "python": sys.executable}
    assert environment.version_of(str(tmp_path), "torch", kept) == {"used": "2.5.1+cu121", "there": None}
    other = kept | {"requirements": ["torch>=2.6"]}
    assert environment.version_of(str(tmp_path), "torch", other) == {"used": None, "there": "2.5.1+cu121"}


def test_a_python_in_the_users_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/python").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = environment.environment(str(tmp_path), [], "k", "~/venv/python", {})
    assert made == {"python": str(tmp_path / "venv/python"), "made": False}

    async def local() -> list[int]:
        machine = ClusterMachine(name="here", address="local", folder=str(tmp_path), python="~/venv/python")
        found: dict[str, Any] = await host.Host(machine, None).call("inspect", name="lab")
        version: list[int] = found["python"]
        return version

    assert asyncio.run(local()) == list(sys.version_info[:3])


def test_an_environment_is_made_by_one_at_a_time_and_for_one_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits, says so, and takes what the first has made."""
    made: list[Path] = []
    waiting = threading.Event()

    def make(given: str, root: Path, inside: Path, requirements: list[str]) -> None:
        assert waiting.wait(300)
        inside.parent.mkdir(parents=True)
        (root / "made").touch()
        made.append(root)

    monkeypatch.setattr(environment, "_make", make)
    monkeypatch.setattr(environment, "_missing", lambda python, _: [] if Path(python).parent.exists() else ["torch"])
    monkeypatch.setattr(environment, "say", lambda **_: waiting.set())
    with ThreadPoolExecutor() as pool:
        ask = (str(tmp_path), ["torch"], "k", "/no/such/python", {})
        found = [ended.result() for ended in [pool.submit(environment.environment, *ask) for _ in range(2)]]
    assert sorted(answer["made"] for answer in found) == [False, True]
    assert found[0]["python"] == found[1]["python"]
    environment.environment(str(tmp_path), ["torch"], "k", "/another/python", {})
    assert len(set(made)) == 2


def test_what_is_copied_is_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "clusters/lab/runs/r"
    (run / "logs").mkdir(parents=True)
    for other in ("r", "before"):
        (tmp_path / "clusters/lab/logs" / other).mkdir(parents=True)
    (run / "metrics.jsonl").write_text("1\n2\n")
    (run / "config.yaml").write_text("a: 1\n")
    (run / "weights.safetensors").write_text("secret")
    (tmp_path / "clusters/lab/logs/r/worker-rank1-pi5.log").write_text("hello\n")
    (tmp_path / "clusters/lab/logs/before/worker-rank2-pi5.log").write_text("of another run\n")
    target = tmp_path / "mirror"
    told: list[dict[str, Any]] = []

    class Enough(Exception):
        pass

    def say(**fields: Any) -> None:
        told.append(fields)
        if "file" in fields:
            put(target, fields)

    def at_rest(_: float) -> None:
        if len(pauses) == 0:
            with (run / "metrics.jsonl").open("a") as file:
                file.write("3\n")
        elif len(pauses) == 1:
            (run / "metrics.jsonl").unlink()
            (run / "metrics.jsonl").write_text("anew\n")
        else:
            raise Enough
        pauses.append(None)

    pauses: list[None] = []
    monkeypatch.setattr(following, "say", say)
    monkeypatch.setattr(following.time, "sleep", at_rest)
    with pytest.raises(Enough):
        following.copy(str(tmp_path), "lab", "r", {})
    sent = [(said["file"], said.get("at"), base64.b64decode(said["data"])) for said in told if "file" in said]
    assert sorted(sent[:3]) == [
        ("config.yaml", None, b"a: 1\n"),
        ("logs/worker-rank1-pi5.log", 0, b"hello\n"),
        ("metrics.jsonl", 0, b"1\n2\n"),
    ]
    assert sent[3:] == [("metrics.jsonl", 4, b"3\n"), ("metrics.jsonl", 0, b"anew\n")]
    assert (target / "metrics.jsonl").read_text() == "anew\n"
    assert (target / "logs/worker-rank1-pi5.log").read_text() == "hello\n"
    assert not (target / "logs/worker-rank2-pi5.log").exists()


@pytest.mark.parametrize(
    ("now", "sent"),
    [("1\n2\n3\n", (4, b"3\n")), ("1\n5\n6\n7\n", (0, b"1\n5\n6\n7\n")), ("1\n", (0, b"1\n"))],
    ids=["grown", "rewritten and longer", "cut"],
)
def test_a_file_that_was_rewritten_while_nobody_looked_is_copied_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str, sent: tuple[int, bytes]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n2\n")
    with path.open("rb") as file:
        have = {"metrics.jsonl": [4, following.digest_of(file, 4)]}
    path.write_text(now)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(following, "say", lambda **said: told.append(said))
    following._copy_new("metrics.jsonl", path, {}, have)
    assert [(said["at"], base64.b64decode(said["data"])) for said in told] == [sent]


@pytest.mark.parametrize("text", ["[1]", "null", "5", "[]", "{", '{"pid": "x", "identity": 1, "keeper": null}'])
def test_a_broken_state_file_stops_nobody(tmp_path: Path, text: str) -> None:
    place = tmp_path / "clusters/lab/processes/worker-0"
    place.mkdir(parents=True)
    (place / "order.json").write_text("{}")
    (place / "state.json").write_text(text)
    assert not processes.states(str(tmp_path), "lab")["worker-0"]["alive"]
    assert processes.stop(str(tmp_path), "lab", processes=["worker-0"]) == {"stopped": [], "killed": []}


def test_a_keeper_goes_on_when_its_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "order.json").write_text(json.dumps({"argv": []}))
    keeping = keeper.Keeper(tmp_path)
    monkeypatch.setattr(keeper, "LOG_BYTES", 10)
    for name in ("output.log", "order.json"):
        (tmp_path / name).unlink()
    tmp_path.rmdir()
    for _ in range(3):
        keeping._write(b"a line that is long\n")
    keeping.log.close()


def test_the_users_path_comes_after_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_start_keeper", lambda *_, **__: None)
    process = SEAT | {"environment": {"PYTHONPATH": "/theirs"}}
    processes.begin(str(tmp_path), "lab", "m")
    processes.start(str(tmp_path), "lab", [process], "python3", "c0", "p", False, "m")
    order = json.loads((tmp_path / "clusters/lab/processes/w/order.json").read_text())
    assert order["environment"]["PYTHONPATH"] == f"{tmp_path}/code/c0{os.pathsep}/theirs"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([b"3 11 2 51053296\n"], ((3, 11, 2), "")),
        ([b"welcome to b\n", b"3 11 2\n", b"3 13 0 50987008\n", b"3 13 0 51183856\n"], ((3, 13, 0), "3 13 0 50987008")),
        ([b"bash: python3: command not found\n"], (None, "bash: python3: command not found")),
    ],
)
def test_a_login_may_print_what_it_likes(lines: list[bytes], expected: Any) -> None:
    class Stream:
        async def line(self) -> bytes:
            return lines.pop(0) if lines else b""

    assert asyncio.run(host._first_line(Stream())) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("python3", "python3"),
        ("~/venv/bin/python", "~/venv/bin/python"),
        ("~/my venv/bin/python", "~/'my venv/bin/python'"),
        ("/o'brien/p(1)/python", """'/o'"'"'brien/p(1)/python'"""),
        ("x;touch${IFS}/tmp/y", "'x;touch${IFS}/tmp/y'"),
        ("C:\\Python 3\\python.exe", '"C:\\Python 3\\python.exe"'),
    ],
)
def test_a_python_is_one_word_for_the_shell(python: str, expected: str) -> None:
    assert host._quote(python) == expected


def test_a_connection_that_asyncssh_loses_is_a_lost_connection() -> None:
    asyncssh = pytest.importorskip("asyncssh")

    class Process:
        stdin = stdout = stderr = property(lambda self: self)

        async def readline(self) -> bytes:
            raise asyncssh.ConnectionLost("Connection lost")

        read = drain = readline

        def write(self, _: bytes) -> None: ...

    stream = host._SshStream(Process())
    for asked in (stream.line, lambda: stream.send(b"x")):
        with pytest.raises(ConnectionResetError, match="the connection was lost"):
            asyncio.run(asked())
    assert asyncio.run(stream.stderr()) == ""


@pytest.mark.parametrize("lost_in", ["line", "send"])
def test_a_connection_that_is_lost_before_the_agent_starts_is_the_machines_problem(lost_in: str) -> None:
    """`logs -f` reconnects after it, as after any loss."""

    class Dead:
        async def line(self) -> bytes:
            return self._answer("line", b"%d %d %d %d\n" % (*sys.version_info[:3], sys.hexversion))

        async def send(self, _: bytes) -> None:
            self._answer("send", b"")

        def _answer(self, name: str, answer: bytes) -> bytes:
            if name == lost_in:
                raise ConnectionResetError("the connection was lost")
            return answer

    class Machine(host.Host):
        async def _run(self, python: str) -> Any:
            return Dead()

    async def call() -> None:
        await Machine(ClusterMachine(name="pi5", address="pi5"), None).call("inspect")

    with pytest.raises(HostError, match="pi5: the agent cannot be started: the connection was lost") as lost:
        asyncio.run(call())
    assert lost.value.layer == "route"


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record.state_folder().mkdir(parents=True)
    return record.state_folder()


def test_a_refused_up_leaves_the_record_as_it_was(records: Path) -> None:
    for number, name in enumerate(("a", "b")):
        record.save_record({"name": name, "run": f"run-{name}", "seats": []})
        os.utime(records / f"{name}.json", (number, number))
    former = record.read_raw("a")
    record.save_record({"name": "a", "run": "another"})
    record.restore_record("a", former)
    assert record.load_record("a")["run"] == "run-a"
    assert record.load_record(None)["name"] == "b"
    record.save_record({"name": "c", "run": "new"})
    record.restore_record("c", None)
    assert record.load_record(None)["name"] == "b"


@pytest.mark.parametrize("text", ["[]", "null", "{"])
def test_a_record_that_is_none_is_named(records: Path, text: str) -> None:
    (records / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json cannot be read"):
        record.load_record("a")


# Keys of machines, and our own


@pytest.fixture
def known_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ssh" / "known_hosts"
    path.parent.mkdir()
    return path


def new_key() -> Any:
    return pytest.importorskip("asyncssh").generate_private_key("ssh-ed25519")


def line_of(name: str, key: Any) -> bytes:
    return name.encode() + b" " + bytes(key.export_public_key()).strip()


def refused(**said: Any) -> HostError:
    """Nobody listens on port 1."""
    machine = ClusterMachine(name="pi5", address="127.0.0.1", port=1, **said)
    with pytest.raises(HostError) as caught:
        asyncio.run(host.connect(machine))
    return caught.value


@pytest.mark.parametrize("before", [None, b"", b"\n"], ids=["no file", "a line without its end", "a line"])
def test_a_key_that_is_taken_leaves_the_line_before_as_it_was(known_hosts: Path, before: bytes | None) -> None:
    old, new = line_of("old", new_key()), new_key()
    if before is not None:
        known_hosts.write_bytes(old + before)
    known = host.KnownHosts(accept_new=True)
    assert known._judge("new", "10.0.0.9", 22, new)
    assert known._judge("new", "10.0.0.9", 2222, new)
    known.remember()
    lines = [line_of("new", new), line_of("[new]:2222", new)]
    assert known_hosts.read_bytes().splitlines() == ([] if before is None else [old]) + lines


def test_a_line_that_means_nothing_is_left_out_and_told_once(
    known_hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = new_key()
    latin = line_of("b", key) + b" from M\xfcnchen"
    lines = [b"# ours", b"nonsense", line_of("a", key), b"@odd a b", line_of("|1|x|y", key), latin, b""]
    known_hosts.write_bytes(b"\n".join(lines))
    for _ in range(2):
        known = host.KnownHosts()
        for name in "ab":
            assert known.trusted(name, "", None)[0], "its neighbours are as good as ever"
    told = capsys.readouterr().err.splitlines()
    assert told == [f"smolcluster: {known_hosts}, line {n} is not a host key: skipped" for n in (2, 4, 5)]
    assert refused().layer == "port", "a connection is tried"


def test_a_file_of_known_hosts_that_cannot_be_read_is_explained(known_hosts: Path) -> None:
    new_key()
    known_hosts.mkdir()
    error = refused()
    assert error.layer == "ssh"
    assert str(error).startswith(f"pi5: {known_hosts} cannot be read: Is a directory; ")


def test_a_key_that_cannot_be_read_is_not_a_machine_that_is_away(known_hosts: Path, tmp_path: Path) -> None:
    new_key()
    for key, what in (
        (str(tmp_path), f"the key {tmp_path} cannot be read: Is a directory"),
        ("~/.ssh", "the key ~/.ssh cannot be read: Is a directory"),
        ("~nobody-we-know/key", "the key ~nobody-we-know/key does not exist"),
    ):
        error = refused(key=key)
        assert (error.layer, str(error)) == ("ssh", f"pi5: {what}; check hosts.pi5.key")


# Secrets


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_what_a_machine_keeps_is_its_users_alone(tmp_path: Path) -> None:
    """The environment of a host may hold keys; logs and runs what was trained on."""
    root = tmp_path / ".smolcluster"
    (root / "clusters").mkdir(parents=True)  # by an earlier version, open to all
    code = root / "code/c/smolcluster/launch/cluster"
    code.mkdir(parents=True)
    (code / "keeper.py").write_bytes(Path(keeper.__file__).read_bytes())
    home = root / "clusters/lab"
    where: dict[str, Any] = {"folder": str(root), "name": "lab", "mark": "m"}
    # Instead of `python -m smolcluster`: a process that makes a folder and says something.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -m ]; then mkdir run; echo said; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    process = {"name": "w", "arguments": [], "again": None, "restart": False, "environment": {"HF_TOKEN": "secret"}}
    start = {
        "op": "start",
        "processes": [process],
        "python": str(python),
        "code": "c",
        "fingerprint": "p",
        "panes": False,
    }
    asked = [{"op": "begin", **where}, start | where]
    code = "import os; os.umask(0o022); from smolcluster.launch.cluster.agent.main import main; main()"
    lines = "".join(json.dumps(request) + "\n" for request in asked)
    apart, tmux = os.environ | {"TMUX_TMPDIR": str(tmp_path)}, shutil.which("tmux")
    if tmux:  # one that runs already has the usual umask, and gives it to what is started in it
        subprocess.run([tmux, "new-session", "-d", "-s", "mine", "cat"], env=apart, umask=0o022, check=True)
    ended = subprocess.run(
        [sys.executable, "-c", code], input=lines, capture_output=True, text=True, timeout=120, check=True, env=apart
    )
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [{"result": None}, {"result": ["w"]}]
    place = home / "processes/w"
    try:
        eventually((place / "state.json").exists)
        eventually(lambda: json.loads((place / "state.json").read_text())["state"] == "finished")
    finally:
        if tmux:
            subprocess.run([tmux, "kill-server"], env=apart, check=False)
    assert b"said" in (place / "output.log").read_bytes()
    assert "secret" in (place / "order.json").read_text()
    assert {mode(path) for path in (root, root / "clusters", home, place, home / "run")} == {0o700}
    assert {mode(place / name) for name in ("order.json", "output.log", "state.json")} == {0o600}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "is not a file of a run"),
        ({"file": 7, "data": ""}, "is not a file of a run"),
        *(
            ({"file": place, "data": ""}, "is not a file of a run")
            for place in ("../x.log", "/x.log", "/etc/x.log", "logs/../../x.log", "logs/x", "a/b/c.log")
        ),
        ({"file": "metrics.jsonl"}, "cannot be read"),
        ({"file": "metrics.jsonl", "data": None, "at": 0}, "cannot be read"),
        ({"file": "metrics.jsonl", "data": "%%%", "at": 0}, "cannot be read"),
        ({"file": "metrics.jsonl", "data": "YQ==", "at": -1}, "so the offset -1 is invalid"),
        ({"file": "metrics.jsonl", "data": "YQ==", "at": 4}, "has 3 bytes here, so the offset 4"),
        ({"file": "metrics.jsonl", "data": "YQ==", "at": 1 << 60}, "so the offset"),
        ({"file": "metrics.jsonl", "data": "YQ==", "at": True}, "so the offset True is invalid"),
        ({"file": "metrics.jsonl", "data": "YQ==", "at": None}, "so the offset None is invalid"),
    ],
)
def test_a_machine_writes_nothing_outside_its_mirror_or_beyond_what_it_has(
    tmp_path: Path, told: dict[str, Any], words: str
) -> None:
    file = tmp_path / "mirror" / "metrics.jsonl"
    file.parent.mkdir()
    file.write_bytes(b"abc")
    with pytest.raises(HostError, match=words):
        put(file.parent, told)
    assert file.read_bytes() == b"abc"
    put(file.parent, {"file": "metrics.jsonl", "data": "ZA==", "at": 2})
    assert file.read_bytes() == b"abd"
    assert [*tmp_path.iterdir(), *file.parent.iterdir()] == [file.parent, file]
