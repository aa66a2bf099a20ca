"""Fragments of a model: which parameter is in which, and what is refused."""

from __future__ import annotations

import pytest
from torch import nn

from smolcluster.config.options import DiLoCoOptions, Streaming
from smolcluster.errors import UserError
from smolcluster.parallel.fragments import deal
from smolcluster.parallel.placement import Node, Shape
from smolcluster.planner.dry_run import describe_traffic
from smolcluster.strategies.diloco import DiLoCo

GPT = {"embedding.weight": 90, "positions.weight": 10} | {
    f"blocks.{layer}.{part}": size for layer in range(5) for part, size in (("norm.weight", 1), ("mlp.up.weight", 20))
}
GPT |= {"head.weight": 80}


def test_layers_are_strided_and_the_rest_evens_out() -> None:
    names = list(GPT)
    fragments = [{names[place] for place in places} for places in deal(GPT, 2)]
    for name in GPT:
        if name.startswith("blocks."):
            assert name in fragments[int(name.split(".")[1]) % 2]
    assert [sum(GPT[name] for name in fragment) for fragment in fragments] == [63 + 80, 42 + 90 + 10]
    assert sorted(names.index(name) for fragment in fragments for name in fragment) == list(range(len(GPT)))


def test_one_fragment_is_all_in_order() -> None:
    assert deal({"weight": 3, "bias": 1}, 1) == [[0, 1]]


def test_more_fragments_than_layers() -> None:
    assert len(deal(GPT, 5)) == 5
    with pytest.raises(UserError, match=r"strategy.fragments is 6, and the model has 5 numbered layers"):
        deal(GPT, 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inner_steps": 10, "fragments": 3}, r"fragments is 3, which must divide strategy.inner_steps, 10"),
        ({"inner_steps": 10, "overlap": 10}, r"overlap is 10; it must be less than strategy.inner_steps, 10"),
        ({"mixing": 1.5}, "less than or equal to 1"),
        ({"fragments": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DiLoCoOptions(**options)


def test_half_is_mixed_in_by_default_where_results_come_late() -> None:
    assert DiLoCoOptions().streaming == Streaming()
    assert not DiLoCoOptions().streaming.streams
    assert DiLoCoOptions(overlap=3).streaming == Streaming(1, 3, 0.5)
    assert DiLoCoOptions(overlap=3, mixing=0.9, fragments=2).streaming == Streaming(2, 3, 0.9)


def test_the_plan_says_what_an_exchange_sends() -> None:
    nodes = [Node(name=f"n{i}") for i in range(2)]
    shape = Shape(parameters=sum(GPT.values()))
    cost = DiLoCo.plan(DiLoCoOptions(inner_steps=4), nodes, shape).cost
    assert cost.bytes_at_once == cost.bytes_at_end == 4 * shape.parameters
    assert "at once" in describe_traffic(cost)
    assert "last round" not in describe_traffic(cost)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    shape = Shape(parameters=4 * 272, model=model)
    cost = DiLoCo.plan(DiLoCoOptions(inner_steps=4, fragments=2), nodes, shape).cost
    assert describe_traffic(cost).endswith("from each worker, at most 2.12 KiB at once, and 4.25 KiB in the last round")
