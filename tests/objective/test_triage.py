"""TRIAGE against a loop in float64, its variants and its bounded repair."""

from __future__ import annotations

import math

import torch
from damaged_batch import damaged, rule
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.objective import (
    CorrectionInput,
    Triage,
)

SEEDS = st.integers(0, 2**31)


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
