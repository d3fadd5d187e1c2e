"""Importance ratios and KL estimators against plain Python and exact expectations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.objective import EXPONENT_LIMIT, clamped_exp, importance_ratio, kl_estimate, log_ratio

TOKEN = st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.booleans(), st.sampled_from([4, 0, 9]))


def columns(tokens, dtype=torch.float64):
    logp, base, mask, index = zip(*tokens) if tokens else ((), (), (), ())
    return (
        torch.tensor(logp, dtype=dtype),
        torch.tensor(base, dtype=dtype),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(index, dtype=torch.int64),
    )


def oracle(tokens, level):
    """exp(sum of log-ratios / length) by loops."""
    result = []
    for logp, base, counts, sequence in tokens:
        if not counts:
            result.append(0.0)
            continue
        gaps = [a - b for a, b, m, s in tokens if m and s == sequence]
        exponent = {
            "token": logp - base,
            "sequence_sum": math.fsum(gaps),
            "sequence_mean": math.fsum(gaps) / len(gaps),
        }[level]
        result.append(math.exp(max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, exponent))))
    return result


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
@settings(max_examples=40)
@given(tokens=st.lists(TOKEN, max_size=10))
def test_ratio_equals_plain_python(level, tokens):
    result = importance_ratio(*columns(tokens), level)
    torch.testing.assert_close(result, torch.tensor(oracle(tokens, level), dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
def test_gradient_matches_finite_differences(level):
    torch.manual_seed(0)
    logp = torch.randn(6, dtype=torch.float64, requires_grad=True)
    base = torch.randn(6, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True, True])
    index = torch.tensor([3, 1, 1, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, base, mask, index, level), (logp,))


def test_gap_zero_gives_exactly_one():
    assert clamped_exp(torch.zeros(9)).tolist() == [1.0] * 9


@settings(max_examples=40)
@given(a=st.floats(allow_nan=False, width=32), b=st.floats(allow_nan=False, width=32))
def test_clamped_exp_is_finite_and_monotone(a, b):
    low, high = clamped_exp(torch.tensor([min(a, b), max(a, b)], dtype=torch.float32)).tolist()
    assert 0.0 < low <= high < math.inf


def test_wrong_arguments_are_named():
    logp, base, mask, index = columns([(-1.0, -2.0, True, 0)], torch.float32)
    with pytest.raises(ConfigError, match="geometric"):
        log_ratio(logp, base, mask, index, "geometric")
    with pytest.raises(ShapeError, match="mask"):
        log_ratio(logp, base, mask.float(), index, "token")
    with pytest.raises(ShapeError, match="bfloat16"):
        log_ratio(logp.bfloat16(), base, mask, index, "token")
    with pytest.raises(ShapeError, match="sequence_index"):
        log_ratio(logp, base, mask, index - 1, "token")


PI = [0.5, 0.3, 0.15, 0.05]
REFERENCE = [0.25, 0.25, 0.3, 0.2]


def exact_kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimate_is_unbiased(estimator):
    logp, reference = torch.tensor([PI, REFERENCE], dtype=torch.float64).log()
    expectation = float((torch.tensor(PI).double() * kl_estimate(logp, reference, estimator)).sum())
    assert expectation == pytest.approx(exact_kl(PI, REFERENCE), rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", lambda pi, reference: 0.0 * pi.sum()),
        ("k2", lambda pi, reference: (pi * (pi.log() - reference.log())).sum()),
        ("k3", lambda pi, reference: (reference * (reference.log() - pi.log())).sum()),
    ],
)
def test_expected_kl_gradient_is_the_documented_one(estimator, divergence):
    theta = torch.tensor(PI, dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    logp = torch.log_softmax(theta, 0)
    loss = (logp.exp().detach() * kl_estimate(logp, reference.log(), estimator)).sum()
    (ours,) = torch.autograd.grad(loss, theta)
    (exact,) = torch.autograd.grad(divergence(torch.softmax(theta, 0), reference), theta)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_k3_is_bounded_for_a_vanishing_policy():
    value = kl_estimate(torch.tensor([-300.0]), torch.tensor([-1.0]), "k3")
    assert 1e8 < float(value) < 1e9


def test_unknown_kl_is_named():
    with pytest.raises(ConfigError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
