"""Injected gaps: where they land, how large they are, and that a perfect correction undoes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError
from halfbyte.objective import (
    QUADRANTS,
    CorrectionInput,
    CorrectionResult,
    NoCorrection,
    TokenTis,
    Triage,
    clamped_exp,
    quadrant_of,
    read,
)
from halfbyte.objective.injection import GapInjection, InjectedCorrection


def batch(count: int = 4000, length: int = 20, seed: int = 0, version: int = 0) -> CorrectionInput:
    """``count`` tokens without a gap, in samples of ``length``; half of the samples have a negative advantage."""
    draws = torch.Generator().manual_seed(seed)
    sequence = torch.arange(count) // length
    advantages = torch.randn(int(sequence.max()) + 1, generator=draws)[sequence]
    logp = -torch.rand(count, generator=draws) * 3
    return CorrectionInput(
        gap=torch.zeros(count),
        advantages=advantages,
        mask=torch.rand(count, generator=draws) < 0.9,
        sequence_index=sequence,
        versions=torch.full((count,), version),
        learner_version=version,
        rollout_logp=logp,
    )


@dataclass(frozen=True)
class Exact:
    """The whole ratio, without any bound."""

    name = "exact"
    uses_ratio = True

    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        weights = torch.where(tokens.mask, clamped_exp(tokens.gap), 0.0)
        return CorrectionResult(weights, torch.zeros_like(tokens.mask), {})


@settings(max_examples=40, deadline=None)
@given(
    quadrant=st.sampled_from(QUADRANTS),
    tail=st.sampled_from(["constant", "exponential", "heavy"]),
    seed=st.integers(0, 2**31),
    block=st.integers(1, 30),
)
def test_the_gap_lands_in_its_quadrant_and_nowhere_else(quadrant: str, tail: str, seed: int, block: int) -> None:
    tokens = batch(600, seed=seed)
    gap = GapInjection(quadrant=quadrant, tail=tail, seed=seed, block=block, largest=5.0)(tokens)  # type: ignore[arg-type]
    hit = gap != 0
    assert (quadrant_of(tokens.advantages, gap)[hit] == QUADRANTS.index(quadrant)).all()
    assert not hit[~tokens.mask].any()
    assert gap.abs().max() <= 5.0


@pytest.mark.parametrize("tail", ["constant", "exponential", "heavy"])
def test_share_and_size_are_those_asked_for(tail: str) -> None:
    tokens = batch(400_000)
    injection = GapInjection(quadrant="neg_pos", tail=tail, scale=0.5, share=0.3, density=0.6, largest=20.0)  # type: ignore[arg-type]
    gap = injection(tokens)
    negative = tokens.mask & (tokens.advantages < 0)
    assert float((gap != 0).float().sum() / negative.sum()) == pytest.approx(0.18, abs=0.01)
    assert float(gap[gap != 0].mean()) == pytest.approx(0.5, rel=0.03)


def test_damage_comes_in_blocks() -> None:
    tokens = batch(40_000, length=40)
    tokens = replace(tokens, mask=torch.ones_like(tokens.mask))
    gap = GapInjection(quadrant="neg_neg", share=0.3, density=1.0, block=8)(tokens)
    hit = (gap != 0).view(-1, 8)
    assert ((hit.sum(1) == 0) | (hit.sum(1) == 8)).all()


def test_unlikely_tokens_get_the_larger_gap() -> None:
    tokens = batch(20_000)
    plain = GapInjection(quadrant="neg_neg", share=1.0, density=1.0, largest=20.0)(tokens)
    scaled = GapInjection(quadrant="neg_neg", share=1.0, density=1.0, largest=20.0, unlikely=True)(tokens)
    assert tokens.rollout_logp is not None
    torch.testing.assert_close(scaled, torch.where(tokens.mask, plain * (1 - tokens.rollout_logp.exp()), 0.0))
    with pytest.raises(ConfigError, match="log-probs"):
        GapInjection(quadrant="neg_neg", unlikely=True)(replace(tokens, rollout_logp=None))


def test_it_is_a_function_of_seed_and_version_and_begins_at_start() -> None:
    injection = GapInjection(quadrant="pos_pos", start=3)
    assert not injection(batch(version=2)).any()
    assert torch.equal(injection(batch(version=3)), injection(batch(version=3)))
    assert not torch.equal(injection(batch(version=3)), injection(batch(version=4)))
    assert not torch.equal(injection(batch(version=3)), replace(injection, seed=1)(batch(version=3)))


@pytest.mark.parametrize("quadrant", QUADRANTS)
def test_the_whole_ratio_undoes_the_injection(quadrant: str) -> None:
    injected = InjectedCorrection(Exact(), GapInjection(quadrant=quadrant, scale=2.0))(batch())
    torch.testing.assert_close(injected.weights, batch().mask.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("quadrant", QUADRANTS)
def test_without_correction_the_step_is_biased_as_the_sampler_would_bias_it(quadrant: str) -> None:
    injection = GapInjection(quadrant=quadrant)
    result = InjectedCorrection(NoCorrection(), injection)(batch())
    expected = torch.where(batch().mask, torch.exp(-injection(batch())), 0.0)
    torch.testing.assert_close(result.weights, expected)
    touched = expected[expected != batch().mask]
    assert (touched > 1).all() if quadrant.endswith("neg") else (touched < 1).all()
    assert read(result.metrics)["injected/mean_abs"] == pytest.approx(
        float(injection(batch())[batch().mask].abs().mean())
    )


def test_the_expectation_is_that_of_another_sampler() -> None:
    """E over mu of A grad log pi equals E over pi of exp(-g) A grad log pi, by enumeration of a softmax."""
    logits, noise = torch.randn(7, dtype=torch.float64), 0.8 * torch.randn(7, dtype=torch.float64)
    learner, sampler = torch.log_softmax(logits, 0), torch.log_softmax(logits + noise, 0)
    gradients = torch.eye(7, dtype=torch.float64) - learner.exp()  # of log pi(token) in the logits
    advantages = torch.randn(7, dtype=torch.float64)
    biased = (sampler.exp() * advantages) @ gradients
    emulated = (learner.exp() * torch.exp(-(learner - sampler)) * advantages) @ gradients
    torch.testing.assert_close(biased, emulated)


def test_a_correction_sees_the_gap_as_a_real_one() -> None:
    seen: list[CorrectionInput] = []

    class Spy(NoCorrection):
        def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
            seen.append(tokens)
            return super().__call__(tokens)

    injection = GapInjection(quadrant="neg_neg")
    InjectedCorrection(Spy(), injection)(batch())
    gap = injection(batch())
    original = batch().rollout_logp
    assert torch.equal(seen[0].gap, gap)
    assert seen[0].rollout_logp is not None
    assert original is not None
    torch.testing.assert_close((original - seen[0].rollout_logp)[batch().mask], gap[batch().mask])


def test_without_injection_nothing_changes_and_memories_pass_through() -> None:
    for inner in (NoCorrection(), TokenTis(), Triage()):
        plain, wrapped = inner(batch()), InjectedCorrection(inner, None)(batch())
        assert torch.equal(plain.weights, wrapped.weights)
        assert plain.state == wrapped.state
    memory = {"loc": 0.1, "scale": 0.2, "length": 5.0, "batches": 8.0}
    assert InjectedCorrection(Triage(), None).with_state(memory).state() == memory
    assert InjectedCorrection(NoCorrection(), None).with_state({}).state() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"quadrant": "--"},
        {"scale": -1.0},
        {"tail": "cauchy"},
        {"share": 1.5},
        {"block": 0},
        {"largest": 50.0},
        {"start": -1},
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GapInjection(**{"quadrant": "neg_neg", **wrong})  # type: ignore[arg-type]
