"""Entropy against plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.objective import entropy_statistics, merge, read, token_entropy

ROWS = st.lists(st.lists(st.floats(-8, 8, width=32), min_size=5, max_size=5), min_size=1, max_size=9)


def oracle(row, temperature):
    weights = [math.exp(x / temperature) for x in row]
    shares = [w / math.fsum(weights) for w in weights]
    return -math.fsum(p * math.log(p) for p in shares if p > 0)


def everything(rows):
    return torch.ones(len(rows), dtype=torch.bool)


@settings(max_examples=40)
@given(rows=ROWS, temperature=st.floats(0.25, 4, width=32), chunk=st.integers(1, 4))
def test_entropy_equals_plain_python(rows, temperature, chunk):
    result = token_entropy(torch.tensor(rows), everything(rows), temperature=temperature, chunk=chunk)
    expected = torch.tensor([oracle(row, temperature) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-6)


def test_temperature_of_each_token():
    logits = torch.tensor([[0.0, 1.0, 3.0]]).repeat(3, 1)
    result = token_entropy(logits, everything(logits), temperature=torch.tensor([0.5, 1.0, 2.0]))
    assert result.tolist() == pytest.approx([oracle([0.0, 1.0, 3.0], t) for t in (0.5, 1.0, 2.0)], abs=1e-6)


def test_filtered_tokens_add_nothing_and_keep_gradients_finite():
    logits = torch.tensor([[2.0, -math.inf, 1.0, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]])
    logits.requires_grad_()
    result = token_entropy(logits, everything(logits))
    assert result[0].item() == pytest.approx(oracle([2.0, 1.0], 1.0), abs=1e-6)
    assert result[1].item() == 0.0
    result.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_gradient_matches_finite_differences():
    torch.manual_seed(1)
    logits = torch.randn(4, 6, requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    (ours,) = torch.autograd.grad(token_entropy(logits, mask, temperature=1.5, chunk=2).sum(), logits)
    reference = logits.detach().double().requires_grad_()
    entropy = torch.distributions.Categorical(logits=reference / 1.5).entropy()
    (exact,) = torch.autograd.grad(entropy[mask].sum(), reference)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def test_masked_rows_may_hold_anything():
    logits = torch.tensor([[math.nan] * 3, [0.0] * 3, [math.inf] * 3])
    mask = torch.tensor([False, True, False])
    assert token_entropy(logits, mask).tolist() == pytest.approx([0.0, math.log(3), 0.0])
    assert token_entropy(logits, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_bad_logits_name_the_token(bad):
    logits = torch.tensor([[0.0, 1.0], [9.0, 9.0], bad])
    with pytest.raises(NumericsError, match=r"flat token 2 \(sequence 8, its token 1\)"):
        token_entropy(logits, torch.tensor([True, False, True]), sequence_index=torch.tensor([1, 8, 8]), chunk=1)


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="temperature"):
        token_entropy(torch.zeros(1, 3), torch.tensor([True]), temperature=0.0)
    with pytest.raises(ShapeError, match="logits"):
        token_entropy(torch.zeros(2, 3), torch.tensor([True]))


@settings(max_examples=40)
@given(rows=ROWS, cut=st.integers(0, 9))
def test_statistics_add_up_over_micro_batches(rows, cut):
    entropy = token_entropy(torch.tensor(rows), everything(rows))
    parts = [entropy[:cut], entropy[cut:]]
    whole = read(entropy_statistics(entropy, everything(rows)))
    merged = read(merge(entropy_statistics(part, everything(part)) for part in parts))
    assert merged == pytest.approx(whole, abs=1e-9)
    assert whole["entropy/mean"] == pytest.approx(math.fsum(entropy.tolist()) / len(rows), abs=1e-9)
    assert whole["entropy/min"] == min(entropy.tolist())
