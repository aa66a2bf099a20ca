"""The traffic formulas of collectives: what is sent equals what is received."""

from __future__ import annotations

from typing import get_args

import pytest

from smolcluster.comm.mesh.volume import Exchange, moved, num_children


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", [kind for kind in get_args(Exchange) if kind != "broadcast"])
def test_what_is_sent_is_received(kind: Exchange, size: int, backend: str) -> None:
    ranks = [moved(kind, 840 * 8, rank=rank, size=size, backend=backend, root=size - 1) for rank in range(size)]
    assert sum(sent for sent, _ in ranks) == sum(received for _, received in ranks)
    assert (sum(sent for sent, _ in ranks) == 0) == (size == 1)


@pytest.mark.parametrize("size", range(1, 20))
def test_a_tree_reaches_everybody_once(size: int) -> None:
    assert sum(num_children(place, size) for place in range(size)) == size - 1
    assert num_children(0, size) == (size - 1).bit_length()


def test_only_gloo_sums_everything_everywhere() -> None:
    sizes = {"rank": 1, "size": 4}
    assert moved("reduce_scatter", 4000, backend="nccl", **sizes) == (3000, 3000)
    assert moved("reduce_scatter", 4000, backend="gloo", **sizes) == (6000, 6000)
    assert moved("all_to_all", 4000, backend="gloo", **sizes) == (3000, 3000)
