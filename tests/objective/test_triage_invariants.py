"""Invariants I1-I14 of TRIAGE, each a property on batches with planted damage (I10 and I12: learner, bench)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from damaged_batch import VARIANTS, damaged, loss_and_slope, rule
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.objective import (
    CorrectionInput,
    Distribution,
    SegmentInput,
    make_segmenter,
    read,
    support_fingerprint,
)

SEEDS = st.integers(0, 2**31)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@EVERY_VARIANT
@settings(max_examples=25)
@given(seed=SEEDS)
def test_i1_without_gap_or_advantage_weights_loss_and_gradient_are_bitwise_the_baseline(
    variant: str, seed: int
) -> None:
    tokens = damaged(seed)
    triage = rule(variant=variant, alpha=1.0)
    for field in ("gap", "advantages"):
        still = dataclasses.replace(tokens, **{field: torch.zeros_like(tokens.gap)})
        weights = triage(still).weights
        assert bool((weights[tokens.mask] == 1.0).all())
        (loss, slope), (plain, plain_slope) = loss_and_slope(still, weights), loss_and_slope(still, None)
        assert torch.equal(loss, plain)
        assert torch.equal(slope, plain_slope)
    weights = triage(tokens).weights
    exact = tokens.mask & ((tokens.gap == 0) | (tokens.advantages == 0))
    if variant != "segment_mask":  # which throws whole segments out
        assert bool((weights[exact] == 1.0).all())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "segment_mask"])
@settings(max_examples=25)
@given(seed=SEEDS, w_min=st.floats(0.05, 1), w_max=st.floats(1, 3), strength=st.floats(0, 5), g_sev=st.floats(0.3, 3))
def test_i2_i3_weights_are_positive_and_within_their_bounds(
    variant: str, seed: int, w_min: float, w_max: float, strength: float, g_sev: float
) -> None:
    tokens = damaged(seed)
    triage = rule(variant=variant, alpha=1.0, w_min=w_min, w_max=w_max, strength=strength, g_sev=g_sev)
    weights = triage(tokens).weights[tokens.mask]
    assert bool((weights > 0).all())
    assert float(weights.min()) >= w_min * (1 - 1e-6)
    assert float(weights.max()) <= w_max * (1 + 1e-6)


@EVERY_VARIANT
@settings(max_examples=25)
@given(seed=SEEDS)
def test_i4_outside_selected_segments_and_not_severe_is_exactly_one(variant: str, seed: int) -> None:
    tokens = damaged(seed)
    triage = rule(variant=variant)
    weights = triage(tokens).weights
    inside = triage.diagnose(tokens).selected_tokens(len(tokens.mask))
    severe = (tokens.advantages * tokens.gap > 0) & (tokens.gap.abs() > triage.g_sev)
    untouched = tokens.mask & ~inside & ~severe
    assert bool((weights[untouched] == 1.0).all())
    quiet = dataclasses.replace(tokens, mask=untouched)
    (loss, slope), (plain, plain_slope) = loss_and_slope(quiet, weights), loss_and_slope(quiet, None)
    assert torch.equal(loss, plain)
    assert torch.equal(slope, plain_slope)


@settings(max_examples=40)
@given(seed=SEEDS, w_max=st.floats(1, 4))
def test_i5_mass_never_grows_and_is_conserved_while_the_cap_is_slack(seed: int, w_max: float) -> None:
    tokens = damaged(seed)
    triage = rule(alpha=1.0, w_max=w_max, g_sev=1e6)  # nothing severe: that mass is meant to go
    weights = triage(tokens).weights.double()
    inside = triage.diagnose(tokens).selected_tokens(len(tokens.mask))
    for segment in tokens.segments.unique():
        part = inside & (tokens.segments == segment)
        size = tokens.advantages[part].double().abs()
        before, after = float(size.sum()), float((weights[part] * size).sum())
        assert after <= before * (1 + 1e-6)
        contracting = part & (tokens.gap > 0)
        if bool(contracting.any()) and float(weights[contracting].max()) < w_max * (1 - 1e-6):
            assert after == pytest.approx(before, rel=1e-6)
    whole = tokens.advantages[tokens.mask].double().abs()
    assert float((weights[tokens.mask] * whole).sum()) <= float(whole.sum()) * (1 + 1e-6)


@pytest.mark.parametrize("variant", ["rebalance", "segment_mask", "cross_quadrant"])
@settings(max_examples=25)
@given(seed=SEEDS)
def test_i5_mass_does_not_grow_in_variants_either(variant: str, seed: int) -> None:
    tokens = damaged(seed)
    size = tokens.advantages[tokens.mask].double().abs()
    weights = rule(variant=variant, alpha=1.0)(tokens).weights[tokens.mask].double()
    assert float((weights * size).sum()) <= float(size.sum()) * (1 + 1e-6)


@pytest.mark.parametrize("segmenter", ["fixed", "change_point", "turn"])
@EVERY_VARIANT
@settings(max_examples=10)
@given(seed=SEEDS, junk=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_i6_i7_row_order_packing_and_padding_change_nothing(
    segmenter: str, variant: str, seed: int, junk: float
) -> None:
    """Samples in another order, with padding of each sample at either end that holds NaN, under other ids."""
    tokens = damaged(seed)
    random = torch.Generator().manual_seed(seed + 1)
    triage, cut = rule(variant=variant, alpha=1.0), make_segmenter(segmenter)

    def weigh(gap: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor) -> Any:
        fields: dict[str, Any] = {"gap": gap, "advantages": advantages, "mask": mask, "sequence_index": sequence}
        result = triage(CorrectionInput(**fields, segments=cut(SegmentInput(**fields))))
        return result, read(result.metrics)

    plain, numbers = weigh(tokens.gap, tokens.advantages, tokens.mask, tokens.sequence_index)
    places, pieces = [], []
    for sample in torch.randperm(8, generator=random).tolist():
        left, right = torch.randint(0, 5, (2,), generator=random).tolist()
        rows = (tokens.sequence_index == sample).nonzero()[:, 0]
        places += [torch.full((left,), -1), rows, torch.full((right,), -1)]
        pieces.append(torch.full((left + len(rows) + right,), 100 - 3 * sample))
    place, ids = torch.cat(places), torch.cat(pieces)
    real = place >= 0
    full = {name: torch.full((len(place),), junk) for name in ("gap", "advantages")}
    mask = torch.zeros(len(place), dtype=torch.bool)
    mask[real] = tokens.mask[place[real]]
    for name in full:
        source = torch.where(tokens.mask, getattr(tokens, name), junk)
        full[name][real] = source[place[real]]
    moved, moved_numbers = weigh(full["gap"], full["advantages"], mask, ids)
    assert torch.equal(moved.weights[mask], plain.weights[place[mask]])
    assert torch.equal(moved.rejected[mask], plain.rejected[place[mask]])
    assert moved_numbers == pytest.approx(numbers, rel=1e-9, abs=1e-12)
    assert moved.state == plain.state


def test_i6_weights_are_made_once_for_the_global_batch_so_micro_batches_add_up() -> None:
    tokens = damaged(7)
    weights = rule()(tokens).weights
    whole, slope = loss_and_slope(tokens, weights)
    total = torch.zeros(())
    for half in (0, 1):
        mask = tokens.mask & (tokens.sequence_index % 2 == half)
        loss, part = loss_and_slope(dataclasses.replace(tokens, mask=mask), weights)
        total = total + loss
        assert torch.equal(part[mask], slope[mask])
    assert float(total) == pytest.approx(float(whole), abs=1e-6)


@settings(max_examples=40)
@given(seed=SEEDS)
def test_i8_a_larger_amplification_never_gets_a_larger_weight_within_a_segment(seed: int) -> None:
    tokens = damaged(seed)
    weights = rule(alpha=1.0)(tokens).weights
    for segment in tokens.segments.unique():
        part = tokens.mask & (tokens.segments == segment) & (tokens.advantages < 0) & (tokens.gap <= 0)
        by_size = torch.argsort(-tokens.gap[part], stable=True)
        ordered = weights[part][by_size]
        assert bool((ordered[1:] <= ordered[:-1]).all())


@EVERY_VARIANT
def test_i9_weights_are_detached(variant: str) -> None:
    tokens = damaged(3)
    tokens = dataclasses.replace(tokens, gap=tokens.gap.clone().requires_grad_())
    result = rule(variant=variant)(tokens)
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float32
    assert all(not statistic.total.requires_grad for statistic in result.metrics.values())


@EVERY_VARIANT
@settings(max_examples=25)
@given(seed=SEEDS, factor=st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_i11_positive_scaling_of_the_advantages_changes_nothing(variant: str, seed: int, factor: float) -> None:
    tokens = damaged(seed)
    triage = rule(variant=variant, alpha=1.0)
    scaled = triage(dataclasses.replace(tokens, advantages=tokens.advantages * factor))
    plain = triage(tokens)
    torch.testing.assert_close(scaled.weights, plain.weights, rtol=1e-6, atol=0)
    assert torch.equal(scaled.rejected, plain.rejected)
    assert scaled.state == plain.state


def test_i13_unequal_temperatures_and_kept_sets_are_refused() -> None:
    tokens = damaged(1)
    total = len(tokens.mask)
    one = torch.ones(total)

    def check(rollout: Distribution, learner: Distribution) -> None:
        dataclasses.replace(tokens, rollout_distribution=rollout, learner_distribution=learner)

    check(Distribution(one), Distribution(one.clone()))
    with pytest.raises(SpecMismatchError, match=r"temperature: 1\.0 and 0\.5"):
        check(Distribution(one), Distribution(0.5 * one))
    hidden = one.clone()
    hidden[~tokens.mask] = 0.5
    check(Distribution(one), Distribution(hidden))
    kept: list[torch.Tensor | None] = [torch.tensor([i, i + 1, 7]) for i in range(total)]
    swapped: list[torch.Tensor | None] = [torch.tensor([7, i + 1, i]) for i in range(total)]
    same = support_fingerprint(kept), support_fingerprint(swapped)
    assert torch.equal(*same)
    check(Distribution(one, same[0]), Distribution(one, same[1]))
    first = int(tokens.mask.nonzero()[0, 0])
    swapped[first] = torch.tensor([first, 7])
    with pytest.raises(SpecMismatchError, match=rf"kept set[\s\S]*flat token {first}"):
        check(Distribution(one, same[0]), Distribution(one, support_fingerprint(swapped)))
    with pytest.raises(SpecMismatchError, match="kept set"):
        check(Distribution(one, same[0]), Distribution(one))
    mixed = torch.where(tokens.sequence_index < 4, one, 0.7)
    both = Distribution(mixed)
    with pytest.raises(SpecMismatchError, match="mixes temperatures"):
        rule()(dataclasses.replace(tokens, rollout_distribution=both, learner_distribution=both))


@EVERY_VARIANT
@settings(max_examples=25)
@given(seed=SEEDS)
def test_i14_tokens_of_older_weights_are_not_diagnosed(variant: str, seed: int) -> None:
    """Their weight is 1, and whatever gap they have, nothing else changes."""
    tokens = damaged(seed, versions=True)
    triage = rule(variant=variant, alpha=1.0)
    old = tokens.mask & (tokens.versions != 4)
    wild = dataclasses.replace(tokens, gap=torch.where(old, -9.0, tokens.gap))
    one, other = triage(tokens), triage(wild)
    assert bool((one.weights[old] == 1.0).all())
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.rejected, other.rejected)
    assert one.state == other.state
    with pytest.raises(ConfigError, match="learner_version"):
        triage(dataclasses.replace(tokens, learner_version=None))


@settings(max_examples=25)
@given(seed=SEEDS)
def test_cross_quadrant_brings_negative_mass_down_to_positive_mass_and_no_further(seed: int) -> None:
    tokens = damaged(seed)
    triage = rule(variant="cross_quadrant", alpha=1.0, w_min=1e-3, g_sev=1e6)
    weights = triage(tokens).weights.double()
    size = tokens.advantages.abs().double()

    def mass(sign: int, w: torch.Tensor) -> float:
        part = tokens.mask & (tokens.advantages * sign > 0) & (tokens.gap * sign > 0)
        return float((w * size)[part].sum())

    before, target = mass(-1, torch.ones_like(weights)), mass(1, torch.ones_like(weights))
    after = mass(-1, weights)
    assert mass(1, weights) == target
    if before <= target:
        assert after == before
    else:
        assert after >= min(target, before) * (1 - 1e-6)
        inside = triage.diagnose(tokens).selected_tokens(len(tokens.mask)) & (tokens.gap < 0)
        if float((size * inside).sum()) > (before - target) * 1.01:
            assert after == pytest.approx(target, rel=1e-5)
