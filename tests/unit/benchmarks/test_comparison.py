"""Comparisons whose samples are known: order, ratios, noise, verdicts, and the file."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from benchmarks.harness import Comparison, Measured, Session, Target, Variant
from benchmarks.harness.comparison import measure, table


def variant(name: str, samples: Iterable[float], role: str = "ours", target: Target | None = None) -> Variant:
    values = iter(samples)
    return Variant(name=name, run=lambda: next(values), role=role, target=target)


def seen(ours: list[list[float]], peer: list[list[float]], *, unit: str = "s", **fields: object) -> Measured:
    """As if these had been measured: a list of rounds per repeat."""
    variants = [variant("peer", [], "peer"), variant("ours", [], **fields)]
    return Measured(Comparison(name="c", variants=variants, unit=unit), {"peer": peer, "ours": ours})


def test_variants_take_turns_and_the_order_turns_with_every_round() -> None:
    calls: list[str] = []

    def call(name: str) -> Callable[[], tuple[float, str]]:
        def run() -> tuple[float, str]:
            calls.append(name)
            return float(len(calls)), name

        return run

    variants = [Variant(name=n, run=call(n), role="peer" if n == "a" else "ours") for n in "abc"]
    measured = measure(Comparison(name="c", variants=variants, rounds=3, warmup=2), repeats=2)
    assert "".join(calls) == "abccba" + "abccbaabccbaabccba"
    assert measured.samples == {  # without the warm-up
        "a": [[7.0, 12.0, 13.0], [18.0, 19.0, 24.0]],
        "b": [[8.0, 11.0, 14.0], [17.0, 20.0, 23.0]],
        "c": [[9.0, 10.0, 15.0], [16.0, 21.0, 22.0]],
    }
    assert measured.ratios("c", "a") == [15 / 13, 22 / 24]
    assert measured.beside == {name: [name] * 6 for name in "abc"}


def test_the_median_is_that_of_repeats_and_a_ratio_is_taken_within_a_round() -> None:
    measured = seen(ours=[[2.0, 3.0, 100.0], [4.0, 4.0, 4.0]], peer=[[1.0, 1.0, 50.0], [4.0, 2.0, 1.0]])
    assert measured.medians("ours") == [3.0, 4.0]
    assert measured.median("ours") == 3.5
    assert measured.ratios("ours", "peer") == [2.0, 2.0]
    assert measured.ratio("ours", "peer") == 2.0


@pytest.mark.parametrize(
    ("unit", "of", "limit", "ours", "verdict", "shown"),
    [
        ("s", "ratio", 1.03, 1.03, "met", "<= 1.03"),
        ("s", "ratio", 1.03, 1.04, "missed", "<= 1.03"),
        ("1/s", "ratio", 2.0, 2.0, "met", ">= 2"),
        ("1/s", "ratio", 2.0, 1.9, "missed", ">= 2"),
        ("s", "median", 0.3, 0.25, "met", "<= 300 ms"),
        ("s", "median", 0.3, 0.4, "missed", "<= 300 ms"),
    ],
)
def test_seconds_stay_below_a_target_and_rates_above(
    unit: str, of: str, limit: float, ours: float, verdict: str, shown: str
) -> None:
    measured = seen(
        ours=[[ours / 2], [ours], [2 * ours]], peer=[[0.5], [1.0], [2.0]], unit=unit, target=Target(limit=limit, of=of)
    )
    assert measured.verdict(measured.comparison.variants[1]) == verdict
    assert shown in table(measured, repeats=3)


def test_the_ratio_to_every_peer_counts() -> None:
    variants = [
        variant("slow", [], "peer"),
        variant("fast", [], "peer"),
        variant("ours", [], target=Target(limit=1.0)),
    ]
    samples = {"slow": [[2.0]], "fast": [[1.0]], "ours": [[1.5]]}
    measured = Measured(Comparison(name="c", variants=variants), samples)
    assert measured.ratio("ours", "slow") < 1.0
    assert measured.verdict(variants[2]) == "missed"
    assert "/ slow" in table(measured, repeats=1)
    assert "/ fast" in table(measured, repeats=1)


@pytest.mark.parametrize(
    ("twin", "ours", "verdict"),
    [
        *((1.02, 1.01, "within noise"), (1.02, 1.03, "missed"), (1.02, 0.99, "met")),
        *((1.20, 1.10, "unclear"), (1.20, 0.90, "unclear"), (1.20, 0.70, "met"), (1.20, 1.30, "missed")),
    ],
)
def test_noise_is_how_far_a_peer_lies_from_itself(twin: float, ours: float, verdict: str) -> None:
    variants = [
        variant("peer", [], "peer"),
        variant("ours", [], target=Target(limit=1.0)),
        variant("twin", [], "noise"),
    ]
    samples = {"peer": [[1.0]] * 2, "ours": [[ours]] * 2, "twin": [[twin], [2.0 - twin]]}
    measured = Measured(Comparison(name="c", variants=variants), samples)
    assert measured.noise == pytest.approx(twin - 1.0)
    assert measured.verdict(variants[1]) == verdict
    assert f"{twin - 1:.1%}" in table(measured, repeats=2)


def test_a_comparison_needs_a_peer_and_distinct_names() -> None:
    with pytest.raises(ValueError, match="no peer"):
        Comparison(name="c", variants=[variant("ours", [])])
    with pytest.raises(ValueError, match="same name"):
        Comparison(name="c", variants=[variant("a", [], "peer"), variant("a", [])])


def test_the_file_holds_raw_samples_figures_and_the_machine(tmp_path: Path) -> None:
    session = Session("fake", repeats=2)
    session.parameters = {"link": "loopback"}
    variants = [variant("peer", [2.0] * 4, "peer"), variant("ours", [1.0, 3.0, 1.0, 1.0], target=Target(limit=1.5))]
    session.compare(Comparison(name="c", variants=variants, rounds=2, warmup=0, parameters={"workers": 2}))
    path = session.write(tmp_path / "new")
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "fake.json"
    assert (kept["benchmark"], kept["repeats"], kept["quick"]) == ("fake", 2, False)
    assert kept["parameters"] == {"link": "loopback"}
    assert kept["date"].endswith("+00:00")
    assert (kept["machine"]["cores"], bool(kept["machine"]["torch"])) == (os.cpu_count(), True)
    assert socket.gethostname() not in json.dumps(kept["machine"])
    assert "/" not in kept["machine"]["cpu"]
    (comparison,) = kept["comparisons"]
    assert comparison["parameters"] == {"workers": 2}
    ours = comparison["variants"]["ours"]
    assert ours["samples"] == [[1.0, 3.0], [1.0, 1.0]]
    assert ours["median"] == 1.5
    assert ours["spread"] == [1.0, 2.0]
    assert ours["ratio"] == {"peer": 0.75}
    assert ours["ratios"] == {"peer": [1.0, 0.5]}
    assert ours["target"] == {"limit": 1.5, "of": "ratio"}
    assert ours["verdict"] == "met"
    assert comparison["variants"]["peer"]["verdict"] is None
