"""Corrections: token TIS against plain Python, and what every registered correction must keep."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.objective import (
    CORRECTIONS,
    Correction,
    CorrectionInput,
    LossInput,
    PolicySettings,
    TokenTis,
    make_correction,
    policy_loss,
    read,
)

EVERY = pytest.mark.parametrize("name", sorted(CORRECTIONS))
TOKENS = st.lists(
    st.tuples(st.floats(-30, 30, width=32), st.floats(-3, 3, width=32), st.booleans(), st.sampled_from([6, 1, 0])),
    max_size=12,
)


def batch(tokens):
    gap, advantages, mask, index = zip(*tokens) if tokens else ((), (), (), ())
    return CorrectionInput(
        gap=torch.tensor(gap, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask, dtype=torch.bool),
        sequence_index=torch.tensor(index, dtype=torch.int64),
        rollout_logp=torch.tensor([-0.05 - abs(g) for g in gap], dtype=torch.float32),
    )


@settings(max_examples=40)
@given(tokens=TOKENS, cap=st.floats(1, 50))
def test_token_tis_equals_plain_python(tokens, cap):
    result = TokenTis(cap)(batch(tokens))
    expected = [min(math.exp(max(-20, min(20, g))), cap) if counts else 0.0 for g, _, counts, _ in tokens]
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=0)
    assert not result.rejected.any()
    numbers, real = read(result.metrics), [t for t in tokens if t[2]]
    if real:
        weights = [w for w, t in zip(expected, tokens) if t[2]]
        assert numbers["correction/weight_mean"] == pytest.approx(math.fsum(weights) / len(real), rel=1e-5)
        assert numbers["correction/weight_max"] == pytest.approx(max(weights), rel=1e-5)
    else:
        assert numbers == {}


def test_token_tis_counts_what_it_cuts():
    cut = TokenTis()(batch([(math.log(3), 1.0, True, 0), (0.1, 1.0, True, 0), (5.0, 1.0, False, 0), (-9, 1, True, 1)]))
    assert read(cut.metrics)["correction/cut_share"] == pytest.approx(1 / 3)
    assert cut.weights[0] == 2.0


@EVERY
@settings(max_examples=40)
@given(data=st.data())
def test_order_of_tokens_does_not_matter(name, data):
    tokens = data.draw(TOKENS)
    order = data.draw(st.permutations(range(len(tokens))))
    straight = make_correction(name)(batch(tokens))
    shuffled = make_correction(name)(batch([tokens[i] for i in order]))
    index = torch.tensor(order, dtype=torch.int64)
    torch.testing.assert_close(straight.weights[index], shuffled.weights, rtol=1e-6, atol=0)
    assert torch.equal(straight.rejected[index], shuffled.rejected)


@EVERY
@settings(max_examples=40)
@given(tokens=TOKENS, bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_masked_tokens_may_hold_anything_and_change_nothing(name, tokens, bad):
    correction = make_correction(name)
    clean = correction(batch([t for t in tokens if t[2]]))
    dirty = batch([t if t[2] else (bad, bad, False, -1) for t in tokens])
    result = correction(dirty)
    assert torch.equal(result.weights[dirty.mask], clean.weights)
    assert torch.equal(result.rejected[dirty.mask], clean.rejected)
    assert (result.weights[~dirty.mask] == 0).all()
    assert not result.rejected[~dirty.mask].any()
    assert read(result.metrics) == read(clean.metrics)


@EVERY
@settings(max_examples=40)
@given(tokens=TOKENS)
def test_weights_are_detached_finite_and_not_negative(name, tokens):
    correction = make_correction(name)
    assert isinstance(correction, Correction)
    assert correction.name == name
    record = batch(tokens)
    record = dataclasses.replace(record, gap=record.gap.requires_grad_())
    result = correction(record)
    assert result.weights.dtype == torch.float32
    assert not result.weights.requires_grad
    assert torch.isfinite(result.weights).all()
    assert (result.weights >= 0).all()
    assert (result.weights[result.rejected] == 0).all()


@EVERY
def test_without_gap_loss_and_gradient_are_bitwise_those_of_the_baseline(name):
    torch.manual_seed(5)
    logp = torch.randn(64, requires_grad=True)
    mask, index, advantages = torch.rand(64) > 0.3, torch.arange(64) // 9, torch.randn(64)
    result = make_correction(name)(
        CorrectionInput(
            gap=torch.zeros(64), advantages=advantages, mask=mask, sequence_index=index, rollout_logp=-torch.rand(64)
        )
    )
    assert (result.weights[mask] == 1.0).all()
    fields = {"logp": logp, "advantages": advantages, "mask": mask, "sequence_index": index, "scale": torch.rand(64)}
    fields["old_logp"] = logp.detach() + 0.1 * torch.randn(64)
    outcomes = []
    for weights in (None, result.weights):
        loss = policy_loss(LossInput(**fields, weights=weights), PolicySettings()).loss
        outcomes.append((loss, torch.autograd.grad(loss, logp)[0]))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_wrong_names_and_values_are_refused():
    with pytest.raises(ConfigError, match="none, token_tis"):
        make_correction("tis")
    with pytest.raises(ConfigError, match="threshold"):
        make_correction("token_tis", threshold=2.0)
    for cap in (0.9, math.inf, math.nan):
        with pytest.raises(ConfigError, match="cap"):
            make_correction("token_tis", cap=cap)
    for cap in ("2", None, True, [2.0]):
        with pytest.raises(ConfigError, match=r"option 'cap' [\s\S]*correction_options\.cap"):
            make_correction("token_tis", cap=cap)
    with pytest.raises(ConfigError, match=r"no option 'cap'[\s\S]*no options"):
        make_correction("none", cap=2.0)
    with pytest.raises(ConfigError, match="no option 'name'"):
        make_correction("token_tis", name=1)
    assert make_correction("token_tis", cap=3) == TokenTis(3.0)
    with pytest.raises(TypeError):
        CORRECTIONS["mine"] = TokenTis


def test_bad_records_are_refused():
    good = {"gap": torch.zeros(2), "advantages": torch.zeros(2), "mask": torch.tensor([True, True])}
    good["sequence_index"] = torch.tensor([0, 1])
    with pytest.raises(NumericsError, match=r"gap is nan[\s\S]*flat token 1 \(sequence 1, its token 0\)"):
        CorrectionInput(**(good | {"gap": torch.tensor([0.0, math.nan])}))
    for name, value in (("segments", torch.zeros(2)), ("versions", torch.zeros(3, dtype=torch.int64))):
        with pytest.raises(ShapeError, match=name):
            CorrectionInput(**good, **{name: value})
