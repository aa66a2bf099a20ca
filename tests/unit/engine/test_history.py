"""History: a run that kept the rules passes, and every way to break one is found."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smolcluster.data.leases import Leases
from smolcluster.engine.elastic import history
from smolcluster.engine.elastic.history import (
    Begin,
    CommitLine,
    History,
    HistoryLine,
    MemberLine,
    check,
    last_commit,
    read,
)
from smolcluster.observe import jsonl

Lines = list[dict[str, Any]]


class Run:
    """A small elastic run that writes its history as a server does: three workers, 4 samples each in a step."""

    def __init__(self) -> None:
        self.lines: list[HistoryLine] = []
        self.leases = Leases()
        self.members: dict[int, str] = {}
        self.step, self.epoch, self.seq, self.server = 0, 0, 0, ""

    def begin(self, server: str) -> None:
        """A server starts, or takes the place of one that was killed: it knows the committed part only."""
        self.epoch += 1
        self.server, self.leases, self.members = server, Leases.from_state(self.leases.state_dict()), {}
        state = self.leases.state_dict()
        self.lines.append(Begin(epoch=self.epoch, server=server, next_step=self.step, data=state))

    def join(self, rank: int, instance: str) -> None:
        self.epoch += 1
        self.members[rank] = instance
        self.lines.append(MemberLine(event="joined", rank=rank, instance=instance, epoch=self.epoch))

    def lose(self, rank: int, event: str) -> None:
        self.epoch += 1
        instance = self.members.pop(rank)
        self.leases.release(instance)
        self.lines.append(
            MemberLine(event=event, rank=rank, instance=instance, epoch=self.epoch, reason="silent for 5 s")
        )

    def commit(self, *, late: tuple[int, ...] = ()) -> None:
        """All but the late ones are counted; a late lease returns."""
        parts = []
        for instance in self.members.values():
            self.leases.grant(instance, self.step, 4)
        for rank, instance in self.members.items():
            if rank in late:
                self.leases.release(instance, self.step)
                continue
            ranges = self.leases.commit(instance, self.step)
            self.seq += 1
            parts.append({"rank": rank, "instance": instance, "seq": self.seq, "ranges": ranges, "samples": 4})
        self.lines.append(
            CommitLine(
                step=self.step,
                epoch=self.epoch,
                server=self.server,
                contributors=parts,
                digest=f"d{self.step}",
                data=self.leases.state_dict(),
            )
        )
        self.step += 1


def a_run() -> Run:
    run = Run()
    run.begin("s1")
    for rank, instance in enumerate("abc"):
        run.join(rank, instance)
    run.commit()
    run.commit(late=(1,))
    run.lose(2, "evicted")
    run.commit()
    run.lines.append(MemberLine(event="refused", rank=2, instance="c", epoch=run.epoch, reason="stale"))
    run.join(2, "c2")
    run.commit()
    run.begin("s2")
    for rank, instance in ((0, "a"), (1, "b"), (2, "c2")):
        run.join(rank, instance)
    run.commit(late=(0,))
    run.lose(0, "left")
    run.commit()
    return run


def lines_of(run: Run) -> Lines:
    return json.loads(json.dumps([line.fields() for line in run.lines]))


def test_a_good_history_passes() -> None:
    run = a_run()
    assert check(lines_of(run), data=run.leases.state_dict()) == []
    assert check([]) == []


def test_a_run_that_goes_on_from_a_checkpoint_passes() -> None:
    run = Run()
    run.step, run.leases = 500, Leases.from_state({"position": 96, "holes": [[8, 4]]})
    run.begin("s1")
    run.join(0, "a")
    run.commit()
    assert run.leases.state_dict() == {"position": 96, "holes": []}
    run.commit()
    assert check(lines_of(run), data={"position": 100, "holes": []}) == []


def test_without_the_state_of_the_leases_coverage_is_not_judged() -> None:
    lines = [line | {"data": None} if "data" in line else line for line in lines_of(a_run())]
    assert check(lines) == []


# Each mutation breaks one rule, and names what must be said of it.


def commits(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] == "commit"]


def commit_again(lines: Lines) -> None:
    again = copy.deepcopy(commits(lines)[1])
    again["contributors"] = [again["contributors"][0] | {"seq": 900, "ranges": [[900, 4]]}]
    lines.insert(lines.index(commits(lines)[2]), again)
    for line in lines:
        line.pop("data", None)


def count_twice(lines: Lines) -> None:
    late = commits(lines)[3]["contributors"][0]
    late["seq"] = commits(lines)[0]["contributors"][0]["seq"]


def count_twice_in_one_step(lines: Lines) -> None:
    contributors = commits(lines)[0]["contributors"]
    contributors[1] |= {"rank": 0, "instance": "a", "seq": contributors[0]["seq"]}


def read_twice(lines: Lines) -> None:
    commits(lines)[2]["contributors"][0]["ranges"] = commits(lines)[0]["contributors"][0]["ranges"]
    for line in commits(lines):
        line["data"] = None


def read_partly_twice(lines: Lines) -> None:
    """Samples 2 to 5 in the place of 0 to 3, of which another worker has 4 to 7."""
    commits(lines)[0]["contributors"][0]["ranges"] = [[2, 4]]
    for line in lines:
        line.pop("data", None)


def lose_a_lease(lines: Lines) -> None:
    """The lease that step 1 left out is forgotten instead of granted again."""
    for line in lines:
        if line.get("data"):
            line["data"]["holes"] = []


def read_again(lines: Lines) -> None:
    commits(lines)[0]["data"]["holes"] = [[4, 4]]


def forget_a_step(lines: Lines) -> None:
    """The second server has lost the last step of the first, and does it again, with other samples."""
    begin = [line for line in lines if line["kind"] == "begin"][1]
    begin |= {"next_step": begin["next_step"] - 1, "data": None}
    for line in commits(lines)[4:]:
        line["step"] -= 1


def split_brain(lines: Lines) -> None:
    """The first server lives on beside the second."""
    commits(lines)[4]["server"] = "s1"


def drop(lines: Lines, which: Callable[[dict[str, Any]], bool]) -> None:
    del lines[next(i for i, line in enumerate(lines) if which(line))]


def is_join(instance: str) -> Callable[[dict[str, Any]], bool]:
    return lambda line: line.get("event") == "joined" and line["instance"] == instance


MUTATIONS: dict[str, tuple[Callable[[Lines], object], str]] = {
    "a step is missing": (
        lambda lines: lines.remove(commits(lines)[1]),
        "step 2 was committed, but step 1 was next: a step is missing",
    ),
    "a step is committed twice": (commit_again, "step 1 was committed again or too late: step 2 was next"),
    "an epoch goes down": (
        lambda lines: commits(lines)[3].update(epoch=1),
        "step 3 was committed in epoch 1, after epoch",
    ),
    "a membership epoch goes down": (
        lambda lines: lines[2].update(epoch=1),
        "rank 1 (b) joined in epoch 1, after epoch 2",
    ),
    "two servers in one epoch": (
        lambda lines: [line for line in lines if line["kind"] == "begin"][1].update(epoch=6),
        "server s2 began in epoch 6, which belongs to s1",
    ),
    "a server that was replaced commits": (
        split_brain,
        "step 4 was committed by server s1, but s2 was the server",
    ),
    "another server commits in an epoch": (
        lambda lines: commits(lines)[1].update(server="s9"),
        "step 1 was committed by server s9, but s1 was the server",
    ),
    "a server forgets a step": (forget_a_step, "server s2 began with step 3, but step 4 was next"),
    "no server began": (lambda lines: lines.pop(0), "step 0 was committed before any server began"),
    "a gradient is counted in two steps": (
        count_twice,
        "step 3 counted gradient 1 of rank 0 (a), already counted in step 0",
    ),
    "a gradient is counted twice in a step": (
        count_twice_in_one_step,
        "step 0 counted gradient 1 of rank 0 (a), already counted in step 0",
    ),
    "samples are counted twice": (read_twice, "step 2 counted samples 0 to 3 of rank 0 (a), already counted before"),
    "samples are partly counted twice": (
        read_partly_twice,
        "step 0 counted samples 4 to 5 of rank 1 (b), already counted before",
    ),
    "samples are lost": (lose_a_lease, "samples 16 to 19 are lost: never counted, and not to be read again"),
    "samples would be read again": (
        read_again,
        "after step 0, samples 4 to 7 would be read again, though they are counted",
    ),
    "sample counts do not add up": (
        lambda lines: commits(lines)[0]["contributors"][0].update(samples=5),
        "step 0 counted 5 samples of rank 0 (a), but its ranges are [(0, 4)]",
    ),
    "one that never joined is counted": (
        lambda lines: drop(lines, is_join("b")),
        "step 0 counted rank 1 (b), which was no member in epoch",
    ),
    "one that did not join the new server is counted": (
        lambda lines: lines.remove([line for line in lines if is_join("b")(line)][1]),
        "step 4 counted rank 1 (b), which was no member in epoch",
    ),
    "one that was evicted is counted": (
        lambda lines: drop(lines, is_join("c2")) or commits(lines)[3]["contributors"][2].update(instance="c"),
        "step 3 counted rank 2 (c), which was no member in epoch",
    ),
    "one that left is counted": (
        lambda lines: commits(lines)[5]["contributors"].append(
            {"rank": 0, "instance": "a", "seq": 99, "ranges": [[900, 4]], "samples": 4}
        ),
        "step 5 counted rank 0 (a), which was no member in epoch",
    ),
    "one is counted under another rank": (
        lambda lines: commits(lines)[0]["contributors"][0].update(rank=7),
        "step 0 counted rank 7 (a), which was no member in epoch",
    ),
    "a rank has two members": (
        lambda lines: lines[2].update(rank=0),
        "rank 0 joined as b while it was a member as a",
    ),
    "a step has no gradients": (
        lambda lines: commits(lines)[0]["contributors"].clear(),
        "step 0 was committed without any gradient",
    ),
    "a field is missing": (
        lambda lines: commits(lines)[0].pop("server"),
        "line 5 is not a line of a history: commit.server: Field required",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_broken_rule_is_found(name: str) -> None:
    mutate, sentence = MUTATIONS[name]
    lines = lines_of(a_run())
    mutate(lines)
    found = check(lines)
    assert any(sentence in violation for violation in found), found
    assert len(found) == len(set(found)), "a violation is told once"


def test_a_saved_position_is_held_against_the_history() -> None:
    run = a_run()
    lines, state = lines_of(run), run.leases.state_dict()
    end = state["position"]
    assert check(lines, data=state | {"position": end + 4}) == [
        f"at the end, samples {end} to {end + 3} are lost: never counted, and not to be read again"
    ]
    assert check(lines, data=state | {"position": end - 4}) == [
        f"at the end, samples {end - 4} to {end - 1} would be read again, though they are counted"
    ]


def test_any_dropped_doubled_or_swapped_commit_is_found() -> None:
    good = lines_of(a_run())
    at = [i for i, line in enumerate(good) if line["kind"] == "commit"]
    for i in at[:-1]:  # without its last line a history is one that ended earlier
        assert check(good[:i] + good[i + 1 :])
        assert check(good[: i + 1] + good[i:])
    for i, j in itertools.pairwise(at):
        swapped = list(good)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert check(swapped)


def test_nonsense_is_told_and_not_raised() -> None:
    for line in ({}, {"kind": None}, {"kind": "damaged"}, {"kind": "member", "epoch": "x"}, {"kind": []}):
        (violation,) = check([line])
        assert violation.startswith("line 1 is not a line of a history: ")


# The file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def write(path: Path, run: Run) -> Lines:
    with History(path) as history:
        for line in run.lines:
            history.add(line)
    return lines_of(run)


def test_what_is_written_is_read(path: Path) -> None:
    assert read(path) == []
    with History(path) as history:
        part = {"rank": 0, "instance": "a", "seq": 1, "ranges": [[0, 4]], "samples": 4}
        added = [
            Begin(next_step=0, epoch=1, server="s1"),
            MemberLine(event="joined", rank=0, instance="a", epoch=2),
            CommitLine(step=0, epoch=2, server="s1", contributors=[part], digest="x"),
        ]
        for line in added:
            history.add(line)
        history.flush()
        lines = read(path)
    assert lines == [line.fields() for line in added]
    assert lines[2].pop("time") > 0
    written = {"kind": "commit", "epoch": 2, "server": "s1", "step": 0, "digest": "x", "data": None}
    assert lines[2] == written | {"contributors": [part]}
    assert check(lines) == []


def test_a_torn_last_line_is_cut_at_every_byte(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = write(path, a_run())
    good = path.read_bytes()
    last = len(json.dumps(lines[-1])) + 1
    for torn in range(1, last + 1):
        path.write_bytes(good[:-torn])
        assert read(path) == lines[:-1]
        History(path).close()
        assert path.read_bytes() == good[:-last]
    path.write_bytes(good[:-last] + b"\0" * last)
    History(path).close()
    path.write_bytes(path.read_bytes() + b"\0" * 40 + b"\n")  # the length reached the disk, the contents did not
    assert read(path)[-1] == {"kind": "damaged"}
    History(path).close()
    assert path.read_bytes() == good[:-last]
    assert "a line that was being written" in caplog.text


def test_the_journal_gives_back_what_the_file_lost(path: Path) -> None:
    """Wherever the file was cut by a crash, the last lines of the journal make it whole again."""
    lines = write(path, a_run())
    good = path.read_bytes()
    rng = random.Random(3)
    for size in rng.sample(range(len(good) // 2, len(good)), 40):
        path.write_bytes(good[:size])
        with History(path) as history:
            history.reconcile(lines[len(lines) // 3 :], next_step=6)
        assert path.read_bytes() == good
        with History(path) as history:
            history.reconcile([], next_step=6)
        assert path.read_bytes() == good


def test_steps_that_the_journal_does_not_have_are_cut(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = write(path, a_run())
    with History(path) as history:
        assert history.epoch == lines[-1]["epoch"]
        history.reconcile(lines, next_step=3)
        assert history.epoch == lines[-1]["epoch"], "it was used, and must not be again"
        history.add(Begin(next_step=3, epoch=history.epoch + 1, server="s9"))
        assert history.epoch == lines[-1]["epoch"] + 1
    assert read(path)[:-1] == lines[: lines.index(commits(lines)[3])]
    assert "of steps from 3 on, which do not count" in caplog.text


def long_run(path: Path, steps: int, *, members: int = 8) -> Lines:
    """Write a history of so many steps; returns its last 50 lines, as the journal has them."""
    with path.open("w") as file:
        begin = Begin(epoch=1, server="s1", next_step=1, time=0.0).fields()
        joined = [
            MemberLine(epoch=2, event="joined", rank=r, instance=f"w{r}", time=0.0).fields() for r in range(members)
        ]
        lines = [begin, *joined]
        for step in range(1, steps + 1):
            at = (step - 1) * members * 4
            parts = [
                {"rank": r, "instance": f"w{r}", "seq": step, "ranges": [[at + 4 * r, 4]], "samples": 4}
                for r in range(members)
            ]
            data = {"position": at + 4 * members, "holes": []}
            commit = {"epoch": 2, "time": 0.0, "kind": "commit", "server": "s1", "step": step, "contributors": parts}
            lines = [*lines[-49:], commit | {"digest": "", "data": data}]
            file.writelines(json.dumps(line) + "\n" for line in ([begin, *joined] if step == 1 else []))
            file.write(json.dumps(lines[-1]) + "\n")
    return lines


@pytest.mark.parametrize("lost", [0, 1, 20])
def test_a_server_that_comes_back_reads_the_end_of_its_history_only(
    path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """However long the run is, and whatever a crash took from the end of the file."""
    costs = []
    for steps in (400, 4000):
        last = long_run(path, steps)
        good = path.read_bytes()
        path.write_bytes(b"".join(good.splitlines(keepends=True)[: -lost or None]))
        read_bytes = 0

        def counted(*where: Any) -> Iterator[tuple[int, bytes]]:
            nonlocal read_bytes
            for at, line in jsonl.lines_backwards(*where):
                read_bytes += len(line)
                yield at, line

        monkeypatch.setattr(history, "lines_backwards", counted)
        tracemalloc.start()
        with History(path) as opened:
            assert opened.epoch == 2
            opened.reconcile(last, next_step=steps + 1)
        costs.append((read_bytes, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
        assert path.read_bytes() == good
        assert last_commit(path) == steps
    (few_bytes, few_memory), (many_bytes, memory) = costs
    assert 0 < many_bytes <= few_bytes + jsonl.CHUNK_BYTES
    assert memory <= 1.5 * few_memory
    assert many_bytes < len(good) / 2


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_lines_are_read_from_the_end_whatever_the_size_of_a_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", chunk)
    for text in (b"", b"\n", b"a", b"a\n", b"\n\na\n", b"one\ntwo\n\nthree", b"x" * 9 + b"\n" + b"y" * 8 + b"\n"):
        path.write_bytes(text)
        found = list(jsonl.lines_backwards(path, len(text)))[::-1]
        assert [line for _, line in found] == text.splitlines(keepends=True)
        assert [at for at, _ in found] == [sum(map(len, text.splitlines(keepends=True)[:n])) for n in range(len(found))]


def test_a_full_disk_keeps_lines_for_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = a_run().lines
    history = History(path)
    real, full = os.write, [False]

    def short_write(fd: int, data: bytes) -> int:
        if fd != history._fd:
            return real(fd, data)
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        full[0] = len(data) > 60
        return real(fd, data[:60])

    monkeypatch.setattr(os, "write", short_write)
    for line in lines[:3]:
        history.add(line)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    with pytest.raises(OSError, match="3 lines could not be written"):
        history.flush()
    monkeypatch.setattr(os, "write", real)
    history.add(lines[3])
    history.close()
    history.close()
    assert read(path) == [line.fields() for line in lines[:4]]


def test_the_command_counts_rounds_and_servers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(a_run())
    lines[-1]["step"] += 1
    lines[-1]["steps"] = 2  # two local steps, one round
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert history.main([str(path)]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out == "6 committed rounds under 2 server(s): in order\n"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-3]))
    assert history.main([str(path)]) == 0
    with path.open("a") as file:
        file.write(json.dumps(lines[4]) + "\n")  # a round again
    assert history.main([str(path)]) == 1
    assert "committed rounds under 2 server(s): NOT in order" in capsys.readouterr().out
    assert history.main([]) == 2


def test_history_needs_no_torch() -> None:
    code = "import sys, smolcluster.engine.elastic.history, smolcluster.data.leases; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
