"""Failures reported for comparable systems, one test each, named after the report."""

import math

import pytest
import torch

from halfbyte.objective import (
    CorrectionInput,
    LossInput,
    PolicySettings,
    TokenTis,
    advantages,
    clamped_exp,
    count_batch,
    gap_metrics,
    importance_ratio,
    policy_loss,
    read,
    spread,
    token_gap,
    token_scale,
)


def ids(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def loss_of(logp, advantages_, mask, index, *, scale=None, method="token_mean", settings=None, **fields):
    if scale is None:
        scale = token_scale(mask, index, count_batch(mask, index), method)
    tokens = LossInput(logp=logp, advantages=advantages_, mask=mask, sequence_index=index, scale=scale, **fields)
    return policy_loss(tokens, settings or PolicySettings())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_prime_rl_2084_masked_infinity_times_zero(bad):
    mask = torch.tensor([True, True, False])
    index = ids(3)
    logp = torch.tensor([-1.0, -2.0, bad], requires_grad=True)
    other = torch.tensor([-1.1, -1.9, -bad])
    weights = TokenTis()(
        CorrectionInput(gap=logp.detach() - other, advantages=other, mask=mask, sequence_index=index)
    ).weights
    settings = PolicySettings(kl="k3", kl_coefficient=0.1, ratio="sequence_mean")
    dirty = loss_of(logp, other, mask, index, settings=settings, old_logp=other, reference_logp=other, weights=weights)
    dirty.loss.backward()
    short = logp.detach()[:2].clone().requires_grad_()
    first = (other[:2], mask[:2], index[:2])
    clean = loss_of(short, *first, settings=settings, old_logp=other[:2], reference_logp=other[:2], weights=weights[:2])
    clean.loss.backward()
    assert dirty.loss.item() == clean.loss.item()
    assert logp.grad.tolist() == [*short.grad.tolist(), 0.0]
    assert read(dirty.metrics) == read(clean.metrics)


def test_nemo_rl_4120_masked_token_does_not_poison_parameters():
    # A masked position whose token was filtered out has log-prob -inf; the gradient reaches shared parameters.
    torch.manual_seed(0)
    features, head = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True)
    allowed = torch.ones(5, 4, dtype=torch.bool)
    allowed[2, 1] = False
    chosen = torch.tensor([0, 3, 1, 2, 1])
    mask = torch.tensor([True, True, False, True, True])

    def gradient(rows):
        logits = (features[rows] @ head).masked_fill(~allowed[rows], -math.inf)
        logp = torch.log_softmax(logits, -1)[torch.arange(len(rows)), chosen[rows]]
        loss = loss_of(logp, torch.ones(len(rows)), mask[rows], ids(len(rows)), old_logp=logp.detach() - 0.1).loss
        return torch.autograd.grad(loss, head)[0]

    everything = gradient(torch.arange(5))
    assert torch.isfinite(everything).all()
    torch.testing.assert_close(everything, gradient(torch.tensor([0, 1, 3, 4])))


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_trl_5773_one_valid_reward_in_a_group(method):
    rewards = torch.tensor([math.nan, 0.7, math.nan, 1.0, 0.0])
    result = advantages(rewards, torch.tensor([0, 0, 0, 1, 1]), method=method)
    assert result.advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.advantages[3] == -result.advantages[4] > 0
    assert result.metrics.groups_of_one == 1
    assert result.metrics.invalid == 2


def test_slime_2230_uneven_groups_are_normalised_per_group():
    # Group 0 is easy, group 1 is hard and larger: statistics over the batch would give all of group 0 a positive sign.
    rewards = torch.tensor([1.0, 0.9, 0.0, 0.1, 0.0, 0.1, 0.0])
    groups = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    result = advantages(rewards, groups).advantages
    alone = [advantages(rewards[groups == g], groups[groups == g]).advantages for g in (0, 1)]
    torch.testing.assert_close(result, torch.cat(alone))
    assert result[1] < 0 < result[0]
    assert result[2:].mean().abs() < 1e-6
    assert result[2:].std().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("asked", [False, True])
def test_trl_7068_equal_rewards_give_no_kl_push_unless_asked(asked):
    index = ids(2, 3, 2, 2)
    values = spread(advantages(torch.tensor([0.1, 0.1, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])).advantages, index)
    assert (values[:5] == 0.0).all()
    logp = torch.randn(9, generator=torch.Generator().manual_seed(2)).requires_grad_()
    settings = PolicySettings(kl="k3", kl_coefficient=0.5, kl_on_zero_advantage=asked)
    mask = torch.ones(9, dtype=torch.bool)
    loss_of(logp, values, mask, index, settings=settings, reference_logp=logp.detach() - 0.3).loss.backward()
    assert (logp.grad[5:] != 0).all()
    assert bool((logp.grad[:5] != 0).all()) is asked
    assert bool((logp.grad[:5] == 0).all()) is not asked


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_verl_group_of_one_gets_zero_and_a_warning(method):
    result = advantages(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([3, 8, 8]), method=method)
    assert result.advantages[0] == 0.0
    assert "1 of 2 groups" in result.warning
    assert advantages(torch.tensor([1.0, 0.0]), torch.tensor([8, 8]), method=method).warning is None


@pytest.mark.parametrize("method", ["token_mean", "sequence_mean"])
def test_trl_6024_loss_does_not_depend_on_accumulation(method):
    # Responses of 1 and 9 tokens: a mean of micro-batch means weighs the short one like the long one.
    index, mask = ids(1, 9, 2), torch.ones(12, dtype=torch.bool)
    start = torch.randn(12, generator=torch.Generator().manual_seed(4))
    values = torch.where(index == 0, 2.0, -1.0)
    scale = token_scale(mask, index, count_batch(mask, index), method)
    outcomes = []
    for parts in ([[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]):
        logp, total = start.clone().requires_grad_(), 0.0
        for part in parts:
            pick = torch.isin(index, torch.tensor(part))
            loss = loss_of(logp[pick], values[pick], mask[pick], index[pick], scale=scale[pick]).loss
            loss.backward()
            total += loss.item()
        outcomes.append((total, logp.grad))
    assert outcomes[0][0] == pytest.approx({"token_mean": 0.75, "sequence_mean": 0.0}[method], abs=1e-6)
    for total, gradient in outcomes[1:]:
        assert total == pytest.approx(outcomes[0][0], abs=1e-6)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=0, atol=1e-6)


def test_ms_swift_10116_gradient_does_not_shrink_with_accumulation_steps():
    index, mask = ids(*[3] * 16), torch.ones(48, dtype=torch.bool)
    scale = token_scale(mask, index, count_batch(mask, index), "token_mean")
    logp = torch.zeros(48, requires_grad=True)
    for sequence in range(16):
        pick = index == sequence
        loss_of(logp[pick], torch.ones(48)[pick], mask[pick], index[pick], scale=scale[pick]).loss.backward()
    assert logp.grad.sum().item() == pytest.approx(-1.0, abs=1e-6)


def test_openrlhf_mean_of_means_weighs_tokens_by_their_micro_batch():
    mask = torch.tensor([True] * 2 + [False] * 6 + [True] * 8)
    index = ids(8, 8)
    scale = token_scale(mask, index, count_batch(mask, index), "token_mean")
    assert scale[mask].unique().tolist() == pytest.approx([0.1])
    assert (scale[~mask] == 0).all()


def test_trl_5814_sequence_ratio_by_sum_and_by_mean():
    # The same gap on every token of a short and a long response.
    index = ids(4, 400)
    logp, base = torch.full((404,), -1.01), torch.full((404,), -1.0)
    mask = torch.ones(404, dtype=torch.bool)
    total = importance_ratio(logp, base, mask, index, "sequence_sum")
    mean = importance_ratio(logp, base, mask, index, "sequence_mean")
    assert total[0].item() == pytest.approx(math.exp(-0.04), rel=1e-4)
    assert total[-1].item() == pytest.approx(math.exp(-4.0), rel=1e-4)
    assert mean[0].item() == pytest.approx(math.exp(-0.01), rel=1e-5)
    assert mean[-1].item() == pytest.approx(math.exp(-0.01), rel=1e-5)


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("method", ["token_mean", "sequence_mean", "constant"])
def test_trl_6095_fully_masked_sequence_contributes_nothing(method, level):
    index = ids(3, 4, 2)
    mask = index != 1
    budget = 5 if method == "constant" else None
    generator = torch.Generator().manual_seed(6)
    logp, base, values = (torch.randn(9, generator=generator) for _ in range(3))
    ratio = importance_ratio(logp, base, mask, index, level)
    assert (ratio[index == 1] == 0).all()
    assert (
        TokenTis()(CorrectionInput(gap=logp - base, advantages=values, mask=mask, sequence_index=index))
        .weights[index == 1]
        .sum()
        == 0
    )
    results = []
    for pick in (torch.ones(9, dtype=torch.bool), mask):
        scale = token_scale(mask[pick], index[pick], count_batch(mask[pick], index[pick]), method, max_tokens=budget)
        settings = PolicySettings(ratio=level)
        results.append(
            loss_of(
                logp[pick], values[pick], mask[pick], index[pick], scale=scale, settings=settings, old_logp=base[pick]
            )
        )
    assert results[0].loss.item() == results[1].loss.item() != 0.0
    assert read(results[0].metrics) == read(results[1].metrics)


def test_nemo_rl_nan_to_num_jump_ratios_are_monotone_in_the_gap():
    gap = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([1e4, 3e38])]).sort().values
    mask, index = torch.ones_like(gap, dtype=torch.bool), torch.arange(gap.shape[0])
    ratio = importance_ratio(gap, torch.zeros_like(gap), mask, index, "token")
    weights = TokenTis()(CorrectionInput(gap=gap, advantages=gap, mask=mask, sequence_index=index)).weights
    for values in (ratio, weights, clamped_exp(gap)):
        assert torch.isfinite(values).all()
        assert (values.diff() >= 0).all()
    assert ratio[-1] > 1e8
    assert weights[-1] == 2.0


def test_nemo_rl_huge_ratio_keeps_the_dual_clip_bound():
    # The loss of a negative advantage grows with the gap up to the bound, and stays there.
    gaps = torch.tensor([0.0, 0.5, 1.0, 2.0, 50.0, 1000.0])
    losses = [
        loss_of(g[None], -torch.ones(1), torch.tensor([True]), ids(1), old_logp=torch.zeros(1)).loss.item()
        for g in gaps
    ]
    assert losses == sorted(losses)
    assert losses[-1] == losses[-2] == losses[-3] == 3.0


def test_verl_7771_padding_rows_do_not_shrink_the_gap():
    learner, rollout = torch.full((6,), -2.0), torch.full((6,), -1.0)
    mask = torch.ones(6, dtype=torch.bool)
    alone = gap_metrics(token_gap(learner, rollout, mask), mask)
    padding = 30
    padded_mask = torch.cat([mask, torch.zeros(padding, dtype=torch.bool)])
    gap = token_gap(torch.cat([learner, torch.zeros(padding)]), torch.cat([rollout, torch.zeros(padding)]), padded_mask)
    padded = gap_metrics(gap, padded_mask)
    assert padded == alone
    assert padded.mean_abs == 1.0
    assert padded.tokens == 6
