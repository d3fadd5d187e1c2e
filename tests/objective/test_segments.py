"""Segmenters against loops over one sample after another, and the borders that none may cross."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.objective import SEGMENTERS, SegmentInput, delimiter_flags, make_segmenter

EVERY = pytest.mark.parametrize("name", sorted(SEGMENTERS))
TOKEN = st.tuples(
    st.sampled_from([True] * 7 + [False]),  # counts
    st.sampled_from([False] * 4 + [True]),  # ends a sentence
    st.sampled_from([False] * 15 + [True]),  # begins a turn
    st.sampled_from([0] * 15 + [1]),  # the weight version moves on
    st.floats(-1, 1, width=32),
)
BATCH = st.lists(st.lists(TOKEN, max_size=60), max_size=4)


def layout(batch: list[list[Any]], order: list[int] | None = None) -> SegmentInput:
    """Flat tensors, samples in the given order; sample i has id i."""
    rows = [(s, p, token) for s in (order or range(len(batch))) for p, token in enumerate(batch[s])]
    versions = []
    for s in order or range(len(batch)):
        version = 3
        for token in batch[s]:
            version += token[3]
            versions.append(version)
    return SegmentInput(
        mask=torch.tensor([t[0] for _, _, t in rows], dtype=torch.bool),
        sequence_index=torch.tensor([s for s, _, _ in rows], dtype=torch.int64),
        delimiters=torch.tensor([t[1] for _, _, t in rows], dtype=torch.bool),
        turn_starts=torch.tensor([t[2] for _, _, t in rows], dtype=torch.bool),
        versions=torch.tensor(versions, dtype=torch.int64),
        gap=torch.tensor([t[4] for _, _, t in rows], dtype=torch.float32),
        advantages=torch.tensor([[1.0, -2.0][s % 2] for s, _, _ in rows], dtype=torch.float32),
    )


def loop_runs(tokens: SegmentInput) -> list[list[int]]:
    """Flat places of each run, from a walk over the tokens of each sample."""
    runs: list[list[int]] = []
    for sample in sorted(set(tokens.sequence_index.tolist())):
        previous: int | None = None
        for i in (tokens.sequence_index == sample).nonzero()[:, 0].tolist():
            if not tokens.mask[i]:
                previous = None
                continue
            same = (
                previous is not None and tokens.versions[i] == tokens.versions[previous] and not tokens.turn_starts[i]
            )
            if same:
                runs[-1].append(i)
            else:
                runs.append([i])
            previous = i
    return runs


def loop_turn(run: list[int], tokens: SegmentInput) -> list[int]:
    return [len(run)]


def loop_fixed(run: list[int], tokens: SegmentInput) -> list[int]:
    sizes = [16] * (len(run) // 16) + ([len(run) % 16] if len(run) % 16 else [])
    if len(sizes) > 1 and sizes[-1] < 8:
        last = sizes.pop()
        sizes[-1] += last
    return sizes


def loop_delimiter(run: list[int], tokens: SegmentInput) -> list[int]:
    sizes, at = [], 0
    while at < len(run):
        size = next(
            (k for k in range(8, len(run) - at + 1) if tokens.delimiters[run[at + k - 1]] or k == 64), len(run) - at
        )
        rest = len(run) - at - size
        if 0 < rest < 8:
            size = size + rest if size + rest <= 64 else len(run) - at - 8
        sizes.append(size)
        at += size
    return sizes


def better_path(scaled: list[float]) -> list[int]:
    """Dynamic programme over whole paths of two states."""
    evidence = [round(float(torch.tensor(x, dtype=torch.float32) - 0.5) * 64) / 64 for x in scaled]
    best: list[tuple[float, list[int]]] = [(0.0, [0]), (evidence[0], [1])]
    for x in evidence[1:]:
        zero = max((best[0][0], best[0][1]), (best[1][0] - 4.0, best[1][1]), key=lambda e: e[0])
        one = max((best[1][0], best[1][1]), (best[0][0] - 4.0, best[0][1]), key=lambda e: e[0])
        best = [(zero[0], [*zero[1], 0]), (one[0] + x, [*one[1], 1])]
    return best[1][1] if best[1][0] > best[0][0] else best[0][1]


def loop_change_point(run: list[int], tokens: SegmentInput, scale: float) -> list[int]:
    """Where amplifying and contracting paths change, then blocks of 32."""
    scaled = []
    for i in run:
        signed = float(tokens.gap[i]) * math.copysign(1.0, float(tokens.advantages[i]))
        scaled.append(float(torch.tensor(signed / scale, dtype=torch.float32).clamp(-3, 3)))
    path = [up - down for up, down in zip(better_path(scaled), better_path([-x for x in scaled]))]
    sizes: list[int] = []
    at = 0
    while at < len(path):
        end = at
        while end < len(path) and path[end] == path[at]:
            end += 1
        left = end - at
        while left:
            size = 32 if left - 32 >= 16 else left if left < 48 else 32
            sizes.append(size)
            left -= size
        at = end
    return sizes


def expected(name: str, tokens: SegmentInput) -> list[list[int]]:
    sizes = sorted(abs(g) for g, m in zip(tokens.gap.tolist(), tokens.mask.tolist()) if m)
    scale = max(sizes[math.ceil(len(sizes) / 4) - 1] / 0.3186, 0.02) if sizes else 1.0
    out = []
    for run in loop_runs(tokens):
        if name == "change_point":
            cuts = loop_change_point(run, tokens, scale)
        else:
            cuts = {"turn": loop_turn, "fixed": loop_fixed, "delimiter": loop_delimiter}[name](run, tokens)
        at = 0
        for size in cuts:
            out.append(run[at : at + size])
            at += size
    return out


def groups(labels: torch.Tensor) -> list[list[int]]:
    return [(labels == k).nonzero()[:, 0].tolist() for k in range(int(labels.max()) + 1 if len(labels) else 0)]


@EVERY
@settings(max_examples=60)
@given(batch=BATCH)
def test_segments_equal_a_loop(name: str, batch: list[list[Any]]) -> None:
    tokens = layout(batch)
    labels = make_segmenter(name)(tokens)
    assert bool((labels[~tokens.mask] == -1).all())
    assert groups(labels) == expected(name, tokens)


@EVERY
@settings(max_examples=40)
@given(data=st.data())
def test_order_of_samples_and_tokens_does_not_matter_where_positions_are_given(name: str, data: st.DataObject) -> None:
    batch = data.draw(BATCH)
    tokens = layout(batch)
    labels = make_segmenter(name)(tokens)
    positions = torch.tensor([p for sample in batch for p in range(len(sample))], dtype=torch.int64)
    order = torch.tensor(data.draw(st.permutations(range(len(positions)))), dtype=torch.int64)
    fields = ("mask", "sequence_index", "delimiters", "turn_starts", "versions", "gap", "advantages")
    moved = SegmentInput(
        **{f: getattr(tokens, f)[order] for f in fields},  # type: ignore[arg-type]
        positions=positions[order],
    )
    assert torch.equal(make_segmenter(name)(moved), labels[order])


@EVERY
def test_no_segment_crosses_an_observation_a_turn_a_version_or_a_sample(name: str) -> None:
    total = 120
    mask, turns = torch.ones(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    mask[20:23] = False
    turns[50] = True
    tokens = SegmentInput(
        mask=mask,
        sequence_index=(torch.arange(total) >= 100).to(torch.int64),
        versions=(torch.arange(total) >= 70).to(torch.int64),
        turn_starts=turns,
        delimiters=torch.zeros(total, dtype=torch.bool),
        gap=torch.zeros(total),
        advantages=-torch.ones(total),
    )
    labels = make_segmenter(name)(tokens)
    for before, after in ((19, 23), (49, 50), (69, 70), (99, 100)):
        assert labels[before] != labels[after], (before, after)
    if name == "turn":
        assert int(labels.max()) == 4


def test_change_point_finds_a_planted_cluster_to_within_a_few_tokens() -> None:
    random = torch.Generator().manual_seed(2)
    gap = 0.05 * torch.randn(400, generator=random)
    gap[137:171] -= 0.3
    ones = torch.ones(400)
    tokens = SegmentInput(mask=ones > 0, sequence_index=torch.zeros(400, dtype=torch.int64), gap=gap, advantages=-ones)
    labels = make_segmenter("change_point", size=64)(tokens)
    borders = [i for i, (a, b) in enumerate(pairwise(labels.tolist()), 1) if a != b]
    assert min(abs(b - 137) for b in borders) <= 2
    assert min(abs(b - 171) for b in borders) <= 2
    cluster = (labels == labels[150]).nonzero()[:, 0]
    assert abs(len(cluster) - 34) <= 4


@pytest.mark.parametrize("length", [*range(56, 76), 127, 128, 131, 136, 200])
@pytest.mark.parametrize("every", [0, 5, 61])
def test_delimiter_segments_stay_within_their_bounds_in_long_runs(length: int, every: int) -> None:
    places = torch.arange(length)
    tokens = SegmentInput(
        mask=places >= 0,
        sequence_index=torch.zeros_like(places),
        versions=torch.zeros_like(places),
        turn_starts=places == 0,
        delimiters=places % every == every - 1 if every else places < 0,
        gap=torch.zeros(length),
        advantages=torch.ones(length),
    )
    labels = make_segmenter("delimiter")(tokens)
    assert groups(labels) == expected("delimiter", tokens)
    sizes = torch.bincount(labels)
    assert int(sizes.min()) >= 8
    assert int(sizes.max()) <= 64


def test_delimiter_flags() -> None:
    texts = ["a", ".", "end.", "line\n", "\n\n", "x = 1", "why? ", "3.5", "。", ""]
    assert delimiter_flags(texts).tolist() == [False, True, True, True, True, False, True, False, True, False]


def test_missing_columns_and_bad_options_are_refused() -> None:
    tokens = SegmentInput(mask=torch.ones(3, dtype=torch.bool), sequence_index=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="delimiters"):
        make_segmenter("delimiter")(tokens)
    with pytest.raises(ConfigError, match="gap and advantages"):
        make_segmenter("change_point")(tokens)
    for name, options in (
        ("fixed", {"size": 0}),
        ("delimiter", {"shortest": 0}),
        ("delimiter", {"shortest": 40}),
        ("change_point", {"drift": 0.0}),
        ("change_point", {"penalty": -1.0}),
        ("change_point", {"clip": 0.1}),
        ("change_point", {"size": 0}),
        ("change_point", {"floor": 0.0}),
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_segmenter(name, **options)
    with pytest.raises(ConfigError, match="unknown segmenter"):
        make_segmenter("sentence")
    with pytest.raises(ConfigError, match="segmenter_options"):
        make_segmenter("fixed", width=3)
    twice = torch.tensor([0, 1, 1])
    with pytest.raises(ShapeError, match="share a position"):
        make_segmenter("turn")(SegmentInput(mask=tokens.mask, sequence_index=tokens.sequence_index, positions=twice))
