"""The training step: invariances of loss and gradient, straight-through rounding at the rollout's sites, refusals, state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.errors import DataError, SpecMismatchError
from halfbyte.kernels import active
from halfbyte.learner.batch import micro_batches
from halfbyte.learner.buckets import length_buckets
from halfbyte.learner.learner import Learner
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.precision import Precision, precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request


@pytest.fixture
def checkpoint(family_folders: dict[str, Path]) -> Checkpoint:
    return load_checkpoint(family_folders["qwen3_moe"])


def rollouts(
    checkpoint: Checkpoint, precision: str = "fp32", *, groups: int = 3, n: int = 4, **sampling: object
) -> list[Trajectory]:
    engine = Engine(
        checkpoint.architecture, precision_from(precision), checkpoint.tensors, options=EngineOptions(kv_memory_mb=2)
    )
    params = SamplingParams(**{"max_tokens": 9, **sampling})  # type: ignore[arg-type]
    requests = [Request(tuple(range(3, 6 + 4 * g)), params, n=n, key=g, group=g) for g in range(groups)]
    out = engine.generate(requests)
    for i, t in enumerate(out):
        t.reward = float((i * 7) % 4)
    return out


def learner(
    checkpoint: Checkpoint,
    precision: str | Precision = "fp32",
    rollout: str | Precision | None = None,
    objective: dict[str, object] | None = None,
    **config: object,
) -> Learner:
    settings = {"schedule": "constant", "warmup_steps": 0, **config}
    return Learner(
        checkpoint.architecture,
        checkpoint.tensors,
        precision=precision_from(precision),
        rollout_precision=precision_from(rollout or precision),
        config=LearnerConfig(**settings),  # type: ignore[arg-type]
        objective_config=ObjectiveConfig(**(objective or {})),  # type: ignore[arg-type]
        kernels=active(),
        total_steps=10,
    )


def gradients(of: Learner, trajectories: list[Trajectory]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients of one step's first update, before clipping."""
    caught: dict[str, torch.Tensor] = {}
    real = of.optimiser.step

    def spy(found: dict[str, torch.Tensor], factor: float) -> float:
        if not caught:
            caught.update({k: v.clone() for k, v in found.items()})
        return real(found, factor)

    of.optimiser.step = spy  # type: ignore[assignment]
    result = of.step(trajectories, 0)
    assert result.changed
    return caught, result.metrics


@pytest.mark.parametrize("denominator", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens_per_microbatch": 1},
        {"max_tokens_per_microbatch": 40},
        {"packing": False},
        {"packing": False, "max_tokens_per_microbatch": 70},
        {"activation_checkpointing": True},
    ],
    ids=str,
)
def test_trl_6024_loss_and_gradient_do_not_depend_on_how_tokens_are_split(
    checkpoint: Checkpoint, change: dict[str, object], denominator: str
) -> None:
    trajectories = rollouts(checkpoint)
    objective: dict[str, object] = {"denominator": denominator}
    base, base_metrics = gradients(learner(checkpoint, objective=objective), trajectories)
    got, metrics = gradients(learner(checkpoint, objective=objective, **change), trajectories)
    assert base.keys() == got.keys()
    scale = max(float(g.abs().max()) for g in base.values())
    assert scale > 1e-3
    for name, gradient in base.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6 * max(1.0, scale), rtol=1e-6, msg=name)
    assert abs(metrics["loss/policy"] - base_metrics["loss/policy"]) <= 1e-6
    assert metrics["gap/mean_abs"] == pytest.approx(base_metrics["gap/mean_abs"], abs=1e-6)


def test_order_of_samples_does_not_matter(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint)
    base, _ = gradients(learner(checkpoint), trajectories)
    got, _ = gradients(learner(checkpoint), trajectories[::-1])
    for name, gradient in base.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_skipping_samples_without_advantage_changes_no_gradient(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint)
    for t in trajectories[:4]:
        t.reward = 1.0
    base, base_metrics = gradients(learner(checkpoint, objective={"skip_zero_advantage": False}), trajectories)
    got, metrics = gradients(learner(checkpoint, objective={"skip_zero_advantage": True}), trajectories)
    assert base_metrics["learner/samples"] == 12
    assert metrics["learner/samples"] == 8
    for name, gradient in base.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_gradient_equals_an_independent_computation(checkpoint: Checkpoint, family_folders: dict[str, Path]) -> None:
    """Policy gradient of the same samples by transformers and autograd, sample by sample, no packing, no clipping."""
    import transformers

    trajectories = rollouts(checkpoint)
    got, _ = gradients(learner(checkpoint, router_replay=False), trajectories)
    model = transformers.AutoModelForCausalLM.from_pretrained(family_folders["qwen3_moe"], dtype=torch.float32)
    rewards = np.array([t.reward for t in trajectories]).reshape(3, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    total = sum(len(t.response_ids) for t in trajectories)
    for t, advantage in zip(trajectories, advantages.reshape(-1)):
        logits = model(torch.tensor([t.ids.tolist()])).logits[0, len(t.prompt_ids) - 1 : -1]
        logp = F.log_softmax(logits, dim=-1)[range(len(t.response_ids)), t.response_ids.tolist()]
        (-(logp * float(advantage)).sum() / total).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("precision", ["w4a4kv4", "experts-w4a4kv4", "w4a16", "bf16"])
def test_emulated_forward_follows_the_rollout_and_plain_bf16_does_not(checkpoint: Checkpoint, precision: str) -> None:
    """Rounding at the rollout's own sites leaves a gap from summation order alone; forgetting the quantiser leaves far more."""
    trajectories = rollouts(checkpoint, precision)
    gap = learner(checkpoint, precision).step(trajectories, 0).metrics["gap/mean_abs"]
    naive = learner(checkpoint, "bf16", rollout=precision).step(trajectories, 0).metrics["gap/mean_abs"]
    if precision == "bf16":
        assert gap == naive
    else:
        assert gap < 0.5 * naive


def test_forgetting_the_kv_quantiser_is_visible(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint, "w4a4kv4")
    without = replace(precision_from("w4a4kv4"), kv="bf16")
    right = learner(checkpoint, "w4a4kv4").step(trajectories, 0).metrics["gap/mean_abs"]
    wrong = learner(checkpoint, without, rollout="w4a4kv4").step(trajectories, 0).metrics["gap/mean_abs"]
    assert wrong > 1.5 * right


def test_published_weights_are_the_bf16_cast_of_the_masters(checkpoint: Checkpoint) -> None:
    of = learner(checkpoint, "w4a4kv4")
    of.step(rollouts(checkpoint, "w4a4kv4"), 0)
    published = dict(of.parameters.published())
    assert set(published) == set(checkpoint.tensors)
    for name, tensor in published.items():
        assert tensor.dtype == torch.bfloat16, name
    q = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(published[q], of.parameters.masters[q].bfloat16())
    stacked = of.parameters.masters["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(published["model.layers.1.mlp.experts.3.up_proj.weight"], stacked[3, 48:].bfloat16())


def test_effective_weights_are_the_codes_the_rollout_serves(checkpoint: Checkpoint) -> None:
    of = learner(checkpoint, "w4a4kv4")
    engine = Engine(
        checkpoint.architecture,
        precision_from("w4a4kv4"),
        dict(of.parameters.published()),
        options=EngineOptions(kv_memory_mb=2),
    )
    names = tuple(f"model.layers.0.self_attn.{p}_proj" for p in "qkv")
    served = engine.weights.linears[names, "w4a4"].dequantised()
    trained = torch.cat([of.parameters.effective(f"{n}.weight", "w4a4") for n in names])
    assert torch.equal(served, trained)
    gate_up, down = engine.weights.experts[1, "w4a4"].dequantised()
    prefix = "model.layers.1.mlp.experts"
    assert torch.equal(gate_up, of.parameters.effective(f"{prefix}.gate_up_proj", "w4a4"))
    assert torch.equal(down, of.parameters.effective(f"{prefix}.down_proj", "w4a4"))


def test_rollout_of_another_spec_is_refused_by_field(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint, "w4a4kv4")
    other = precision_from({"preset": "w4a4kv4", "weight_spec": "modelopt"})
    with pytest.raises(SpecMismatchError, match="weight_spec differs"):
        learner(checkpoint, "w4a4kv4", rollout=other).step(trajectories, 0)
    with pytest.raises(SpecMismatchError, match="kv differs"):
        learner(checkpoint, "w4a4kv4", rollout=replace(precision_from("w4a4kv4"), kv="bf16")).step(trajectories, 0)
    mixed = [*trajectories[:-1], replace(trajectories[-1], sampling=SamplingParams(temperature=0.5))]
    with pytest.raises(SpecMismatchError, match="temperature"):
        learner(checkpoint, "w4a4kv4").step(mixed, 0)


def test_malformed_trajectories_are_refused(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint)
    bad = replace(trajectories[0], response_ids=trajectories[0].response_ids + 64)
    with pytest.raises(DataError, match="outside the vocabulary"):
        learner(checkpoint).step([bad, *trajectories[1:]], 0)
    bad = replace(trajectories[0], logprobs=trajectories[0].logprobs * np.float32("nan"))
    with pytest.raises(DataError, match="not finite"):
        learner(checkpoint).step([bad, *trajectories[1:]], 0)


def test_verl_group_of_one_and_equal_rewards_change_nothing(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint)
    for t in trajectories:
        t.reward = 1.0
    of = learner(checkpoint)
    before = {k: v.clone() for k, v in of.parameters.masters.items()}
    result = of.step(trajectories, 0)
    assert not result.changed
    assert all(torch.equal(before[k], v) for k, v in of.parameters.masters.items())
    alone = rollouts(checkpoint, n=1)
    result = of.step(alone, 0)
    assert not result.changed
    assert result.warnings


def test_failed_reward_leaves_its_sample_out(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint)
    trajectories[2].reward = None
    got, metrics = gradients(learner(checkpoint), trajectories)
    rest, _ = gradients(learner(checkpoint), [t for i, t in enumerate(trajectories) if i != 2])
    assert metrics["advantage/invalid"] == 1
    for name, gradient in rest.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_router_replay_uses_the_rollouts_experts_and_still_trains_the_router(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint)
    for t in trajectories:
        assert t.routes is not None
        t.routes = np.ascontiguousarray((t.routes + 1) % 8)  # routes the router would not choose
    _, live_metrics = gradients(learner(checkpoint, router_replay=False), trajectories)
    replayed, metrics = gradients(learner(checkpoint, router_replay=True), trajectories)
    assert live_metrics["gap/mean_abs"] < 1e-5
    assert metrics["gap/mean_abs"] > 1e-2
    assert float(replayed["model.layers.0.mlp.gate.weight"].abs().max()) > 0


def test_filtered_rollouts_are_scored_under_the_kept_set(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint, top_k=4, temperature=0.8)
    metrics = learner(checkpoint).step(trajectories, 0).metrics
    assert metrics["gap/max_abs"] < 1e-4


def test_one_long_sequence_does_not_widen_the_grid_of_the_others() -> None:
    lengths = [20] * 200 + [1500] + [25, 3]
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()])
    buckets = length_buckets(starts)
    cells = sum(b.n * b.length for b in buckets)
    assert cells <= sum(lengths) / 0.7 + 1
    rows = torch.cat([b.real_rows for b in buckets])
    assert torch.equal(rows.sort().values, torch.arange(sum(lengths)))


def test_trl_6357_the_eos_is_trained_on_also_where_it_is_the_padding(checkpoint: Checkpoint) -> None:
    """A response that is EOS alone, padded with the same id: its log-prob gets a gradient, the padding none."""
    trajectories = rollouts(checkpoint)
    for t in trajectories:
        t.response_ids = np.array([1], np.int32) if t.sample else t.response_ids
        if t.sample:
            t.logprobs, t.mask, t.versions = (x[:1] for x in (t.logprobs, t.mask, t.versions))
            assert t.routes is not None
            t.routes = t.routes[: len(t) - 1]
    of = learner(checkpoint, packing=False)
    scored = of.score(trajectories)
    assert int((scored.mask & (scored.sequence >= 0)).sum()) == sum(len(t.response_ids) for t in trajectories)
    padded, _ = gradients(learner(checkpoint, packing=False), trajectories)
    packed, _ = gradients(learner(checkpoint, packing=True), trajectories)
    head = padded["lm_head.weight"][1]
    assert float(head.abs().max()) > 1e-4, "the EOS row of the head is trained"
    torch.testing.assert_close(padded["lm_head.weight"], packed["lm_head.weight"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_openrlhf_857_the_learner_divides_by_the_rollouts_temperature(
    checkpoint: Checkpoint, temperature: float
) -> None:
    metrics = learner(checkpoint).step(rollouts(checkpoint, temperature=temperature), 0).metrics
    assert metrics["gap/max_abs"] < 1e-4


def test_micro_batches_keep_order_and_budget() -> None:
    assert micro_batches([5, 5, 5, 20, 1], 10, packing=True) == [[0, 1], [2], [3], [4]]
    assert micro_batches([2, 6, 2], 12, packing=False) == [[0, 1], [2]]
    assert micro_batches([], 10, packing=True) == []


def test_several_epochs_and_minibatches_take_as_many_updates(checkpoint: Checkpoint) -> None:
    of = learner(checkpoint, epochs=2, minibatches=3, lr=1e-3)
    metrics = of.step(rollouts(checkpoint), 0).metrics
    assert metrics["optim/updates"] == 6
    assert metrics["ratio/max"] > 1.0


def test_token_tis_weighs_by_the_truncated_ratio(checkpoint: Checkpoint) -> None:
    trajectories = rollouts(checkpoint, "w4a4kv4")
    of = learner(checkpoint, "bf16", rollout="w4a4kv4", objective={"correction": "token_tis"})
    metrics = of.step(trajectories, 0).metrics
    assert metrics["weight/mean"] != 1.0
    assert metrics["gap/mean_abs"] > 0


@pytest.mark.parametrize("level", ["sequence_sum", "sequence_mean"])
def test_sequence_ratios_run(checkpoint: Checkpoint, level: str) -> None:
    of = learner(checkpoint, objective={"ratio": level}, minibatches=2, lr=1e-3)
    assert np.isfinite(of.step(rollouts(checkpoint), 0).metrics["loss/policy"])
