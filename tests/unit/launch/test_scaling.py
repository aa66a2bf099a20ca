"""`bench scaling`: what is planned, what is made of the rows of a run, and how it is shown. Nothing here trains."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from tests.unit.samples import logged

from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch import scaling as launch
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.scaling import ScalingRequest, batch_for, parse_sizes, plan, run_scaling, sample_of
from smolcluster.launch.scaling_report import Sample, Scaling, Size, bar, chart, draw, remarks
from smolcluster.observe.events import Event, StepLogged


def row(step: int, *, rank: int = 0, samples: int, rate: float, role: str = "worker") -> StepLogged:
    return logged(step, rank, role=role, samples=samples, tokens=2 * samples, samples_per_s=rate)


def size(workers: int, *rates: float, **fields: Any) -> Size:
    samples = [
        Sample(repeat=i + 1, samples_per_s=rate, tokens_per_s=0.0, steps_per_s=rate / 8, stretches=[])
        for i, rate in enumerate(rates)
    ]
    return Size(workers=workers, shards=workers, batch_size=8, samples=samples, **fields)


def scaling_of(*sizes: Size, weak: bool = False) -> Scaling:
    return Scaling(title="allreduce <&>", weak=weak, unit="cores", units=2, sizes=list(sizes))


@pytest.mark.parametrize(
    ("text", "sizes"), [("8", [1, 2, 4, 8]), ("6", [1, 2, 4, 6]), ("1", [1]), ("4,1,2,2", [1, 2, 4]), ("3,5", [3, 5])]
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["two", "1;2", "", "0", "1,-2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--workers"):
        parse_sizes(text)


def test_strong_scaling_shares_a_batch_and_weak_scaling_one_for_each_worker() -> None:
    assert batch_for(12, 4, 4, weak=False) == 3
    assert batch_for(12, 4, 1, weak=False) == 12  # a pipeline of four: all see the same samples
    assert batch_for(12, 4, 4, weak=True) == 12
    assert batch_for(12, 4, 1, weak=True) == 48
    assert batch_for(12, 4, 2, weak=True) == 24
    with pytest.raises(UserError, match=r"12 samples cannot be divided among 5 .* training.batch_size=15"):
        batch_for(12, 5, 5, weak=False)


def test_a_sample_leaves_the_warm_up_out_and_adds_up_ranks() -> None:
    rows = [
        row(1, samples=4, rate=0.1),
        row(5, samples=20, rate=1.0),  # the warm-up ends here
        row(10, samples=40, rate=10.0),  # 20 samples in 2 s
        row(15, samples=60, rate=5.0),  # 20 samples in 4 s
        *(row(step, rank=1, samples=4 * step, rate=20.0) for step in (1, 5, 10, 15)),
        *(row(step, rank=2, samples=0, rate=0.0) for step in (1, 5, 10, 15)),  # a peer that counts nothing
    ]
    found = sample_of(rows, repeat=1, warmup=5, global_batch=8)
    assert found.samples_per_s == pytest.approx(40 / 6 + 20)
    assert found.tokens_per_s == pytest.approx(2 * found.samples_per_s)
    assert found.steps_per_s == pytest.approx(found.samples_per_s / 8)
    assert [s["seconds"] for s in found.stretches if s["rank"] == 0] == pytest.approx([2.0, 4.0])
    with pytest.raises(SmolclusterError, match="raise --steps"):
        sample_of(rows[:2], repeat=1, warmup=5, global_batch=8)


def test_efficiency_is_to_the_fewest_workers_and_of_medians() -> None:
    scaling = scaling_of(size(1, 90, 100, 400), size(2, 180, 160, 150), size(4, 100))
    assert [scaling.efficiency(s) for s in scaling.sizes] == pytest.approx([1.0, 0.8, 0.25])
    assert scaling.efficiency(scaling.sizes[1], repeat=1) == pytest.approx(0.9)
    without_one = scaling_of(size(1, reason="cannot"), size(2, 100), size(4, 150))
    assert without_one.efficiency(without_one.sizes[2]) == pytest.approx(0.75)
    assert without_one.to_dict()["sizes"][2]["efficiency"] == pytest.approx(0.75)
    assert "efficiency" not in without_one.to_dict()["sizes"][0]


def test_the_chart_has_the_line_the_reasons_and_what_the_machine_lacks() -> None:
    scaling = scaling_of(size(1, 100), size(2, 170), size(3, reason="because\nof this"), size(4, 180, shared=True))
    text = [line for line, _ in chart(scaling, unicode=False)]
    assert text[3].endswith("85%   " + "#" * 20 + "|")
    assert text[4].endswith("because")
    assert text[5].endswith("45%*  " + "#" * 11 + " " * 9 + "|")
    said = "\n".join(remarks(scaling))
    assert "at or above 80%: 1, 2 workers" in said
    assert "4 workers share 2 cores: these figures measure this machine" in said
    assert "█│" not in "".join(text)
    assert bar(1.0, unicode=True) == "█" * 20 + "│" + "█" * 4
    assert len(bar(9.0, unicode=True)) == 30


def test_the_picture_is_well_formed_and_has_every_point() -> None:
    root = ElementTree.fromstring(draw(scaling_of(size(1, 100), size(2, 150, 190), size(4, 180, shared=True))))
    places = [e for e in root.iter() if e.tag.endswith("circle")]
    assert [place.get("fill") for place in places] == ["#3182bd", "#3182bd", "white"]
    assert ElementTree.fromstring(draw(scaling_of(size(1, reason="cannot")))) is not None


def request(folder: Path, *, sizes: list[int], weak: bool = False, **overrides: Any) -> ScalingRequest:
    return ScalingRequest(
        overrides={"training.batch_size": 6, "training.device": "cpu", **overrides},
        sizes=sizes,
        weak=weak,
        steps=2,
        warmup=1,
        repeats=2,
        threads=1,
        folder=folder,
    )


def test_a_size_that_cannot_be_says_why_and_the_others_stay(tmp_path: Path) -> None:
    scaling = plan(request(tmp_path, sizes=[1, 2, 4], **{"strategy.name": "mesh", "strategy.tp": 2}))
    assert "tp 2 x pp 1 does not divide 1 workers" in scaling.sizes[0].reason
    assert (scaling.sizes[2].shards, scaling.sizes[2].batch_size) == (2, 3)
    assert [size.workers for size in scaling.sizes if not size.reason] == [2, 4]
    with pytest.raises(UserError, match="does not divide 1 workers"):
        plan(request(tmp_path, sizes=[1], **{"strategy.name": "mesh", "strategy.tp": 2}))
    with pytest.raises(UserError, match="unknown strategy"):
        plan(request(tmp_path, sizes=[1], **{"strategy.name": "nosuch"}))


def test_repeats_turn_and_what_is_measured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are scripted here: the one of three workers fails, the last one is interrupted."""
    order: list[int] = []

    def scripted(run: Any, *, sinks: list[Any]) -> dict[str, Any]:
        order.append(run.workers)
        if run.workers == 3:
            raise SmolclusterError("worker rank 1 failed: of its own")
        if len(order) == 5:
            raise Interrupted("interrupted")
        for rank in range(run.workers):
            batch = run.config.training.batch_size
            for step in (1, 2, 3):
                sinks[0].handle(row(step, rank=rank, samples=batch * step, rate=10.0))
        return {}

    monkeypatch.setattr(launch, "run_here", scripted)
    heard: list[tuple[str, Event | None]] = []
    scaling = run_scaling(request(tmp_path, sizes=[1, 2, 3]), on_event=lambda name, event: heard.append((name, event)))
    assert order == [1, 2, 3, 2, 1]
    assert scaling.status == "interrupted"
    kept = json.loads((tmp_path / "scaling.json").read_text())
    assert kept["status"] == "interrupted"
    assert [len(s["samples"]) for s in kept["sizes"]] == [1, 2, 0]
    assert kept["sizes"][1]["efficiency"] == pytest.approx(1.0)
    assert kept["sizes"][2]["reason"] == "worker rank 1 failed: of its own"
    assert (tmp_path / "scaling.svg").is_file()
    assert next(name for name, event in heard if event is None) == "repeat 1 of 2, 1 worker"
