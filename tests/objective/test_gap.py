"""Gap metrics against plain Python in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.objective import effective_sample_size, gap_metrics, token_gap


def metrics_of(values):
    return gap_metrics(torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool))


@settings(max_examples=40)
@given(gaps=st.lists(st.floats(-15, 15), min_size=1, max_size=300))
def test_metrics_equal_plain_python(gaps):
    result = metrics_of(gaps)
    n = len(gaps)
    sizes = sorted(abs(g) for g in gaps)
    weights = [math.exp(g) for g in gaps]
    assert result.tokens == n
    assert result.mean == pytest.approx(math.fsum(gaps) / n, abs=1e-12)
    assert result.mean_abs == pytest.approx(math.fsum(sizes) / n, abs=1e-12)
    assert result.max_abs == sizes[-1]
    assert result.p99_abs == sizes[-(-99 * n // 100) - 1]
    assert result.k3_kl == pytest.approx(math.fsum(math.expm1(g) - g for g in gaps) / n, rel=1e-9, abs=1e-12)
    assert result.ess == pytest.approx(sum(weights) ** 2 / (n * sum(w * w for w in weights)), rel=1e-9)


def test_k3_is_the_kl_from_rollout_to_learner():
    # 100 tokens drawn by the rollout in exact proportion: the mean of the estimator is the divergence itself.
    rollout, learner = [50, 30, 15, 5], [0.25, 0.25, 0.3, 0.2]
    gaps = [math.log(q / (n / 100)) for n, q in zip(rollout, learner) for _ in range(n)]
    exact = sum(n / 100 * math.log(n / 100 / q) for n, q in zip(rollout, learner))
    other_way = sum(q * math.log(q / (n / 100)) for n, q in zip(rollout, learner))
    assert metrics_of(gaps).k3_kl == pytest.approx(exact, rel=1e-9)
    assert metrics_of(gaps).mean == pytest.approx(-exact, rel=1e-9)
    assert abs(exact - other_way) > 0.01


def test_small_gaps_keep_their_digits():
    gap = torch.full((1000,), 1e-4, dtype=torch.float32)
    result = gap_metrics(gap, torch.ones(1000, dtype=torch.bool))
    g = float(gap[0])
    assert result.k3_kl == pytest.approx(g * g / 2 + g**3 / 6, rel=1e-6)


def test_without_gap():
    result = metrics_of([0.0] * 5)
    assert (result.mean, result.mean_abs, result.max_abs, result.p99_abs, result.k3_kl) == (0.0,) * 5
    assert result.ess == 1.0


def test_enormous_gaps_stay_finite():
    result = metrics_of([300.0, -300.0, 0.0])
    assert all(math.isfinite(value) for value in result.to_dict().values())
    assert result.ess == pytest.approx(1 / 3)


def test_no_tokens():
    result = gap_metrics(torch.tensor([math.nan]), torch.tensor([False]))
    assert result.to_dict() == {"gap/tokens": 0.0}


def test_gap_is_learner_minus_rollout_and_detached():
    learner = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    gap = token_gap(learner, torch.tensor([-1.5, -1.0, math.inf]), torch.tensor([True, True, False]))
    assert gap.tolist() == [0.5, -1.0, 0.0]
    assert gap.dtype == torch.float32
    assert not gap.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["learner_logp", "rollout_logp"])
def test_non_finite_log_prob_names_the_token(bad, side):
    index = torch.tensor([0, 0, 1, 1, 1])
    values = {"learner_logp": torch.zeros(5), "rollout_logp": torch.zeros(5)}
    values[side][3] = bad
    with pytest.raises(NumericsError) as caught:
        token_gap(**values, mask=torch.ones(5, dtype=torch.bool), sequence_index=index)
    assert side in str(caught.value)
    assert "flat token 3 (sequence 1, its token 1)" in str(caught.value)


def test_gap_that_overflows_is_an_error():
    with pytest.raises(NumericsError, match="gap is inf"):
        token_gap(torch.tensor([3e38]), torch.tensor([-3e38]), torch.tensor([True]))
    with pytest.raises(NumericsError, match="flat token 1"):
        gap_metrics(torch.tensor([0.0, math.inf]), torch.tensor([True, True]))


def test_sixteen_bit_log_probs_are_refused():
    with pytest.raises(ShapeError, match="float32"):
        token_gap(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1), torch.tensor([True]))


def test_effective_sample_size():
    assert effective_sample_size(torch.ones(7)) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_sample_size(torch.zeros(3)) == 0.0
    assert effective_sample_size(torch.zeros(0)) == 0.0
