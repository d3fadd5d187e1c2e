"""Scales that outlive versions: learner and rollout quantise with the same ones, and a resumed run has them too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.formats import get_spec
from halfbyte.kernels import active
from halfbyte.learner.parameters import Parameters
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import Precision, precision_from
from halfbyte.rollout.engine import Engine, EngineOptions


def precision(policy: str, preset: str = "w4a4kv4-head") -> Precision:
    spec = get_spec("halfbyte").replace(global_rounding="none", global_update=policy)
    return replace(precision_from(preset), weight_spec=spec, name=policy)


def engine_of(parameters: Parameters, chosen: Precision) -> Engine:
    tensors = dict(parameters.published()) | parameters.published_scales()
    return Engine(parameters.arch, chosen, tensors, options=EngineOptions(kv_memory_mb=2))


def move(parameters: Parameters, factor: float) -> None:
    for master in parameters.masters.values():
        if master.dim() > 1:
            master.view(-1)[::7] *= factor
    parameters.refresh()


@pytest.mark.parametrize("policy", ["frozen", "hysteretic"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "llama"])
def test_learner_and_engine_hold_the_same_weights_after_updates(
    policy: str, family: str, family_folders: dict[str, Path]
) -> None:
    checkpoint = load_checkpoint(family_folders[family])
    chosen = precision(policy)
    parameters = Parameters(checkpoint.architecture, checkpoint.tensors, chosen, active())
    first = {name: scale.clone() for name, scale in parameters.published_scales().items()}
    assert first
    for factor in (1.02, 1.3, 2.5, 0.05):
        move(parameters, factor)
        weights = engine_of(parameters, chosen).weights
        for (names, _), linear in weights.linears.items():
            head = "model.embed_tokens" if checkpoint.architecture.tie_embeddings else "lm_head"
            parts = [n if n != "lm_head" else head for n in names]
            expected = torch.cat([parameters.effective(f"{n}.weight", linear.kind) for n in parts])
            assert torch.equal(linear.dequantised(), expected.detach()), names
        for (layer, kind), experts in weights.experts.items():
            for part, held in zip(("gate_up_proj", "down_proj"), experts.dequantised()):
                expected = parameters.effective(f"model.layers.{layer}.mlp.experts.{part}", kind)
                assert torch.equal(held, expected.detach()), (layer, part)
    if policy == "frozen":
        assert all(torch.equal(scale, first[name]) for name, scale in parameters.published_scales().items())


def test_a_resumed_learner_has_the_scales_of_the_run_and_not_those_of_its_weights(
    family_folders: dict[str, Path],
) -> None:
    checkpoint = load_checkpoint(family_folders["qwen3_moe"])
    chosen = precision("frozen")
    run = Parameters(checkpoint.architecture, checkpoint.tensors, chosen, active())
    move(run, 3.0)
    assert run.scales is not None
    resumed = Parameters(checkpoint.architecture, dict(run.published()), chosen, active())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(resumed.effective(name), run.effective(name)), "else this test shows nothing"
    for key, master in resumed.masters.items():
        master.copy_(run.masters[key])
    resumed.restore_scales(run.scales.state())
    resumed.refresh()
    for (key, kind), leaf in run._effective.items():
        assert torch.equal(leaf, resumed.effective(key, kind)), key


def test_a_learner_in_bf16_still_keeps_the_scales_of_its_rollout(family_folders: dict[str, Path]) -> None:
    checkpoint = load_checkpoint(family_folders["qwen3_moe"])
    parameters = Parameters(
        checkpoint.architecture,
        checkpoint.tensors,
        precision_from("bf16"),
        active(),
        rollout_precision=precision("hysteretic"),
    )
    assert len(parameters.published_scales()) > 10
    plain = Parameters(checkpoint.architecture, checkpoint.tensors, precision_from("w4a4kv4"), active())
    assert plain.published_scales() == {}
