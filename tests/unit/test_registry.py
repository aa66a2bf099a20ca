"""Strategies by name: built in, aliased, planned, and from other packages; their options, seats and costs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smolcluster.config import Config, strategies
from smolcluster.config.options import Options
from smolcluster.config.reference import markdown
from smolcluster.config.schema import StrategyConfig
from smolcluster.config.strategies import (
    BUILT_IN,
    PLANNED,
    all_records,
    canonical_strategy,
    check_name,
    record_of,
    strategy_names,
)
from smolcluster.dashboard.links import shape_of
from smolcluster.engine.choices import choices
from smolcluster.errors import UserError
from smolcluster.launch import prepare
from smolcluster.observe.board import counts_own_steps
from smolcluster.parallel.placement import Node, Shape
from smolcluster.strategies.base import Strategy
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.strategies.replicated import Replicated

NODES = [Node(name=f"n{i}") for i in range(4)]


@pytest.mark.parametrize("name", ["allreduce", "AllReduce", "ClassicDP", "classic_dp", "ddp"])
def test_every_spelling_finds_the_strategy(name: str) -> None:
    assert canonical_strategy(name) == check_name(name) == "allreduce"


def test_unknown_names_list_the_known_and_suggest_the_nearest() -> None:
    with pytest.raises(
        UserError,
        match=r"unknown strategy 'alreduce'; did you mean 'allreduce'\? "
        "known: allreduce, edp, fsdp, mesh, pipeline, single, syncps, tensor",
    ):
        check_name("alreduce")
    with pytest.raises(UserError, match="'diloco' is not built yet"):
        check_name("diloco")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a distribution on the path, as pip would leave it: its module, and what its entry point names there."""

    def one(name: str, code: str, at: str) -> None:
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{strategies.GROUP}]\n{name} = {at}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    def forget() -> None:
        strategies._registered.cache_clear()
        strategies.find_record.cache_clear()

    yield one
    forget()
    for made in tmp_path.glob("*.py"):
        sys.modules.pop(made.stem, None)


def test_a_package_registers_a_class(install: Callable[..., None]) -> None:
    """It runs on the mesh plane, and is known by the name of its entry point."""
    code = "from smolcluster.strategies.single import Single\nclass Lonely(Single):\n    'Alone.'\n"
    install("lonely", code, "lonely:Lonely")
    assert "lonely" in strategy_names()
    assert find_strategy("Lonely").__name__ == "Lonely"
    record = record_of("lonely")
    assert (record.planes, record.summary, record.topology) == (("mesh",), "Alone.", "ring")
    with pytest.raises(UserError, match="lonely does not run on the elastic plane"):
        find_strategy("lonely", plane="elastic")


RECORD = """
from smolcluster.config.strategies import Record
RECORD = Record(
    name="mine", algorithm="Mine", summary="my own", aliases=("my-own",), topology="star", own_steps=True,
    where={"elastic": "smolcluster.strategies.edp:EDP", "mesh": "nowhere:Mine"},
)
"""


def test_a_package_registers_a_record_for_both_planes(install: Callable[..., None]) -> None:
    install("mine", RECORD, "mine:RECORD")
    assert canonical_strategy("MY_OWN") == canonical_strategy("Mine") == "mine"
    assert find_strategy("mine") is find_strategy("edp")
    with pytest.raises(UserError, match=r"strategy mine: nowhere:Mine cannot be imported: No module named 'nowhere'"):
        find_strategy("mine", plane="mesh")
    assert shape_of("mine", served=True, num_workers=3) == "star"
    assert counts_own_steps("mine")
    assert [c.plane for c in choices(4) if c.strategy == "mine"] == ["mesh", "elastic"]
    planes = {
        said: prepare.choose_plane(Config(strategy={"name": "mine"}, cluster={"plane": said}))
        for said in ("mesh", "elastic", None)
    }
    assert planes == {"mesh": "mesh", "elastic": "elastic", None: "elastic"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_of_that_name", "broken:RECORD cannot be imported: No module named 'nothing_of_that_name'"),
        (RECORD, "the record at broken:RECORD is of 'mine'; use one name"),
    ],
)
def test_a_package_that_is_broken_is_named_when_it_is_used(install: Callable[..., None], code: str, said: str) -> None:
    """And is in nobody's way before."""
    install("broken", code, "broken:RECORD")
    with pytest.raises(UserError, match=said):
        record_of("broken")
    assert "broken" not in all_records()
    with pytest.raises(UserError, match=r"unknown strategy 'brokn'; did you mean 'broken'\?"):
        check_name("brokn")


def test_names_are_known_without_importing_torch() -> None:
    code = (
        "import sys\nfrom smolcluster.config.strategies import record_of as f; f('ddp'); print('torch' in sys.modules)"
    )
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
    assert {name for name in strategy_names() if option in find_strategy(name).Config.model_fields} == takers


def test_the_strategy_section_has_the_options_of_all_strategies() -> None:
    """On every plane; what a description says before its colon are strategies that take it."""
    takers: dict[str, set[str]] = {}
    for record in BUILT_IN.values():
        for plane in record.planes:
            for key in find_strategy(record.name, plane=plane).Config.model_fields:
                takers.setdefault(key, set()).add(record.name)
    section = {k: f for k, f in StrategyConfig.model_fields.items() if k not in ("name", "options")}
    assert set(section) - set(takers) == {"reduce_bucket_size", "inner_steps"}  # another's name; one that is to come
    assert set(takers) <= set(section)
    for key, field in section.items():
        named = set(re.findall(r"\w+", (field.description or "").partition(":")[0])) & set(BUILT_IN)
        assert named <= takers.get(key, named), key


def test_the_documentation_has_a_row_for_every_strategy() -> None:
    root = Path(__file__).parents[2]
    index = (root / "docs" / "strategies" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\| \[(\w+)\]\((\w+)\.md\)", index, flags=re.MULTILINE)
    assert {name for name, *_ in rows} == set(BUILT_IN)
    for name, also, *pages in rows:
        assert set(pages) == {name}
        assert (root / "docs" / "strategies" / f"{name}.md").is_file()
        for word in filter(None, map(str.strip, also.split(","))):
            assert word == BUILT_IN[name].algorithm or canonical_strategy(word) == name
    readme = (root / "README.md").read_text(encoding="utf-8")
    linked = dict(re.findall(r"^\| `(\w+)[^|]*\|[^|]*\| \[[\w.]+\]\(src/(\S+)\.py\)", readme, flags=re.MULTILINE))
    assert set(linked) == set(BUILT_IN)
    assert all(module.replace("/", ".") in "".join(BUILT_IN[name].where.values()) for name, module in linked.items())


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


def test_a_strategy_has_few_members() -> None:
    """What an author of one has to know. Whatever can be derived from its state, or is a role of its own, is not here."""
    members = {name for name in {*vars(Strategy), *Strategy.__annotations__} if not name.startswith("_")}
    members |= {"options", "context"}  # set when it is made
    assert len(members) <= 12, sorted(members)
