"""Small parts of benchmarks: counters, curves, formulas, checks that the work is equal."""

from __future__ import annotations

import math
import socket
import sys
from xml.etree import ElementTree

import pytest
from benchmarks.harness.plot import draw
from benchmarks.harness.workload import Shape, make_config
from benchmarks.p2 import first_at
from benchmarks.p4 import ROWS, _split, reached
from benchmarks.p6 import counted, most, zero
from benchmarks.p7 import check_same_work
from benchmarks.p9 import _again
from benchmarks.peers.bare import Recipe
from benchmarks.peers.work import Work
from benchmarks.tasks.counted import kernel_bytes, per_step

from smolcluster.compute.optim import warmup_cosine
from smolcluster.errors import SmolclusterError


def test_bytes_of_a_step_leave_out_the_beginning_and_what_is_under_way() -> None:
    rows = [(1000 + 10 * step, 5000 + (80 if step % 4 == 0 else 0) + 20 * (step // 4)) for step in range(40)]
    rows = [(10**6, 10**6)] * 4 + rows  # the state travels
    assert per_step(rows, interval=4) == (10.0, 5.0)
    with pytest.raises(ValueError, match="too few"):
        per_step(rows[:11], interval=4)


def test_the_kernel_counts_the_bytes_of_this_process() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("TCP_INFO is Linux's")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        before = kernel_bytes()
        ours.sendall(bytes(12_345))
        assert len(theirs.recv(12_345, socket.MSG_WAITALL)) == 12_345
        after = kernel_bytes()
    if after == (0, 0):
        pytest.skip("this kernel does not count bytes per socket")
    assert (after[0] - before[0], after[1] - before[1]) == (12_345, 12_345)


def test_a_loss_is_reached_when_the_mean_of_the_last_rows_is_there() -> None:
    curve = [(float(i), 3.0) for i in range(ROWS)]
    assert not reached(curve[:-1], 5.0), "too few rows"
    assert reached(curve, 3.0)
    assert not reached([*curve, (9.0, 3.1)], 3.0)


def test_samples_of_each_worker_are_means_over_steps() -> None:
    commits = [{"contributors": [{"rank": 0, "samples": n}, {"rank": 1, "samples": 32 - n}]} for n in (24, 26)]
    assert _split(commits) == [25.0, 7.0]


def test_a_worker_counts_again_with_a_new_instance_only() -> None:
    def commit(when: float, *instances: str) -> dict[str, object]:
        return {"time": when, "contributors": [{"rank": int(i[0]), "instance": i} for i in instances]}

    lines = [commit(1.0, "0a", "1a"), commit(2.0, "0a", "1a"), commit(3.0, "0a")]
    assert _again(lines, 1, 1) is None
    assert _again([*lines, commit(4.0, "0a", "1b")], 1, 1) == 4.0


def test_where_a_curve_comes_down_to_a_loss() -> None:
    curve = [(30.0, 4.0), (60.0, 3.0), (90.0, 3.5), (120.0, 2.0)]
    assert [first_at(curve, loss) for loss in (5.0, 3.5, 2.5, 1.9)] == [30.0, 45.0, 110.0, None]


def test_a_picture_has_every_line_in_its_panel() -> None:
    panels = {"1 Mbit/s": {"a < b": [(1.0, 4.0), (100.0, 2.0)], "c": [(10.0, 3.0), (10.0, 2.0)]}, "10 Mbit/s": {}}
    picture = ElementTree.fromstring(draw(panels, title="t", across="seconds"))
    lines = [line.get("points") for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert lines == ["0.0,56.0 290.0,348.0", "145.0,202.0 145.0,348.0"]
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1 Mbit/s", "10 Mbit/s", "a < b", "c", "seconds", "2.5"} <= set(words)


def test_workers_have_the_same_weights_and_share_the_samples_of_a_step() -> None:
    def work(batch_size: int, rank: int, size: int) -> Work:
        config = make_config(Shape("tiny", 16, 1, 2, 8, batch_size), steps=4, overrides={"training.device": "cpu"})
        return Work(config, rank=rank, size=size)

    alone, *parts = work(4, 0, 1), work(2, 0, 2), work(2, 1, 2)
    for own, *others in zip(*(w.model.parameters() for w in (alone, *parts)), strict=True):
        assert all(own.equal(other) for other in others)
    for _ in range(2):
        whole, shares = alone.batch()[0].tolist(), [part.batch()[0].tolist() for part in parts]
        assert sorted(whole) == sorted(shares[0] + shares[1])
    assert alone.gradient() > 0


def test_unequal_work_is_refused() -> None:
    check_same_work({10: 2.5, 20: 2.0}, {1: 5.5, 10: 2.5, 20: 2.0}, name="single", exact=True)
    with pytest.raises(SmolclusterError, match="at step 20"):
        check_same_work({10: 2.5, 20: 2.0}, {10: 2.5, 20: 2.1}, name="single", exact=True)
    with pytest.raises(SmolclusterError, match="no step"):
        check_same_work({10: 2.5}, {5: 2.5}, name="single", exact=True)


def test_the_peers_learning_rates_are_ours() -> None:
    recipe = Recipe(learning_rate=1e-3, min_lr=1e-4, warmup=5, steps=40, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0)
    ours = warmup_cosine(peak=1e-3, floor=1e-4, warmup=5, steps=40)
    assert all(math.isclose(recipe.rate(n), ours(n)) for n in range(50))


def test_p6_knows_the_formulas_of_zero_and_who_has_most() -> None:
    assert [zero(stage, "fp32", 100, 4) for stage in range(4)] == [1600, 1000, 700, 400]
    assert [zero(stage, "bf16", 100, 4) for stage in range(4)] == [1600, 700, 550, 400]
    noted = {"peak": {"at": {"parameters": 3, "other": 4}}}
    assert counted(noted) == 7
    assert most([noted, noted | {"allocated": 9}])["allocated"] == 9
