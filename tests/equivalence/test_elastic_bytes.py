"""`cost` is what crosses the sockets: every codec against the kernel's own counters.

Plain TCP on loopback. Workers read their counters at the beginning of each step; what travels once, at joining, is left out.
At most 2 % and headers may come on top of the formula, and nothing may be missing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from benchmarks.p12 import CASES, INTERVAL, TASK, Case, compare, formula, steps_of
from benchmarks.tasks import counted
from tests.world import run_elastic_world

from smolcluster.config import load_config, resolve
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.planner.dry_run import describe_run

SHAPE = {"model_dim": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 16}
CONFIG = {
    **{f"model.{key}": value for key, value in SHAPE.items()},
    "training.batch_size": 1,
    "training.steps": 40,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 0,
    "cluster.plane": "elastic",
    "logging.log_interval": 1000,  # rows travel too
    "task": TASK,
}
# Every codec once with a server: none of them knows how many workers there are. Without a codec: tests/conformance.
CODED = [case for case in CASES if case.strategy == "syncps" and case.options["codec"] != "fp32"]
BETWEEN_WORKERS = [
    case for case in CASES if case.strategy in ("allreduce", "fsdp") and case.options.get("codec") in ("int8", "topk")
]


def config_of(case: Case, *, workers: int) -> Config:
    run = {"strategy.name": case.strategy, "cluster.num_workers": workers}
    return resolve(load_config([], overrides=CONFIG | case.overrides() | run))


@pytest.mark.usual(when=lambda case: case.name in ("allreduce, int8", "fsdp 1, int8", "syncps, powersgd"))
@pytest.mark.parametrize("case", CODED + BETWEEN_WORKERS, ids=lambda case: case.name)
def test_bytes_of_a_step_are_those_of_the_formula(tmp_path: Path, case: Case) -> None:
    workers = 2
    if not sys.platform.startswith("linux"):
        pytest.skip("TCP_INFO is Linux's")
    counts = tmp_path / "counts"
    counts.mkdir()
    environ = {counted.FOLDER: str(counts)}
    world = run_elastic_world(
        workers, tmp_path / "run", CONFIG | case.overrides(), strategy=case.strategy, environ=environ
    )
    assert set(world.statuses.values()) == {0}, world.story()
    config = config_of(case, workers=workers)
    row = compare(config, steps_of(counts, config))
    assert row["verdict"] == "met", row
    for sent, received in row["samples"]:
        assert sent >= row["formula_sent"], row
        assert received >= row["formula_received"], row


@pytest.mark.parametrize("strategy", ["syncps", "allreduce"])
def test_a_dry_run_knows_what_a_codec_saves(tmp_path: Path, strategy: str) -> None:
    said = {}
    for codec in ("fp32", "int8", "powersgd"):
        config = load_config(
            [], overrides={"strategy.name": strategy, "strategy.codec": codec, "training.device": "cpu"}
        )
        text = describe_run(config, workers=2, run_dir=RunDir(tmp_path / "run"), backend=None, plane="elastic")
        said[codec] = float(re.findall(r"a step sends (\S+) MiB", text)[0])
    assert said["fp32"] > 3 * said["int8"] > 6 * said["powersgd"] > 0


def test_a_dry_run_says_on_which_plane_a_codec_has_no_effect(tmp_path: Path) -> None:
    config = load_config(
        [], overrides={"strategy.name": "allreduce", "strategy.codec": "int8", "training.device": "cpu"}
    )
    said = {
        plane: describe_run(config, workers=2, run_dir=RunDir(tmp_path / "run"), backend=None, plane=plane)
        for plane in ("mesh", "elastic")
    }
    assert "# strategy allreduce does not use, on the mesh plane and with these options: codec\n" in said["mesh"]
    assert "does not use" not in said["elastic"]


def test_pulls_that_never_come_cost_nothing() -> None:
    """With a large interval what a lossy codec makes is all that travels."""
    often, never = (
        formula(config_of(Case("", "syncps", {"codec": "topk", "worker_update_interval": interval}), workers=2))
        for interval in (INTERVAL, 10**6)
    )
    assert never.bytes_received == never.bytes_sent < often.bytes_sent * 1.001
    assert often.bytes_received > 10 * never.bytes_received


@pytest.mark.parametrize(("name", "value"), [("codec_fraction", 0.1), ("codec_rank", 8)])
def test_the_formula_knows_how_strong_a_codec_is(name: str, value: float) -> None:
    codec = "topk" if name == "codec_fraction" else "powersgd"
    weak = formula(config_of(Case("", "edp", {"codec": codec, name: value}), workers=2))
    strong = formula(config_of(Case("", "edp", {"codec": codec}), workers=2))
    full = formula(config_of(Case("", "edp"), workers=2))
    assert strong.bytes_sent < weak.bytes_sent < full.bytes_sent
