"""Advantages against the statistics module, group by group."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.objective import advantages

METHODS = ("grpo", "dr_grpo", "rloo", "reinforce")
REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -0.5]), st.floats(-5, 5, width=32), st.just(math.nan))


def oracle(rewards, groups, valid, method, unbiased=True, epsilon=1e-6):
    """Plain Python, one sample at a time."""
    result = []
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j] and math.isfinite(rewards[j])]
        values = [rewards[j] for j in members]
        if i not in members:
            result.append(0.0)
        elif method == "reinforce":
            result.append(reward)
        elif len(members) == 1 or len(set(values)) == 1:
            result.append(0.0)
        elif method == "rloo":
            result.append(reward - statistics.fmean(rewards[j] for j in members if j != i))
        else:
            centred = reward - statistics.fmean(values)
            spread = statistics.stdev(values) if unbiased else statistics.pstdev(values)
            result.append(centred / (spread + epsilon) if method == "grpo" else centred)
    return result


def run(rewards, groups, valid=None, method="grpo", **keywords):
    flags = None if valid is None else torch.tensor(valid, dtype=torch.bool)
    return advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64), flags, method, **keywords
    )


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40)
@given(samples=st.lists(st.tuples(REWARD, st.sampled_from([7, -3, 40, 2]), st.booleans()), max_size=14))
def test_every_method_equals_plain_python(method, unbiased, samples):
    rewards, groups, valid = ([s[k] for s in samples] for k in range(3))
    result = run(rewards, groups, valid, method, unbiased=unbiased)
    expected = torch.tensor(oracle(rewards, groups, valid, method, unbiased), dtype=torch.float64)
    assert result.advantages.dtype == torch.float32
    torch.testing.assert_close(result.advantages.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40)
@given(data=st.data())
def test_order_of_samples_does_not_matter(method, data):
    samples = data.draw(st.lists(st.tuples(REWARD, st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
    order = data.draw(st.permutations(range(len(samples))))
    straight = run(*([s[k] for s in samples] for k in range(3)), method)
    shuffled = run(*([samples[i][k] for i in order] for k in range(3)), method)
    torch.testing.assert_close(straight.advantages[list(order)], shuffled.advantages, rtol=0, atol=1e-6)
    assert straight.metrics == shuffled.metrics


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.3])
def test_equal_rewards_give_exactly_zero(method, reward):
    # Three times .1 sums to more than .3: a mean by summation alone is off by a rounding.
    result = run([reward] * 3, [0] * 3, method=method)
    assert result.advantages.tolist() == [0.0, 0.0, 0.0]
    assert result.metrics.groups_degenerate == 1
    assert result.metrics.degenerate_share == 1.0
    assert result.warning is None


def test_rounding_noise_between_rewards_is_not_amplified():
    result = run([0.1 + 0.2, 0.3, 0.3, 0.3], [0] * 4, method="grpo")
    assert float(result.advantages.abs().max()) < 1e-9


def test_counts():
    result = run(
        [1.0, 0.0, 1.0, 1.0, 5.0, math.nan, 2.0, math.inf],
        [0, 0, 1, 1, 2, 2, 3, 3],
        [True, True, True, True, True, True, False, True],
    )
    metrics = result.metrics
    assert (metrics.samples, metrics.invalid, metrics.groups) == (8, 3, 4)
    assert (metrics.groups_empty, metrics.groups_of_one, metrics.groups_degenerate) == (1, 1, 1)
    assert metrics.degenerate_share == 0.5
    assert metrics.to_dict()["advantage/groups_of_one"] == 1.0
    assert result.valid.tolist() == [True, True, True, True, True, False, False, False]
    assert "1 of 4 groups" in result.warning


def test_warning_not_given_without_a_baseline():
    assert run([3.0, 4.0], [0, 1], method="reinforce").warning is None
    assert run([3.0, 4.0], [0, 1], method="reinforce").advantages.tolist() == [3.0, 4.0]


def test_no_samples():
    result = run([], [])
    assert result.advantages.shape == (0,)
    assert result.metrics.groups == 0


@pytest.mark.parametrize(
    ("error", "rewards", "groups", "valid", "keywords"),
    [
        (ShapeError, torch.zeros(2, 2), torch.zeros(4, dtype=torch.int64), None, {}),
        (ShapeError, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), None, {}),
        (ShapeError, torch.zeros(4), torch.zeros(3, dtype=torch.int64), None, {}),
        (ShapeError, torch.zeros(4), torch.zeros(4), None, {}),
        (ShapeError, torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.ones(4), {}),
        (ConfigError, torch.zeros(4), torch.zeros(4, dtype=torch.int64), None, {"method": "gae"}),
        (ConfigError, torch.zeros(4), torch.zeros(4, dtype=torch.int64), None, {"epsilon": 0.0}),
    ],
)
def test_bad_input_is_named(error, rewards, groups, valid, keywords):
    with pytest.raises(error):
        advantages(rewards, groups, valid, **keywords)
