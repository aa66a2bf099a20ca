"""Strategies by name: built in, aliased, planned, and from other packages; their options, seats and costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tools.reference import markdown

from smolcluster.config import Config, dump, load_config, resolve, strategies
from smolcluster.config.describe import schema_for_editors
from smolcluster.config.options import Options, RoundOptions
from smolcluster.config.schema import StrategyConfig
from smolcluster.config.strategies import (
    BUILT_IN,
    PLANNED,
    all_records,
    built_in_options,
    canonical_strategy,
    check_name,
    record_of,
    strategy_names,
    written,
)
from smolcluster.dashboard.links import shape_of
from smolcluster.errors import UserError
from smolcluster.launch import prepare
from smolcluster.observe.run_state import counts_own_steps
from smolcluster.parallel.placement import Node, Shape
from smolcluster.planner.candidates import choices
from smolcluster.strategies.base import Strategy
from smolcluster.strategies.base.replicated import Replicated
from smolcluster.strategies.registry import find_strategy, read_options

NODES = [Node(name=f"n{i}") for i in range(4)]


@pytest.mark.parametrize("name", ["allreduce", "AllReduce", "ClassicDP", "classic_dp", "ddp"])
def test_every_spelling_finds_the_strategy(name: str) -> None:
    assert canonical_strategy(name) == check_name(name) == "allreduce"


def test_unknown_names_list_the_known_and_suggest_the_nearest() -> None:
    with pytest.raises(
        UserError,
        match=r"unknown strategy 'alreduce'; did you mean 'allreduce'\? "
        "known: allreduce, diloco, edp, fsdp, mesh, pipeline, single, syncps, tensor",
    ):
        check_name("alreduce")
    with pytest.raises(UserError, match="'swarm' is not built yet"):
        check_name("swarm")


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
    assert record.options_on("mesh") is Options
    with pytest.raises(UserError, match="lonely does not run on the elastic plane"):
        find_strategy("lonely", plane="elastic")


ROOT = Path(__file__).parents[3]

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


def test_a_strategy_that_cannot_run_on_the_elastic_plane_says_what_to_derive_from(install: Callable[..., None]) -> None:
    install("mine", RECORD.replace("edp:EDP", "single:Single"), "mine:RECORD")
    with pytest.raises(
        UserError, match=r"mine: Single cannot run on the elastic plane; derive it from Exchanging, or .*"
    ):
        find_strategy("mine", plane="elastic")


OPTIONS = """
from pydantic import Field
from smolcluster.config.options import Options
from smolcluster.config.strategies import Record

class Mine(Options):
    factor: float = Field(1.0, gt=0, description="of the gradient")
    timeout: float = Field(5.0, gt=1)
    mode: str | None = "slow"

RECORD = Record(
    name="mine", algorithm="Mine", summary="my own", where={"mesh": "smolcluster.strategies.single:Single"},
    options=Mine, variants=lambda _: [(name, {"mode": name}) for name in ("slow", "fast")],
)
"""


@pytest.mark.parametrize(
    ("file", "overrides", "options"),
    [
        ("{name: mine, factor: 0.5, mode: fast}", [], {"factor": 0.5, "mode": "fast"}),
        ("{name: mine, options: {factor: 0.5, other: 1}}", [], {"factor": 0.5, "other": 1}),
        ("{name: mine, factor: 0.5}", ["strategy.options.factor=2"], {"factor": 2}),
        ("{name: mine, options: {factor: 0.5, mode: fast}}", ["strategy.factor=2"], {"factor": 2, "mode": "fast"}),
        ("{name: mine, factor: 0.5}", ["strategy.factor=null"], {}),
        ("{name: mine, options: {mode: fast}}", ["strategy.factor=2"], {"factor": 2, "mode": "fast"}),
        ("{factor: 0.5}", ["strategy.name=MINE"], {"factor": 0.5}),
    ],
)
def test_options_of_a_package_stand_beside_its_name_or_below_options(
    install: Callable[..., None], tmp_path: Path, file: str, overrides: list[str], options: dict[str, Any]
) -> None:
    install("mine", OPTIONS, "mine:RECORD")
    (tmp_path / "run.yaml").write_text(f"training: {{steps: 3}}\ntraining.epochs: 2\nstrategy: {file}\n")
    config = load_config([tmp_path / "run.yaml"], overrides=overrides)
    assert config.strategy.options == options
    assert config.training.epochs == 2
    (tmp_path / "again.yaml").write_text(dump(resolve(config)))
    assert load_config([tmp_path / "again.yaml"]).strategy.options == options


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("  factor: -1", "run.yaml:3: strategy.factor = -1: Input should be greater than 0"),
        ("  options:\n    factor: [1]", "run.yaml:4: strategy.factor = [1]: Input should be a valid number"),
        ("  timeout: 0.5", "run.yaml:3: strategy.timeout = 0.5: Input should be greater than 1"),
        ("  factr: 2", "run.yaml:3: strategy.factr = 2: unknown key; did you mean 'strategy.factor'?"),
        (
            "  factor: 2\n  options: {factor: 3}",
            "run.yaml:3: strategy.factor: given twice, here and as strategy.options.factor at run.yaml:4",
        ),
    ],
)
def test_options_of_a_package_are_checked_where_they_are_written(
    install: Callable[..., None], tmp_path: Path, lines: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("mine", OPTIONS, "mine:RECORD")
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f"strategy:\n  name: mine\n{lines}\n")
    with pytest.raises(UserError) as error:
        load_config(["run.yaml"])
    assert str(error.value) == said


def test_options_of_a_package_are_in_the_schema_for_editors(install: Callable[..., None]) -> None:
    assert schema_for_editors() == Config.model_json_schema()
    install("mine", OPTIONS, "mine:RECORD")
    section = schema_for_editors()["$defs"]["StrategyConfig"]["properties"]
    assert section["factor"]["description"] == "mine: of the gradient"
    assert section["factor"]["exclusiveMinimum"] == 0
    assert section["timeout"]["description"].startswith("syncps: ")
    assert schema_for_editors()["$defs"]["ModelConfig"] == Config.model_json_schema()["$defs"]["ModelConfig"]


def test_options_of_a_package_vary_in_a_plan(install: Callable[..., None]) -> None:
    install("mine", OPTIONS, "mine:RECORD")
    section = load_config([], overrides=["strategy.name=mine", "strategy.mode=none"]).strategy
    said = {c.label: section.with_options(c.options).given() for c in choices(2) if c.strategy == "mine"}
    assert said == {"mine slow": {"mode": "slow"}, "mine fast": {"mode": "fast"}}
    assert section.given() == {"mode": "none"}


def test_a_record_and_its_class_have_the_same_options(install: Callable[..., None]) -> None:
    install("mine", OPTIONS, "mine:RECORD")
    with pytest.raises(UserError, match="strategy mine: its record has the options Mine, and Single has Options"):
        find_strategy("mine")


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
    options, ignored = read_options(section)
    assert options.staleness_bound == 3
    assert options.bucket_mb == 25.0
    assert ignored == ["polyak_alpha", "timeout"]


@pytest.mark.parametrize(
    ("plane", "ignored"),
    [("mesh", ["codec", "codec_rank", "on_stale", "step_timeout"]), ("elastic", []), (None, [])],
)
def test_options_for_members_that_come_and_go_are_named_where_they_stay(plane: str | None, ignored: list[str]) -> None:
    section = StrategyConfig(name="allreduce", step_timeout=60.0, on_stale="stop", codec="powersgd", codec_rank=4)
    assert read_options(section, plane=plane)[1] == ignored


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        (
            {"codec": "fp32", "average": "all", "feedback_decay": 0.5, "codec_bits": 4},
            "average codec_bits feedback_decay",
        ),
        ({"codec": "int4", "average": "all", "feedback_decay": 0.5, "codec_k": 8}, "average codec_k"),
        ({"preset": "wan", "average": "all", "feedback_decay": 0.5, "codec_k": 8}, ""),
        ({"preset": "wan", "outer_momentum": 0.0, "nesterov": True}, "nesterov"),
        ({"preset": "wan", "codec": "bf16"}, ""),  # nobody gave the preset's codec_bits
    ],
)
def test_options_beside_which_others_have_no_effect_name_them(given: dict[str, Any], ignored: str) -> None:
    for plane in ("mesh", "elastic"):
        assert read_options(StrategyConfig(name="diloco", **given), plane=plane)[1] == ignored.split()
    quantized = StrategyConfig(name="syncps", use_quantization=True, codec="powersgd", codec_rank=4)
    assert read_options(quantized)[1] == ["codec_rank"]


def test_local_steps_need_the_length_of_a_round() -> None:
    class Endless(RoundOptions):
        pass

    with pytest.raises(TypeError, match="steps_per_round"):
        Endless()


@pytest.mark.parametrize(
    ("option", "takers"),
    [
        ("sequence_parallel", {"tensor", "mesh"}),
        ("bucket_mb", {"allreduce", "diloco", "edp", "syncps", "fsdp", "mesh"}),
        ("num_microbatches", {"pipeline", "mesh"}),
        ("fsdp_stage", {"fsdp", "mesh"}),
    ],
)
def test_a_strategy_lists_what_applies_to_it(option: str, takers: set[str]) -> None:
    assert {name for name in strategy_names() if option in find_strategy(name).Config.model_fields} == takers


def test_an_option_is_written_alike_for_all_who_take_it() -> None:
    """The section has one type for it, that of the first."""
    for key, takers in built_in_options().items():
        section = TypeAdapter(StrategyConfig.model_fields[key].annotation).json_schema()
        for option in takers:
            assert TypeAdapter(written(option.field)).json_schema() == section, option


def test_the_section_says_who_takes_an_option_and_what_it_means_there() -> None:
    said = {key: field.description for key, field in StrategyConfig.model_fields.items()}
    assert said["polyak_alpha"] == "syncps: weight of the server's weights in a pull; the rest is the worker's"
    assert said["step_timeout"].startswith(
        "allreduce (elastic), fsdp (elastic), diloco (elastic): seconds that a worker may compute"
    )
    assert "allreduce, fsdp (elastic): averaged gradients in flight" in said["staleness_bound"]
    assert ". edp: refuse gradients older than this" in said["staleness_bound"]


@pytest.mark.parametrize(("name", "plane"), [(name, plane) for name in BUILT_IN for plane in BUILT_IN[name].planes])
def test_a_record_has_the_options_of_its_classes(name: str, plane: str) -> None:
    options = record_of(name).options_on(plane)
    assert options is not None
    assert issubclass(options, find_strategy(name, plane=plane).Config)


def test_the_readme_has_a_row_for_every_strategy() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| `(\w+)[^|]*\|[^|]*\| \[[\w.]+\]\((src/\S+\.py)\)", readme, flags=re.MULTILINE)
    assert {name for name, _ in linked} == set(BUILT_IN)
    assert all((ROOT / file).is_file() and f"/strategies/{name}" in file for name, file in linked)


def test_nothing_but_its_record_and_its_code_names_a_strategy() -> None:
    source = ROOT / "src" / "smolcluster"
    theirs = [source / "strategies", *(source / "config" / f"{name}.py" for name in ("strategies", "options"))]
    allowed = {
        (source / "serve" / "engine" / "folder_source.py", "single"),  # a key of tokenizer.json
    }
    names = set(BUILT_IN) - {"mesh"}  # a plane has that name too
    plain_words = {"single", "tensor", "pipeline"}
    inside = re.compile(rf"\b({'|'.join(names - plain_words)})\b")
    found = []
    for path in source.rglob("*.py"):
        if not {path, *path.parents}.isdisjoint(theirs):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in prose:
                continue
            example = path.parent.name == "cli" and node.value.startswith("Example")
            remedy = path.parent.name == "parallel"  # what strategies are made of: its errors name another of them
            named = node.value in names or (inside.search(node.value) and not example and not remedy)
            if named and (path, node.value) not in allowed:
                found.append(f"{path.name}:{node.lineno}: {node.value}")
    assert found == []


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
    assert refused == ["fsdp_stage 3 needs fixed membership; the elastic plane has stages 0 and 1"]


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


def test_options_that_others_make_useless_are_named() -> None:
    given = StrategyConfig.model_validate({"name": "diloco", "inner_size": 2, "max_rounds_apart": 3})
    assert read_options(given)[1] == ["inner_size", "max_rounds_apart"]
    used = StrategyConfig.model_validate({"name": "diloco", "offline": True, "max_rounds_apart": 3})
    assert read_options(used)[1] == []
