"""A whole step, rewards to gradient: the same whatever the order, padding, packing and micro-batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.objective import (
    CorrectionInput,
    LossInput,
    PolicySettings,
    TokenTis,
    advantages,
    count_batch,
    counted_tokens,
    gap_metrics,
    merge,
    policy_loss,
    read,
    spread,
    token_gap,
    token_scale,
)

FLOATS = ("logp", "old_logp", "rollout_logp", "reference_logp")
TOKEN = st.tuples(*[st.floats(-3, 0, width=32)] * 4, st.sampled_from([True, True, False]))
SAMPLE = st.tuples(
    st.lists(TOKEN, max_size=5), st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-1, 1, width=32)), st.integers(0, 2)
)
BATCH = st.lists(SAMPLE, min_size=1, max_size=6)
LAYOUTS = pytest.mark.parametrize(
    ("denominator", "budget", "ratio"),
    [("token_mean", None, "token"), ("sequence_mean", None, "sequence_mean"), ("constant", 8, "sequence_sum")],
)


def flatten(samples, order, junk=(), value=math.nan, ids=None):
    """Flat tensors of the samples in the given order; ``junk`` places masked tokens of no sample in front of tokens."""
    rows = []
    for sample in order:
        rows += [(*token, sample if ids is None else ids[sample]) for token in samples[sample][0]]
    for position in sorted(junk, reverse=True):
        rows.insert(min(position, len(rows)), (*[value] * 4, False, -1))
    columns = list(zip(*rows)) if rows else [()] * 6
    fields = {name: torch.tensor(columns[k], dtype=torch.float32) for k, name in enumerate(FLOATS)}
    fields["mask"] = torch.tensor(columns[4], dtype=torch.bool)
    return fields, torch.tensor(columns[5], dtype=torch.int64)


def step(samples, denominator, budget, ratio, *, order=None, junk=(), value=math.nan, parts=1, ids=None):
    """One step. Returns the loss, the gradient of every response token by (sample, position), and metrics."""
    order = range(len(samples)) if order is None else order
    fields, index = flatten(samples, order, junk, value, ids)
    rewards = torch.tensor([samples[i][1] for i in order], dtype=torch.float32)
    groups = torch.tensor([samples[i][2] for i in order], dtype=torch.int64)
    per_sample = torch.zeros(1 + max(ids or order))
    per_sample[[i if ids is None else ids[i] for i in order]] = advantages(rewards, groups).advantages
    fields["advantages"] = spread(per_sample, index)

    gap = token_gap(fields["old_logp"], fields["rollout_logp"], fields["mask"])
    corrected = TokenTis(1.5)(
        CorrectionInput(gap=gap, advantages=fields["advantages"], mask=fields["mask"], sequence_index=index)
    )
    fields["weights"] = corrected.weights
    counted = counted_tokens(fields["mask"], corrected.rejected, count_rejected=True)
    fields["scale"] = token_scale(counted, index, count_batch(counted, index), denominator, max_tokens=budget)

    logp = fields.pop("logp").requires_grad_()
    chosen = PolicySettings(ratio=ratio, kl="k3", kl_coefficient=0.1)
    losses, metrics = [], []
    for part in range(parts):
        # Padding goes along with micro-batch 0.
        pick = (torch.clamp(index, min=0) % parts == part).nonzero()[:, 0]
        tokens = LossInput(
            logp=logp[pick], sequence_index=index[pick], **{name: values[pick] for name, values in fields.items()}
        )
        result = policy_loss(tokens, chosen)
        result.loss.backward()
        losses.append(result.loss.item())
        metrics.append(result.metrics)
    names = {i if ids is None else ids[i]: i for i in order}
    gradient, position = {}, dict.fromkeys(names, 0)
    for sequence, slope in zip(index.tolist(), logp.grad.tolist()):
        if sequence < 0:
            assert slope == 0.0
            continue
        gradient[names[sequence], position[sequence]] = slope
        position[sequence] += 1
    return math.fsum(losses), gradient, read(merge(metrics)), gap_metrics(gap, fields["mask"])


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=0, abs=1e-6)
    assert one[1] == pytest.approx(other[1], rel=0, abs=1e-6)
    assert one[2] == pytest.approx(other[2], rel=1e-6, abs=1e-6)
    assert one[3].to_dict() == pytest.approx(other[3].to_dict(), rel=1e-9, abs=1e-12)


@LAYOUTS
@given(samples=BATCH, parts=st.integers(2, 4))
@settings(max_examples=40)
def test_micro_batches(denominator, budget, ratio, samples, parts):
    assert_same(step(samples, denominator, budget, ratio), step(samples, denominator, budget, ratio, parts=parts))


@LAYOUTS
@given(data=st.data())
@settings(max_examples=40)
def test_order_and_packing_of_samples(denominator, budget, ratio, data):
    samples = data.draw(BATCH)
    order = data.draw(st.permutations(range(len(samples))))
    ids = data.draw(st.lists(st.integers(0, 50), min_size=len(samples), max_size=len(samples), unique=True))
    assert_same(
        step(samples, denominator, budget, ratio), step(samples, denominator, budget, ratio, order=order, ids=ids)
    )


@LAYOUTS
@given(
    samples=BATCH,
    junk=st.lists(st.integers(0, 30), max_size=8),
    value=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)
@settings(max_examples=40)
def test_padding_changes_not_even_the_last_bit(denominator, budget, ratio, samples, junk, value):
    plain = step(samples, denominator, budget, ratio)
    padded = step(samples, denominator, budget, ratio, junk=junk, value=value)
    assert plain == padded


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_a_bandit_learns_and_does_not_without_signal(method):
    """Six arms, one pays: the true rewards find it from chance, rewards of another draw do not."""

    def final_chance(shuffle):
        generator = torch.Generator().manual_seed(11)
        theta = torch.zeros(6, requires_grad=True)
        for _ in range(60):
            policy = torch.softmax(theta.detach(), 0)
            arms = torch.multinomial(policy, 64, replacement=True, generator=generator)
            rewards = (arms == 4).float()
            if shuffle:
                rewards = rewards[torch.randperm(64, generator=generator)]
            result = advantages(rewards, torch.arange(64) // 8, method=method)
            mask, index = torch.ones(64, dtype=torch.bool), torch.arange(64)
            tokens = LossInput(
                logp=torch.log_softmax(theta, 0)[arms],
                old_logp=policy.log()[arms],
                advantages=result.advantages,
                mask=mask,
                sequence_index=index,
                scale=token_scale(mask, index, count_batch(mask, index), "token_mean"),
            )
            (slope,) = torch.autograd.grad(policy_loss(tokens, PolicySettings()).loss, theta)
            theta = (theta - 1.0 * slope).detach().requires_grad_()
        return float(torch.softmax(theta.detach(), 0)[4])

    assert final_chance(shuffle=False) > 0.9
    assert final_chance(shuffle=True) < 0.5
