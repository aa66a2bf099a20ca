"""How the same step is shared out among other numbers of workers, and which numbers cannot."""

from __future__ import annotations

from typing import Any

import pytest

from smolcluster.config import load_config, resolve
from smolcluster.config.schema import Config
from smolcluster.engine.checks import batch_size_of
from smolcluster.errors import UserError
from smolcluster.planner.world_sizes import plans, share

SMALL = {"model.model_dim": 32, "model.num_heads": 4, "model.num_layers": 3, "training.batch_size": 4}


def found(strategy: str, sizes: range, **overrides: Any) -> dict[int, Config | str]:
    config = resolve(
        load_config([], overrides=SMALL | {"strategy.name": strategy, "cluster.num_workers": max(sizes)} | overrides)
    )
    return {size: str(p) if isinstance(p, UserError) else p for size, p in plans(config, sizes).items()}


@pytest.mark.parametrize(
    ("samples", "shards", "at_most", "expected"),
    [
        (16, 4, 4, (1, [4, 4, 4, 4])),
        (16, 2, 4, (2, [4, 4])),
        (16, 1, 4, (4, [4])),
        (16, 3, 4, (2, [3, 3, 2])),
        (4, 3, 1, (1, [2, 1, 1])),  # no way without a larger one
        (7, 3, 1, (1, [3, 2, 2])),
        (12, 2, 5, (2, [3, 3])),
    ],
)
def test_shares(samples: int, shards: int, at_most: int, expected: tuple[int, list[int]]) -> None:
    micro_steps, sizes = share(samples, shards, at_most=at_most)
    assert (micro_steps, sizes) == expected
    assert micro_steps * sum(sizes) == samples


def test_more_workers_than_samples() -> None:
    with pytest.raises(UserError, match="3 workers cannot share 2 samples"):
        share(2, 3, at_most=1)


def test_a_step_reads_the_same_on_any_number_of_workers() -> None:
    for size, config in found("allreduce", range(1, 5)).items():
        assert isinstance(config, Config)
        each = [batch_size_of(config, rank) for rank in range(size)]
        assert sum(each) * config.training.grad_accumulation == 16
        assert max(each) <= 4
        assert config.training.batch_size == 4


def test_ranks_that_share_samples_have_the_same_size() -> None:
    configs = found("mesh", range(2, 7, 2), **{"strategy.tp": 2})
    for size, config in configs.items():
        assert isinstance(config, Config)
        each = [batch_size_of(config, rank) for rank in range(size)]
        assert each[0::2] == each[1::2]
        assert sum(each[0::2]) * config.training.grad_accumulation == 12


def test_sizes_that_cannot_run_say_why() -> None:
    tensor = found("tensor", range(1, 5))
    assert [size for size, plan in tensor.items() if isinstance(plan, Config)] == [1, 2, 4]
    assert tensor[3] == "tp = 3 does not divide 4 heads; try 1, 2, 4"
    mesh = found("mesh", range(2, 5), **{"strategy.tp": 2})
    assert "tp 2 x pp 1 does not divide 3 workers" in str(mesh[3])
    fsdp = found("fsdp", range(2, 5), **{"strategy.shard_size": 2})
    assert "strategy.shard_size = 2 does not divide 3 workers" in str(fsdp[3])
    stages = found("pipeline", range(1, 4), **{"strategy.layer_distribution": [1, 1, 1]})
    assert "strategy.layer_distribution has 3 entries" in str(stages[2])


def test_the_largest_that_can_run_sets_the_step() -> None:
    configs = found("pipeline", range(2, 5))
    assert "only 3 layers" in str(configs[4])
    assert isinstance(configs[2], Config)
    assert isinstance(configs[3], Config)
    mesh = found("mesh", range(2, 6), **{"strategy.tp": 2})
    assert isinstance(mesh[2], Config)
    assert batch_size_of(mesh[2], 0) * mesh[2].training.grad_accumulation == 8, "as four workers read, not five"


def test_a_size_with_fewer_micro_batches_than_stages_cannot_run() -> None:
    """1f1b needs one for each stage, in every pipeline of a mesh."""
    configs = found("pipeline", range(2, 4), **{"training.batch_size": 2})
    assert isinstance(configs[2], Config)
    assert "schedule 1f1b on 3 ranks needs as many micro-batches, and a batch of 2 samples is cut into 2" in str(
        configs[3]
    )
    mesh = found(
        "mesh", range(2, 7, 2), **{"training.batch_size": 2, "strategy.pp": 2, "training.grad_accumulation": 1}
    )
    assert isinstance(mesh[6], Config)
    hosts = {f"worker-{rank}": 1 if rank % 2 else 2 for rank in range(4)}  # the second pipeline has one sample
    unlike = {"strategy.pp": 2, "cluster.workers": list(hosts), "cluster.batch_size": hosts}
    with pytest.raises(UserError, match="batches of 1, 2 samples are cut into 1"):
        found("mesh", range(4, 5), **unlike)


def test_where_none_can_run_the_reason_of_the_largest_is_told() -> None:
    with pytest.raises(UserError, match="tp = 7 does not divide"):
        found("tensor", range(5, 8))


def test_sizes_by_host_are_left_alone() -> None:
    hosts = {"cluster.workers": ["a", "b"], "cluster.batch_size": {"a": 3}}
    config = found("allreduce", range(1, 3), **hosts)[1]
    assert isinstance(config, Config)
    assert (batch_size_of(config, 0), config.training.grad_accumulation) == (3, 1)
