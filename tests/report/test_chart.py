"""Axes, thinning, smoothing and the geometry of charts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.html.scale import linear_axis, logarithmic_axis, number
from halfbyte.report.chart import HEIGHT, LEFT, RIGHT, WIDTH, Line, Point, line_chart, smooth, stacked_chart, thin

finite = st.floats(-1e12, 1e12, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=20))
def test_a_linear_axis_holds_its_values_between_round_ticks(values: list[float]) -> None:
    axis = linear_axis(min(values), max(values), 0.0, 100.0)
    rounding = 1e-9 * (axis.high - axis.low)
    assert axis.low <= min(values) + rounding
    assert axis.high >= max(values) - rounding
    assert 2 <= len(axis.ticks) <= 9
    pixels = [axis.pixel(v) for v in sorted(values)]
    assert pixels == sorted(pixels)
    assert all(0.0 <= p <= 100.0 for p in pixels)


def test_ticks_of_steps_are_whole_numbers() -> None:
    assert linear_axis(1, 3, 0, 1, ticks=6, whole=True).ticks == (1, 2, 3)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.9991, 1.0, ["0.9990", "0.9992", "0.9994", "0.9996", "0.9998", "1.0000"]),
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 3e-4, ["0", "1e-4", "2e-4", "3e-4"]),
        (0.0, 20_000.0, ["0", "5000", "10k", "15k", "20k"]),
        (0.0, 0.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_neighbouring_ticks_read_differently(low: float, high: float, labels: list[str]) -> None:
    assert linear_axis(low, high, 0.0, 100.0).labels() == labels


def test_zeros_are_gaps_on_a_logarithmic_axis() -> None:
    points = [(1.0, 1e-4), (2.0, 0.0), (3.0, 0.1), (4.0, 0.2), (5.0, 0.0)]
    svg = line_chart("x", [Line(points)], logarithmic=True)
    assert "log scale" in svg
    assert svg.count("<circle") == 1
    (path,) = re.findall(r'class="line c0" d="M([^"]*)"', svg)
    assert path.count("L") == 1


def test_a_logarithmic_axis_covers_whole_decades() -> None:
    axis = logarithmic_axis([3e-4, 0.0, 0.2], 100.0, 0.0)
    assert axis is not None
    assert axis.ticks == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1, 1.0))
    assert axis.pixel(1e-4) == 100.0
    assert axis.pixel(1.0) == 0.0
    assert axis.pixel(1e-2) == pytest.approx(50.0)
    assert logarithmic_axis([1.0, 2.0], 0, 1) is None
    assert logarithmic_axis([0.0, 0.0], 0, 1) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0125, "0.0125"), (12.5, "12.5"), (1234, "1234"), (17_300, "17.3k"), (1_200_000, "1.2M"),
     (3e-5, "3e-5"), (-4.2e-4, "-4.2e-4"), (1e12, "1e12")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@given(st.lists(finite, min_size=1, max_size=700), st.integers(1, 50))
def test_thinning_keeps_order_count_and_mean(values: list[float], most: int) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    got = thin(points, most)
    assert len(got) <= most
    assert [x for x, _ in got] == sorted(x for x, _ in got)
    if len(points) % len(got) == 0:
        scale = max(1.0, max(map(abs, values)))
        assert sum(y for _, y in got) / len(got) == pytest.approx(sum(values) / len(values), abs=1e-9 * scale)


def test_smoothing_is_a_centred_mean() -> None:
    points = [(float(i), float(y)) for i, y in enumerate([0, 3, 6, 0, 3])]
    assert [y for _, y in smooth(points, 3)] == pytest.approx([1.5, 3, 3, 3, 1.5])
    assert smooth(points, 1) == points


@given(
    st.lists(st.tuples(st.integers(0, 500), finite), min_size=1, max_size=40, unique_by=lambda p: p[0]), st.booleans()
)
def test_everything_drawn_lies_inside_the_picture(data: list[tuple[int, float]], logarithmic: bool) -> None:
    points = [(float(x), y) for x, y in sorted(data)]
    svg = line_chart(
        "x",
        [Line(points)],
        [Point(points[0][0], points[0][1], points[0][1] - 1, points[0][1] + 1)],
        logarithmic=logarithmic,
    )
    for path in re.findall(r'class="(?:line|fill)[^"]*" d="([^"]*)"', svg):
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path):
            assert LEFT - 0.1 <= float(x) <= WIDTH - RIGHT + 0.1
            assert 0 <= float(y) <= HEIGHT
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_line_goes_up_when_values_do() -> None:
    svg = line_chart("x", [Line([(0.0, 1.0), (1.0, 2.0)])])
    (path,) = re.findall(r'class="line c0" d="M([^"]*)"', svg)
    (x0, y0), (x1, y1) = [tuple(map(float, p.split(","))) for p in path.split("L")]
    assert x0 < x1
    assert y0 > y1


def test_stacked_areas_sit_on_each_other() -> None:
    svg = stacked_chart("x", [[(0.0, 1.0), (1.0, 1.0)], [(0.0, 3.0), (1.0, 3.0)]])
    first, second = (
        [tuple(map(float, p.split(","))) for p in path.split("L")]
        for path in re.findall(r'class="area c\d" d="M([^"]*)Z"', svg)
    )
    assert first[:2] == second[:1:-1]  # the top of one is the bottom of the next
    heights = [area[3][1] - area[0][1] for area in (first, second)]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)


def test_no_data_gives_no_picture_and_labels_are_escaped() -> None:
    assert line_chart("x", []) == ""
    assert stacked_chart("x", []) == ""
    assert 'aria-label="&lt;&quot;"' in line_chart('<"', [Line([(1.0, 1.0)])])
