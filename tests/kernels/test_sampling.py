"""Sampling against softmax statistics and brute force; log-probabilities against float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.errors import DataError, NumericsError, ShapeError
from halfbyte.kernels import Kernels, available, get

NAMES = [name for name in available() if name != "native"]


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


class Parameters(NamedTuple):
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def parameters(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> Parameters:
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    full = [torch.full((rows,), x) for x in (temperature, top_p, min_p)]
    return Parameters(full[0], torch.full((rows,), top_k, dtype=torch.int32), full[1], full[2], uniform)


def random_logits(rows: int, vocabulary: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.5, 8)])
def test_draws_follow_the_softmax(kernels: Kernels, temperature: float, top_k: int) -> None:
    logits, n = random_logits(1, 20, 1, 1.0), 20_000
    sampled = kernels.sample(logits.expand(n, -1), *parameters(n, temperature=temperature, top_k=top_k, seed=7))
    p = (logits[0].double() / temperature).softmax(0)
    if top_k:
        p[p < p.sort(descending=True).values[top_k - 1]] = 0
        p /= p.sum()
    observed, alive = torch.bincount(sampled[0], minlength=20).double(), p > 0
    assert not bool(observed[~alive].any())
    statistic = float(((observed - n * p)[alive] ** 2 / (n * p)[alive]).sum())
    quantile = {19: 43.8, 7: 24.3}[int(alive.sum()) - 1]  # chi-square, 99.9%
    assert statistic < quantile


def brute_force_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Filters on exact-ish probabilities, in the order temperature, top-k, top-p, min-p."""
    z = (torch.tensor(logits) / temperature).tolist()  # float32, so that ties are those of the kernel
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if 0 < top_k < len(z):
        order = order[:top_k]
    weight = {i: math.exp(z[i] - z[order[0]]) for i in order}
    if top_p < 1:
        total, reached, kept = math.fsum(weight.values()), 0.0, []
        for i in order:
            if reached >= top_p * total:
                break
            kept.append(i)
            reached += weight[i]
        order = kept
    return sorted(i for i in order if weight[i] >= min_p)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 200),
    st.floats(0.25, 3.0, width=32),
    st.integers(0, 40),
    st.floats(0.0625, 1.0, width=32),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_filters_against_brute_force(
    name: str, vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool, seed: int
) -> None:
    logits = random_logits(1, vocabulary, seed)
    logits = logits.round() if ties else logits
    min_p = float(torch.tensor(min_p))
    p = parameters(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    ids, logprobs, support = get(name).sample(logits, *p, want_support=True)
    kept = list(range(vocabulary)) if support[0] is None else support[0].tolist()
    expected = brute_force_kept(logits[0].tolist(), temperature, top_k, top_p, min_p)
    if kept != expected:  # the threshold may fall between two roundings: then the sets differ by a token on the border
        z = (logits[0] / temperature).double()
        w = (z - z.max()).exp()
        limited = brute_force_kept(logits[0].tolist(), temperature, top_k, 1.0, 0.0)
        mass = float(w[expected].sum() / w[limited].sum())
        border = [abs(float(w[i]) / min_p - 1) for i in set(kept) ^ set(expected) if min_p] + [abs(mass - top_p)]
        last = min(expected, key=lambda i: float(w[i]))
        border.append(abs(mass - float(w[last] / w[limited].sum()) - top_p))
        assert min(border) < 1e-6, (kept, expected)
    assert ids.item() in kept
    z = logits[0].double() / temperature
    truth = z[ids].item() - torch.logsumexp(z[kept], 0).item()
    assert logprobs.item() == pytest.approx(truth, abs=3e-6, rel=1e-6)


def test_ties_go_to_the_lower_id(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, 3.0]]).expand(4, -1)
    p = parameters(4)
    top_k = torch.tensor([2, 1, 0, 0], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.3, 0.6])
    support = kernels.sample(logits, p.temperature, top_k, top_p, p.min_p, p.uniform, want_support=True)[2]
    assert [s.tolist() for s in support if s is not None] == [[1, 2], [1], [1, 2], [1, 2, 3]]


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_filters(kernels: Kernels) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 1.0, 5.0, 5.0], [-0.0, 0.0, -0.0, 0.0]])
    ids, logprobs, support = kernels.sample(
        logits, *parameters(3, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9), want_support=True
    )
    assert ids.tolist() == [1, 0, 0]
    assert support == [None, None, None]
    ones = torch.ones(3)
    assert torch.equal(logprobs, kernels.log_softmax(logits, ones).gather(1, ids[:, None]).squeeze(1))
    assert torch.equal(logprobs, kernels.token_logprobs(logits, ids, torch.zeros(3)))


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 1000, 1024, 1025, 3000])
def test_log_probabilities_against_float64(kernels: Kernels, vocabulary: int) -> None:
    logits = random_logits(6, vocabulary, vocabulary, 5.0)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 0.1, 1.0])
    used = torch.where(temperature == 0, 1.0, temperature).double()
    truth = (logits.double() / used[:, None]).log_softmax(1)
    result = kernels.log_softmax(logits, temperature)
    size = logits.abs().double() / used[:, None]
    # Division and subtraction round once each; the sum of exp errs by one ulp.
    bound = 2.0**-24 * (2 * (size + size.amax(1, keepdim=True)) + truth.abs() + 4)
    assert bool(((result.double() - truth).abs() <= bound).all())
    ids = torch.arange(6) % vocabulary
    assert torch.equal(kernels.token_logprobs(logits, ids, temperature), result.gather(1, ids[:, None]).squeeze(1))


def test_trl_6789_top_p_on_one_side(kernels: Kernels) -> None:
    """The sampler's log-probs are those of the filtered distribution; the learner replays them from the support."""
    logits = random_logits(50, 300, 2)
    p = parameters(50, temperature=0.8, top_k=40, top_p=0.7, min_p=0.01, seed=3)
    ids, logprobs, support = kernels.sample(logits, *p, want_support=True)
    for row, kept in enumerate(support):
        assert kept is not None
        z = logits[row, kept].double() / p.temperature[row].double()
        truth = z.log_softmax(0)[kept.tolist().index(int(ids[row]))].item()
        assert logprobs[row].item() == pytest.approx(truth, abs=2e-6, rel=1e-6)
    assert torch.equal(kernels.token_logprobs(logits, ids, p.temperature, support), logprobs)
    assert bool((kernels.token_logprobs(logits, ids, p.temperature) < logprobs).all()), (
        "the full vocabulary has more mass"
    )


def test_support_of_another_policy_may_miss_the_best_token(kernels: Kernels) -> None:
    """A learner whose logits moved replays the rollout's support: the largest logit may lie outside, far above."""
    logits = torch.tensor([[900.0, 1.0, 2.0, 3.0]])
    got = kernels.token_logprobs(logits, torch.tensor([2]), torch.ones(1), [torch.tensor([3, 1, 2, 2])])
    assert got.item() == pytest.approx(torch.tensor([1.0, 2.0, 3.0]).log_softmax(0)[1].item(), rel=1e-6)


def test_prime_rl_697_temperature_divides_logits_not_log_probs(kernels: Kernels) -> None:
    logits, temperature = random_logits(8, 50, 4), torch.full((8,), 0.5)
    ids, logprobs = kernels.sample(logits, *parameters(8, temperature=0.5))[:2]
    right = (logits.double() / 0.5).log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    wrong = logits.double().log_softmax(1).gather(1, ids[:, None]).squeeze(1) / 0.5
    assert torch.allclose(logprobs.double(), right, atol=2e-6, rtol=0)
    assert float((logprobs.double() - wrong).abs().min()) > 1e-3
    assert float((kernels.log_softmax(logits, temperature).double().exp().sum(1) - 1).abs().max()) < 1e-6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 30), st.sampled_from([1, 5, 16, 40, 1024, 1500, 2100]), st.booleans(), st.integers(0, 2**31))
def test_implementations_agree_bit_for_bit_and_rows_are_independent(
    rows: int, vocabulary: int, ties: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, vocabulary, seed)
    logits = logits.round() if ties else logits
    mixed = Parameters(
        (torch.rand(rows, generator=g) * 2) * (torch.rand(rows, generator=g) > 0.2),
        torch.randint(0, 50, (rows,), generator=g, dtype=torch.int32) * (torch.rand(rows, generator=g) > 0.5),
        torch.where(torch.rand(rows, generator=g) > 0.5, 1.0, torch.rand(rows, generator=g) * 0.99 + 0.01),
        torch.rand(rows, generator=g) * 0.3 * (torch.rand(rows, generator=g) > 0.5),
        torch.rand(rows, generator=g, dtype=torch.float64),
    )
    truth = get("reference").sample(logits, *mixed, want_support=True)
    scored = get("reference").log_softmax(logits, mixed.temperature)
    assert torch.equal(get("reference").token_logprobs(logits, truth[0], mixed.temperature, truth[2]), truth[1])
    part = slice(rows // 3, None)
    for name in NAMES:
        kernels = get(name)
        for which in (slice(None), part):
            got = kernels.sample(logits[which], *(t[which] for t in mixed), want_support=True)
            assert torch.equal(got[0], truth[0][which])
            assert torch.equal(got[1], truth[1][which])
            assert [s if s is None else s.tolist() for s in got[2]] == [
                s if s is None else s.tolist() for s in truth[2][which]
            ]
            assert torch.equal(kernels.log_softmax(logits[which], mixed.temperature[which]), scored[which])
        assert torch.equal(kernels.token_logprobs(logits, truth[0], mixed.temperature, truth[2]), truth[1])


@pytest.mark.parametrize("vocabulary", [10, 2500])
def test_the_ends_of_the_uniform_range_draw_tokens_that_exist(kernels: Kernels, vocabulary: int) -> None:
    logits = random_logits(2, vocabulary, 5)
    logits[:, :3] = -1e4  # probability exactly 0 at both ends
    logits[:, -2:] = -1e4
    p = parameters(2)
    uniform = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    ids = kernels.sample(logits, *p[:4], uniform)[0]
    assert ids.tolist() == [3, vocabulary - 3]


def test_log_probs_are_finite_for_any_finite_logits(kernels: Kernels) -> None:
    top = torch.finfo(torch.float32).max
    logits = torch.tensor([[top, -top, 0.0], [-top, -top, -top], [0.0, -top, 1e-30], [88.0, -88.0, 1e6]])
    ones = torch.ones(4)
    result = kernels.log_softmax(logits, ones)
    assert bool(torch.isfinite(result).all())
    assert bool((result <= 0).all())
    ids, logprobs = kernels.sample(logits, *parameters(4, top_p=0.5))[:2]
    assert bool(torch.isfinite(logprobs).all())
    assert ids.tolist()[0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_logit_is_an_error_that_names_row_and_token(kernels: Kernels, bad: float) -> None:
    logits = torch.zeros(5, 40)
    logits[3, 17] = bad
    p = parameters(5)
    for call in (
        lambda: kernels.sample(logits, *p),
        lambda: kernels.log_softmax(logits, p.temperature),
        lambda: kernels.token_logprobs(logits, torch.zeros(5, dtype=torch.int64), p.temperature),
    ):
        with pytest.raises(NumericsError, match="row 3, token 17"):
            call()


def test_a_temperature_that_overflows_is_an_error(kernels: Kernels) -> None:
    with pytest.raises(NumericsError, match="row 1"):
        kernels.log_softmax(torch.ones(2, 4), torch.tensor([1.0, 1e-45]))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("temperature", -1.0, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("temperature", math.inf, "temperature"),
        ("top_k", -1, "top_k"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("min_p", -0.1, "min_p"),
        ("min_p", 1.1, "min_p"),
        ("uniform", 1.0, "uniform"),
        ("uniform", math.nan, "uniform"),
    ],
)
def test_parameters_out_of_range_are_refused(kernels: Kernels, field: str, value: float, match: str) -> None:
    p = parameters(3)
    tensor = getattr(p, field).clone()
    tensor[2] = value
    with pytest.raises(DataError, match=match):
        kernels.sample(torch.zeros(3, 8), *p._replace(**{field: tensor}))


def test_bad_shapes_ids_and_supports_are_refused(kernels: Kernels) -> None:
    logits, ones, ids = torch.zeros(3, 8), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"\(3, 8\)"):
        kernels.log_softmax(logits, torch.ones(2))
    with pytest.raises(ShapeError, match=r"top_k"):
        kernels.sample(logits, *parameters(3)._replace(top_k=torch.zeros(2, dtype=torch.int32)))
    with pytest.raises(ShapeError, match="V >= 1"):
        kernels.log_softmax(torch.zeros(3, 0), ones)
    with pytest.raises(DataError, match=r"0\.\.7"):
        kernels.token_logprobs(logits, ids + 8, ones)
    with pytest.raises(DataError, match="row 1"):
        kernels.token_logprobs(logits, ids, ones, [None, torch.tensor([1, 2]), None])
    with pytest.raises(DataError, match="row 2"):
        kernels.token_logprobs(logits, ids, ones, [None, None, torch.tensor([0, 8])])
    with pytest.raises(ShapeError, match="support"):
        kernels.token_logprobs(logits, ids, ones, [None])
