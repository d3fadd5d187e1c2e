"""Corrections on padded batches, and inside TRL and verl: the same weights and the same loss as in our own loop."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.errors import ConfigError, DataError, NumericsError, ShapeError
from halfbyte.objective import (
    CorrectionInput,
    LossInput,
    NoCorrection,
    PolicySettings,
    SegmentInput,
    TokenTis,
    Triage,
    count_batch,
    make_correction,
    make_segmenter,
    policy_loss,
    token_scale,
)
from halfbyte.objective.padded import correct_padded
from halfbyte.objective.trl import correct_grpo_batch
from halfbyte.objective.verl import make_policy_loss, rollout_weights

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = ["none", "token_tis", "icepop", "opsm", "triage"]


def padded(seed: int = 0, rows: int = 12, width: int = 40, fill: float = float("nan")) -> dict[str, Tensor]:
    """Responses of different length, padded on the right, some with a masked span and a damaged run."""
    draws = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(5, width + 1, (rows, 1), generator=draws)
    mask[:, 3] &= torch.rand(rows, generator=draws) < 0.7
    rollout = -torch.rand(rows, width, generator=draws) * 3
    learner = (rollout + 0.02 * torch.randn(rows, width, generator=draws)).clamp(max=0)
    advantages = torch.randn(rows, generator=draws)
    learner[advantages < 0, 8:28] -= 0.7
    return {
        "advantages": advantages,
        "rollout": torch.where(mask, rollout, fill),
        "learner": torch.where(mask, learner, fill),
        "mask": mask,
    }


def flat_weights(name: str, batch: dict[str, Tensor]) -> list[Tensor]:
    """Weights row by row, from the flat interface without any padding."""
    mask = batch["mask"]
    rows = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
    # positions, because the masked token in the middle is not among the flat ones and still separates segments
    positions = torch.arange(mask.shape[1]).expand(mask.shape)[mask]
    ones = torch.ones(len(rows), dtype=torch.bool)
    segments = make_segmenter("fixed")(SegmentInput(mask=ones, sequence_index=rows, positions=positions))
    tokens = CorrectionInput(
        gap=(batch["learner"] - batch["rollout"])[mask],
        advantages=batch["advantages"][rows],
        mask=ones,
        sequence_index=rows,
        segments=segments,
        rollout_logp=batch["rollout"][mask],
    )
    return list(make_correction(name)(tokens).weights.split(mask.sum(1).tolist()))


def arguments(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "advantages": batch["advantages"],
        "rollout_logp": batch["rollout"],
        "learner_logp": batch["learner"],
        "mask": batch["mask"],
    }


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(RULES), seed=st.integers(0, 2**31), fill=st.sampled_from([float("nan"), float("inf"), 0.0]))
def test_padding_and_what_stands_in_it_change_nothing(name: str, seed: int, fill: float) -> None:
    batch = padded(seed, fill=fill)
    result = correct_padded(make_correction(name), **arguments(batch), segmenter=make_segmenter("fixed"))
    for row, expected in enumerate(flat_weights(name, batch)):
        assert torch.equal(result.weights[row][batch["mask"][row]], expected)
    assert not result.weights[~batch["mask"]].any()
    per_token = batch["advantages"].unsqueeze(1).expand(batch["mask"].shape)
    again = correct_padded(
        make_correction(name), **arguments(batch | {"advantages": per_token}), segmenter=make_segmenter("fixed")
    )
    assert torch.equal(result.weights, again.weights)


def test_memory_goes_from_batch_to_batch() -> None:
    rule: Any = Triage(reference_batches=2)
    seen = []
    for seed in range(3):
        done = correct_padded(rule, **arguments(padded(seed)), segmenter=make_segmenter("fixed"))
        rule = done.correction
        seen.append(rule.state())
    assert seen[0]["batches"] == 1
    assert seen[1]["batches"] == 2
    assert seen[2] == seen[1]  # frozen
    plain = NoCorrection()
    assert correct_padded(plain, **arguments(padded())).correction is plain


def test_shapes_and_values_that_do_not_fit_are_named() -> None:
    batch = padded()
    for key in ("rollout", "learner", "advantages"):
        with pytest.raises(ShapeError, match="batch, tokens"):
            correct_padded(NoCorrection(), **arguments(batch | {key: batch["rollout"][:, :-1]}))
    with pytest.raises(NumericsError):
        correct_padded(NoCorrection(), **arguments(batch | {"mask": torch.ones_like(batch["mask"])}))


def trl_batch(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "advantages": batch["advantages"],
        "completion_mask": batch["mask"].long(),
        "old_per_token_logps": batch["learner"],
        "sampling_per_token_logps": batch["rollout"],
        "tool_mask": None,
    }


@pytest.mark.parametrize("name", RULES)
def test_trl_advantages_carry_the_weights(name: str) -> None:
    batch = padded()
    done = correct_grpo_batch(trl_batch(batch), make_correction(name), segmenter=make_segmenter("fixed"))
    for row, expected in enumerate(flat_weights(name, batch)):
        mask = batch["mask"][row]
        assert torch.equal(done.advantages[row][mask], batch["advantages"][row] * expected)
    assert not done.advantages[~batch["mask"]].any()


def test_trl_tool_tokens_and_unknown_log_probs_are_not_corrected() -> None:
    batch = trl_batch(padded())
    mask = batch["completion_mask"].bool()
    tools = torch.ones_like(batch["completion_mask"])
    tools[:, :2] = 0
    unknown = batch["sampling_per_token_logps"].clone()
    unknown[:, 4] = float("nan")
    done = correct_grpo_batch(batch | {"tool_mask": tools, "sampling_per_token_logps": unknown}, TokenTis())
    assert not done.weights[:, :2].any()
    assert (done.weights[:, 4][mask[:, 4]] == 1).all()
    assert torch.equal(done.weights[:, 5:], correct_grpo_batch(batch, TokenTis()).weights[:, 5:])


def test_trl_says_what_is_missing_or_doubled() -> None:
    batch = trl_batch(padded())
    for key, match in (("old_per_token_logps", "num_iterations"), ("sampling_per_token_logps", "rollout_func")):
        with pytest.raises(DataError, match=match):
            correct_grpo_batch(batch | {key: None}, TokenTis())
    doubled = batch | {"importance_sampling_ratio": torch.ones(1)}
    with pytest.raises(ConfigError, match="twice"):
        correct_grpo_batch(doubled, TokenTis())
    correct_grpo_batch(doubled, NoCorrection())


def our_loss(batch: dict[str, Tensor], logp: Tensor, weights: Tensor, chosen: PolicySettings) -> Tensor:
    mask = batch["mask"].reshape(-1)
    rows = torch.arange(len(batch["mask"])).repeat_interleave(batch["mask"].shape[1])
    per_token = batch["advantages"].unsqueeze(1).expand(batch["mask"].shape).reshape(-1)
    scale = token_scale(mask, rows, count_batch(mask, rows), "token_mean")
    tokens = LossInput(
        logp=logp.reshape(-1),
        advantages=per_token,
        mask=mask,
        sequence_index=rows,
        scale=scale,
        old_logp=batch["learner"].reshape(-1),
        weights=weights.reshape(-1),
    )
    return policy_loss(tokens, chosen).loss


def moved(batch: dict[str, Tensor]) -> Tensor:
    """The learner's log-probs after some updates."""
    noise = 0.3 * torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(9))
    return (batch["learner"] + noise).requires_grad_()


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RULES)
def test_verl_loss_and_gradient_are_ours(name: str) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    batch = padded(fill=0.0)  # verl multiplies by the mask, so its own loss cannot stand NaN there
    per_token = batch["advantages"].unsqueeze(1).expand(batch["mask"].shape)
    names = {"rollout_log_probs": "rollout", "old_log_probs": "learner", "response_mask": "mask"}
    verl_batch = {key: batch[ours] for key, ours in names.items()} | {"advantages": per_token}
    weights = rollout_weights(verl_batch, make_correction(name), segmenter=make_segmenter("fixed")).weights
    core.register_policy_loss("halfbyte-test")(make_policy_loss(PolicySettings()))
    found = []
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={}, get=lambda key, default: default
    )
    for which in ("vanilla", "halfbyte-test"):
        logp = moved(batch)
        value, metrics = core.get_policy_loss_fn(which)(
            old_log_prob=batch["learner"],
            log_prob=logp,
            advantages=per_token,
            response_mask=batch["mask"].float(),
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=weights,
        )
        value.backward()
        found.append((value.detach(), logp.grad, metrics))
    logp = moved(batch)
    ours = our_loss(batch, logp, weights, PolicySettings())
    ours.backward()
    for value, gradient, metrics in found:
        torch.testing.assert_close(value, ours.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, logp.grad, rtol=1e-5, atol=1e-7)
        assert metrics.keys() == found[0][2].keys()
        for key, number in metrics.items():
            assert number == pytest.approx(found[0][2][key], abs=1e-6), key


def test_verl_padding_may_hold_nan_under_our_loss() -> None:
    pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    losses = []
    for fill in (0.0, float("nan")):
        batch = padded(fill=fill)
        logp = moved(batch)
        value, _ = make_policy_loss(PolicySettings())(
            batch["learner"], logp, batch["advantages"].unsqueeze(1).expand(batch["mask"].shape), batch["mask"].float()
        )
        value.backward()
        assert logp.grad is not None
        losses.append((value.detach(), logp.grad))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])


def test_verl_says_what_is_missing() -> None:
    with pytest.raises(DataError, match="calculate_log_probs"):
        rollout_weights({"old_log_probs": torch.zeros(1, 1)}, NoCorrection())


def test_verl_example_weighs_the_advantages_of_a_real_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    verl = pytest.importorskip("verl", exc_type=ImportError)
    pytest.importorskip("verl.trainer.ppo.v1.trainer_base", exc_type=ImportError)
    monkeypatch.setenv("HALFBYTE_CORRECTION", "token_tis")
    from verl.trainer.ppo import core_algos, ray_trainer

    example = load_example("verl_triage")
    batch = padded(fill=0.0)
    rewards = torch.zeros(batch["mask"].shape)
    rewards[torch.arange(12), batch["mask"].sum(1) - 1] = torch.rand(12, generator=torch.Generator().manual_seed(1))
    data = verl.DataProto.from_single_dict(
        {
            "token_level_rewards": rewards,
            "response_mask": batch["mask"].float(),
            "rollout_log_probs": batch["rollout"],
            "old_log_probs": batch["learner"],
            "uid": np.array([str(i // 4) for i in range(12)], dtype=object),
        }
    )
    plain = ray_trainer.compute_advantage(data, adv_estimator="grpo").batch["advantages"].clone()
    compute = example.corrected(ray_trainer.compute_advantage, make_correction("token_tis"))
    weighed = compute(data, adv_estimator="grpo").batch["advantages"]
    expected = torch.where(batch["mask"], (batch["learner"] - batch["rollout"]).exp().clamp(max=2), 0.0)
    torch.testing.assert_close(weighed, plain * expected)
    assert "halfbyte" in core_algos.POLICY_LOSS_REGISTRY


@pytest.mark.parametrize("name", ["none", "token_tis", "triage"])
def test_trl_example_trains_on_fp4_rollouts_and_its_loss_is_ours(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", exc_type=ImportError)
    example = load_example("trl_triage")
    seen: list[tuple[dict[str, Any], Tensor, Tensor]] = []

    class Watched(example.CorrectedTrainer):  # type: ignore[misc,name-defined]
        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            self.last = super()._get_per_token_logps_and_entropies(*args, **named)
            return self.last

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            loss = super()._compute_loss(model, inputs)
            seen.append((dict(inputs), self.last[0].detach(), loss.detach()))
            return loss

    example.CorrectedTrainer = Watched
    settings_ = {"per_device_train_batch_size": 16, "learning_rate": 3e-3}
    trainer = example.train(4, name, "w4a4kv4", str(tmp_path), router_aux_loss_coef=0.0, **settings_)
    assert len(seen) == 4
    assert len(trainer.mismatch) == 2
    changed = 0
    for inputs, logp, loss in seen:
        mask = inputs["completion_mask"].bool()
        rows = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
        flat = mask.reshape(-1)
        tokens = LossInput(
            logp=logp.reshape(-1),
            advantages=inputs["advantages"].reshape(-1),
            mask=flat,
            sequence_index=rows,
            scale=token_scale(flat, rows, count_batch(flat, rows), "token_mean"),
            old_logp=inputs["old_per_token_logps"].reshape(-1),
        )
        ours = policy_loss(tokens, PolicySettings(dual_clip=None)).loss
        torch.testing.assert_close(loss, ours, rtol=1e-4, atol=1e-5)
        row_varies = [a[m].unique().numel() > 1 for a, m in zip(inputs["advantages"], mask)]
        changed += any(row_varies)
    if name != "triage":  # whose selection may be empty
        assert (changed > 0) == (name == "token_tis")
