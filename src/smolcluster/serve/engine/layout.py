"""Which stage holds which layers: pure functions from the stages that have joined to a `StageLayout`, and from one to the next.

    plan             split the layers evenly, as given, or by measured speed and memory; then replicas, then spares
    remove_machine   give its layers to a spare, else to a replica of another stage, else to its neighbours
    add_machine      add it to a stage that needs a machine, else make it a spare
    replan           some layers are on no machine: split all of them again, if the remaining machines can hold them

Machines keep their layers wherever possible: moving them takes seconds and drops their caches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smolcluster.errors import UserError
from smolcluster.parallel.split import share_layers
from smolcluster.parallel.stages import evenly
from smolcluster.serve.engine.wire import StageOffer

USABLE = 0.8  # share of memory for weights; the rest is for caches


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Layers, and the machines that hold them: more than one are replicas."""

    layers: range
    machines: tuple[str, ...]  # by instance


@dataclass(frozen=True, slots=True)
class StageLayout:
    stages: tuple[PlacedStage, ...]
    spares: tuple[str, ...] = ()

    def stage_of(self, machine: str) -> int | None:
        return next((i for i, stage in enumerate(self.stages) if machine in stage.machines), None)

    @property
    def complete(self) -> bool:
        """Return whether every layer is on a machine."""
        return bool(self.stages) and all(stage.machines for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    stages: int
    replicas: int = 1
    distribution: tuple[int, ...] | str | None = None  # layers of each stage; "auto": by measured speed; None: evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Bytes of the model's weights, at `weight_bytes` for each number."""

    layers: tuple[int, ...]
    embedding: int
    head: int  # a tied head counts the embedding again
    tied: int = 0  # bytes of the head that a stage with the embedding shares
    weight_bytes: int = 4

    def of(self, layers: range) -> int:
        first, last = layers.start == 0, layers.stop == len(self.layers)
        ends = self.embedding * first + self.head * last - self.tied * (first and last)
        return sum(self.layers[layers.start : layers.stop]) + ends

    @property
    def per_layer(self) -> list[int]:
        """Return the bytes of every layer; the first includes the embedding, the last the head."""
        return [self.of(range(n, n + 1)) for n in range(len(self.layers))]


def check_options(options: LayoutOptions, *, num_layers: int) -> None:
    """Raise UserError for a layout that no machines can have."""
    if options.stages > num_layers:
        raise UserError(f"--stages {options.stages}: the model has {num_layers} layers, and a stage needs at least one")
    counts = options.distribution
    if isinstance(counts, tuple) and (sum(counts) != num_layers or len(counts) != options.stages or min(counts) < 1):
        raise UserError(
            f"--layers {','.join(map(str, counts))}: for {options.stages} stages of a model with {num_layers} layers, give "
            f"{options.stages} numbers of at least 1 whose sum is {num_layers}"
        )


def plan(options: LayoutOptions, offers: Mapping[str, StageOffer], sizes: WeightSizes) -> StageLayout:
    """Lay out all layers. With too few machines some stages have none, and the layout is not `complete`."""
    order = sorted(offers, key=lambda machine: (offers[machine].name, machine))
    if options.distribution == "auto":
        order.sort(key=lambda machine: offers[machine].layer_s)  # the slowest become spares
    try:
        return _plan(options, order, offers, sizes)
    except UserError:  # one is too small: try the largest
        largest = sorted(order, key=lambda machine: -usable_bytes(offers[machine], sizes))
        if options.distribution != "auto":  # the largest machine gets the largest share
            shares = sorted(range(options.stages), key=lambda place: -sizes.of(_split(options, (), sizes)[place]))
            places = dict(zip(shares, largest, strict=False))
            largest = [*(places[place] for place in sorted(places)), *largest[options.stages :]]
        with contextlib.suppress(UserError):
            return _plan(options, largest, offers, sizes)
        raise


def _plan(
    options: LayoutOptions, order: list[str], offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """Give layers to the first machines of `order`; the others become replicas and spares."""
    chosen = order[: options.stages]
    if options.distribution == "auto":
        chosen.sort(key=lambda machine: (offers[machine].host, offers[machine].name, machine))
    layers = _split(options, [offers[machine] for machine in chosen], sizes)
    layout = StageLayout(tuple(PlacedStage(span, ()) for span in layers))
    for place, machine in enumerate(chosen):
        if not fits(machine, layers[place], layout, offers, sizes):
            raise UserError(_memory_message(machine, layers[place], layout, offers, sizes))
        layout = _add(layout, place, machine)
    for machine in order:
        if machine not in chosen:
            layout = add_machine(layout, machine, options, offers, sizes)
    return layout


def _memory_message(
    machine: str, span: range, layout: StageLayout, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> str:
    offer = offers[machine]
    needed, others = _weight_bytes(offer, span, sizes), _colocated_bytes(machine, layout, offers, sizes)
    if needed <= USABLE * offer.memory_bytes:
        return (
            f"{offer.name} and the other stages on its machine need {(needed + others) / 1e9:.2f} GB of its "
            f"{offer.shared_bytes / 1e9:.2f} GB, without caches: start stages on other machines, or use a smaller --dtype"
        )
    return (
        f"{offer.name} has {offer.memory_bytes / 1e9:.2f} GB, and layers {span.start} to {span.stop - 1} need "
        f"{needed / 1e9:.2f} GB, without caches: add machines, or use --layers auto or a smaller --dtype"
    )


def _split(options: LayoutOptions, offers: Sequence[StageOffer], sizes: WeightSizes) -> list[range]:
    num_layers = len(sizes.layers)
    counts: Sequence[int]
    if isinstance(options.distribution, tuple):
        counts = options.distribution
    elif options.distribution == "auto" and len(offers) == options.stages:
        found = share_layers(
            range(len(offers)),
            [[offer.layer_s] * num_layers for offer in offers],
            sizes.per_layer,
            [usable_bytes(offer, sizes) for offer in offers],
        )
        if found is None:
            raise UserError(
                "the model does not fit the memory of these machines: add machines, or use a smaller --dtype"
            )
        counts = found
    else:
        counts = evenly(num_layers, options.stages)
    ends = list(itertools.accumulate(counts, initial=0))
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def usable_bytes(offer: StageOffer, sizes: WeightSizes) -> float:
    """Return the memory for weights in bytes of `sizes`: at half the bytes per number, twice as many numbers fit."""
    return USABLE * offer.memory_bytes * sizes.weight_bytes / offer.weight_bytes


def fits(
    machine: str, layers: range, layout: StageLayout, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> bool:
    """Return whether the layers fit its memory, and the memory of the host or GPU which it shares with other stages."""
    offer = offers[machine]
    needed = _weight_bytes(offer, layers, sizes)
    if needed > USABLE * offer.memory_bytes:
        return False
    others = _colocated_bytes(machine, layout, offers, sizes)
    return not offer.shared_bytes or needed + others <= USABLE * offer.shared_bytes


def _weight_bytes(offer: StageOffer, layers: range, sizes: WeightSizes) -> float:
    return sizes.of(layers) * offer.weight_bytes / sizes.weight_bytes


def _colocated_bytes(machine: str, layout: StageLayout, offers: Mapping[str, StageOffer], sizes: WeightSizes) -> float:
    """Return the bytes of the other stages on the same device."""

    def place(one: str) -> tuple[str, str]:
        return offers[one].host, offers[one].device

    held = ((other, stage.layers) for stage in layout.stages for other in stage.machines if other != machine)
    return sum(_weight_bytes(offers[other], layers, sizes) for other, layers in held if place(other) == place(machine))


def add_machine(
    layout: StageLayout, machine: str, options: LayoutOptions, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """Add it to a stage without machines; else split merged stages; else add a missing replica; else make it a spare."""
    stages = enumerate(layout.stages)
    empty = [i for i, s in stages if not s.machines and fits(machine, s.layers, layout, offers, sizes)]
    if not empty and len(layout.stages) < options.stages and layout.complete:
        machines = {m for stage in layout.stages for m in stage.machines} | set(layout.spares) | {machine}
        with contextlib.suppress(UserError):  # one is too small for its share
            replanned = plan(options, {m: offers[m] for m in machines}, sizes)
            if replanned.complete:
                return replanned
    few = [i for i, stage in enumerate(layout.stages) if len(stage.machines) < options.replicas]
    few = [i for i in few if fits(machine, layout.stages[i].layers, layout, offers, sizes)]
    wanted = empty or sorted(few, key=lambda i: len(layout.stages[i].machines))
    if not wanted:
        return replace(layout, spares=(*layout.spares, machine))
    return _add(layout, wanted[0], machine)


def remove_machine(layout: StageLayout, lost: str, offers: Mapping[str, StageOffer], sizes: WeightSizes) -> StageLayout:
    """Move the layers of a lost machine. If no other can hold them, its stage has no machine until one joins."""
    if lost in layout.spares:
        return replace(layout, spares=tuple(spare for spare in layout.spares if spare != lost))
    place = layout.stage_of(lost)
    if place is None:
        return layout
    stage = layout.stages[place]
    layout = _remove(layout, place, lost)
    for spare in layout.spares:
        if fits(spare, stage.layers, layout, offers, sizes):
            return _add(replace(layout, spares=tuple(s for s in layout.spares if s != spare)), place, spare)
    if layout.stages[place].machines:
        return layout
    for other, theirs in sorted(enumerate(layout.stages), key=lambda entry: -len(entry[1].machines)):
        for machine in theirs.machines[1:]:
            if fits(machine, stage.layers, layout, offers, sizes):
                return _add(_remove(layout, other, machine), place, machine)
    return _merge_into_neighbours(layout, place, offers, sizes)


def replan(
    layout: StageLayout, options: LayoutOptions, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """Lay out all layers again if some are on no machine, in the requested number of stages or fewer. Return the layout
    unchanged if none fits. Moving the other layers costs nothing: without the missing ones no request can be served."""
    if layout.complete:
        return layout
    machines = {m for stage in layout.stages for m in stage.machines} | set(layout.spares)
    for count in range(min(options.stages, len(machines)), 0, -1):
        fewer = replace(options, stages=count, distribution="auto" if options.distribution == "auto" else None)
        with contextlib.suppress(UserError):  # one is too small for its share
            return plan(options if count == options.stages else fewer, {m: offers[m] for m in machines}, sizes)
    return layout


def reduce_offer(offer: StageOffer, layers: range, sizes: WeightSizes) -> StageOffer:
    """Return the offer of a machine that failed to load these layers with less memory, so that it gets fewer."""
    return replace(
        offer, memory_bytes=max(0, min(offer.memory_bytes, int(_weight_bytes(offer, layers, sizes) / USABLE) - 1))
    )


def _merge_into_neighbours(
    layout: StageLayout, place: int, offers: Mapping[str, StageOffer], sizes: WeightSizes
) -> StageLayout:
    """Remove the stage; divide its layers between the neighbouring stages, about half to each where both have room."""
    span, before, after = layout.stages[place].layers, place - 1, place + 1
    neighbours = {i: layout.stages[i] for i in (before, after) if 0 <= i < len(layout.stages)}
    if not all(stage.machines for stage in neighbours.values()):
        return layout
    middle = (span.start + span.stop) / 2
    for cut in sorted(range(span.start, span.stop + 1), key=lambda cut: abs(cut - middle)):
        wider: dict[int, range] = {}  # neighbours, with their new layers
        if cut > span.start and before in neighbours:
            wider[before] = range(neighbours[before].layers.start, cut)
        if cut < span.stop and after in neighbours:
            wider[after] = range(cut, neighbours[after].layers.stop)
        all_taken = sum(len(layers) - len(neighbours[i].layers) for i, layers in wider.items()) == len(span)
        holders = [(machine, layers) for i, layers in wider.items() for machine in neighbours[i].machines]
        if all_taken and all(fits(machine, layers, layout, offers, sizes) for machine, layers in holders):
            stages = [replace(s, layers=wider.get(i, s.layers)) for i, s in enumerate(layout.stages) if i != place]
            return replace(layout, stages=tuple(stages))
    return layout


def _add(layout: StageLayout, place: int, machine: str) -> StageLayout:
    stages = list(layout.stages)
    stages[place] = replace(stages[place], machines=(*stages[place].machines, machine))
    return replace(layout, stages=tuple(stages))


def _remove(layout: StageLayout, place: int, machine: str) -> StageLayout:
    stages = list(layout.stages)
    stages[place] = replace(stages[place], machines=tuple(m for m in stages[place].machines if m != machine))
    return replace(layout, stages=tuple(stages))
