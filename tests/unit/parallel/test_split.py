"""How layers are dealt out to unlike machines: against every split there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smolcluster.config.options import PipelineOptions
from smolcluster.config.schema import Config
from smolcluster.parallel.split import measure, share_layers
from smolcluster.parallel.stages import holders, layers_of
from smolcluster.tasks.base import Task


def every_split(num_layers: int, num_stages: int) -> list[list[int]]:
    ends = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cut, num_layers))] for cut in ends]


def stage_times(
    counts: Sequence[int],
    ranks: Sequence[int],
    seconds: Sequence[Sequence[int]],
    need: Sequence[int],
    memory: Sequence[int],
) -> list[float]:
    """Infinitely long where it does not fit."""
    times, start = [], 0
    for rank, count in zip(ranks, counts, strict=True):
        fits = sum(need[start : start + count]) * ranks.count(rank) <= memory[rank]  # type: ignore[attr-defined]
        times.append(sum(seconds[rank][start : start + count]) if fits else math.inf)
        start += count
    return times


@given(st.data())
def test_no_split_is_better(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 3))
    schedule = data.draw(st.sampled_from(["1f1b", "interleaved", "zbv"]))
    ranks = holders(num_ranks, PipelineOptions(schedule=schedule))
    num_layers = data.draw(st.integers(len(ranks), len(ranks) + 4))
    numbers = st.lists(st.integers(1, 20), min_size=num_layers, max_size=num_layers)
    seconds = [data.draw(numbers) for _ in range(num_ranks)]
    need, memory = data.draw(numbers), [data.draw(st.integers(1, 200)) for _ in range(num_ranks)]

    found = share_layers(ranks, seconds, need, memory)
    all_times = [stage_times(c, ranks, seconds, need, memory) for c in every_split(num_layers, len(ranks))]
    fastest = min(max(times) for times in all_times)
    if math.isinf(fastest):
        assert found is None
        return
    assert found is not None
    assert sum(found) == num_layers
    assert min(found) >= 1
    mine = stage_times(found, ranks, seconds, need, memory)
    assert max(mine) == fastest
    squares = [sum(t * t for t in times) for times in all_times if max(times) == fastest]
    assert sum(t * t for t in mine) == min(squares)


def test_a_slow_rank_gets_fewer_layers_and_a_small_one_what_fits() -> None:
    free = [math.inf, math.inf]
    assert share_layers((0, 1), [[1] * 8, [3] * 8], [1] * 8, free) == [6, 2]
    assert share_layers((0, 1), [[1] * 8, [3] * 8], [1] * 8, [4, math.inf]) == [4, 4]
    assert share_layers((0, 1), [[5, *[1] * 7], [1] * 8], [1] * 8, free) == [
        2,
        6,
    ]  # an embedding as long as four layers
    assert share_layers((0, 1), [[1] * 8, [1] * 8], [1] * 8, [3, 4]) is None


class Wide(Task):
    """Norms keep running means; the second half is wider."""

    def model(self) -> nn.Module:
        sizes = [(8, 8), (8, 8), (8, 512), (512, 512)]
        return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.BatchNorm1d(size[1])) for size in sizes))

    def train_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


def test_measuring_leaves_the_model_as_it_was() -> None:
    task = Wide(Config())
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure(task, model, layers_of(model), torch.randn(64, 8), torch.device("cpu"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [layer.weight_bytes for layer in found] == [
        4 * (a * b + 3 * b) for a, b in [(8, 8), (8, 8), (8, 512), (512, 512)]
    ]
    assert found[1] is not found[0]  # the first has what goes before it
    assert all(layer.seconds > 0 for layer in found)
    # Backward keeps the inputs of the linear layer and of the norm, and the norm's means and deviations.
    assert found[1].kept_bytes == pytest.approx(4 * 64 * (8 + 8), rel=0.1)
