"""Fragments of a model: every `count`-th of its layers, for exchanges that take turns."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from smolcluster.errors import UserError


def deal(sizes: Mapping[str, int], count: int) -> list[list[int]]:
    """Return the places of the parameters in each fragment. `sizes`: numbers in each parameter, by its name, in order.

    Layer l, as in `blocks.l.mlp.up.weight`, is in fragment l % count. Parameters outside of layers go, the
    largest first, to the smallest fragment. Layers are counted as they come, so that those without parameters leave no gaps.
    """
    if count == 1:
        return [list(range(len(sizes)))]
    layers: dict[str, int] = {}
    fragments: list[list[int]] = [[] for _ in range(count)]
    held, others = [0] * count, list[tuple[int, int]]()
    for place, (name, size) in enumerate(sizes.items()):
        found = re.match(r"(?:.*?\.)??\d+\.", f"{name}.")
        if found is None:
            others.append((-size, place))
            continue
        fragment = layers.setdefault(found[0], len(layers)) % count
        fragments[fragment].append(place)
        held[fragment] += size
    if count > len(layers):
        raise UserError(
            f"strategy.fragments is {count}, and the model has {len(layers)} numbered layers with parameters; "
            f"set it to {max(1, len(layers))} or less"
        )
    for size, place in sorted(others):
        fragment = held.index(min(held))
        fragments[fragment].append(place)
        held[fragment] -= size
    return [sorted(fragment) for fragment in fragments]


def largest_share(model: nn.Module | None, count: int) -> float:
    """Return the largest fragment's share of the trained parameters; 1 where the model is not known."""
    sizes = {} if model is None else {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    if not sizes or count == 1:
        return 1.0
    counts = list(sizes.values())
    return max(sum(counts[place] for place in places) for places in deal(sizes, count)) / sum(counts)
