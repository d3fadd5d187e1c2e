"""Cutting, sharing out and accounting: properties over all shapes of a step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.models.precision import PRESETS
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.train.ray.balance import Load, share_out
from halfbyte.train.ray.ledger import Ledger
from halfbyte.train.ray.pieces import Piece, cut

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=20)


def sample(group: int, index: int, mark: int = 0) -> Trajectory:
    one = np.array([mark], np.int32)
    return Trajectory(
        one,
        one,
        np.zeros(1, np.float32),
        np.ones(1, bool),
        one,
        SamplingParams(),
        PRESETS["bf16"],
        "eos",
        group=group,
        sample=index,
    )


@given(lengths, st.integers(1, 9), st.integers(1, 50), st.integers(1, 12))
def test_a_cut_holds_every_sample_once(prompts: list[int], samples: int, tokens: int, workers: int) -> None:
    pieces = cut(prompts, samples, tokens, workers)
    found = sorted(key for piece in pieces for key in piece.samples())
    assert found == [(g, s) for g in range(len(prompts)) for s in range(samples)]
    assert all(p.count >= 1 and p.tokens == prompts[p.group] + p.count * tokens for p in pieces)
    if workers == 1:
        assert len(pieces) == len(prompts)  # a prompt is computed once
    else:
        assert len(pieces) >= min(2 * workers, len(prompts) * samples) or all(p.count == 1 for p in pieces)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.lists(st.one_of(st.none(), st.floats(1.0, 1000.0)), min_size=1, max_size=6),
)
def test_nobody_is_given_what_another_would_have_done_sooner(costs: list[int], speeds: list[float | None]) -> None:
    pieces = [Piece(i, 0, 1, tokens) for i, tokens in enumerate(costs)]
    loads = [Load(10_000, speed=speed) for speed in speeds]
    shares, left = share_out(pieces, loads)
    assert left == []
    assert sorted(p.group for share in shares for p in share) == list(range(len(pieces)))
    known = [s for s in speeds if s]
    usual = sum(known) / len(known) if known else 1.0
    ends = [load.tokens / (load.speed or usual) for load in loads]
    for share, end in zip(shares, ends):
        if share:  # its last piece would not have been done sooner elsewhere
            last = share[-1].tokens
            assert all(end <= (o.tokens + last) / (o.speed or usual) * (1 + 1e-9) for o in loads)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=5),
)
def test_a_worker_is_not_given_more_than_it_runs_at_once(counts: list[int], workers: list[tuple[int, int]]) -> None:
    pieces = [Piece(i, 0, count, 10 * count) for i, count in enumerate(counts)]
    loads = [Load(capacity, samples=busy, tokens=10 * busy) for capacity, busy in workers]
    shares, left = share_out(pieces, loads)
    assert sorted(p.group for share in [*shares, left] for p in share) == list(range(len(pieces)))
    for (capacity, busy), load, share in zip(workers, loads, shares):
        assert load.samples == busy + sum(p.count for p in share)
        if share and not (busy == 0 and len(share) == 1):
            assert load.samples <= capacity
    if left:
        assert all(not load.takes(piece) for load in loads for piece in left)


def test_a_faster_worker_gets_more() -> None:
    slow, fast = Load(1000), Load(1000)
    slow.measure(100, 1.0)
    fast.measure(300, 1.0)
    (few, many), _ = share_out([Piece(i, 0, 1, 10) for i in range(40)], [slow, fast])
    assert len(few) == 10
    assert len(many) == 30


deliveries = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=6), max_size=12)


@given(deliveries)
def test_a_ledger_takes_each_sample_once_whoever_brings_it(parts: list[list[tuple[int, int]]]) -> None:
    pieces = cut([5, 5, 5, 5], 3, 4, 2)
    ledger = Ledger(pieces)
    first: dict[tuple[int, int], int] = {}
    for mark, part in enumerate(parts):
        new = ledger.accept(sample(g, s, mark) for g, s in part)
        fresh = {key for key in part if key not in first}
        assert new == len(fresh)
        first |= dict.fromkeys(fresh, mark)
    assert ledger.duplicates == sum(map(len, parts)) - len(first)
    assert ledger.complete == (len(first) == 12)
    ledger.accept(sample(g, s, 99) for piece in pieces for g, s in piece.samples())
    taken = ledger.trajectories()
    keys = [(t.group, t.sample) for t in taken]
    assert all(a < b for a, b in pairwise(keys))
    assert len(keys) == 12
    assert all(int(t.versions[0]) == first.get(key, 99) for t, key in zip(taken, keys))


def test_a_ledger_gives_nothing_before_it_is_complete() -> None:
    ledger = Ledger([Piece(0, 0, 2, 10)])
    ledger.accept([sample(0, 0)])
    with pytest.raises(AssertionError):
        ledger.trajectories()
    with pytest.raises(AssertionError):
        ledger.accept([sample(0, 2)])
