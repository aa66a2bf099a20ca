"""Who holds which layers: plans, losses and newcomers. Whatever happens, layers stay in order and whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.errors import UserError
from smolcluster.serve.engine.layout import (
    LayoutOptions,
    PlacedStage,
    StageLayout,
    WeightSizes,
    add_machine,
    check_options,
    fits,
    plan,
    reduce_offer,
    remove_machine,
    replan,
)
from smolcluster.serve.engine.wire import StageOffer

GB = 10**9


def offer(name: str, *, memory: float = 8 * GB, layer_s: float = 1e-3, host: str = "") -> StageOffer:
    return StageOffer(
        name=name,
        host=host or name,
        address=f"{name}:1",
        device="cpu",
        cores=1,
        host_cores=4,
        memory_bytes=int(memory),
        layer_s=layer_s,
    )


def offers(*names: str, **said: float) -> dict[str, StageOffer]:
    return {name: offer(name, **said) for name in names}


def sizes(layers: int = 12, each: int = 1 << 20) -> WeightSizes:
    return WeightSizes(layers=(each,) * layers, embedding=each, head=each)


def shape(layout: StageLayout) -> list[tuple[int, tuple[str, ...]]]:
    return [(len(stage.layers), stage.machines) for stage in layout.stages]


def check(layout: StageLayout, layers: int = 12) -> None:
    """In order, each layer once; each machine in one place."""
    assert [n for stage in layout.stages for n in stage.layers] == list(range(layers))
    machines = [m for stage in layout.stages for m in stage.machines] + list(layout.spares)
    assert len(set(machines)) == len(machines)


def test_layers_are_split_evenly_as_given_or_by_speed() -> None:
    machines = offers("a", "b", "c")
    assert shape(plan(LayoutOptions(stages=3), machines, sizes())) == [(4, ("a",)), (4, ("b",)), (4, ("c",))]
    assert [n for n, _ in shape(plan(LayoutOptions(stages=3), machines, sizes(11)))] == [4, 4, 3]
    said = plan(LayoutOptions(stages=3, distribution=(1, 1, 10)), machines, sizes())
    assert [n for n, _ in shape(said)] == [1, 1, 10]
    unlike = {"a": offer("a", layer_s=1e-3), "b": offer("b", layer_s=3e-3)}
    assert shape(plan(LayoutOptions(stages=2, distribution="auto"), unlike, sizes())) == [(9, ("a",)), (3, ("b",))]


@pytest.mark.parametrize("distribution", [None, "auto", (6, 6)])
def test_processes_on_one_host_have_its_memory_once(distribution: Any) -> None:
    machines = {name: offer(name, host="box", memory=12 << 20) for name in "ab"}
    wish = LayoutOptions(stages=2, distribution=distribution)
    shared = {name: replace(one, shared_bytes=12 << 20) for name, one in machines.items()}
    with pytest.raises(UserError, match=r"b and the other stages on its machine need 0\.01 GB of its 0\.01"):
        plan(wish, shared, sizes())
    for enough in (
        {name: replace(one, shared_bytes=24 << 20) for name, one in machines.items()},
        {name: replace(one, host=name) for name, one in shared.items()},
        {name: replace(one, device=f"cuda:{name}") for name, one in shared.items()},
        {name: replace(one, weight_bytes=2) for name, one in shared.items()},
        machines,
    ):
        assert [n for n, _ in shape(plan(wish, enough, sizes()))] == [6, 6]


def test_replicas_and_takeovers_count_shared_memory() -> None:
    room = {name: replace(offer(name, host="box"), shared_bytes=36 << 20) for name in "abc"}  # for two of 14 MB
    layout = plan(LayoutOptions(stages=1, replicas=3), room, sizes())
    assert (shape(layout), layout.spares) == ([(12, ("a", "b"))], ("c",))
    tight = {name: replace(one, shared_bytes=18 << 20) for name, one in room.items()}
    layout = plan(LayoutOptions(stages=2), {name: replace(one, host=name) for name, one in tight.items()}, sizes())
    crowded = {**tight, "a": replace(tight["a"], host="other")}  # b and c have 14 of 18 MB: for 7 and 7, not 7 and 8
    assert shape(remove_machine(layout, "a", crowded, sizes())) == [(6, ("c",)), (6, ("b",))]
    tighter = {name: replace(one, shared_bytes=16 << 20) for name, one in crowded.items()}
    assert shape(remove_machine(layout, "a", tighter, sizes())) != [(6, ("c",)), (6, ("b",))]


@pytest.mark.parametrize("distribution", [None, "auto", (8, 4)])
def test_machines_that_are_too_small_are_left_out(distribution: Any) -> None:
    """Whatever their names; and the largest share is on the largest machine."""
    machines = {"a": offer("a", memory=1 << 20), "b": offer("b", memory=9 << 20), "c": offer("c", memory=1 << 40)}
    layout = plan(LayoutOptions(stages=2, distribution=distribution), machines, sizes())
    check(layout)
    assert layout.spares == ("a",)
    if distribution == (8, 4):
        assert shape(layout) == [(8, ("c",)), (4, ("b",))]
    with pytest.raises(UserError):
        plan(LayoutOptions(stages=3, distribution=None), machines, sizes())


def test_a_tied_head_is_there_once() -> None:
    one = WeightSizes(layers=(10, 10), embedding=5, head=6, tied=5)
    assert [one.of(layers) for layers in (range(2), range(1), range(1, 2))] == [26, 15, 16]


def test_by_speed_the_slowest_are_spares_and_memory_counts() -> None:
    machines = {"a": offer("a", layer_s=5e-3), "b": offer("b"), "c": offer("c")}
    layout = plan(LayoutOptions(stages=2, distribution="auto"), machines, sizes())
    assert (shape(layout), layout.spares) == ([(6, ("b",)), (6, ("c",))], ("a",))
    small = {"b": offer("b", memory=5 * (1 << 20)), "c": offer("c", layer_s=1e-1)}
    assert [n for n, _ in shape(plan(LayoutOptions(stages=2, distribution="auto"), small, sizes()))] == [3, 9]
    with pytest.raises(UserError, match="does not fit the memory of these machines"):
        plan(LayoutOptions(stages=2, distribution="auto"), offers("b", "c", memory=5 * (1 << 20)), sizes())


@pytest.mark.parametrize("distribution", [None, (6, 6)])
def test_a_share_that_does_not_fit_names_its_machine(distribution: tuple[int, ...] | None) -> None:
    machines = {"a": offer("a"), "b": offer("b", memory=5 * (1 << 20))}
    with pytest.raises(UserError, match=r"b has 0.01 GB, and layers 6 to 11 need 0.01 GB, .*: add machines"):
        plan(LayoutOptions(stages=2, distribution=distribution), machines, sizes())
    halves = {"a": machines["a"], "b": replace(machines["b"], memory_bytes=6 * (1 << 20), weight_bytes=2)}
    assert [n for n, _ in shape(plan(LayoutOptions(stages=2, distribution=distribution), halves, sizes()))] == [6, 6]


def test_replicas_first_then_spares() -> None:
    layout = plan(LayoutOptions(stages=2, replicas=2), offers("a", "b", "c", "d", "e"), sizes())
    assert (shape(layout), layout.spares) == ([(6, ("a", "c")), (6, ("b", "d"))], ("e",))


def test_too_few_machines_leave_stages_empty() -> None:
    layout = plan(LayoutOptions(stages=3), offers("a"), sizes())
    assert shape(layout) == [(4, ("a",)), (4, ()), (4, ())]
    assert not layout.complete
    both = add_machine(layout, "b", LayoutOptions(stages=3), offers("a", "b"), sizes())
    assert shape(both)[1] == (4, ("b",))


def test_a_spare_takes_over() -> None:
    machines = offers("a", "b", "c")
    layout = plan(LayoutOptions(stages=2), machines, sizes())
    after = remove_machine(layout, "a", machines, sizes())
    assert (shape(after), after.spares) == ([(6, ("c",)), (6, ("b",))], ())


def test_a_replica_of_another_stage_takes_over() -> None:
    layout = StageLayout((PlacedStage(range(6), ("a",)), PlacedStage(range(6, 12), ("b", "c"))))
    assert shape(remove_machine(layout, "a", offers("a", "b", "c"), sizes())) == [(6, ("c",)), (6, ("b",))]


def test_neighbours_take_over_and_give_back() -> None:
    machines = offers("a", "b", "c")
    layout = plan(LayoutOptions(stages=3), machines, sizes())
    after = remove_machine(layout, "b", machines, sizes())
    assert [(stage.layers, stage.machines) for stage in after.stages] == [(range(6), ("a",)), (range(6, 12), ("c",))]
    assert [s.layers for s in remove_machine(layout, "a", machines, sizes()).stages] == [range(8), range(8, 12)]
    assert [s.layers for s in remove_machine(layout, "c", machines, sizes()).stages] == [range(4), range(4, 12)]
    again = add_machine(after, "b", LayoutOptions(stages=3), machines, sizes())
    assert shape(again) == shape(layout)


def test_neighbours_without_room_take_what_they_can() -> None:
    room = {"a": offer("a", memory=7.5 * (1 << 20)), "b": offer("b"), "c": offer("c")}
    layout = plan(LayoutOptions(stages=3), room, sizes())
    assert [s.layers for s in remove_machine(layout, "b", room, sizes()).stages] == [range(5), range(5, 12)]
    full = offers("a", "b", "c", memory=7 * (1 << 20))
    left = remove_machine(plan(LayoutOptions(stages=3), full, sizes()), "b", full, sizes())
    assert not left.complete
    assert left.stages[1].machines == ()


def test_layers_on_no_machine_are_replanned() -> None:
    """One that held everything is gone; those that come hold half of it each."""
    there = {**offers("large"), **offers("b", "c", memory=9.5 * (1 << 20))}
    wish = LayoutOptions(stages=2)
    layout = remove_machine(plan(wish, {n: there[n] for n in ("large", "b")}, sizes()), "b", there, sizes())
    assert shape(layout) == [(12, ("large",))]
    layout = remove_machine(layout, "large", there, sizes())
    layout = add_machine(layout, "b", wish, there, sizes())
    assert replan(layout, wish, there, sizes()) == layout == StageLayout((PlacedStage(range(12), ()),), ("b",))
    layout = add_machine(layout, "c", wish, there, sizes())
    assert shape(replan(layout, wish, there, sizes())) == [(6, ("b",)), (6, ("c",))]


def test_replanning_uses_fewer_stages_for_few_machines() -> None:
    """Neighbours that could not take all of it can if those beyond them take some."""
    there = offers("a", "b", "c", memory=9.5 * (1 << 20))
    wish = LayoutOptions(stages=3, distribution=(2, 6, 4))
    layout = remove_machine(plan(wish, there, sizes()), "c", there, sizes())
    assert shape(layout) == [(2, ("a",)), (6, ("b",)), (4, ())]
    assert shape(replan(layout, wish, there, sizes())) == [(6, ("a",)), (6, ("b",))]


def test_a_machine_that_failed_to_load_gets_fewer_layers() -> None:
    machine = reduce_offer(offer("a"), range(6), sizes())
    layout = StageLayout((PlacedStage(range(12), ()),))
    assert not fits("a", range(6), layout, {"a": machine}, sizes())
    assert fits("a", range(1, 6), layout, {"a": machine}, sizes())
    assert reduce_offer(machine, range(12), sizes()) == machine


def test_impossible_layout_options() -> None:
    with pytest.raises(UserError, match="--stages 13: the model has 12 layers"):
        check_options(LayoutOptions(stages=13), num_layers=12)
    for wrong in ((6, 5), (12,), (12, 0), (6, 3, 3)):
        with pytest.raises(UserError, match="whose sum is 12"):
            check_options(LayoutOptions(stages=2, distribution=wrong), num_layers=12)


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([None, "auto"]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=30),
)
def test_whatever_happens_layers_stay_whole(
    stages: int, replicas: int, distribution: str | None, story: list[tuple[bool, int]]
) -> None:
    wish, known = LayoutOptions(stages=stages, replicas=replicas, distribution=distribution), offers(*"abcdefgh")
    there = {name: known[name] for name in list(known)[:stages]}
    layout = plan(wish, there, sizes())
    for comes, number in story:
        name = "abcdefgh"[number]
        if comes and name not in there:
            there[name] = known[name]
            layout = add_machine(layout, name, wish, there, sizes())
        elif not comes and name in there:
            del there[name]
            layout = remove_machine(layout, name, there, sizes())
        check(layout)
        machines = {m for stage in layout.stages for m in stage.machines} | set(layout.spares)
        assert machines == set(there)
        if there:
            assert layout.complete or len(layout.stages) > len(there)
