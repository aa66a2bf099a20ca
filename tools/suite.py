"""Run the test suite, then every failed test once more, alone.

    python -m tools.suite [--all] [--jobs N] [TEST ...]
    python -m tools.suite --compile

A test that fails and then passes alone is *unstable*: a defect of the test or of the code, but not a reason to discard a whole
run. The last lines name it. The exit status is 0 when no test failed twice.

The file is also the pytest plugin that reports which tests failed (`-p tools.suite`).
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# Tests that take minutes come first, so that small ones fill the gaps at the end. The tests of a file share fixtures that are
# slow to start, so one process runs all tests of a file.
FOLDERS = ("conformance", "faults", "gpu", "e2e", "equivalence", "unit")
DEALT = ("--dist", "loadfile", "--no-loadscope-reorder")
COMPILED = ("src", "benchmarks", "tests", "tools")
MAX_AGAIN = 10  # failures in a run; when more than these fail, something is broken
REPORT = "SMOLCLUSTER_FAILED_TESTS"  # environment: the file that the plugin writes

NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)
RAN = (int(pytest.ExitCode.OK), int(pytest.ExitCode.TESTS_FAILED))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the ids of failed tests to the file that `run_pytest` reads."""
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if REPORT in os.environ:
        ids = dict.fromkeys(report.nodeid for report in reports)
        Path(os.environ[REPORT]).write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")


def run_pytest(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run pytest in a process of its own. Return its exit status and the ids of the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "failed")
        command = [sys.executable, "-m", "pytest", "-p", "tools.suite", *arguments]
        status = subprocess.run(command, env={**environment(), REPORT: str(report)}, check=False).returncode
        return status, report.read_text(encoding="utf-8").splitlines() if report.exists() else []


def environment() -> dict[str, str]:
    """Of tests: they may write bytecode, as thousands of processes would compile the same files again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def compile_all() -> None:
    """Compile the sources, and the tests as pytest rewrites them."""
    for folder in COMPILED:
        compileall.compile_dir(folder, quiet=2)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests"]
    subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False)  # errors show in the run


@dataclass(slots=True)
class Verdict:
    failed: list[str] = field(default_factory=list)  # twice, or without a second try
    unstable: list[str] = field(default_factory=list)  # failed, then passed alone
    broken: list[str] = field(default_factory=list)  # pytest runs that did not finish

    @property
    def status(self) -> int:
        return 1 if self.failed or self.broken else 0

    def lines(self) -> list[str]:
        """The closing lines of a run."""
        named = (
            ("BROKEN", self.broken),
            ("FAILED", self.failed),
            ("UNSTABLE (failed, then passed alone)", self.unstable),
        )
        return [f"{word}: {name}" for word, names in named for name in names]


def judge(arguments: Sequence[str], run: Callable[[Sequence[str]], tuple[int, list[str]]]) -> Verdict:
    """Run all, then what failed once more, one test at a time."""
    verdict = Verdict()
    status, failed = run(arguments)
    if status not in (*RAN, NO_TESTS) or (status == RAN[1] and not failed):
        verdict.broken.append(f"pytest {' '.join(arguments)} (exit status {status})")
    if len(failed) > MAX_AGAIN:
        verdict.failed = failed
        return verdict
    for name in failed:
        status, _ = run([name, "-m", ""])
        (verdict.unstable if status == 0 else verdict.failed).append(name)
    return verdict


def arguments(tests: Sequence[str], *, all_of_them: bool, jobs: int) -> list[str]:
    """For pytest; `tests`, where given, are run one after the other."""
    common = ["-m", "", "--hypothesis-profile=thorough"] if all_of_them else []
    chosen = tests or [f"tests/{folder}" for folder in FOLDERS]
    return [*chosen, *common, *(() if tests else ("-n", str(jobs), *DEALT, "--durations=30"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests, then every failed one once more, alone.")
    parser.add_argument("tests", nargs="*", help="files or test ids; default: all")
    parser.add_argument("--all", action="store_true", help="include tests marked slow")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests beside each other")
    parser.add_argument("--compile", action="store_true", help="only compile, so that the tests start faster")
    chosen = parser.parse_args()
    if chosen.compile:
        compile_all()
        return 0
    if chosen.all:
        os.environ["TEST_TIMES"] = "1"  # also hold what takes time to its bounds: on a quiet machine
    started = time.monotonic()
    verdict = judge(arguments(chosen.tests, all_of_them=chosen.all, jobs=chosen.jobs), run_pytest)
    print(f"\nthe suite took {(time.monotonic() - started) / 60:.1f} minutes", *verdict.lines(), sep="\n", flush=True)
    return verdict.status


if __name__ == "__main__":
    sys.exit(main())
