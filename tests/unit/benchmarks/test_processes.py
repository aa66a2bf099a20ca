"""Processes that benchmarks start: ended with all their descendants, counted, slowed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from benchmarks.harness.jobs import call_each
from benchmarks.harness.peer_programs import Program, usable
from benchmarks.harness.processes import crossed, descendants, environment_of, started
from benchmarks.harness.slow import busy, slowed


def where(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_independent_measurements_run_in_processes_of_their_own() -> None:
    results = call_each(where, [(number,) for number in range(3)], jobs=2)
    assert [number for number, _ in results] == [0, 1, 2]
    assert os.getpid() not in {process for _, process in results}
    assert call_each(where, [(7,)], jobs=1) == [(7, os.getpid())]


def test_a_measurement_that_was_kept_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def square(number: int) -> int:
        if number == 3:
            raise KeyboardInterrupt
        made.append(number)
        return number * number

    kept = tmp_path / "kept.jsonl"
    with pytest.raises(KeyboardInterrupt):
        call_each(square, [(1,), (2,), (3,)], jobs=1, keep=kept)
    assert call_each(square, [(2,), (1,), (4,)], jobs=1, keep=kept) == [4, 1, 16]
    assert made == [1, 2, 4]


def test_peers_that_are_not_installed_are_left_out_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert usable({"a peer": ("no_such_package", {}), "its variant": ("no_such_package", {})}) == []
    assert (
        capsys.readouterr().out.count("no_such_package is not installed (pip install 'smolcluster[bench]'): left out")
        == 1
    )


SS = """
ESTAB 0 0 127.0.0.1:50 127.0.0.1:80 users:(("a",pid=1,fd=3)) cubic bytes_sent:1000 bytes_acked:1000
ESTAB 0 0 [::ffff:127.0.0.1]:80 [::ffff:127.0.0.1]:50 users:(("b",pid=2,fd=3)) cubic bytes_received:1000
ESTAB 0 0 127.0.0.1:51 127.0.0.1:80 users:(("a",pid=11,fd=3),("a",pid=1,fd=9)) cubic bytes_sent:200 bytes_acked:200
ESTAB 0 0 127.0.0.1:80 127.0.0.1:51 users:(("b",pid=2,fd=4)) cubic bytes_sent:30 bytes_acked:30
ESTAB 0 0 127.0.0.1:60 127.0.0.1:61 users:(("a",pid=1,fd=5)) cubic bytes_sent:7777 bytes_acked:7777
ESTAB 0 0 127.0.0.1:61 127.0.0.1:60 users:(("c",pid=11,fd=5)) cubic bytes_sent:7777 bytes_acked:7777
ESTAB 0 0 127.0.0.1:70 127.0.0.1:71 users:(("a",pid=1,fd=6)) cubic bytes_sent:5555 bytes_acked:5555
ESTAB 0 0 127.0.0.1:71 127.0.0.1:70 users:(("stranger",pid=99,fd=6)) cubic bytes_sent:5555 bytes_acked:5555
TIME-WAIT 0 0 127.0.0.1:52 127.0.0.1:80
""".strip()


def test_bytes_count_that_went_from_one_machine_to_another() -> None:
    assert crossed(SS, {1: 0, 11: 0, 2: 1}) == 1000 + 200 + 30


PROGRAM = """
import json, os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    other = socket.create_connection(listener.getsockname())
    listener.close()
    while True:
        other.sendall(bytes(len(other.recv(1000))))  # as many back
connection, _ = listener.accept()
for row in ({"child": child}, {"step": 1}, {"val_loss": 2.0}):
    connection.sendall(bytes(500))
    assert len(connection.recv(500, socket.MSG_WAITALL)) == 500
    print(json.dumps(row), flush=True)
    sys.stdin.readline()
"""


def test_a_program_waits_at_every_row_and_its_bytes_can_be_counted_there() -> None:
    if shutil.which("ss") is None:
        pytest.skip("ss of iproute2 is needed")
    with started([sys.executable, "-c", PROGRAM], listen=True) as process:
        child = json.loads(process.stdout.readline())["child"]
        program = Program([process], [[process.pid], [child]])
        assert (program.machine(0), program.machine(1)) == ({process.pid}, {child})
        assert program.bytes_sent() == 1000
        process.stdin.write(b"\n")
        process.stdin.flush()
        seen = [(row, program.bytes_sent()) for row in program.rows()]
    assert seen == [({"step": 1}, 2000), ({"val_loss": 2.0}, 3000)]


def test_a_command_is_ended_with_all_it_has_started() -> None:
    if not Path("/proc/self/stat").is_file():
        pytest.skip("/proc is Linux's")
    child = "import time; time.sleep(60)"
    script = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{child}']); print(1, flush=True); {child}"
    )
    with started([sys.executable, "-c", script], environ={"MARK": "here"}, listen=True) as process:
        assert process.stdout.readline() == b"1\n"
        (grandchild,) = descendants(process.pid)
        mark = environment_of(grandchild).get("MARK")
        assert mark == "here"
    left = bool(environment_of(grandchild))
    assert not left
    assert process.returncode == -9


def test_competitors_are_gone_afterwards() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("affinity is Linux's")
    before = set(descendants(os.getpid()))
    with busy(min(os.sched_getaffinity(0))):
        assert len(set(descendants(os.getpid())) - before) == 3
    assert set(descendants(os.getpid())) == before


def test_a_slow_process_gets_a_quarter_of_its_core() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("affinity is Linux's")
    core = max(os.sched_getaffinity(0))
    spin = "import time\nt = 0.0\nwhile True:\n    t += 0.3\n    while time.process_time() < t: pass\n    print(flush=True)"
    with started([sys.executable, "-c", spin], listen=True) as process:
        assert process.stdout is not None
        os.sched_setaffinity(process.pid, {core})
        with slowed(process.pid, core=core):
            process.stdout.readline()
            began = time.monotonic()
            process.stdout.readline()
            took_s = time.monotonic() - began
    assert took_s > 0.3 * 2.5
