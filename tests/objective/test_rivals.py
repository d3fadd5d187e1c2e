"""Every correction against a loop written from its paper's formula, in float64; where the paper states a loss, its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError
from halfbyte.objective import CORRECTIONS, CorrectionInput, LossInput, PolicySettings, make_correction, policy_loss


@dataclass
class Response:
    """One response: probabilities of its tokens under rollout (mu) and learner (pi), advantages, and which count."""

    mu: list[float]
    pi: list[float]
    advantages: list[float]
    counts: list[bool]

    @property
    def real(self) -> list[int]:
        return [t for t, c in enumerate(self.counts) if c]


PROBABILITY = st.floats(0.02, 0.98)
TOKEN = st.tuples(PROBABILITY, PROBABILITY, st.sampled_from([True, True, False]))
CLOSE = st.tuples(PROBABILITY, st.floats(-1e-3, 1e-3), st.sampled_from([True, True, False]))


@st.composite
def responses(draw: st.DrawFn) -> list[Response]:
    """Responses with one advantage each; in some the two sides differ by a thousandth only, where GSPO and others decide."""
    out = []
    for _ in range(draw(st.integers(1, 5))):
        close = draw(st.booleans())
        tokens = draw(st.lists(CLOSE if close else TOKEN, min_size=1, max_size=6))
        advantage = draw(st.sampled_from([-1.5, -0.5, 0.0, 0.7, 2.0]))
        pi = [mu * math.exp(x) if close else x for mu, x, _ in tokens]
        out.append(Response([t[0] for t in tokens], pi, [advantage] * len(tokens), [t[2] for t in tokens]))
    return out


def record(batch: list[Response]) -> CorrectionInput:
    mu = torch.tensor([x for r in batch for x in r.mu], dtype=torch.float64).log()
    pi = torch.tensor([x for r in batch for x in r.pi], dtype=torch.float64).log()
    mask = torch.tensor([x for r in batch for x in r.counts])
    return CorrectionInput(
        gap=(pi - mu).float().masked_fill(~mask, math.nan),
        advantages=torch.tensor([x for r in batch for x in r.advantages], dtype=torch.float32),
        mask=mask,
        sequence_index=torch.tensor([i for i, r in enumerate(batch) for _ in r.mu]),
        rollout_logp=mu.float(),
    )


def ratio(r: Response, t: int) -> float:
    return r.pi[t] / r.mu[t]


def product(r: Response) -> float:
    return math.prod(ratio(r, t) for t in r.real)


def geometric(r: Response) -> float:
    return product(r) ** (1 / len(r.real))


def token_tis(r: Response, t: int) -> tuple[float, float]:
    """min(rho, C), C = 2."""
    return min(ratio(r, t), 2.0), ratio(r, t) - 2.0


def sequence_tis(r: Response, t: int) -> tuple[float, float]:
    """min(prod rho, C), C = 2."""
    return min(product(r), 2.0), product(r) - 2.0


def sequence_mis(r: Response, t: int) -> tuple[float, float]:
    """prod rho where that is at most C = 2, else 0."""
    return (product(r) if product(r) <= 2.0 else 0.0), product(r) - 2.0


def icepop(r: Response, t: int) -> tuple[float, float]:
    """k in [1/2, 5] or 0."""
    k = ratio(r, t)
    return (k if 0.5 <= k <= 5.0 else 0.0), min(abs(k - 0.5), abs(k - 5.0))


def opsm(r: Response, t: int) -> tuple[float, float]:
    """0 where A < 0 and the mean over the response of log(mu / pi) is above delta."""
    mean = sum(math.log(r.mu[i] / r.pi[i]) for i in r.real) / len(r.real)
    return (0.0 if r.advantages[t] < 0 and mean > 1e-4 else 1.0), mean - 1e-4


def geometric_rejection(r: Response, t: int) -> tuple[float, float]:
    """1 where the geometric mean of the ratios is in [0.999, 1.001], else 0."""
    g = geometric(r)
    return (1.0 if 0.999 <= g <= 1.001 else 0.0), min(abs(g - 0.999), abs(g - 1.001))


def dppo(divergence: Callable[[float, float], float], delta: float) -> Callable[[Response, int], tuple[float, float]]:
    def rule(r: Response, t: int) -> tuple[float, float]:
        """M r with M = 0 where (A > 0 and r > 1 or A < 0 and r < 1) and D > delta."""
        x, a = ratio(r, t), r.advantages[t]
        d = divergence(r.mu[t], r.pi[t])
        away = (a > 0 and x > 1) or (a < 0 and x < 1)
        return (0.0 if away and d > delta else x), d - delta

    return rule


def total_variation(mu: float, pi: float) -> float:
    return (abs(mu - pi) + abs((1 - mu) - (1 - pi))) / 2


def binary_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def gspo(r: Response, t: int) -> tuple[float, float]:
    """s = (prod rho)^(1/n); no gradient where min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A) has none."""
    s, a = geometric(r), r.advantages[t]
    clipped = (a > 0 and s > 1 + 4e-4) or (a < 0 and s < 1 - 3e-4)
    return (0.0 if clipped else s), min(abs(s - 1 - 4e-4), abs(s - 1 + 3e-4))


def cispo(r: Response, t: int) -> tuple[float, float]:
    """sg(clip(rho, 0, 5))."""
    return min(max(ratio(r, t), 0.0), 5.0), ratio(r, t) - 5.0


RIVALS: dict[str, Callable[[Response, int], tuple[float, float]]] = {
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "icepop": icepop,
    "opsm": opsm,
    "geometric_rejection": geometric_rejection,
    "dppo_tv": dppo(total_variation, 0.15),
    "dppo_kl": dppo(binary_kl, 0.05),
    "gspo": gspo,
    "cispo": cispo,
}
"""Name -> weight of token t, and its distance from the threshold (closer than rounding, either side is right)."""


def test_every_rival_has_a_formula_here() -> None:
    assert RIVALS.keys() == CORRECTIONS.keys() - {"none", "triage"}


@pytest.mark.parametrize("name", sorted(RIVALS))
@settings(max_examples=60)
@given(batch=responses())
def test_weights_equal_the_formula(name: str, batch: list[Response]) -> None:
    result = make_correction(name)(record(batch))
    weights, rejected = iter(result.weights.tolist()), iter(result.rejected.tolist())
    for r in batch:
        for t in range(len(r.mu)):
            weight, thrown = next(weights), next(rejected)
            if not r.counts[t]:
                assert (weight, thrown) == (0.0, False)
                continue
            expected, margin = RIVALS[name](r, t)
            if abs(margin) > 1e-5:
                assert weight == pytest.approx(expected, rel=1e-5)
                assert thrown == (expected == 0.0)


def gspo_loss(logp: torch.Tensor, mu: torch.Tensor, a: float) -> torch.Tensor:
    s = torch.exp((logp - mu).mean())
    return -torch.minimum(s * a, torch.clamp(s, 1 - 3e-4, 1 + 4e-4) * a)


def cispo_loss(logp: torch.Tensor, mu: torch.Tensor, a: float) -> torch.Tensor:
    return -(torch.clamp(torch.exp(logp - mu), max=5.0).detach() * a * logp).mean()


def dppo_tv_loss(logp: torch.Tensor, mu: torch.Tensor, a: float) -> torch.Tensor:
    r = torch.exp(logp - mu)
    far = (torch.exp(logp) - torch.exp(mu)).abs() > 0.15
    keep = ~(far & (((r > 1) & (a > 0)) | ((r < 1) & (a < 0)))).detach()
    return -(torch.where(keep, r, torch.zeros_like(r)) * a).mean()


def opsm_loss(logp: torch.Tensor, mu: torch.Tensor, a: float) -> torch.Tensor:
    """DeepSeek-V3.2's masked GRPO term with the learner itself as old policy: the ratio is 1, its gradient that of logp."""
    keep = 0.0 if a < 0 and float((mu - logp).detach().mean()) > 1e-4 else 1.0
    return -(torch.exp(logp - logp.detach()) * a * keep).mean()


@pytest.mark.parametrize(
    ("name", "loss_of"),
    [("gspo", gspo_loss), ("cispo", cispo_loss), ("dppo_tv", dppo_tv_loss), ("opsm", opsm_loss)],
)
@pytest.mark.parametrize("spread", [3e-4, 0.3])
def test_the_gradient_at_the_start_of_a_step_is_that_of_the_papers_loss(
    name: str, loss_of: Callable[..., torch.Tensor], spread: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths, advantages = [3, 7, 1, 5, 4, 6], [1.0, -1.0, 0.5, -2.0, 1.5, -0.3]
    index = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    mu = -0.05 - 2 * torch.rand(26, generator=generator)
    logp = (mu + spread * torch.randn(26, generator=generator)).clamp(max=-1e-3).requires_grad_()
    a = torch.tensor(advantages)[index]
    expected = torch.zeros(26)
    for i, advantage in enumerate(advantages):
        part = (index == i).nonzero()[:, 0]
        own = logp.detach()[part].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(own, mu[part], advantage), own)
        expected[part] = slope / len(advantages)
    mask = torch.ones(26, dtype=torch.bool)
    gap = (logp - mu).detach()
    weights = make_correction(name)(
        CorrectionInput(gap=gap, advantages=a, mask=mask, sequence_index=index, rollout_logp=mu)
    ).weights
    scale = 1.0 / (6 * torch.tensor(lengths, dtype=torch.float32)[index])
    tokens = LossInput(logp=logp, advantages=a, mask=mask, sequence_index=index, scale=scale, weights=weights)
    (slope,) = torch.autograd.grad(policy_loss(tokens, PolicySettings()).loss, logp)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-7)
    assert bool((slope != 0).any())
    if name in ("gspo", "dppo_tv", "opsm") and spread > 0.1:
        assert bool((slope == 0).any()), "some token is masked, or the test shows nothing"


@pytest.mark.parametrize(
    ("gap", "advantage", "kept"),
    [
        (3.5e-4, 1, True),
        (4.5e-4, 1, False),
        (-2.5e-4, -1, True),
        (-3.5e-4, -1, False),
        (9e-4, -1, True),
        (-9e-4, 1, True),
    ],
)
def test_the_two_bounds_of_gspo_are_3e_4_below_and_4e_4_above(gap: float, advantage: float, kept: bool) -> None:
    tokens = CorrectionInput(
        gap=torch.full((3,), gap),
        advantages=torch.full((3,), float(advantage)),
        mask=torch.ones(3, dtype=torch.bool),
        sequence_index=torch.zeros(3, dtype=torch.int64),
    )
    assert bool((make_correction("gspo")(tokens).weights > 0).all()) == kept


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_needs_probabilities(name: str) -> None:
    one = torch.ones(1)
    with pytest.raises(ConfigError, match="rollout_logp"):
        make_correction(name)(
            CorrectionInput(gap=one, advantages=one, mask=one > 0, sequence_index=torch.zeros(1, dtype=torch.int64))
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sequence_tis", {"cap": 0.5}),
        ("sequence_mis", {"cap": math.inf}),
        ("icepop", {"low": 1.5}),
        ("icepop", {"high": 0.5}),
        ("opsm", {"delta": -1.0}),
        ("geometric_rejection", {"low": 2.0}),
        ("geometric_rejection", {"high": math.nan}),
        ("dppo_tv", {"delta": 0.0}),
        ("dppo_kl", {"delta": math.inf}),
        ("gspo", {"eps_low": -0.1}),
        ("gspo", {"eps_high": -0.1}),
        ("cispo", {"high": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_correction(name, **options)


def test_trl_5814_sequence_ratio_by_sum_and_by_mean_are_told_apart() -> None:
    """The same gap of 0.1 a token: the sum grows with length and runs into the cap, the mean does not."""
    for length, weight in ((1, math.exp(0.1)), (100, 2.0)):
        ones = torch.ones(length)
        tokens = CorrectionInput(
            gap=0.1 * ones,
            advantages=-ones,
            mask=ones > 0,
            sequence_index=torch.zeros(length, dtype=torch.int64),
            rollout_logp=-ones,
        )
        assert float(make_correction("sequence_tis")(tokens).weights[0]) == pytest.approx(weight)
        assert float(make_correction("gspo")(tokens).weights[0]) == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("name", ["sequence_tis", "sequence_mis", "gspo", "geometric_rejection", "opsm"])
def test_trl_6095_a_fully_masked_response_contributes_nothing(name: str) -> None:
    tokens = CorrectionInput(
        gap=torch.tensor([0.0, math.nan, math.inf]),
        advantages=torch.tensor([-1.0, -1.0, -1.0]),
        mask=torch.tensor([True, False, False]),
        sequence_index=torch.tensor([0, 1, 1]),
    )
    result = make_correction(name)(tokens)
    assert result.weights.tolist() == [1.0, 0.0, 0.0]
    assert not result.rejected.any()


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_prime_rl_2084_nemo_rl_4120_an_infinite_gap_on_a_masked_token_poisons_nothing(name: str) -> None:
    """Through correction and loss to the gradient."""
    logp = torch.tensor([-0.5, -1.0, -0.7], requires_grad=True)
    mask = torch.tensor([True, False, True])
    tokens = CorrectionInput(
        gap=torch.tensor([-0.4, math.inf, 0.3]),
        advantages=torch.tensor([-1.0, math.nan, -1.0]),
        mask=mask,
        sequence_index=torch.tensor([0, 0, 0]),
        rollout_logp=torch.tensor([-0.1, -math.inf, -1.0]),
    )
    weights = make_correction(name)(tokens).weights
    loss = policy_loss(
        LossInput(
            logp=logp,
            advantages=tokens.advantages,
            mask=mask,
            sequence_index=tokens.sequence_index,
            scale=torch.ones(3),
            weights=weights,
        ),
        PolicySettings(),
    ).loss
    (slope,) = torch.autograd.grad(loss, logp)
    assert torch.isfinite(loss)
    assert torch.isfinite(slope).all()
    assert slope[1] == 0.0


@pytest.mark.parametrize("name", ["token_tis", "cispo", "icepop", "sequence_tis"])
def test_nemo_rl_ratios_are_monotone_in_the_gap_up_to_their_bound(name: str) -> None:
    """No jump down from nan_to_num(posinf=0): kept weights never fall as the gap grows."""
    gaps = torch.tensor([-200.0, -30.0, -5.0, -1.0, 0.0, 0.3, 0.6, 1.0, 5.0, 30.0, 200.0])
    tokens = CorrectionInput(
        gap=gaps, advantages=torch.ones(11), mask=torch.ones(11, dtype=torch.bool), sequence_index=torch.arange(11)
    )
    result = make_correction(name)(tokens)
    kept = result.weights[~result.rejected]
    assert bool((kept[1:] >= kept[:-1]).all())
    assert torch.isfinite(kept).all()
