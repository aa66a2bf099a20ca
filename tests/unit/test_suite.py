"""The runner of the tests: a failed test is run once more, alone, and is listed at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.suite import MAX_AGAIN, arguments, judge, run_pytest


class Scripted:
    """Stands for pytest: each call returns the next of the given results."""

    def __init__(self, *results: tuple[int, list[str]]) -> None:
        self.results, self.calls = list(results), []

    def __call__(self, arguments: Sequence[str]) -> tuple[int, list[str]]:
        self.calls.append(list(arguments))
        return self.results.pop(0)


def test_a_test_that_passes_alone_is_unstable_and_named() -> None:
    run = Scripted((1, ["a.py::one", "a.py::two"]), (0, []), (1, ["a.py::two"]))
    verdict = judge(["a"], run)
    assert (verdict.unstable, verdict.failed, verdict.status) == (["a.py::one"], ["a.py::two"], 1)
    assert run.calls[1:] == [["a.py::one", "-m", ""], ["a.py::two", "-m", ""]]
    assert verdict.lines() == ["FAILED: a.py::two", "UNSTABLE (failed, then passed alone): a.py::one"]


def test_unstable_tests_alone_do_not_fail_the_run() -> None:
    assert judge(["a"], Scripted((1, ["a.py::one"]), (0, []))).status == 0


def test_many_failures_are_not_run_again() -> None:
    names = [f"a.py::test_{i}" for i in range(MAX_AGAIN + 1)]
    assert judge(["a"], Scripted((1, names))).failed == names


@pytest.mark.parametrize("result", [(2, []), (3, []), (-9, []), (1, [])])
def test_tests_that_did_not_end_fail_the_run(result: tuple[int, list[str]]) -> None:
    verdict = judge(["a"], Scripted(result))
    assert verdict.status == 1
    assert f"exit status {result[0]}" in verdict.broken[0]


def test_the_plugin_reports_failures_and_errors(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef broken():\n    raise OSError\n\n"
        "def test_good(): pass\n\ndef test_bad(): assert False\n\ndef test_error(broken): pass\n",
        encoding="utf-8",
    )
    status, failed = run_pytest([str(tmp_path), f"--rootdir={tmp_path}", "-c", "/dev/null", "-p", "no:cacheprovider"])
    assert status == 1
    assert [name.partition("::")[2] for name in failed] == ["test_bad", "test_error"]


def test_the_whole_suite_is_run() -> None:
    words = arguments([], all_of_them=False, jobs=3)
    first = words.index("-n")
    assert {Path(folder) for folder in words[:first]} == {
        Path(*path.parts[:2]) for path in Path("tests").glob("*/**/test_*.py")
    }
    assert words[first : first + 3] == ["-n", "3", "--dist"]
    assert arguments(["tests/unit/test_x.py"], all_of_them=True, jobs=2)[1:3] == ["-m", ""]
