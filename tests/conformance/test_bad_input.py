"""What a user may get wrong about a strategy is refused before anything starts, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.cases import Case, all_cases, named, over

from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.planner.dry_run import describe_run
from smolcluster.strategies.registry import find_strategy, read_options

CASES = all_cases()
USUAL = [case for case in CASES if case.usual]
FIRST = {
    (case.strategy, case.plane): case for case in reversed(USUAL)
}  # options are those of the strategy, not of a variant


def options_of(case: Case, overrides: dict[str, Any]) -> Any:
    """What a launcher does, and then every worker."""
    config = case.config(overrides)
    return read_options(config.strategy, plane=case.plane)[0]


@over([*FIRST.values()])
def test_an_unknown_option_is_refused(case: Case) -> None:
    with pytest.raises(UserError, match=r"unknown|known:"):
        options_of(case, {"strategy.no_such_option": 1})


def bounded(case: Case) -> list[tuple[str, float]]:
    """Every option that has bounds, with a value beyond each."""
    found = []
    for name, field in find_strategy(case.strategy, plane=case.plane).Config.on(case.plane).items():
        for bound in field.metadata:
            found += [(name, getattr(bound, kind) - 1) for kind in ("ge", "gt") if hasattr(bound, kind)]
            found += [(name, getattr(bound, kind) + 1) for kind in ("le", "lt") if hasattr(bound, kind)]
    return found


@over([*FIRST.values()])
def test_a_value_out_of_bounds_is_refused(case: Case) -> None:
    for name, value in bounded(case):
        with pytest.raises(UserError) as refused:
            options_of(case, named({name: value}))
        assert f"{name} = {value!r}" in str(refused.value)


@over(USUAL)
def test_a_number_of_workers_that_cannot_be_is_refused(case: Case, tmp_path: Any) -> None:
    """Wherever the plan refuses one of the first numbers, a run does too, in the same words."""
    refusals = {}
    for workers in range(1, 10):
        other = case.on(workers)
        options = options_of(other, {})
        refused = find_strategy(case.strategy, case.plane, options).plan(options, other.nodes(), None).refusals
        if refused:
            refusals[workers] = refused[0]
    assert case.workers not in refusals
    for workers, words in list(refusals.items())[:2]:
        config = case.on(workers).config({"training.batch_size": 4, "training.steps": 2})
        with pytest.raises(UserError) as said:
            describe_run(config, workers=workers, run_dir=RunDir(tmp_path), backend=None, plane=case.plane)
        assert str(said.value) == words
        assert ";" in words, "no remedy"
