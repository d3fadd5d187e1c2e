"""Quadrant and segment numbers against sums written out, and the parts of a gap."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import NumericsError
from halfbyte.objective import (
    QUADRANTS,
    CorrectionInput,
    GapParts,
    Triage,
    quadrant_of,
    quadrants,
    split_gap,
)

TOKENS = st.lists(
    st.tuples(
        st.sampled_from([-2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 3.0]),
        st.sampled_from([-1.0, -0.5, 0.0, 2.0]),
        st.sampled_from([True, True, True, False]),
        st.integers(0, 3),
        st.sampled_from([0.5, 1.0, 1.25]),
    ),
    max_size=30,
)
SIGNS = {"neg_neg": (-1, -1), "pos_pos": (1, 1), "neg_pos": (-1, 1), "pos_neg": (1, -1)}


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def record(tokens: list[Any]) -> tuple[CorrectionInput, torch.Tensor]:
    gap, advantages, mask, segment, weights = zip(*tokens) if tokens else ((), (), (), (), ())
    mask_ = torch.tensor(mask, dtype=torch.bool)
    return CorrectionInput(
        gap=torch.tensor(gap, dtype=torch.float32).masked_fill(~mask_, math.nan),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=mask_,
        sequence_index=torch.tensor(segment, dtype=torch.int64),
    ), torch.tensor(weights, dtype=torch.float32)


@settings(max_examples=80)
@given(tokens=TOKENS)
def test_numbers_equal_sums_written_out(tokens: list[Any]) -> None:
    batch, weights = record(tokens)
    found = quadrants(batch, weights)
    real = [(g, a, s, w) for g, a, counts, s, w in tokens if counts]
    if not real:
        assert found == {}
        return
    total = sum(w * abs(a) for _, a, _, w in real)
    masses = {}
    for name, (sa, sg) in SIGNS.items():
        inside = [(g, a, w) for g, a, _, w in real if sign(a) == sa and sign(g) == sg]
        masses[name] = sum(w * abs(a) for _, a, w in inside)
        assert found[f"quadrant/share_{name}"] == pytest.approx(len(inside) / len(real))
        if total:
            assert found[f"quadrant/mass_{name}"] == pytest.approx(masses[name] / total)
        if inside:
            assert found[f"quadrant/gap_{name}"] == pytest.approx(sum(abs(g) for g, _, _ in inside) / len(inside))
        else:
            assert f"quadrant/gap_{name}" not in found
    moved = sum(w * abs(a * g) for g, a, _, w in real)
    if moved:
        index = sum(w * a * g for g, a, _, w in real) / moved
        assert found["quadrant/amplification"] == pytest.approx(index, abs=1e-12)
    if masses["neg_neg"] + masses["pos_pos"]:
        imbalance = (masses["neg_neg"] - masses["pos_pos"]) / (masses["neg_neg"] + masses["pos_pos"])
        assert found["quadrant/imbalance"] == pytest.approx(imbalance)
    segments: dict[int, list[float]] = {}
    for g, a, s, _ in real:
        if a < 0:
            segments.setdefault(s, []).append(g)
    assert found["segment/count"] == len(segments)
    if segments:
        e = [sum(max(-g, 0) for g in gaps) / len(gaps) for gaps in segments.values()]
        c = [sum(max(g, 0) for g in gaps) / len(gaps) for gaps in segments.values()]
        assert found["segment/tokens"] == pytest.approx(sum(map(len, segments.values())) / len(segments))
        assert found["segment/amplification"] == pytest.approx(sum(e) / len(e))
        assert found["segment/contraction"] == pytest.approx(sum(c) / len(c))
        i = [(x - y) / (x + y + 1e-8) for x, y in zip(e, c)]
        assert found["segment/imbalance"] == pytest.approx(sum(i) / len(i), abs=1e-6)


def test_quadrant_of_leaves_zero_and_nan_out() -> None:
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0, 1.0, math.nan])
    gap = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0, 0.0, 1.0])
    assert quadrant_of(advantages, gap).tolist() == [0, 1, 2, 3, -1, -1, -1]
    assert tuple(SIGNS) == QUADRANTS


def test_verl_7771_padding_rows_change_no_number() -> None:
    batch, _ = record([(-0.5, -1.0, True, 0, 1.0), (0.2, 1.0, True, 1, 1.0), (0.1, -1.0, True, 2, 1.0)])
    padded, _ = record(
        [
            (-0.5, -1.0, True, 0, 1.0),
            *[(9.0, -9.0, False, 5, 1.0)] * 50,
            (0.2, 1.0, True, 1, 1.0),
            (0.1, -1.0, True, 2, 1.0),
        ]
    )
    assert quadrants(batch) == quadrants(padded)


def test_tail_share_tells_clustered_damage_from_spread_damage() -> None:
    random = torch.Generator().manual_seed(0)
    ones = torch.ones(100 * 20)
    fields: dict[str, Any] = {
        "advantages": -ones,
        "mask": ones > 0,
        "sequence_index": torch.arange(100).repeat_interleave(20),
    }
    noise = 0.01 * torch.randn(2000, generator=random)
    clustered, spread = noise.clone(), noise.clone()
    clustered[40:60] -= 1.0
    spread[torch.randperm(2000, generator=random)[:20]] -= 1.0
    assert quadrants(CorrectionInput(gap=clustered, **fields))["segment/tail_share"] == 1.0
    assert quadrants(CorrectionInput(gap=spread, **fields))["segment/tail_share"] < 0.5


def test_leading_indicator_counts_segments_over_threshold() -> None:
    random = torch.Generator().manual_seed(0)
    ones = torch.ones(50 * 32)
    gap = 0.02 * torch.randn(1600, generator=random)
    gap[: 5 * 32] -= 0.5
    batch = CorrectionInput(
        gap=gap, advantages=-ones, mask=ones > 0, sequence_index=torch.arange(50).repeat_interleave(32)
    )
    assert quadrants(batch)["segment/over_threshold"] == pytest.approx(0.1)
    healthy = dataclasses.replace(batch, gap=torch.where(torch.arange(1600) < 160, gap + 0.5, gap))
    assert quadrants(healthy)["segment/over_threshold"] == 0.0
    strict = Triage(reference="batch", e_min=0.6)
    assert quadrants(batch, triage=strict)["segment/over_threshold"] == 0.0


def test_split_gap_parts_add_up_and_missing_ones_stay_in_the_next() -> None:
    random = torch.Generator().manual_seed(4)
    learner, sampling, routes, weights, rollout = (-torch.rand(40, generator=random) for _ in range(5))
    mask = torch.arange(40) % 5 != 0
    rollout = rollout.masked_fill(~mask, math.nan)
    full = GapParts(learner=learner, rollout=rollout, same_sampling=sampling, same_routes=routes, same_weights=weights)
    found = split_gap(full, mask)
    chain = [learner, sampling, routes, weights, rollout]
    for name, before, after in zip(("sampling", "routing", "staleness", "numerics"), chain, chain[1:]):
        difference = (before - after)[mask].double()
        assert found[f"split/{name}_mean"] == pytest.approx(float(difference.mean()), abs=1e-6)
        assert found[f"split/{name}_mean_abs"] == pytest.approx(float(difference.abs().mean()), abs=1e-6)
    parts = ("sampling", "routing", "staleness", "numerics")
    whole = float((learner - rollout)[mask].double().mean())
    assert sum(found[f"split/{name}_mean"] for name in parts) == pytest.approx(whole, abs=1e-6)
    less = split_gap(GapParts(learner=learner, rollout=rollout, same_weights=weights), mask)
    assert less.keys() == {f"split/{n}_{k}" for n in ("staleness", "numerics") for k in ("mean", "mean_abs")}
    assert less["split/staleness_mean"] == pytest.approx(float((learner - weights)[mask].mean()), abs=1e-6)
    with pytest.raises(NumericsError, match="numerics"):
        split_gap(full, torch.ones(40, dtype=torch.bool))


def test_split_gap_by_versions() -> None:
    learner, rollout = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.1, -1.3, -2.0, -1.0])
    versions, mask = torch.tensor([3, 3, 2, 9]), torch.tensor([True, True, True, False])
    found = split_gap(GapParts(learner=learner, rollout=rollout), mask, versions, 3)
    assert found["split/stale_tokens"] == pytest.approx(1 / 3)
    assert found["split/current_mean_abs"] == pytest.approx(0.2)
    assert found["split/stale_mean_abs"] == pytest.approx(1.0)
