"""Strategies by name: built in, aliased, planned, and from other packages; their options, seats and costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smolcluster.config.reference import markdown
from smolcluster.config.schema import StrategyConfig
from smolcluster.errors import UserError
from smolcluster.strategies.base import Options
from smolcluster.strategies.placement import Node, Shape
from smolcluster.strategies.registry import PLANNED, check_name, find_strategy, known_strategies, read_options
from smolcluster.strategies.replicated import Replicated

NODES = [Node(name=f"n{i}") for i in range(4)]


@pytest.mark.parametrize("name", ["allreduce", "AllReduce", "ClassicDP", "classic_dp", "ddp"])
def test_every_spelling_finds_the_strategy(name: str) -> None:
    assert find_strategy(name).name == "allreduce"


def test_unknown_names_list_the_known_and_suggest_the_nearest() -> None:
    with pytest.raises(
        UserError,
        match=r"unknown strategy 'alreduce'; did you mean 'allreduce'\? "
        "known: allreduce, edp, fsdp, mesh, pipeline, single, syncps, tensor",
    ):
        check_name("alreduce")
    with pytest.raises(UserError, match="'diloco' is not built yet"):
        check_name("diloco")


def test_a_package_registers_its_strategy_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, as pip would leave it."""
    (tmp_path / "lonely.py").write_text(
        "from smolcluster.strategies.single import Single\nclass Lonely(Single):\n    name = 'lonely'\n",
        encoding="utf-8",
    )
    info = tmp_path / "lonely-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lonely\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[smolcluster.strategies]\nlonely = lonely:Lonely\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_strategies()["lonely"] == "lonely:Lonely"
    assert find_strategy("lonely").name == "lonely"
    sys.modules.pop("lonely", None)


def test_names_are_known_without_importing_torch() -> None:
    code = "import sys\nfrom smolcluster.strategies.registry import check_name as f; f('ddp'); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "False\n"


def test_options_are_the_strategys_own_and_the_others_are_named() -> None:
    section = StrategyConfig(name="allreduce", staleness_bound=3, polyak_alpha=0.5, timeout=1.0)
    options, ignored = read_options(find_strategy("allreduce"), section)
    assert options.staleness_bound == 3
    assert options.bucket_mb == 25.0
    assert ignored == ["polyak_alpha", "timeout"]


@pytest.mark.parametrize(("plane", "ignored"), [("mesh", ["step_timeout"]), ("elastic", []), (None, [])])
def test_options_for_members_that_come_and_go_are_named_where_they_stay(plane: str | None, ignored: list[str]) -> None:
    section = StrategyConfig(name="allreduce", step_timeout=60.0)
    assert read_options(find_strategy("allreduce"), section, plane=plane)[1] == ignored


@pytest.mark.parametrize(
    ("option", "takers"),
    [
        ("sequence_parallel", {"tensor", "mesh"}),
        ("bucket_mb", {"allreduce", "edp", "syncps", "fsdp", "mesh"}),
        ("num_microbatches", {"pipeline", "mesh"}),
        ("fsdp_stage", {"fsdp", "mesh"}),
    ],
)
def test_a_strategy_lists_what_applies_to_it(option: str, takers: set[str]) -> None:
    assert {name for name in known_strategies() if option in find_strategy(name).Config.model_fields} == takers


def test_the_reference_names_no_strategy_that_is_not_there() -> None:
    page = markdown().lower()
    assert [name for name in PLANNED if name in page] == []


def test_seats() -> None:
    allreduce, single = find_strategy("allreduce"), find_strategy("single")
    seats = allreduce.plan(allreduce.Config(), NODES, None).checked().seats
    assert [(s.rank, s.node, s.role, s.shard) for s in seats] == [(i, f"n{i}", "worker", i) for i in range(4)]
    with pytest.raises(UserError, match="one worker, not 4"):
        single.plan(single.Config(), NODES, None).checked()


@pytest.mark.parametrize(("workers", "bound"), [(1, 0), (2, 0), (4, 3)])
def test_cost_is_the_formula_of_the_docstring(workers: int, bound: int) -> None:
    strategy = find_strategy("allreduce")
    options = strategy.Config(staleness_bound=bound)
    cost = strategy.plan(options, NODES[:workers], Shape(parameters=1000)).cost
    assert cost.bytes_sent == cost.bytes_received == 2 * (workers - 1) * 4000 // workers
    assert cost.gradient_bytes == 4000 * (bound + 1)
    assert cost.optimizer_bytes == 8000


def test_what_only_the_elastic_plane_refuses_is_known_without_a_model() -> None:
    elastic = find_strategy("fsdp", plane="elastic")
    refused = elastic.plan(elastic.Config(fsdp_stage=3), NODES, None).refusals
    assert refused == ["fsdp_stage 3 needs machines that stay; on the elastic plane there are 0 and 1"]


def test_options_are_what_a_strategy_is_generic_in() -> None:
    class Mine(find_strategy("single")):  # type: ignore[misc]
        pass

    class MyOptions(Options):
        pace: int = 3

    class Other(Replicated[MyOptions]):
        pass

    assert Mine.Config is find_strategy("single").Config is Options
    assert Other.Config is MyOptions
