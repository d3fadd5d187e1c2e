"""The pictures of the mismatch show what they are given: cells, frames, bars and stacks are counted and placed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.report import mismatch
from halfbyte.report.plane import BOTTOM, HEIGHT, LEFT, LEVELS, RIGHT, TOP, WIDTH
from halfbyte.report.sample_tokens import SampleTokens, read_tokens

NAMES = [name for name, _, _ in mismatch.QUADRANTS]


def cells(svg: str) -> dict[tuple[int, int], tuple[int, int]]:
    """(column, row) -> (colour, level) of every cell drawn."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for colour, level, path in re.findall(r'<path class="cell c(\d) l(\d)" d="([^"]*)"', svg):
        for column, row in re.findall(r"M(\d+) (\d+)h1v1h-1z", path):
            assert (int(column), int(row)) not in out
            out[int(column), int(row)] = (int(colour), int(level))
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.one_of(st.none(), st.floats(-3, 3)), min_size=1, max_size=20), st.sampled_from([-1.0, 0.0, 2.0])
        ),
        max_size=8,
    )
)
def test_the_carpet_colours_every_token_by_direction(samples: list[tuple[list[float | None], float]]) -> None:
    given_ = [
        SampleTokens(gap, [None if g is None else -1.0 for g in gap], [None if g is None else a for g in gap])
        for gap, a in samples
    ]
    drawn = cells(mismatch.carpet(given_).svg)
    shown = [s for s in given_ if any(g is not None for g in s.gap)]
    expected = {
        (column, row): 1 if g * a > 0 else 0
        for row, sample in enumerate(shown)
        for column, (g, a) in enumerate(zip(sample.gap, sample.advantage))
        if g and a
    }
    assert {place: colour for place, (colour, _) in drawn.items()} == expected
    assert all(1 <= level <= LEVELS for _, level in drawn.values())


def test_frames_lie_around_the_selected_tokens() -> None:
    sample = SampleTokens(
        [-0.5] * 10,
        [-1.0] * 10,
        [-1.0] * 10,
        selected=[False, True, True, True, False, False, False, False, True, True],
    )
    svg = mismatch.carpet([sample, sample]).svg
    frames = [tuple(map(float, f)) for f in re.findall(r'outline" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg)]
    cell, high = (WIDTH - LEFT - RIGHT) / 10, (HEIGHT - TOP - BOTTOM) / 2
    expected = [(LEFT + first * cell, TOP + row * high, n * cell) for row in (0, 1) for first, n in ((1, 3), (8, 2))]
    assert len(frames) == 4
    for got, want in zip(frames, expected):
        assert got == pytest.approx(want, abs=0.06)


def test_large_batches_are_cut_to_a_size_that_fits_a_page() -> None:
    sample = SampleTokens([0.1, -0.2] * 500, [-1.0] * 1000, [-1.0] * 1000, [0.5] * 1000)
    many = [sample] * 300
    pictures = [mismatch.carpet(many), mismatch.gap_density(many), mismatch.weight_histogram(many)]
    assert all(0 < len(p.svg) < 200_000 for p in pictures)
    assert len(cells(pictures[0].svg)) == mismatch.CARPET_ROWS * mismatch.CARPET_COLUMNS


def test_the_histogram_counts_weights_and_mass() -> None:
    panel = mismatch.weight_histogram(
        [SampleTokens([0.1] * 4, [-1.0] * 4, [1.0, 1.0, -2.0, None], [1.0, 0.5, 0.0, 9.0])]
    )
    assert "Mass kept: 37.5%" in panel.note  # (1 + .5 + 0) / 4; the masked token does not count
    assert "66.7% of tokens have a weight other than 1" in panel.note
    assert len(re.findall('class="area', panel.svg)) == 3
    assert mismatch.weight_histogram([SampleTokens([0.1], [-1.0], [1.0], [1.0])]).svg == ""


def test_density_has_a_cell_for_every_region_with_points() -> None:
    tail = SampleTokens([0.0, 0.01, -4.0], [-0.1, -0.2, -6.0], [1.0, 1.0, -1.0])
    drawn = cells(mismatch.gap_density([tail]).svg)
    assert 2 <= len(drawn) <= 3
    assert drawn[min(drawn)] == (1, LEVELS) or drawn[min(drawn)][0] == 1  # the unlikely token amplifies
    assert mismatch.gap_density([SampleTokens([0.0], [-1.0], [1.0])]).svg == ""  # no gap, nothing to see


def test_the_stack_needs_all_four_and_adds_them() -> None:
    series = [[(1.0, 0.1), (2.0, 0.2)], [(1.0, 0.2), (2.0, 0.2)], [(1.0, 0.3), (2.0, 0.2)], [(1.0, 0.4), (2.0, 0.3)]]
    panel = mismatch.quadrant_stack(series)
    assert re.findall(r'class="area c(\d)"', panel.svg) == [str(colour) for _, _, colour in mismatch.QUADRANTS]
    assert len(panel.legend) == 4
    assert mismatch.quadrant_stack([*series[:3], []]).svg == ""
    assert mismatch.quadrant_stack([]).svg == ""


def test_indicator_and_reward_stand_above_each_other() -> None:
    points = [(float(i), 0.01 * i) for i in range(5)]
    assert mismatch.indicator(points, points).svg.count("<svg") == 2
    assert mismatch.indicator([], points).svg == ""


def test_quadrant_names_are_those_of_the_metrics() -> None:
    from halfbyte.objective import QUADRANTS

    assert tuple(NAMES) == QUADRANTS


def test_saved_samples_are_read_tolerantly(tmp_path: Path) -> None:
    good = {"logprobs": [-1.0, -2.0, 0.0], "learner_logprobs": [-1.5, -1.0, 0.0], "mask": [1, 1, 0], "advantage": -0.5}
    decided = {"weights": [0.5, 1.0, 0.0], "selected": [1, 0, 0]}
    lines = [
        good | decided,
        {key: value for key, value in good.items() if key != "mask"},
        good | {"mask": [1]},
        good | {"advantage": None},
        good | {"logprobs": "text"},
        good | {"logprobs": [-1.0, None, 0.0]},
        {"prompt_text": "an older file"},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
    found = read_tokens(path)
    assert [s.gap for s in found] == [[-0.5, 1.0, None], [-0.5, None, None]]
    assert found[0].advantage == [-0.5, -0.5, None]
    assert found[0].weight == [0.5, 1.0, 0.0]
    assert list(found[0].selected) == [True, False, False]
    assert found[1].weight is None
    assert read_tokens(tmp_path / "none") == []
