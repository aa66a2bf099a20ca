"""P14: which runs are compared, on which cores they run, and their verdicts."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import p14
from benchmarks.__main__ import main
from benchmarks.harness import Session
from benchmarks.harness.processes import descendants
from benchmarks.programs.p14_run import BATCH, Order, share_of

from smolcluster.config import load_config, resolve
from smolcluster.errors import SmolclusterError

EDP = Order(strategy="edp", workers=4, seed=1, steps=400)


def arguments(**given: Any) -> argparse.Namespace:
    usual = {"only": None, "workers": None, "slow": "both", "steps": None, "seed": 7, "jobs": None, "set": []}
    return argparse.Namespace(**{**usual, **given})


def result(loss: float, **given: Any) -> dict[str, Any]:
    usual = {"train_loss": loss, "samples": 4 * BATCH * 400, "share_of_slow": None, "staleness": 1.0}
    return {"val_loss": loss, **usual, **given}


def test_every_case_is_run_with_every_seed() -> None:
    orders = p14.cases(Session("p14", repeats=3), arguments())
    assert len(orders) == len(set(orders)) == 3 * len(p14.WORKERS) * len(p14.STRATEGIES) * 2
    assert {order.seed for order in orders} == {7, 8, 9}
    assert {len(group) for group in p14.grouped(orders)} == {3}
    only = p14.cases(Session("p14", repeats=1), arguments(only=["edp"], workers=[2], slow="yes", set=["codec=int8"]))
    assert [(o.name, o.workers, o.slow) for o in only] == [("edp, codec int8", 2, True)]


def test_single_takes_the_samples_of_all_workers_in_as_many_steps() -> None:
    single = p14.single_of(EDP)
    configs = [resolve(load_config(["default"], overrides=order.overrides())) for order in (EDP, single)]
    per_step = [config.training.batch_size * (config.cluster.num_workers or 1) for config in configs]  # type: ignore[operator]
    assert per_step == [64, 64]
    assert configs[0].training.steps == configs[1].training.steps
    assert configs[0].lr_schedule == configs[1].lr_schedule
    assert configs[0].training.learning_rate == configs[1].training.learning_rate
    assert p14.single_of(EDP, result(2.0, samples=64 * 390)).steps == 390


def test_the_gap_is_that_between_runs_of_one_seed() -> None:
    orders = [
        EDP,
        Order(strategy="edp", workers=4, seed=2, steps=400),
        Order(strategy="edp", workers=4, seed=3, steps=400),
    ]
    done = {order: result(loss) for order, loss in zip(orders, (2.04, 2.15, 2.56), strict=True)}
    done |= {p14.single_of(order): result(loss) for order, loss in zip(orders, (2.0, 2.1, 2.6), strict=True)}
    row = p14.row_of(orders, done)
    assert row["gap"] == pytest.approx(0.04)
    assert (row["least"], row["most"]) == (pytest.approx(-0.04), pytest.approx(0.05))
    assert row["verdict"] == "within 0.06"
    assert row["share_of_slow"] is None


@pytest.mark.parametrize(
    ("strategy", "gap", "verdict"),
    [
        *(("edp", 0.03, "met"), ("edp", 0.031, "within 0.06"), ("edp", 0.061, "missed")),
        *(("diloco", 0.0099, "met"), ("diloco", 0.011, "missed")),
    ],
)
def test_diloco_is_held_to_a_percent_and_edp_to_a_difference(strategy: str, gap: float, verdict: str) -> None:
    assert p14.verdict(strategy, gap) == verdict


def test_the_share_of_a_slow_worker_is_of_the_mean_of_the_others() -> None:
    parts = [{"rank": 0, "samples": 30}, {"rank": 1, "samples": 50}, {"rank": 2, "samples": 10}]
    assert share_of(2, [{"contributors": parts}, {"contributors": parts[:2] + [{"rank": 2, "samples": 10}]}]) == 0.25
    assert share_of(2, [{"contributors": parts[:2]}]) == 0.0


def test_no_core_is_used_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, busy, taken = threading.Lock(), list[int](), list[int]()

    def run(self: object, order: Order, cores: list[int]) -> dict[str, Any]:
        with lock:
            busy.append(len(cores))
            taken.extend(cores)
            assert len(busy) <= 3
            assert len(taken) == len(set(taken)) == sum(busy)
        time.sleep(0.01)  # so that others run beside it
        with lock:
            busy.remove(len(cores))
            for core in cores:
                taken.remove(core)
        return result(2.0, seconds=0.01)

    monkeypatch.setattr(p14._Children, "run", run)
    orders, done = p14.cases(Session("p14", repeats=2), arguments()), dict[Order, dict[str, Any]]()
    p14.run_all(orders, range(11), 3, done)
    assert done.keys() == set(orders)
    monkeypatch.setattr(p14._Children, "run", None)
    p14.run_all(orders, range(11), 3, done)  # what is done is not done again


def test_a_run_that_fails_ends_the_others() -> None:
    before = set(descendants(os.getpid()))
    bad = Order(strategy="edp", workers=1, seed=1, steps=1, tiny=True, options=(("no_such_option", 1),))
    long = Order(strategy="single", workers=1, seed=1, steps=10**6, tiny=True)
    with pytest.raises(SmolclusterError, match="no_such_option"):
        p14.run_all([bad, long], [0, 1, 2, 3], 2, {})
    assert set(descendants(os.getpid())) <= before, "something is left running"


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_p14_in_its_smallest_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2:
        pytest.skip("two cores and Linux are needed")
    before = descendants(os.getpid())
    assert main(["p14", "--quick", "--repeats", "1", "--steps", "20", "--out", str(tmp_path)]) == 0
    assert "the loss above that of single" in capsys.readouterr().out
    assert set(descendants(os.getpid())) <= set(before), "something is left running"
    (rows,) = json.loads((tmp_path / "p14.json").read_text(encoding="utf-8"))["parameters"]["tables"].values()
    assert [(row["strategy"], row["slow"]) for row in rows] == [
        *(("edp", ""), ("edp", "one"), ("diloco", ""), ("diloco", "one")),
    ]
    assert all(row["samples"] == [2 * BATCH * 20] for row in rows)
    assert all(1.0 < row["loss"] < 5.6 for row in rows)
