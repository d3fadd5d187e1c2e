"""TRIAGE against a loop in float64, and its invariants I1-I14, each a property on batches with planted damage."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import CheckpointError, ConfigError, SpecMismatchError
from halfbyte.objective import (
    CorrectionInput,
    Distribution,
    LossInput,
    PolicySettings,
    SegmentInput,
    StatefulCorrection,
    Triage,
    make_correction,
    make_segmenter,
    policy_loss,
    read,
    support_fingerprint,
)
from halfbyte.objective.reference import Reference
from halfbyte.objective.selection import direction_p_value, select_within

SEEDS = st.integers(0, 2**31)
VARIANTS = ("rebalance", "segment_is", "segment_mask", "cross_quadrant")
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
HEALTHY = Reference(loc=0.02, scale=0.01, length=16.0, batches=8.0)


def rule(**options: Any) -> Triage:
    """With a healthy reference, and a budget that does not bind unless asked."""
    return Triage(**({"q_max": 1.0} | options)).with_state(HEALTHY.to_state())


def damaged(seed: int, *, samples: int = 8, length: int = 48, versions: bool = False) -> CorrectionInput:
    """Segments of 16; noise of 0.05; about a third of the segments of A < 0 pushed down, a few gaps severe or exactly 0."""
    random = torch.Generator().manual_seed(seed)
    total = samples * length
    sequence = torch.arange(samples).repeat_interleave(length)
    advantages = torch.randn(samples, generator=random)[sequence]
    gap = 0.05 * torch.randn(total, generator=random)
    hit = (torch.rand(total // 16, generator=random) < 0.35).repeat_interleave(16)
    gap -= torch.where(hit, 0.1 + 0.6 * torch.rand(total, generator=random), 0.0)
    wild = torch.rand(total, generator=random) < 0.03
    gap = torch.where(wild, 6.0 * torch.randn(total, generator=random), gap)
    gap = torch.where(torch.rand(total, generator=random) < 0.05, 0.0, gap)
    return CorrectionInput(
        gap=gap,
        advantages=advantages,
        mask=torch.rand(total, generator=random) < 0.9,
        sequence_index=sequence,
        segments=torch.arange(total) // 16,
        versions=(torch.rand(total, generator=random) < 0.8).to(torch.int64) + 3 if versions else None,
        learner_version=4 if versions else None,
    )


def loss_and_slope(tokens: CorrectionInput, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    logp = (-torch.rand(len(tokens.mask), generator=random)).requires_grad_()
    record = LossInput(
        logp=logp,
        advantages=tokens.advantages,
        mask=tokens.mask,
        sequence_index=tokens.sequence_index,
        scale=torch.rand(len(tokens.mask), generator=random),
        old_logp=logp.detach() + 0.1 * torch.randn(len(tokens.mask), generator=random),
        weights=weights,
    )
    loss = policy_loss(record, PolicySettings()).loss
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def brute_force(tokens: CorrectionInput, triage: Triage) -> tuple[list[float], set[int]]:
    """Steps 2-5 of the default algorithm, token by token."""
    reference, n_all = triage.memory, len(tokens.mask)
    assert reference is not None
    g, adv = tokens.gap.double().tolist(), tokens.advantages.double().tolist()
    current = tokens.current.tolist()
    sizes = sorted(abs(g[i]) for i in range(n_all) if current[i])
    bound = 2 * max(sizes[math.ceil(len(sizes) / 4) - 1] / 0.3186, triage.floor)
    segments: dict[int, list[int]] = {}
    for i in range(n_all):
        if current[i] and adv[i] < 0:
            segments.setdefault(int(tokens.segments[i]), []).append(i)
    facts = {}
    for name, members in segments.items():
        n = len(members)
        e = sum(max(0.0, -g[i]) for i in members) / n
        c = sum(max(0.0, g[i]) for i in members) / n
        z = math.sqrt(n / reference.length) * (e - reference.loc) / max(reference.scale, triage.floor)
        signed = [min(max(-g[i], -bound), bound) for i in members]
        norm = math.sqrt(sum(x * x for x in signed))
        t = max(sum(signed) / norm, 0.0) if norm else 0.0
        p = min(math.exp(-t * t / 2), 3.179 * 0.5 * math.erfc(t / math.sqrt(2)))
        facts[name] = (e, c, z, p)
    ranked = sorted(p for _, _, _, p in facts.values())
    passing = [p for k, p in enumerate(ranked, 1) if p <= triage.alpha * k / len(ranked)]
    threshold = max(passing, default=-1.0)
    gated, mirrored = [], 0
    for name, (e, c, z, _) in facts.items():
        n, scale = len(segments[name]), max(reference.scale, triage.floor)
        mirror = math.sqrt(n / reference.length) * (c - reference.loc) / scale
        imbalance = (e - c) / (e + c + 1e-8)
        if e > triage.e_min and z > triage.z_min and imbalance > triage.i_min:
            gated.append(name)
        if c > triage.e_min and mirror > triage.z_min and imbalance < -triage.i_min:
            mirrored += 1
    lead = (len(gated) - mirrored) / math.sqrt(max(len(gated) + mirrored, 1))
    chance = min(math.exp(-(lead**2) / 2), 3.179 * 0.5 * math.erfc(lead / math.sqrt(2))) if lead > 0 else 1.0
    everyone = triage.alpha == 1 or (mirrored <= triage.alpha * len(gated) and chance <= triage.alpha / 10)
    suspicious = [name for name in gated if everyone or facts[name][3] <= threshold]
    budget, selected = triage.q_max * sum(tokens.mask.tolist()), set()
    for name in sorted(suspicious, key=lambda k: -facts[k][2]):
        if len(segments[name]) > budget:
            break
        budget -= len(segments[name])
        selected.add(name)
    w = [1.0 if m else 0.0 for m in tokens.mask.tolist()]
    for name in selected:
        removed = room = 0.0
        for i in segments[name]:
            if g[i] < 0:
                w[i] = max(triage.w_min, math.exp(triage.strength * max(g[i], -20.0)))
                removed += (1 - w[i]) * abs(adv[i])
            elif g[i] > 0:
                room += abs(adv[i])
        for i in segments[name]:
            if g[i] > 0:
                w[i] = 1 + min(triage.w_max - 1, removed / room)
    for i in range(n_all):
        if current[i] and adv[i] * g[i] > 0 and abs(g[i]) > triage.g_sev:
            w[i] = max(triage.w_min, min(w[i], triage.g_sev / abs(g[i])))
    return w, selected


@settings(max_examples=40)
@given(
    seed=SEEDS,
    alpha=st.sampled_from([1.0, 0.5, 0.1]),
    q_max=st.sampled_from([1.0, 0.15]),
    strength=st.floats(0.2, 3),
    versions=st.booleans(),
)
def test_weights_equal_a_loop(seed: int, alpha: float, q_max: float, strength: float, versions: bool) -> None:
    tokens = damaged(seed, versions=versions)
    triage = rule(alpha=alpha, q_max=q_max, strength=strength)
    weights, selected = brute_force(tokens, triage)
    torch.testing.assert_close(triage(tokens).weights, torch.tensor(weights), rtol=1e-5, atol=1e-6)
    found = triage.diagnose(tokens).selected_tokens(len(tokens.mask))
    assert set(tokens.segments[found].tolist()) == selected


def test_the_batches_of_these_tests_have_something_to_select() -> None:
    counts = [int(rule(alpha=1.0).diagnose(damaged(seed)).selected.sum()) for seed in range(50)]
    strict = [int(rule().diagnose(damaged(seed)).selected.sum()) for seed in range(50)]
    assert sum(n > 0 for n in counts) > 40
    assert sum(n > 0 for n in strict) > 15


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


def test_segment_mask_rejects_exactly_the_selected_tokens() -> None:
    tokens = damaged(5)
    triage = rule(variant="segment_mask", alpha=1.0)
    result = triage(tokens)
    assert torch.equal(result.rejected, triage.diagnose(tokens).selected_tokens(len(tokens.mask)))
    assert bool(result.rejected.any())
    assert bool((result.weights[result.rejected] == 0).all())


def test_segment_is_equals_the_ratio_within_bounds() -> None:
    tokens = damaged(5)
    triage = rule(variant="segment_is", alpha=1.0, g_sev=1e6)
    weights = triage(tokens).weights
    inside = triage.diagnose(tokens).selected_tokens(len(tokens.mask))
    assert bool(inside.any())
    torch.testing.assert_close(weights[inside], tokens.gap[inside].exp().clamp(0.2, 1.5))


def test_severe_gaps_are_bounded_on_either_side_of_the_advantage_but_never_contracting_ones() -> None:
    tokens = CorrectionInput(
        gap=torch.tensor([-2.0, 2.0, 2.0, -2.0, -50.0]),
        advantages=torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0]),
        mask=torch.ones(5, dtype=torch.bool),
        sequence_index=torch.arange(5),
    )
    weights = rule(q_max=0.0)(tokens).weights
    bound = math.log(4) / 2
    torch.testing.assert_close(weights, torch.tensor([bound, bound, 1.0, 1.0, 0.2]))


def test_reference_is_a_mean_of_the_first_batches_and_then_frozen_or_slow() -> None:
    for kind in ("frozen", "ema"):
        triage = Triage(reference=kind, reference_batches=2, ema_decay=0.9)
        assert triage.state() == {}
        assert isinstance(triage, StatefulCorrection)
        states = []
        for seed in range(4):
            result = triage(damaged(seed))
            assert result.state is not None
            states.append(dict(result.state))
            assert triage.state() == (states[-2] if len(states) > 1 else {}), "calling it changes nothing"
            triage = triage.with_state(result.state)
        own = [Triage(reference="batch").diagnose(damaged(seed)).reference for seed in (0, 1)]
        assert states[0]["loc"] == pytest.approx(own[0].loc)
        assert states[1]["loc"] == pytest.approx((own[0].loc + own[1].loc) / 2)
        if kind == "frozen":
            assert states[1] == states[2] == states[3]
        else:
            found = (
                Triage(reference=kind, reference_batches=2, ema_decay=0.9).with_state(states[1]).diagnose(damaged(2))
            )
            healthy = found.segments.amplification[~found.verdict.suspicious]
            assert states[2]["loc"] == pytest.approx(0.9 * states[1]["loc"] + 0.1 * float(healthy.median()))


def test_a_batch_relative_reference_goes_blind_and_a_frozen_one_does_not() -> None:
    """Every segment of A < 0 is damaged alike."""
    random = torch.Generator().manual_seed(0)
    ones = torch.ones(64 * 32)
    fields: dict[str, Any] = {
        "advantages": -ones,
        "mask": ones > 0,
        "sequence_index": torch.arange(64).repeat_interleave(32),
    }
    healthy = CorrectionInput(gap=0.05 * torch.randn(64 * 32, generator=random), **fields)
    sick = CorrectionInput(gap=0.05 * torch.randn(64 * 32, generator=random) - 0.4, **fields)
    frozen = Triage(reference_batches=1, q_max=1.0)
    frozen = frozen.with_state(frozen(healthy).state or {})
    assert bool(frozen.diagnose(sick).selected.all())
    assert not bool(frozen.diagnose(healthy).selected.any())
    assert not bool(Triage(reference="batch", q_max=1.0).diagnose(sick).selected.any())


def test_bad_parameters_and_states_are_refused() -> None:
    for options in (
        {"e_min": -1.0},
        {"z_min": math.nan},
        {"i_min": 1.0},
        {"alpha": 0.0},
        {"alpha": 1.5},
        {"floor": 0.0},
        {"q_max": 1.5},
        {"strength": -1.0},
        {"w_min": 0.0},
        {"w_min": 1.1},
        {"w_max": 0.9},
        {"g_sev": 0.0},
        {"variant": "mask"},
        {"reference": "none"},
        {"reference_batches": 0},
        {"ema_decay": 1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_correction("triage", **options)
    with pytest.raises(ConfigError, match="no option 'memory'"):
        make_correction("triage", memory=1.0)
    for state in ({"loc": 0.1}, {"loc": 0.0, "scale": -1.0, "length": 1.0, "batches": 1.0}, {"loc": "x"}):
        with pytest.raises(CheckpointError, match="reference statistics"):
            Triage().with_state(state)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 9)), max_size=12),
    budget=st.integers(0, 60),
)
def test_selection_takes_the_highest_scores_and_ties_together(rows: list[tuple[int, bool, int]], budget: int) -> None:
    left, expected = float(budget), set()
    for level in sorted({s for s, ok, _ in rows if ok}, reverse=True):
        group = [i for i, (s, ok, _) in enumerate(rows) if ok and s == level]
        left -= sum(rows[i][2] for i in group)
        if left < 0:
            break
        expected |= set(group)
    found = select_within(
        torch.tensor([float(s) for s, _, _ in rows]),
        torch.tensor([ok for _, ok, _ in rows], dtype=torch.bool),
        torch.tensor([float(n) for _, _, n in rows]),
        budget,
    )
    assert set(found.nonzero()[:, 0].tolist()) == expected


def test_many_short_segments_that_agree_are_found_and_undirected_ones_of_any_size_are_not() -> None:
    """Six tokens each: none is a discovery on its own."""
    random = torch.Generator().manual_seed(0)
    ones = torch.ones(200 * 6)
    gap = 0.03 * torch.randn(1200, generator=random)
    gap[: 20 * 6] -= 0.8
    tokens = CorrectionInput(
        gap=gap, advantages=-ones, mask=ones > 0, sequence_index=torch.arange(200).repeat_interleave(6)
    )
    healthy = {"loc": 0.012, "scale": 0.01, "length": 6.0, "batches": 8.0}
    triage = Triage(q_max=1.0).with_state(healthy)
    assert float(direction_p_value(triage.diagnose(tokens).segments.direction).min()) > 0.1 / 200
    assert triage.diagnose(tokens).selected.nonzero()[:, 0].tolist() == list(range(20))
    signs = torch.where(torch.rand(200, generator=random) < 0.5, 1.0, -1.0).repeat_interleave(6)
    for undirected in (gap.abs() * 30 * torch.randn(1200, generator=random).sign(), gap.abs() * 30 * signs):
        found = triage.diagnose(dataclasses.replace(tokens, gap=undirected))
        assert not bool(found.selected.any())


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_p_value_bounds_the_exact_chance_of_random_signs(count: int) -> None:
    """All 2^n signs of random weights are counted."""
    random = torch.Generator().manual_seed(count)
    for _ in range(20):
        weights = torch.rand(count, generator=random, dtype=torch.float64) ** 3
        weights = weights / weights.norm()
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * count).reshape(-1, count)
        sums = signs @ weights
        t = sums.unique()
        exact = torch.stack([(sums >= x - 1e-12).double().mean() for x in t])
        assert bool((exact[t > 0] <= direction_p_value(t[t > 0]) + 1e-12).all())
