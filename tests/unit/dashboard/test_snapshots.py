"""Damaged run directories; snapshots and the changes between them."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.run_folder import (
    T0,
    aged,
    append,
    configure,
    drawn,
    member,
    reader_of,
    row,
    snapshot_of,
    summarize,
    write_rows,
)

from smolcluster.dashboard.run_files import flat_config
from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.runs import RunFolder
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.observe.jsonl import truncate_metrics


def test_lines_that_are_not_what_they_should_be_are_left_out(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", row(1), workers=1)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "ra\n[]\n\xff\xfe\n"x"\n' + b"[" * 3000 + b"\n")
    broken: list[dict[str, Any]] = [
        {}, {"step": "2"}, {"step": 2, "rank": -1}, {"step": 2, "rank": "0"}, {"step": None, "rank": 0},
        {"step": 3, "rank": 0, "time": "now", "loss": {"a": 1}, "host": ["x"] * 1000, "bytes_sent": "many"},
        {"step": 4, "rank": 0, "time": T0 + 4, "loss": 1.0, "machine": {"device": "x" * 10_000, "load": "high"}},
        *({"step": 1, "rank": rank} for rank in range(5, 3000)),
    ]  # fmt: skip
    write_rows(run, *broken)
    append(run / "history.jsonl", {"kind": "member"}, {"kind": "member", "rank": [1]}, {"kind": "begin", "time": "x"})
    append(run / "logs" / "worker-rank0-a.log", {"level": "ERROR", "message": ["<b>"], "time": 5, "rank": "x"})
    (run / "summary.json").write_text("[1]", encoding="utf-8")
    told = snapshot_of(run)
    assert len(told["machines"]) <= 1024
    text = json.dumps(told, allow_nan=False)
    assert len(text) < 3_000_000
    assert "x" * 200 not in text


ODD: tuple[Any, ...] = (
    *(0, -1, 1.5, 5e-324, 1e100, 1e308, -1e308, -1e18, 2**63, 10**400, float("nan"), float("inf"), True, None),
    *("nan", "-inf", "x", [], {}, [1], {"a": 1}, "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", {"load": 1e308}),
)
FIELDS_OF_A_ROW = (*row(1), "val_loss", "val_accuracy", "val_ppl", "stale_rejected", "machine")


def damaged_run(run: Path, chance: random.Random) -> None:
    """Files of the right kind, with values in them that nothing in a run can have."""

    def odd(*good: Any) -> Any:
        return chance.choice(ODD) if not good or chance.random() < 0.7 else chance.choice(good)

    steps, workers = chance.choice((0, 5, 10**14, 10**500)), odd(2, "\u00b2")
    configure(run, steps=steps, workers=json.dumps(workers), strategy=chance.choice(("edp", "pipeline", "allreduce")))
    for step in range(1, 9):
        good = row(step, chance.choice((0, 1)), role=chance.choice(("server", "worker", "worker")))
        write_rows(run, good | {name: odd() for name in chance.sample(FIELDS_OF_A_ROW, 4)})
    for event in ("joined", "left", "evicted", 1):
        said = {"kind": chance.choice(("begin", "member")), "event": event, "time": odd(T0), "rank": odd(0, 1)}
        append(run / "history.jsonl", said | {"reason": odd(), "next_step": odd(3)})
    append(run / "logs" / "worker-rank0-x.log", {"level": "ERROR", "message": odd(), "time": odd(), "rank": odd(0)})
    saved = run / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    sizes = {"a": {"size": odd()}, "b": {"size": odd()}}
    manifest = {"files": odd(sizes), "metrics": odd({"val_loss": odd()}), "created": odd()}
    (saved / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    names = ("status", "error", "finished", "steps", "train_loss", "val_loss", "tokens_per_s", "workers", "strategy")
    if chance.random() < 0.3:
        summarize(run, **{name: odd() for name in names})


@pytest.mark.parametrize("seed", range(40))
def test_damaged_rows_are_drawn_without_what_cannot_be_drawn(seed: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    damaged_run(run, random.Random(seed))
    told = snapshot_of(run)
    assert json.dumps(told, allow_nan=False)
    assert json.dumps(RunFolder(tmp_path).list(), allow_nan=False)
    assert drawn(told).startswith("run | ")


def test_counts_that_no_machine_can_have_do_not_stop_the_reader(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", *(row(step, bytes_sent=1e308 * (step % 2)) for step in range(1, 7)), workers=1)
    write_rows(run, row(7, loss=10**400), row(8, loss="inf"), row(9, time=1e300), row(10))
    told = snapshot_of(run)
    assert (told["numbers"]["step"], told["numbers"]["loss"]) == (10, 0.5)
    assert told["curves"]["joined"]["columns"]["loss"].count(None) == 2


def test_a_configuration_is_flat_bounded_and_without_secrets() -> None:
    flat = flat_config(b"cluster:\n  token: abc\n  port: 5\n  workers: [a, b]\ntask: null\n")
    assert flat == {"cluster.token": "(hidden)", "cluster.port": "5", "cluster.workers": '["a", "b"]', "task": "null"}
    flat = flat_config(
        b"data:\n  tokenizer: gpt2\n  tokenizer_root: /t\nlogging:\n  wandb_api_key: k\n  loki_url: http://me:pw@loki:3100\n"
        b"hub_token: x\nlist: [tcp://u:p@a:1, tcp://b:2]\ncluster:\n  token: null\n"
    )
    assert flat == {
        "data.tokenizer": "gpt2", "data.tokenizer_root": "/t", "logging.wandb_api_key": "(hidden)",
        "logging.loki_url": "http://loki:3100", "hub_token": "(hidden)", "list": '["tcp://a:1", "tcp://b:2"]',
        "cluster.token": "null",
    }  # fmt: skip
    bomb = b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (99 + i, 99 + i, b",".join([b"*%c" % (97 if i == 0 else 98 + i)] * 8)) for i in range(9)
    )
    assert flat_config(bomb) == {}
    began = time.monotonic()
    assert flat_config(b"[" * 50_000) == {}  # brackets without end
    assert time.monotonic() - began < 20
    assert flat_config(b"\x00") == flat_config(b"- 1\n") == flat_config(b"a: [") == {}
    assert len(flat_config("\n".join(f"k{i}: {i}" for i in range(5000)).encode())) == 2000


def test_a_poll_of_a_quiet_run_reads_nothing(elastic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(elastic, now=T0 + 7)
    stream = SnapshotStream(reader)
    stream.changes()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert not reader.poll()
    assert stream.changes() is None


# Telling: a snapshot and the changes after it are the later snapshot


def apply(state: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """What static/store.js does."""
    state = copy.deepcopy(state)
    if news.get("whole"):
        return {name: value for name, value in news.items() if name != "whole"}
    for name, curve in news.pop("curves", {}).items():
        old = state["curves"].get(name, {"columns": {}})["columns"]
        columns = {key: old.get(key, [])[: curve["from"]] + values for key, values in curve["columns"].items()}
        state["curves"][name] = {**curve, "from": 0, "columns": columns}
    saved = news.get("checkpoints", state["checkpoints"])
    events = [event for event in state["events"] if event["kind"] != "checkpoint"] + news.pop("events", [])
    events += [{name: c[name] for name in ("time", "text", "step")} | {"kind": "checkpoint"} for c in saved]
    return state | news | {"events": sorted(events, key=lambda event: event["time"])}


def comparable(told: dict[str, Any]) -> dict[str, Any]:
    """Without clocks, and without curves that have no points yet: those are told with their first."""
    kept = {name: value for name, value in told.items() if name not in ("time", "numbers")}
    return kept | {"curves": {name: curve for name, curve in told["curves"].items() if curve["columns"]["step"]}}


def test_who_watched_a_checkpoint_go_sees_what_one_sees_who_comes_later(tmp_path: Path) -> None:
    run = configure(tmp_path / "run", workers=1)
    reader = RunReader(run, now=lambda: T0)
    stream = SnapshotStream(reader)
    state: dict[str, Any] = {}
    for step in range(1, 6):
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"created": f"2026-01-01T00:00:0{step}+00:00"}))
        if step > 2:
            old = run / "checkpoints" / f"step-{step - 2:08d}"
            (old / "manifest.json").unlink()
            old.rmdir()
        aged(run / "checkpoints", T0 + step)
        reader.poll()
        state = apply(state, stream.changes() or {})
        assert state["events"] == snapshot_of(run)["events"]
    assert [event["step"] for event in state["events"]] == [4, 5]


@settings(deadline=None, max_examples=8)
@given(st.randoms(use_true_random=False))
def test_changes_lead_to_the_same_picture(tmp_path_factory: pytest.TempPathFactory, chance: random.Random) -> None:
    run = configure(tmp_path_factory.mktemp("run"), strategy="edp")
    reader = RunReader(run, now=lambda: T0 + 50)
    stream = SnapshotStream(reader)
    state: dict[str, Any] | None = None
    step = 0
    for _ in range(25):
        for _ in range(chance.randrange(4)):
            step += 1
            write_rows(run, row(step, chance.randrange(3), loss=chance.random()))
            if chance.random() < 0.2:
                write_rows(run, row(step, 3, role="server", val_loss=chance.random()))
        if chance.random() < 0.3:
            append(
                run / "history.jsonl", member(chance.choice(["joined", "left", "evicted"]), chance.randrange(3), step)
            )
        if chance.random() < 0.1:
            configure(run, strategy="edp", steps=chance.randrange(1, 99))
        if chance.random() < 0.05:
            truncate_metrics(run / "metrics.jsonl", after_step=step // 2)
        for machine in reader.ranks.values():
            machine.curve.limit = 6  # so that thinning is a part of it
        reader.poll()
        news = stream.changes()
        if news is not None:
            state = apply(state or {}, news)
        again = stream.snapshot()
        assert state is not None
        assert comparable(state) == comparable(again)
