"""Denominators against loops, and their behaviour on uneven and empty sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.objective import BatchCounts, count_batch, counted_tokens, spread, token_scale

LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=0, max_size=6)


def layout(lengths):
    """Sequences of (counted, not counted) tokens, flat."""
    index, counted = [], []
    for sequence, (real, other) in enumerate(lengths):
        index += [sequence] * (real + other)
        counted += [False] * other + [True] * real
    return torch.tensor(counted, dtype=torch.bool), torch.tensor(index, dtype=torch.int64)


@pytest.mark.parametrize(("method", "budget"), [("token_mean", None), ("sequence_mean", None), ("constant", 7)])
@settings(max_examples=40)
@given(lengths=LENGTHS)
def test_scale_equals_plain_python(method, budget, lengths):
    counted, index = layout(lengths)
    real = [n for n, _ in lengths]
    total, sequences = sum(real), sum(n > 0 for n in real)
    expected = []
    for n, other in lengths:
        divisor = {"token_mean": total, "sequence_mean": n * sequences, "constant": 7 * sequences}[method]
        expected += [0.0] * other + ([1 / divisor] * n if n else [])
    scale = token_scale(counted, index, count_batch(counted, index), method, max_tokens=budget)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0)
    if total and budget is None:
        assert float(scale.double().sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("method", "budget"), [("token_mean", None), ("sequence_mean", None), ("constant", 7)])
@settings(max_examples=40)
@given(lengths=LENGTHS, cut=st.integers(0, 6))
def test_ranks_add_their_counts(method, budget, lengths, cut):
    counted, index = layout(lengths)
    first = index < cut
    counts = count_batch(counted[first], index[first]) + count_batch(counted[~first], index[~first])
    assert counts == count_batch(counted, index)
    whole = token_scale(counted, index, counts, method, max_tokens=budget)
    parts = [token_scale(counted[part], index[part], counts, method, max_tokens=budget) for part in (first, ~first)]
    assert torch.equal(whole, torch.cat(parts))


def test_rejected_tokens_in_or_out():
    mask = torch.tensor([True, True, True, True, False])
    rejected = torch.tensor([False, True, False, True, False])
    index = torch.tensor([0, 0, 0, 1, 1])
    kept = counted_tokens(mask, rejected, count_rejected=False)
    assert kept.tolist() == [True, False, True, False, False]
    assert count_batch(kept, index) == BatchCounts(tokens=2, sequences=1)
    assert counted_tokens(mask, rejected, count_rejected=True).equal(mask)
    assert counted_tokens(mask, None, count_rejected=False).equal(mask)


@pytest.mark.parametrize(("method", "budget"), [("mean", None), ("constant", None), ("constant", 0), ("token_mean", 5)])
def test_wrong_choice_is_named(method, budget):
    counted, index = layout([(2, 0)])
    with pytest.raises(ConfigError):
        token_scale(counted, index, BatchCounts(2, 1), method, max_tokens=budget)


def test_spread_gives_each_token_its_sample():
    index = torch.tensor([1, 1, -1, 0])
    assert spread(torch.tensor([5.0, 7.0]), index).tolist() == [7.0, 7.0, 0.0, 5.0]
    assert spread(torch.tensor([True, False]), index).tolist() == [False, False, False, True]
    assert spread(torch.zeros(0), torch.tensor([-1])).tolist() == [0.0]
    with pytest.raises(ShapeError, match="2 samples"):
        spread(torch.zeros(2), torch.tensor([2]))
    with pytest.raises(ShapeError, match="negative"):
        spread(torch.zeros(2), torch.tensor([-2]))
