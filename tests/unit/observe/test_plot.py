"""The plot of a loss curve, and numbers as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.observe import text
from smolcluster.observe.plot import loss_plot


def dots(plot: str) -> int:
    return sum((ord(c) - 0x2800).bit_count() for c in plot if 0x2800 < ord(c) <= 0x28FF)


def test_a_falling_loss_falls() -> None:
    steps = list(range(10, 310, 10))
    plot = loss_plot(steps, [4 * math.exp(-s / 100) for s in steps], val=[(100, 2.0), (300, 0.5)], unicode=True)
    lines = plot.splitlines()
    assert len(lines) == 12 + 3
    assert all(len(line) <= 72 for line in lines)
    assert lines[0].startswith(" 3.619 ┤⠑")
    assert lines[11].startswith("0.1991 ┤")
    assert lines[11][-1] == "⣀"
    assert len(lines[11]) == 72
    assert lines[13].split() == ["10", "300"]
    assert lines[14].strip() == "line: train   ●: val"
    assert plot.count("●") == 2 + 1
    # Every column of the line is covered: the curve has no holes.
    columns = [{row[x : x + 1] for row in lines[:12]} - {" ", "", "●"} for x in range(8, 72)]
    assert sum(not column for column in columns) <= 2


def test_the_plot_in_ascii() -> None:
    plot = loss_plot([1, 2, 3], [3.0, 2.0, 1.0], val=[(2, 2.5)], width=40, height=5, unicode=False)
    assert plot.isascii()
    lines = plot.splitlines()
    assert lines[0].startswith("3 |*")
    assert lines[4].startswith("1 |")
    assert lines[4].endswith("*")
    assert "o" in lines[1]
    assert lines[-1].strip() == "*: train   o: val"


def test_one_point_and_constants_sit_in_the_middle() -> None:
    point = loss_plot([5], [1.25], height=5, unicode=True)
    assert dots(point) == 1
    assert point.splitlines()[2].startswith("1.25 ┤")
    assert dots(point.splitlines()[2]) == 1
    assert point.splitlines()[-1].strip() == "5"
    constant = loss_plot([1, 2, 3], [2.0, 2.0, 2.0], width=40, height=5, unicode=True)
    assert dots(constant) == dots(constant.splitlines()[2]) == 2 * (40 - 3)
    assert constant.count("┤") == 1


def test_values_that_are_not_finite_leave_a_gap() -> None:
    assert "no finite losses" in loss_plot([], [])
    assert "no finite losses" in loss_plot([1, 2], [math.nan, math.inf])
    whole = loss_plot([1, 2, 3, 4], [1.0, 1.0, 1.0, 1.0], unicode=True)
    gap = loss_plot([1, 2, 3, 4], [1.0, 1.0, math.nan, 1.0], unicode=True)
    assert 0 < dots(gap) < dots(whole)
    with pytest.raises(ValueError, match="2 steps but 1 losses"):
        loss_plot([1, 2], [1.0])


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=20),
    st.integers(-5, 120),
    st.integers(-5, 30),
    st.booleans(),
)
def test_any_series_makes_a_plot_that_fits(
    series: list[tuple[int, float]], width: int, height: int, unicode: bool
) -> None:
    plot = loss_plot(
        [s for s, _ in series], [y for _, y in series], width=width, height=height, val=series[:3], unicode=unicode
    )
    assert all(len(line) <= max(width, 36) for line in plot.splitlines())


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (text.short(0), "0"), (text.short(950), "950"), (text.short(999.7), "1.00k"), (text.short(12_345), "12.3k"),
        (text.short(4_830_000), "4.83M"), (text.short(1.234e9), "1.23G"), (text.short(2.5), "2.50"),
        (text.short(math.nan), "nan"), (text.size(999), "999 B"), (text.size(12_345_678), "12.3 MB"),
        (text.clock(41.2), "0:41"), (text.clock(725), "12:05"), (text.clock(10_800), "3:00:00"),
        (text.clock(2 * 86_400 + 61), "2d 0:01:01"), (text.clock(math.inf), "-"), (text.duration(0.16), "160 ms"),
        (text.duration(0.99999), "1.00 s"), (text.duration(8.5e-4), "850 us"), (text.number(2.31), "2.3100"),
        (text.number(0.0), "0.0000"), (text.number(3.2e-7), "3.200e-07"), (text.number(-math.inf), "-inf"),
    ],
)  # fmt: skip
def test_numbers_for_people(made: str, expected: str) -> None:
    assert made == expected
