"""The learner under the rollout's guidance: smaller gap, straight-through gradient, every case without guidance, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.errors import ConfigError, DataError, SpecMismatchError
from halfbyte.formats import get_spec
from halfbyte.guidance.batch import Alignment
from halfbyte.guidance.choice import choose
from halfbyte.guidance.plan import Entry, Plan, make_plan
from halfbyte.guidance.rounding import HARD_REPLAY, SCALE_ONLY, TRACE, RoundingMethod
from halfbyte.kernels import active
from halfbyte.learner.learner import Learner
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.precision import Precision, precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.objective import gap_metrics, token_gap
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request

W4A4 = precision_from("w4a4kv4")


@pytest.fixture(scope="module")
def moe(family_folders: dict[str, Path]) -> Checkpoint:
    return load_checkpoint(family_folders["qwen3_moe"])


def rollouts(
    checkpoint: Checkpoint, precision: Precision = W4A4, plan: Plan | None = None, n: int = 6
) -> list[Trajectory]:
    arch = checkpoint.architecture
    engine = Engine(
        arch,
        precision,
        checkpoint.tensors,
        options=EngineOptions(kv_memory_mb=4),
        guidance=make_plan(arch, precision) if plan is None else plan,
    )
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [tuple(int(v) for v in rng.integers(2, arch.vocab_size, 20)) for _ in range(n)]
    out = engine.generate([Request(p, sampling, n=4, key=i, group=i) for i, p in enumerate(prompts)])
    for i, t in enumerate(out):
        t.reward = float((i * 7) % 4)
    return out


def learner(
    checkpoint: Checkpoint,
    alignment: Alignment | None,
    precision: Precision = W4A4,
    rollout: Precision | None = None,
    objective: dict[str, object] | None = None,
    **config: object,
) -> Learner:
    return Learner(
        checkpoint.architecture,
        checkpoint.tensors,
        precision=precision,
        rollout_precision=rollout or precision,
        config=LearnerConfig(**{"schedule": "constant", "warmup_steps": 0, "products": "bf16", **config}),  # type: ignore[arg-type]
        objective_config=ObjectiveConfig(**(objective or {})),  # type: ignore[arg-type]
        kernels=active(),
        total_steps=4,
        alignment=alignment,
    )


def gap(of: Learner, trajectories: list[Trajectory]) -> tuple[float, float]:
    """(k3 KL, mean |gap|)."""
    s = of.score(trajectories)
    found = gap_metrics(token_gap(s.logp, s.rollout_logp, s.mask, s.sequence), s.mask, s.sequence)
    return found.k3_kl, found.mean_abs


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "qwen2"])
def test_guidance_closes_the_gap_and_shuffled_guidance_opens_it(family: str, family_folders: dict[str, Path]) -> None:
    """Every place guided leaves what replaying the rollout's own values leaves: BF16 sums outside the quantisers."""
    checkpoint = load_checkpoint(family_folders[family])
    trajectories = rollouts(checkpoint)
    independent, traced, oracle = (
        gap(learner(checkpoint, a), trajectories) for a in (None, Alignment(TRACE), Alignment(HARD_REPLAY))
    )
    scales = gap(learner(checkpoint, Alignment(SCALE_ONLY)), trajectories)
    assert traced[0] < 0.1 * independent[0]
    assert traced[1] < 0.3 * independent[1]
    assert oracle[0] <= 1.5 * traced[0] + 1e-12
    assert traced[0] < scales[0] < independent[0]
    others = trajectories[1:] + trajectories[:1]
    shuffled = [replace(t, guidance=o.guidance) for t, o in zip(trajectories, others)]
    assert gap(learner(checkpoint, Alignment(TRACE)), shuffled)[0] > independent[0]


def test_bits_and_shift_are_ordered(moe: Checkpoint) -> None:
    arch = moe.architecture
    trajectories = rollouts(moe)
    by_bits = {
        b: gap(learner(moe, Alignment(TRACE, make_plan(arch, W4A4, bits=b))), trajectories)[0] for b in (1, 2, 4)
    }
    assert by_bits[2] <= by_bits[1] * 1.0001
    assert by_bits[4] <= by_bits[2] * 1.0001
    none = gap(learner(moe, Alignment(RoundingMethod("shift", 0.0))), trajectories)
    full = gap(learner(moe, Alignment(RoundingMethod("shift", 1.0))), trajectories)
    assert none == gap(learner(moe, Alignment(SCALE_ONLY)), trajectories)
    assert full == gap(learner(moe, Alignment(TRACE)), trajectories)


def test_more_places_leave_less(moe: Checkpoint) -> None:
    precision = precision_from("experts-w4a4kv4")
    trajectories = rollouts(moe, precision)
    arch = moe.architecture

    def left(*sites: str, layers: str = "all") -> float:
        plan = make_plan(arch, precision, sites=sites, layers=layers)
        return gap(learner(moe, Alignment(TRACE, plan), precision), trajectories)[0]

    nothing = gap(learner(moe, None, precision), trajectories)[0]
    assert left() == nothing
    assert left("expert_in", "expert_mid", "k", "v") < left("expert_in", "k", "v") < left("k", "v") < nothing
    assert left("expert_in", "k", "v") < left("expert_in", "k", "v", layers="deep:0.5") < nothing


def gradients(of: Learner, trajectories: list[Trajectory]) -> dict[str, torch.Tensor]:
    caught: dict[str, torch.Tensor] = {}
    of.optimiser.step = lambda found, factor: caught.update({k: v.clone() for k, v in found.items()}) or 0.0  # type: ignore
    of.step(trajectories, 0)
    return caught


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens_per_microbatch": 40},
        {"packing": False, "max_tokens_per_microbatch": 130},
        {"activation_checkpointing": True},
    ],
    ids=str,
)
def test_guided_gradients_do_not_depend_on_how_tokens_are_split(moe: Checkpoint, change: dict[str, object]) -> None:
    trajectories = rollouts(moe)
    base = gradients(learner(moe, Alignment(), products="fp32"), trajectories)
    got = gradients(learner(moe, Alignment(), products="fp32", **change), trajectories)
    assert base.keys() == got.keys()
    for name, expected in base.items():
        torch.testing.assert_close(got[name], expected, atol=2e-6 * float(expected.abs().max()) + 1e-12, rtol=1e-4)


def test_replayed_values_give_the_gradient_of_replayed_values(moe: Checkpoint) -> None:
    """Where trace reproduces the rollout's values, it must give exactly the gradients of the oracle: dy/dx = 1 in both."""
    trajectories = rollouts(moe)
    a = gradients(learner(moe, Alignment(TRACE), products="fp32"), trajectories)
    b = gradients(learner(moe, Alignment(HARD_REPLAY), products="fp32"), trajectories)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_expert_guidance_follows_the_expert_when_routes_are_live(moe: Checkpoint) -> None:
    """Without router replay a slot may hold another expert: its guidance comes from that expert's slot, or is left out."""
    trajectories = rollouts(moe)
    live = gap(learner(moe, Alignment(), router_replay=False), trajectories)[0]
    swapped = []
    for t in trajectories:
        assert t.routes is not None
        swapped.append(replace(t, routes=t.routes[:, :, ::-1].copy()))  # says that the slots were the other way round
    assert live < 0.3 * gap(learner(moe, None, router_replay=False), trajectories)[0]
    assert gap(learner(moe, Alignment(), router_replay=False), swapped)[0] > 10 * live


def test_tokens_without_guidance_are_rounded_as_before_and_counted(moe: Checkpoint) -> None:
    """No record, an older version, an aborted sample's tail: own scale, to nearest, bit for bit; and the metric says how many."""
    trajectories = rollouts(moe)
    without = [replace(t, guidance=None) for t in trajectories]
    plain = learner(moe, None).score(trajectories).logp
    assert torch.equal(learner(moe, Alignment()).score(without).logp, plain)

    some = [t if i % 2 else replace(t, guidance=None) for i, t in enumerate(trajectories)]
    mixed, guided = (learner(moe, Alignment()).score(x) for x in (some, trajectories))
    odd = mixed.sequence % 2 == 1
    torch.testing.assert_close(mixed.logp[odd], guided.logp[odd], atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed.logp[~odd], plain[~odd], atol=1e-5, rtol=0)

    short = [
        replace(t, guidance=replace(t.guidance, rows=t.guidance.rows[:10], kv=t.guidance.kv[:10])) for t in trajectories
    ]  # type: ignore
    for given, share in ((trajectories, 0.0), (some, 0.5), (without, 1.0), (short, 1 - 10 / 31)):
        metrics = learner(moe, Alignment(), objective={"skip_zero_advantage": False}).step(given, 0).metrics
        assert metrics["align/unguided"] == pytest.approx(share)
    stale = learner(moe, Alignment(max_version_lag=1), objective={"skip_zero_advantage": False})
    assert stale.step(trajectories, 0, version=1).metrics["align/unguided"] == 0.0
    assert stale.step(trajectories, 1, version=2).metrics["align/unguided"] == 1.0


@pytest.mark.parametrize("name", ["w4a4kv4", "experts-w4a4kv4"])
def test_the_learners_weights_are_the_codes_that_the_rollout_serves(name: str, moe: Checkpoint) -> None:
    """Weights need no guidance: after an update too, both sides multiply by the same bits."""
    precision = precision_from(name)
    trained = learner(moe, Alignment(), precision)
    assert trained.step(rollouts(moe, precision), 0).changed
    engine = Engine(moe.architecture, precision, dict(trained.parameters.published()), version=1)
    spec, compared = precision.weight_spec, 0
    masters = trained.parameters.masters
    for (names, kind), packed in engine.weights.linears.items():
        held = [n for n in names if f"{n}.weight" in masters]  # not a tied head
        if kind == "w4a4" and held:
            mine = torch.cat([trained.parameters.effective(f"{n}.weight", kind) for n in held])
            assert torch.equal(packed.dequantised(), mine)
            for n in held:
                q = active().quantise(masters[f"{n}.weight"].bfloat16(), spec)
                assert torch.equal(q.dequantise(), trained.parameters.effective(f"{n}.weight", kind))
            compared += 1
    for (layer, kind), experts in engine.weights.experts.items():
        for part, values in zip(("gate_up_proj", "down_proj"), experts.dequantised()):
            name_ = f"model.layers.{layer}.mlp.experts.{part}"
            assert torch.equal(values, trained.parameters.effective(name_, kind)), name_
            compared += 1
    assert compared >= 4


def test_another_spec_is_refused_by_the_name_of_the_field(moe: Checkpoint) -> None:
    other = replace(W4A4, activation_spec=get_spec("halfbyte_token").replace(ties="away"))
    trajectories = [replace(t, precision=other) for t in rollouts(moe)]
    with pytest.raises(SpecMismatchError, match="ties"):
        learner(moe, Alignment(), other, other).step(trajectories, 0)


def test_guidance_of_different_plans_in_one_batch_is_refused(moe: Checkpoint) -> None:
    a, b = rollouts(moe), rollouts(moe, plan=make_plan(moe.architecture, W4A4, bits=1))
    with pytest.raises(DataError, match="different plans"):
        learner(moe, Alignment()).score(a[:2] + b[2:4])
    with pytest.raises(ConfigError, match="recorded at 1 bits"):
        learner(moe, Alignment(plan=make_plan(moe.architecture, W4A4, bits=4))).score(b)


def test_metrics_measure_what_guidance_repairs(moe: Checkpoint) -> None:
    found = learner(moe, Alignment()).step(rollouts(moe), 0).metrics
    assert 0.0 < found["align/code_mismatch"] < 0.5
    assert 0.0 < found["align/scale_mismatch"] < 1.0
    parts = [found[f"align/code_difference_{n}"] for n in ("0", "1", "2", "3_or_more")]
    assert sum(parts) == pytest.approx(1.0)
    assert 1.0 - parts[0] == pytest.approx(found["align/code_mismatch"])
    assert found["align/code_mismatch_guided"] < found["align/code_mismatch"]
    assert 0.0 < found["align/relative_difference"] < 1.0
    for layer in (0, 1):
        for site in ("qkv_in", "o_in", "expert_in", "expert_mid", "k", "v"):
            assert f"align/code_mismatch/{layer}/{site}" in found
    same = learner(moe, Alignment(HARD_REPLAY), products="fp32").step(rollouts(moe), 0).metrics
    assert same["align/code_mismatch"] < 0.1 * found["align/code_mismatch"]


def test_auto_keeps_what_repairs_most_a_byte_within_the_budget(moe: Checkpoint) -> None:
    """Against the best choice of places at one bit, by brute force; a greedy choice may lose a little to it."""
    arch = moe.architecture
    measuring = learner(moe, Alignment(measured_tokens=512, thorough=True))
    measuring.step(rollouts(moe), 0)
    found = measuring.comparisons
    plan = make_plan(arch, W4A4)
    whole = plan.formula_bytes(arch, W4A4)
    assert choose(plan, found, arch, W4A4, 1e9).formula_bytes(arch, W4A4) <= whole
    assert len(choose(plan, found, arch, W4A4, 0.0)) == 0

    def repaired(chosen: Plan) -> float:
        total = 0.0
        for e in chosen:
            c = found[e.layer, e.site]
            width = {"expert_mid": 2 * 48, "k": 2 * 16, "v": 2 * 16}.get(e.site, 64)
            total += width * (c.mismatched - c.left_by_bits[e.bits]) / c.values
        return total

    for budget in (30.0, 60.0, 120.0):
        chosen = choose(plan, found, arch, W4A4, budget)
        assert chosen.formula_bytes(arch, W4A4) <= budget
        one_bit = [Entry(e.layer, e.site, 1) for e in plan]
        best = 0.0
        for mask in range(2 ** len(one_bit)):
            picked = Plan(tuple(e for i, e in enumerate(one_bit) if mask >> i & 1))
            if picked.formula_bytes(arch, W4A4) <= budget:
                best = max(best, repaired(picked))
        assert repaired(chosen) >= 0.8 * best
