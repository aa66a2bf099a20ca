"""`trends`: its runs, what they are compared with, and lost contributions."""

from __future__ import annotations

import argparse
import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from benchmarks import trends
from benchmarks.harness import Session
from benchmarks.harness.workload import Shape, make_config
from benchmarks.peers.bare_diloco import BareDiLoCo
from benchmarks.peers.work import Work
from benchmarks.programs.dropped import Dropping
from benchmarks.programs.methods_rank import Ours
from benchmarks.trends import GROUPS, Setting

from smolcluster.comm.group import Group
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Combination
from smolcluster.errors import UserError

TINY = Shape("tiny", 16, 1, 2, 8, 4)


class Weights(Combination):
    """Note the weights of contributions."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        self.seen.append(weight)

    def finish(self, slot: int) -> None: ...

    def done(self, slot: int) -> bool:
        return True

    def wait(self, slot: int) -> None: ...

    def give(self, result: object) -> None: ...


def weights_of(*, size: int, share: float, rounds: int) -> list[tuple[float, ...]]:
    """Of every rank in each round."""
    seen = []
    for rank in range(size):
        real = Weights()
        dropping = Dropping(real, [], rank=rank, size=size, share=share, seed=3)
        for _ in range(rounds):
            dropping.start(0, weight=0.7)
        seen.append(real.seen)
    return list(zip(*seen, strict=True))


def test_the_mean_is_over_the_contributions_that_arrive() -> None:
    rounds = weights_of(size=4, share=0.3, rounds=400)
    for weights in rounds:
        arrived = sum(weight > 0 for weight in weights)
        assert set(weights) <= {0.0, 1 / max(1, arrived)}
    lost = sum(weight == 0 for weights in rounds for weight in weights) / 1600
    assert lost == pytest.approx(0.3, abs=0.05)
    assert set(weights_of(size=4, share=0.0, rounds=5)) == {(0.25,) * 4}


def test_a_worker_goes_on_from_its_own_weights_when_its_contribution_is_lost() -> None:
    """With all lost each worker trains for itself, and the common weights stay."""
    overrides = {"training.device": "cpu", "strategy.name": "diloco", "strategy.inner_steps": 2, "training.seed": 1}
    config = make_config(TINY, steps=5, overrides=overrides)

    def train(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor], Ours]:
        ours = Ours(Work(config, rank=group.rank, size=group.size), group, dropped=1.0)
        begun = [p.detach().clone() for p in ours.model.parameters()]
        work = Work(config, rank=group.rank, size=group.size)
        ours.run([work.batch() for _ in range(4)])
        return begun, [p.detach().clone() for p in ours.model.parameters()], ours

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(train, MemoryGroup.world(2)))
    for rank, (begun, common, ours) in enumerate(ranks):
        assert all(a.equal(b) for a, b in zip(begun, common, strict=True))
        ours._dropping.before_step()
        alone, work = copy.deepcopy(ours.model), Work(config, rank=rank, size=2)
        for parameter, first in zip(alone.parameters(), begun, strict=True):
            parameter.data.copy_(first)
        loop = BareDiLoCo(alone, work.recipe, inner_steps=10**6)
        loop.run([work.batch() for _ in range(4)])
        for own, reference in zip(ours.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-6)
    assert not any(a.equal(b) for a, b in zip(ranks[0][2].model.parameters(), ranks[0][0], strict=True))


def test_contributions_can_be_dropped_only_where_there_are_rounds() -> None:
    config = make_config(TINY, steps=4, overrides={"training.device": "cpu", "strategy.name": "allreduce"})
    (group,) = MemoryGroup.world(1)
    with pytest.raises(UserError, match="no rounds of local steps"):
        Ours(Work(config, rank=0, size=1), group, dropped=0.5)


def test_every_setting_is_valid_and_those_that_train_alike_run_once() -> None:
    settings = [setting for group in GROUPS.values() for setting in group()]
    for group in GROUPS.values():
        names = [setting.name for setting in group()]
        assert len(set(names)) == len(names)
    for setting in settings:
        shape = trends.shape_of(setting.workers, trends.SAMPLES)
        make_config(shape, steps=4, overrides=setting.method.overrides())
        assert shape.batch_size * setting.workers == trends.SAMPLES
    alike = {}
    for setting in settings:
        alike.setdefault(setting.key, []).append(setting.name)
    shared = sorted(sorted(names) for names in alike.values() if len(names) > 1)
    assert shared == [
        ["0% dropped", "0.7, momentum 0.9, H 30", "4 workers", "H 30", "fp32, adamw"],
        ["0.7, momentum 0.9, H 15", "H 15"],
        ["0.9, momentum 0.5, H 15", "dense, fp32"],
        ["2 bits", "k 128 (3.1%)", "over senders", "wan, adamw"],
    ]


def trained(monkeypatch: pytest.MonkeyPatch, losses: dict[str, float], **options: object) -> tuple[Session, list[str]]:
    """Run the benchmark with these losses, one hundredth more for each further seed."""
    made: list[str] = []

    def train(setting: Setting, how: trends.How, seed: int) -> dict[str, float]:
        made.append(setting.name)
        return {
            "val_loss": losses.get(setting.name, 2.0) + 0.01 * (seed - trends.SEED),
            "megabytes": 1.0,
            "seconds": 1.0,
        }

    monkeypatch.setattr(trends, "train", train)
    session = Session("trends", repeats=5)
    common = {"steps": None, "samples": None, "rate": trends.RATE, "device": "cpu", "jobs": 1, "keep": None}
    trends.run(session, argparse.Namespace(**{"only": None, "repeats": None, **common, **options}))
    return session, made


def test_perplexity_is_held_to_the_synchronous_run_of_the_same_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"allreduce, muon": 1.5, "fp32, adamw": 2.009, "fp32, muon": 1.52, "lan, muon": 1.4}
    session, made = trained(monkeypatch, losses, only=["quality"], repeats=2)
    (rows,) = session.parameters["tables"].values()
    found = {row["setting"]: (round(row["perplexity"], 6), row.get("verdict")) for row in rows}
    assert found["fp32, adamw"] == (round(math.exp(0.009), 6), "met")
    assert found["fp32, muon"] == (round(math.exp(0.02), 6), "missed")
    assert found["lan, muon"] == (round(math.exp(-0.1), 6), "met")
    assert found["allreduce, muon"] == (1.0, None)
    assert sorted(made) == sorted(2 * list(found)), "each once with each seed"
    assert session.repeats == 2
    assert [row["val_loss"] for row in rows if row["setting"] == "lan, muon"] == [pytest.approx(1.405)]


def test_only_the_groups_that_are_asked_for_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session, made = trained(monkeypatch, {}, only=["H", "dropped"])
    assert [title.split(":")[0] for title in session.parameters["tables"]] == ["H", "dropped"]
    assert len(made) == len(set(made)) == 1 + 5 + 3, "H 30 and 0 % dropped are one run"
    assert "verdict" not in session.parameters["tables"]["H: 2000 steps of 128 samples"][0]
