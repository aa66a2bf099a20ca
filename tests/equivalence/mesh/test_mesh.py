"""`mesh` computes what `single` computes, for every shape of 4 and 8 ranks. Tolerances as in test_allreduce.py."""

from __future__ import annotations

import itertools

import pytest
from tests.equivalence.same_run import COMMON, GPT, EqualsSingle, Single, named

SHAPES = [
    (size, dp, tp, pp)
    for size in (4, 8)
    for dp, tp, pp in itertools.product((1, 2, 4, 8), repeat=3)
    if dp * tp * pp == size and tp <= 4 and pp <= 4
]
# A stage needs a data axis; with eight ranks the first and the last of them.
CASES = [
    (size, dp, tp, pp, stage)
    for size, dp, tp, pp in SHAPES
    for stage in ((0,) if dp == 1 else (0, 1, 2, 3) if size == 4 else (0, 3))
]
USUAL = [(4, 2, 1, 2, 2)]  # a stage beside another axis; without it: tests/conformance
CONFIG = COMMON | GPT | {"training.steps": 4, "model.num_heads": 4, "model.num_layers": 4}


@pytest.mark.usual(when=lambda strategy, options: strategy != "tensor")
@pytest.mark.parametrize(
    ("strategy", "options"), [("pipeline", {}), ("tensor", {}), ("mesh", {"cp": 2})], ids=["pipeline", "tensor", "cp"]
)
def test_ranks_that_share_samples_augment_them_alike(
    equals_single: EqualsSingle, strategy: str, options: dict[str, int]
) -> None:
    """Inputs and targets are cut from a random place of each sequence: those of the first rank fit those of the last."""
    config = CONFIG | {"training.batch_size": 4, "training.grad_accumulation": 2}
    equals_single(strategy, 2, config, named(options), task="AugmentedGPT", tolerance=1e-9)


@pytest.mark.usual(when=lambda strategy, options, **_: strategy == "pipeline" or options.get("fsdp_stage") == 3)
@pytest.mark.parametrize(
    ("size", "strategy", "options"),
    [
        (2, "fsdp", {"fsdp_stage": 0}),
        (2, "fsdp", {"fsdp_stage": 1}),
        (2, "fsdp", {"fsdp_stage": 3}),
        (2, "tensor", {}),
        (2, "pipeline", {}),
        (8, "mesh", {"tp": 2, "pp": 2, "fsdp_stage": 2}),
    ],
    ids=lambda value: str(value),
)
def test_the_norm_of_every_gradient(
    equals_single: EqualsSingle, single: Single, size: int, strategy: str, options: dict[str, int]
) -> None:
    """Each rank has a piece of some; a tied head counts once."""
    config = CONFIG | {"training.track_gradients": True, "training.steps": 1, "training.batch_size": 8}
    shards = {"fsdp": 2, "mesh": 2}.get(strategy, 1)
    parts = named(options) | {"training.batch_size": 8 // shards}
    many = equals_single(strategy, size, config, parts, task="DoubleGPT", tolerance=1e-9)
    expected = single(config, "DoubleGPT").ranks[0].rows()[0].gradient_norms
    for rank in many.ranks:
        assert rank.rows()[0].gradient_norms == pytest.approx(expected, rel=1e-9)
    assert many.ranks[0].rows()[0].grad_norm == pytest.approx(sum(n**2 for n in expected.values()) ** 0.5, rel=1e-9)


@pytest.mark.usual(when=lambda **case: tuple(case.values()) in USUAL)
@pytest.mark.parametrize(("size", "dp", "tp", "pp", "stage"), CASES, ids=lambda v: str(v))
def test_every_shape_equals_single(
    equals_single: EqualsSingle, size: int, dp: int, tp: int, pp: int, stage: int
) -> None:
    parts = named({"dp": dp, "tp": tp, "pp": pp, "fsdp_stage": stage}) | {"training.batch_size": 8 // dp}
    equals_single("mesh", size, CONFIG | {"training.batch_size": 8}, parts, task="DoubleGPT", tolerance=1e-9)


def test_pipelines_with_unlike_batches_gather_together(equals_single: EqualsSingle) -> None:
    """Sharded along dp, two pipelines gather parameters for each micro-batch: both must have as many of them."""
    hosts = {"cluster.workers": ["a", "b", "c", "d"], "cluster.batch_size": {"a": 8, "b": 6, "c": 8, "d": 6}}
    parts = hosts | named({"dp": 2, "pp": 2, "fsdp_stage": 3})
    config = CONFIG | {"training.steps": 2, "training.batch_size": 14}
    equals_single("mesh", 4, config, parts, task="DoubleGPT", tolerance=1e-9)
