"""A log file as a queue: the times of its lines follow from the file alone."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.strict_loki import record

from smolcluster.observe.log_queue import PRINTED, LogPosition, LogQueue, entries_in

HOST = "worker-rank0-mini2"

_LINES = st.lists(
    st.one_of(
        st.builds(
            record, st.sampled_from([0.0, 0.001, 5.0, 59.999]), st.text(max_size=5), st.sampled_from(["INFO", "ERROR"])
        ),
        st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"") + b"\n"),
        st.sampled_from(
            [b"\n", b"{}\n", b'{"time": 5, "level": "INFO"}\n', b'{"time": "2026-03-01T12:00:00", "level": "I"}\n']
        ),
    ),
    max_size=12,
)


@given(lines=_LINES, cut=st.integers(min_value=0, max_value=12))
def test_a_file_read_from_anywhere_gives_the_same_entries(lines: list[bytes], cut: int) -> None:
    data = b"".join(lines)
    start = LogPosition(0, 1_700_000_000_000_000_000)
    entries = list(entries_in(data, start))
    times = [entry.time_ns for entry in entries]
    assert times == sorted(set(times)), "unique, and rising"
    assert len(entries) == len([line for line in lines if line.decode("utf-8", "replace").strip()])
    for entry in entries[:cut][-1:]:
        rest = entries_in(data[entry.end :], LogPosition(entry.end, entry.time_ns))
        assert list(rest) == entries[cut:]


def test_a_clock_that_is_set_back_a_little_changes_no_order_and_far_back_is_followed() -> None:
    first = int(datetime(2026, 3, 1, 12, 0, 50, tzinfo=UTC).timestamp()) * 10**9
    back = record(0.0).replace(b"12:00", b"11:00")
    times = [entry.time_ns for entry in entries_in(record(50.0) + record(10.0) + b"raw\n" + back, LogPosition(0, 0))]
    assert times == [first, first + 1, first + 2, first - 3650 * 10**9]


def test_what_comes_before_the_first_record_has_its_time(tmp_path: Path) -> None:
    path = tmp_path / f"{HOST}.log"
    path.write_bytes(b"[W] printed by torch\nand more\n" + record(5.0))
    follower = LogQueue(path)
    assert follower.claim()
    entries = follower.read()
    assert [entry.level for entry in entries] == [PRINTED, PRINTED, "INFO"]
    assert 0 < entries[2].time_ns - entries[0].time_ns <= 10**6
    follower.close()


def test_a_line_that_is_longer_than_a_block_does_not_stop_the_rest(tmp_path: Path) -> None:
    path = tmp_path / f"{HOST}.log"
    path.write_bytes(b"y" * 1_200_000 + b"\n" + b"\n" * 600_000 + record(5.0))
    follower = LogQueue(path)
    assert follower.claim()
    texts = []
    while entries := follower.read():
        texts += [entry.text for entry in entries]
        follower.acknowledge(entries[-1])
    assert "".join(texts[:-1]) == "y" * 1_200_000
    assert json.loads(texts[-1])["level"] == "INFO"
    assert follower.unsent_bytes() == 0
    follower.close()


@pytest.mark.parametrize("lines", [1, 30, 100, 300])
def test_a_log_that_is_emptied_between_two_looks_is_read_from_its_first_line(lines: int, tmp_path: Path) -> None:
    path = tmp_path / f"{HOST}.log"
    path.write_bytes(b"".join(record(number % 60, f"old {number}") for number in range(100)))
    follower = LogQueue(path)
    assert follower.unsent_bytes() == path.stat().st_size, "nothing has been sent before anybody has looked"
    assert follower.claim()
    sent = follower.read()
    follower.acknowledge(sent[-1])
    path.write_bytes(b"".join(record(number % 60, f"new {number}") for number in range(lines)))
    assert follower.unsent_bytes() > 0 or lines == 100
    entries = follower.read()
    assert [json.loads(entry.text)["message"] for entry in entries] == [f"new {number}" for number in range(lines)]
    follower.acknowledge(entries[-1])
    assert (follower.read(), follower.unsent_bytes()) == ([], 0)
    follower.close()
    again = LogQueue(path)
    assert again.claim()
    assert again.read() == [], "what was noted is of the new lines"
    again.close()
