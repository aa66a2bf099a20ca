"""Who holds which layers: pure functions from the machines there are to a `StageLayout`, and from a layout to the next one.

    plan     no layers are held yet: layers evenly, as given, or by measured speed and memory; then replicas, then spares
    mend     a machine is gone: its layers go to a spare, else to a machine that another stage can do without, else to
             its neighbours
    welcome  a machine has come: where one is missing; else it is a spare
    renew    some layers are on no machine: all are dealt out anew among those that are there, if they can hold them

Every machine keeps what it holds wherever that is possible: moving layers costs seconds, and the caches that go with them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smolcluster.errors import UserError
from smolcluster.parallel.split import share_layers
from smolcluster.serve.engine.wire import StageOffer

USABLE = 0.8  # of a machine's memory for weights: the rest is for caches


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Layers that one machine holds, or several hold alike."""

    layers: range
    machines: tuple[str, ...]  # instances


@dataclass(frozen=True, slots=True)
class StageLayout:
    stages: tuple[PlacedStage, ...]
    spares: tuple[str, ...] = ()

    def stage_of(self, machine: str) -> int | None:
        return next((i for i, stage in enumerate(self.stages) if machine in stage.machines), None)

    @property
    def whole(self) -> bool:
        return bool(self.stages) and all(stage.machines for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """What the user wants of it."""

    stages: int
    replicas: int = 1
    distribution: tuple[int, ...] | str | None = None  # layers of each stage; "auto": as measured; None: evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Bytes of the model's weights, as they lie in memory where a number has `weight_bytes`."""

    layers: tuple[int, ...]
    embedding: int
    head: int  # with a tied head: the embedding once more
    tied: int = 0  # so much of it is there already where the embedding is
    weight_bytes: int = 4

    def of(self, layers: range) -> int:
        first, last = layers.start == 0, layers.stop == len(self.layers)
        ends = self.embedding * first + self.head * last - self.tied * (first and last)
        return sum(self.layers[layers.start : layers.stop]) + ends

    @property
    def each(self) -> list[int]:
        """Of every layer, with what comes before the first and behind the last."""
        return [self.of(range(n, n + 1)) for n in range(len(self.layers))]


def check_options(wish: LayoutOptions, *, num_layers: int) -> None:
    """Raises UserError for what no machines could do."""
    if wish.stages > num_layers:
        raise UserError(f"--stages {wish.stages}: the model has {num_layers} layers, and a stage needs at least one")
    counts = wish.distribution
    if isinstance(counts, tuple) and (sum(counts) != num_layers or len(counts) != wish.stages or min(counts) < 1):
        raise UserError(
            f"--layers {','.join(map(str, counts))}: for {wish.stages} stages of a model with {num_layers} layers, give "
            f"{wish.stages} numbers of at least 1 that make {num_layers} together"
        )


def plan(wish: LayoutOptions, offers: Mapping[str, StageOffer], sizes: WeightSizes) -> StageLayout:
    """From nothing. With too few machines some stages have none: then it is not `whole`."""
    order = sorted(offers, key=lambda machine: (offers[machine].name, machine))
    if wish.distribution == "auto":
        order.sort(key=lambda machine: offers[machine].layer_s)  # the slowest are the first to be spared
    try:
        return _plan(wish, order, offers, sizes)
    except UserError:  # some are too small; then the largest
        largest = sorted(order, key=lambda machine: -usable_bytes(offers[machine], sizes))
        if wish.distribution != "auto":  # where the largest share is, too
            shares = sorted(range(wish.stages), key=lambda place: -sizes.of(_split(wish, (), sizes)[place]))
            places = dict(zip(shares, largest, strict=False))
            largest = [*(places[place] for place in sorted(places)), *largest[wish.stages :]]
        with contextlib.suppress(UserError):
            return _plan(wish, largest, offers, sizes)
        raise


def _plan(wish: LayoutOptions, order: list[str], offers: Mapping[str, StageOffer], sizes: WeightSizes) -> StageLayout:
    """The first of these hold layers; the others are replicas and spares."""
    chosen = order[: wish.stages]
    if wish.distribution == "auto":
        chosen.sort(key=lambda machine: (offers[machine].host, offers[machine].name, machine))
    layers = _split(wish, [offers[machine] for machine in chosen], sizes)
    layout = StageLayout(tuple(PlacedStage(span, ()) for span in layers))
    for place, machine in enumerate(chosen):
        if not fits(machine, layers[place], layout, offers, sizes):
            raise UserError(_too_small(machine, layers[place], layout, offers, sizes))
        layout = _with(layout, place, machine)
    for machine in order:
        if machine not in chosen:
            layout = add_machine(layout, machine, wish, offers, sizes)
    return layout


def _too_small(
    machine: str, span: range, layout: StageLayout, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> str:
    offer = offers[machine]
    own, beside = _taken(offer, span, sizes), _beside(machine, layout, offers, sizes)
    if own <= USABLE * offer.memory_bytes:
        return (
            f"{offer.name} and the stages beside it on one machine would take {(own + beside) / 1e9:.2f} GB of its "
            f"{offer.shared_bytes / 1e9:.2f} GB, and need some for caches: give stages on other machines, or a smaller --dtype"
        )
    return (
        f"{offer.name} has {offer.memory_bytes / 1e9:.2f} GB, and layers {span.start} to {span.stop - 1} take "
        f"{own / 1e9:.2f} GB beside their caches: give more machines, --layers auto, or a smaller --dtype"
    )


def _split(wish: LayoutOptions, offers: Sequence[StageOffer], sizes: WeightSizes) -> list[range]:
    num_layers = len(sizes.layers)
    counts: Sequence[int]
    if isinstance(wish.distribution, tuple):
        counts = wish.distribution
    elif wish.distribution == "auto" and len(offers) == wish.stages:
        found = share_layers(
            range(len(offers)),
            [[offer.layer_s] * num_layers for offer in offers],
            sizes.each,
            [usable_bytes(offer, sizes) for offer in offers],
        )
        if found is None:
            raise UserError("the model does not fit these machines together: give more of them, or a smaller --dtype")
        counts = found
    else:
        counts = [num_layers // wish.stages + (n < num_layers % wish.stages) for n in range(wish.stages)]
    ends = list(itertools.accumulate(counts, initial=0))
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def usable_bytes(offer: StageOffer, sizes: WeightSizes) -> float:
    """What a machine has for weights, in bytes of `sizes`: one that holds halves has room for twice as many numbers."""
    return USABLE * offer.memory_bytes * sizes.weight_bytes / offer.weight_bytes


def fits(
    machine: str, layers: range, layout: StageLayout, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> bool:
    """Also beside what other processes on the same machine, or the same GPU, hold: together they have its memory once."""
    offer = offers[machine]
    own = _taken(offer, layers, sizes)
    if own > USABLE * offer.memory_bytes:
        return False
    return not offer.shared_bytes or own + _beside(machine, layout, offers, sizes) <= USABLE * offer.shared_bytes


def _taken(offer: StageOffer, layers: range, sizes: WeightSizes) -> float:
    return sizes.of(layers) * offer.weight_bytes / sizes.weight_bytes


def _beside(machine: str, layout: StageLayout, offers: Mapping[str, StageOffer], sizes: WeightSizes) -> float:
    def place(one: str) -> tuple[str, str]:
        return offers[one].host, offers[one].device

    held = ((other, stage.layers) for stage in layout.stages for other in stage.machines if other != machine)
    return sum(_taken(offers[other], layers, sizes) for other, layers in held if place(other) == place(machine))


def add_machine(
    layout: StageLayout, machine: str, wish: LayoutOptions, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """To the stage that needs it most: one without machines, then one with too few. Stages that were merged are cut again."""
    stages = enumerate(layout.stages)
    empty = [i for i, s in stages if not s.machines and fits(machine, s.layers, layout, offers, sizes)]
    if not empty and len(layout.stages) < wish.stages and layout.whole:
        machines = {m for stage in layout.stages for m in stage.machines} | set(layout.spares) | {machine}
        with contextlib.suppress(UserError):  # one of them is too small for its share
            anew = plan(wish, {m: offers[m] for m in machines}, sizes)
            if anew.whole:
                return anew
    few = [i for i, stage in enumerate(layout.stages) if len(stage.machines) < wish.replicas]
    few = [i for i in few if fits(machine, layout.stages[i].layers, layout, offers, sizes)]
    wanted = empty or sorted(few, key=lambda i: len(layout.stages[i].machines))
    if not wanted:
        return replace(layout, spares=(*layout.spares, machine))
    return _with(layout, wanted[0], machine)


def remove_machine(layout: StageLayout, gone: str, offers: Mapping[str, StageOffer], sizes: WeightSizes) -> StageLayout:
    """Without a machine. Where no other can take its layers, its stage has none until a machine comes."""
    if gone in layout.spares:
        return replace(layout, spares=tuple(spare for spare in layout.spares if spare != gone))
    place = layout.stage_of(gone)
    if place is None:
        return layout
    stage = layout.stages[place]
    layout = _without(layout, place, gone)
    for spare in layout.spares:
        if fits(spare, stage.layers, layout, offers, sizes):
            return _with(replace(layout, spares=tuple(s for s in layout.spares if s != spare)), place, spare)
    if layout.stages[place].machines:
        return layout
    for other, theirs in sorted(enumerate(layout.stages), key=lambda entry: -len(entry[1].machines)):
        for machine in theirs.machines[1:]:
            if fits(machine, stage.layers, layout, offers, sizes):
                return _with(_without(layout, other, machine), place, machine)
    return _to_neighbours(layout, place, offers, sizes)


def replan(
    layout: StageLayout, wish: LayoutOptions, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """Nothing can be served without some layers, so nothing is lost by moving others. In as many stages as are wished for, or
    in fewer; if that cannot be either, it stays as it is."""
    if layout.whole:
        return layout
    machines = {m for stage in layout.stages for m in stage.machines} | set(layout.spares)
    for count in range(min(wish.stages, len(machines)), 0, -1):
        fewer = replace(wish, stages=count, distribution="auto" if wish.distribution == "auto" else None)
        with contextlib.suppress(UserError):  # one of them is too small for its share
            return plan(wish if count == wish.stages else fewer, {m: offers[m] for m in machines}, sizes)
    return layout


def reduce_offer(offer: StageOffer, layers: range, sizes: WeightSizes) -> StageOffer:
    """Of a machine that could not hold these layers, whatever it said: it is given less from now on."""
    return replace(offer, memory_bytes=max(0, min(offer.memory_bytes, int(_taken(offer, layers, sizes) / USABLE) - 1)))


def _to_neighbours(
    layout: StageLayout, place: int, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """The stage is given up; its layers go to the stages beside it, about half to each where both have the room."""
    span, before, behind = layout.stages[place].layers, place - 1, place + 1
    neighbours = {i: layout.stages[i] for i in (before, behind) if 0 <= i < len(layout.stages)}
    if not all(stage.machines for stage in neighbours.values()):
        return layout
    middle = (span.start + span.stop) / 2
    for cut in sorted(range(span.start, span.stop + 1), key=lambda cut: abs(cut - middle)):
        wider: dict[int, range] = {}  # the stages beside it, with what they would hold
        if cut > span.start and before in neighbours:
            wider[before] = range(neighbours[before].layers.start, cut)
        if cut < span.stop and behind in neighbours:
            wider[behind] = range(cut, neighbours[behind].layers.stop)
        all_taken = sum(len(layers) - len(neighbours[i].layers) for i, layers in wider.items()) == len(span)
        holders = [(machine, layers) for i, layers in wider.items() for machine in neighbours[i].machines]
        if all_taken and all(fits(machine, layers, layout, offers, sizes) for machine, layers in holders):
            stages = [replace(s, layers=wider.get(i, s.layers)) for i, s in enumerate(layout.stages) if i != place]
            return replace(layout, stages=tuple(stages))
    return layout


def _with(layout: StageLayout, place: int, machine: str) -> StageLayout:
    stages = list(layout.stages)
    stages[place] = replace(stages[place], machines=(*stages[place].machines, machine))
    return replace(layout, stages=tuple(stages))


def _without(layout: StageLayout, place: int, machine: str) -> StageLayout:
    stages = list(layout.stages)
    stages[place] = replace(stages[place], machines=tuple(m for m in stages[place].machines if m != machine))
    return replace(layout, stages=tuple(stages))
