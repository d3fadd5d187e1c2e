"""The policy loss against plain Python written from the formulas, its gradient, and exact expectations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.objective import (
    LossInput,
    NoCorrection,
    PolicySettings,
    TokenTis,
    policy_loss,
    read,
    require_compatible,
)

NAMES = ("logp", "old_logp", "rollout_logp", "advantages", "weights", "reference_logp", "entropy", "scale")
LOGP = st.floats(-4, 0, width=32)
TOKEN = st.fixed_dictionaries(
    {
        "logp": LOGP,
        "old_logp": LOGP,
        "rollout_logp": LOGP,
        "advantages": st.one_of(st.just(0.0), st.floats(-3, 3, width=32)),
        "weights": st.floats(0, 2, width=32),
        "reference_logp": LOGP,
        "entropy": st.floats(0, 3, width=32),
        "scale": st.floats(0, 1, width=32),
        "mask": st.booleans(),
        "sequence_index": st.sampled_from([0, 5, 2]),
    }
)
CHOICES = [
    {},
    {"proximal": "rollout", "dual_clip": None},
    {"ratio": "sequence_mean", "eps_low": 0.1, "eps_high": 0.28, "dual_clip": 1.5},
    {"ratio": "sequence_sum", "eps_low": 1.0, "eps_high": math.inf, "dual_clip": None},
    {"kl": "k1", "kl_coefficient": 0.5},
    {"kl": "k2", "kl_coefficient": 0.3, "kl_on_zero_advantage": True},
    {"kl": "k3", "kl_coefficient": 0.1, "entropy_coefficient": 0.01, "eps_low": 0.0},
]


def record(tokens, dtype=torch.float64, **replaced):
    fields = {name: torch.tensor([t[name] for t in tokens], dtype=dtype) for name in NAMES}
    fields["mask"] = torch.tensor([t["mask"] for t in tokens], dtype=torch.bool)
    fields["sequence_index"] = torch.tensor([t["sequence_index"] for t in tokens], dtype=torch.int64)
    return LossInput(**(fields | replaced))


def oracle(tokens, s):
    """Token by token, with PPO's min and dual clip's max as the papers write them."""
    base = "rollout_logp" if s.proximal == "rollout" else "old_logp"
    total = 0.0
    for token in (t for t in tokens if t["mask"]):
        mates = [t for t in tokens if t["mask"] and t["sequence_index"] == token["sequence_index"]]
        gaps = [t["logp"] - t[base] for t in ([token] if s.ratio == "token" else mates)]
        exponent = math.fsum(gaps) / (len(gaps) if s.ratio == "sequence_mean" else 1)
        r, a = math.exp(min(20.0, max(-20.0, exponent))), token["advantages"]
        surrogate = min(r * a, max(1 - s.eps_low, min(1 + s.eps_high, r)) * a)
        if s.dual_clip is not None and a < 0:
            surrogate = max(surrogate, s.dual_clip * a)
        term = -token["weights"] * surrogate
        if s.kl is not None and (a != 0 or s.kl_on_zero_advantage):
            d = token["reference_logp"] - token["logp"]
            term += s.kl_coefficient * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[s.kl]
        total += token["scale"] * (term - s.entropy_coefficient * token["entropy"])
    return total


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@given(tokens=st.lists(TOKEN, max_size=8))
@settings(max_examples=60)
def test_loss_equals_plain_python(choice, tokens):
    chosen = PolicySettings(**choice)
    result = policy_loss(record(tokens), chosen)
    expected = oracle(tokens, chosen)
    assert float(result.loss) == pytest.approx(expected, rel=1e-10, abs=1e-10)
    numbers = read(result.metrics)
    assert numbers["loss/total"] == pytest.approx(
        numbers["loss/policy"] + numbers.get("loss/kl", 0.0) + numbers.get("loss/entropy", 0.0), abs=1e-12
    )
    single = policy_loss(record(tokens, torch.float32), chosen).loss
    assert single.dtype == torch.float32
    assert float(single) == pytest.approx(expected, rel=3e-5, abs=1e-5)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_gradient_matches_finite_differences(choice):
    generator = torch.Generator().manual_seed(3)
    draw = {name: torch.rand(12, dtype=torch.float64, generator=generator) for name in NAMES}
    draw["advantages"] = 2 * draw["advantages"] - 1
    fields = draw | {
        "mask": torch.arange(12) % 5 != 2,
        "sequence_index": torch.arange(12) % 3,
    }

    def loss(logp, entropy):
        return policy_loss(LossInput(**(fields | {"logp": logp, "entropy": entropy})), PolicySettings(**choice)).loss

    logp, entropy = draw["logp"].clone().requires_grad_(), draw["entropy"].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (logp, entropy))


def tokens_with_ratio(ratio, advantage):
    one = torch.ones(1, dtype=torch.float64)
    return LossInput(
        logp=(one * math.log(ratio)).requires_grad_(),
        old_logp=0 * one,
        advantages=one * advantage,
        mask=one > 0,
        sequence_index=torch.zeros(1, dtype=torch.int64),
        scale=one,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient", "metric"),
    [
        (1.25, 1.0, -1.25, None),
        (1.35, 1.0, 0.0, "ratio/clipped_high"),
        (0.3, 1.0, -0.3, None),
        (0.85, -1.0, 0.85, None),
        (0.75, -1.0, 0.0, "ratio/clipped_low"),
        (2.5, -1.0, 2.5, None),
        (3.5, -1.0, 0.0, "ratio/clipped_dual"),
        (1.0, -1.0, 1.0, None),
    ],
)
def test_each_bound_stops_its_gradient_and_is_counted(ratio, advantage, gradient, metric):
    tokens = tokens_with_ratio(ratio, advantage)
    result = policy_loss(tokens, PolicySettings(eps_low=0.2, eps_high=0.3))
    result.loss.backward()
    assert tokens.logp.grad.item() == pytest.approx(gradient, rel=1e-12)
    shares = {k: v for k, v in read(result.metrics).items() if k.startswith("ratio/clipped")}
    assert shares == {name: float(name == metric) for name in shares}
    assert len(shares) == 3


def test_first_step_has_ratio_one_with_and_without_old_log_probs():
    torch.manual_seed(0)
    logp = torch.randn(40, requires_grad=True)
    fields = {
        "advantages": torch.randn(40),
        "mask": torch.rand(40) > 0.2,
        "sequence_index": torch.arange(40) // 8,
        "scale": torch.rand(40),
    }
    results = [
        policy_loss(LossInput(logp=logp, old_logp=old, **fields), PolicySettings()).loss
        for old in (None, logp.detach().clone(), logp)
    ]
    for loss in results:
        (gradient,) = torch.autograd.grad(loss, logp)
        expected = torch.where(fields["mask"], -fields["scale"] * fields["advantages"], 0.0)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


PI, MU, REWARDS = [0.45, 0.3, 0.2, 0.05], [0.3, 0.3, 0.2, 0.2], [1.0, 0.0, 0.5, -2.0]


@pytest.mark.parametrize("single_ratio", [False, True])
def test_expected_gradient_is_the_policy_gradient(single_ratio):
    """Every token once, weighted by the chance that the rollout samples it: an expectation without sampling noise."""
    theta = torch.tensor(PI, dtype=torch.float64).log().requires_grad_()
    logp = torch.log_softmax(theta, 0)
    mu = torch.tensor(MU, dtype=torch.float64)
    fields = {
        "logp": logp,
        "rollout_logp": mu.log(),
        "advantages": torch.tensor(REWARDS, dtype=torch.float64) - 0.3,
        "mask": torch.ones(4, dtype=torch.bool),
        "sequence_index": torch.arange(4),
        "scale": mu,
    }
    if single_ratio:
        chosen = PolicySettings(proximal="rollout", eps_low=1.0, eps_high=math.inf, dual_clip=None)
    else:
        chosen = PolicySettings()
        fields |= {"old_logp": logp.detach(), "weights": (logp.detach() - mu.log()).exp()}
    (ours,) = torch.autograd.grad(policy_loss(LossInput(**fields), chosen).loss, theta)
    objective = (torch.softmax(theta, 0) * torch.tensor(REWARDS, dtype=torch.float64)).sum()
    (exact,) = torch.autograd.grad(-objective, theta)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_nothing_counts():
    logp = torch.full((3,), math.nan, requires_grad=True)
    tokens = LossInput(
        logp=logp,
        advantages=torch.zeros(3),
        mask=torch.zeros(3, dtype=torch.bool),
        sequence_index=torch.full((3,), -1),
        scale=torch.zeros(3),
    )
    result = policy_loss(tokens, PolicySettings())
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert logp.grad.tolist() == [0.0] * 3
    assert "ratio/mean" not in read(result.metrics)


@pytest.mark.parametrize(
    "choice",
    [
        {"ratio": "sequence"},
        {"proximal": "old"},
        {"kl": "k4", "kl_coefficient": 0.1},
        {"eps_low": -0.1},
        {"eps_low": 1.5},
        {"eps_high": math.nan},
        {"dual_clip": 1.0},
        {"kl": "k3"},
        {"kl_coefficient": 0.1},
        {"kl": "k3", "kl_coefficient": -0.1},
        {"entropy_coefficient": math.nan},
    ],
    ids=str,
)
def test_wrong_settings_are_named(choice):
    with pytest.raises(ConfigError, match=next(iter(choice))):
        PolicySettings(**choice)


@pytest.mark.parametrize(
    ("choice", "missing"),
    [
        ({"proximal": "rollout"}, "rollout_logp"),
        ({"kl": "k3", "kl_coefficient": 0.1}, "reference_logp"),
        ({"entropy_coefficient": 0.1}, "entropy"),
    ],
)
def test_missing_tensor_is_named(choice, missing):
    with pytest.raises(ConfigError, match=missing):
        policy_loss(tokens_with_ratio(1.0, 1.0), PolicySettings(**choice))


TWO = dict.fromkeys(NAMES, 0.5) | {"mask": True, "sequence_index": 3}


@pytest.mark.parametrize("name", NAMES)
def test_non_finite_value_names_tensor_and_token(name):
    with pytest.raises(NumericsError) as caught:
        record([TWO, TWO | {name: math.nan}])
    assert str(caught.value).startswith(name)
    assert "flat token 1 (sequence 3, its token 1)" in str(caught.value)


@pytest.mark.parametrize("name", ["scale", "weights"])
def test_negative_factor_is_refused(name):
    with pytest.raises(NumericsError, match=name):
        record([TWO | {name: -1e-9}])


@pytest.mark.parametrize("name", ["logp", "advantages", "old_logp", "mask", "sequence_index"])
def test_wrong_shape_is_named(name):
    with pytest.raises(ShapeError, match=name):
        record([TWO, TWO], **{name: torch.zeros(3)})


def test_the_ratio_to_the_rollout_is_not_applied_twice():
    require_compatible(PolicySettings(), TokenTis())
    require_compatible(PolicySettings(proximal="rollout"), NoCorrection())
    with pytest.raises(ConfigError, match="token_tis"):
        require_compatible(PolicySettings(proximal="rollout"), TokenTis())
