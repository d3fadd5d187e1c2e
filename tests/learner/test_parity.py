"""Native execution: the learner's log-probs are those of sampling, bit for bit, and its gradient is the emulated one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.errors import ConfigError, NumericsError, SpecMismatchError
from halfbyte.kernels import active, get
from halfbyte.learner.learner import Learner
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.precision import Precision, precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.parity import explain, require_parity

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
PRECISIONS = ("w4a4kv4", "bf16", "w4a16", "fp32", "experts-w4a4kv4", "w4a4kv4-head")


def make_learner(checkpoint: Checkpoint, precision: Precision, **config: object) -> Learner:
    arch = checkpoint.architecture
    return Learner(
        arch,
        checkpoint.tensors,
        precision=precision,
        rollout_precision=precision,
        config=LearnerConfig(**{"execution": "native", "warmup_steps": 0, "schedule": "constant", **config}),  # type: ignore[arg-type]
        objective_config=ObjectiveConfig(),
        kernels=active(),
        total_steps=10,
        pack=lambda t: RolloutWeights.pack(arch, precision, t, active(), version=0, n_positions=256),
    )


def sample(
    checkpoint: Checkpoint, precision: Precision, prompts: list[list[int]], *, page: int = 16, together: int = 64
) -> list[Trajectory]:
    options = EngineOptions(kv_memory_mb=4, page_size=page, max_sequences=together)
    engine = Engine(checkpoint.architecture, precision, checkpoint.tensors, options=options)
    sampling = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=3)
    found = engine.generate([Request(tuple(p), sampling, n=2, group=i) for i, p in enumerate(prompts)])
    return [replace(t, reward=float(i % 2)) for i, t in enumerate(found)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    preset=st.sampled_from(PRECISIONS),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    page=st.sampled_from([16, 48]),
    together=st.integers(1, 8),
    packing=st.booleans(),
    budget=st.sampled_from([None, 40]),
    threads=st.integers(1, 3),
)
def test_the_gap_is_exactly_zero_for_every_token(
    family_folders: dict[str, Path],
    family: str,
    preset: str,
    lengths: list[int],
    page: int,
    together: int,
    packing: bool,
    budget: int | None,
    threads: int,
) -> None:
    checkpoint, precision = load_checkpoint(family_folders[family]), precision_from(preset)
    g = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(2, 64, (n,), generator=g).tolist() for n in lengths]
    trajectories = sample(checkpoint, precision, prompts, page=page, together=together)
    if active().name != "reference":
        from halfbyte.kernels.native import set_thread_count, thread_count

        before = thread_count()
        set_thread_count(threads)
    learner = make_learner(checkpoint, precision, packing=packing, max_tokens_per_microbatch=budget)
    scored = learner.score(trajectories)
    if active().name != "reference":
        set_thread_count(before)
    assert scored.logp.abs().max() > 0.1
    assert torch.equal(scored.logp, scored.rollout_logp)


@pytest.mark.parametrize("preset", ["w4a4kv4", {"preset": "bf16", "decode": {"mlp": "w4a4", "experts": "w4a4"}}])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_steps_of_training_keep_the_gap_at_zero(
    family: str, preset: str | dict, family_folders: dict[str, Path]
) -> None:
    checkpoint, precision = load_checkpoint(family_folders[family]), precision_from(preset)
    learner = make_learner(checkpoint, precision, lr=1e-3)
    engine = Engine(
        checkpoint.architecture, precision, dict(learner.parameters.published()), options=EngineOptions(kv_memory_mb=4)
    )
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    for step in range(3):
        found = engine.generate([Request((5, 9, 11), sampling, n=4, key=step)])
        result = learner.step([replace(t, reward=float(i % 2)) for i, t in enumerate(found)], step, engine.version)
        assert result.changed
        assert result.metrics["parity/max_gap"] == 0.0
        assert result.metrics["gap/k3_kl"] == 0.0
        engine.load_weights(dict(learner.parameters.published()), engine.version + 1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_emulated_execution(
    family: str, checkpointing: bool, family_folders: dict[str, Path]
) -> None:
    """In FP32 the two forward passes agree to rounding, so their gradients must as well."""
    checkpoint, precision = load_checkpoint(family_folders[family]), precision_from("fp32")
    trajectories = sample(checkpoint, precision, [[4, 8, 15], [16, 23]])
    found = []
    for execution in ("native", "emulated"):
        learner = make_learner(checkpoint, precision, execution=execution, activation_checkpointing=checkpointing)
        seen: dict[str, torch.Tensor] = {}
        take = learner.parameters.take_gradients
        learner.parameters.take_gradients = lambda take=take, seen=seen: seen.update(take()) or dict(seen)  # type: ignore[method-assign]
        learner.step(trajectories, 0)
        found.append(seen)
    native, emulated = found
    assert native.keys() == emulated.keys()
    for name, gradient in emulated.items():
        assert (native[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


def test_another_precision_or_no_packed_weights_is_refused(family_folders: dict[str, Path]) -> None:
    checkpoint, arch_precision = load_checkpoint(family_folders["llama"]), precision_from("w4a4kv4")
    arguments = {
        "config": LearnerConfig(execution="native"), "objective_config": ObjectiveConfig(), "kernels": active(), "total_steps": 1,
        "rollout_precision": arch_precision,
    }  # fmt: skip
    with pytest.raises(SpecMismatchError, match="native"):
        Learner(checkpoint.architecture, checkpoint.tensors, precision=precision_from("bf16"), pack=dict, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="packed"):
        Learner(checkpoint.architecture, checkpoint.tensors, precision=arch_precision, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="require_parity"):
        LearnerConfig(require_parity=True)


def test_a_break_names_the_first_layer_that_differs(family_folders: dict[str, Path]) -> None:
    checkpoint, precision = load_checkpoint(family_folders["qwen3_moe"]), precision_from("w4a4kv4")
    trajectories = sample(checkpoint, precision, [[4, 8, 15]])
    tensors = dict(checkpoint.tensors)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name] * 1.5
    learner = make_learner(replace(checkpoint, tensors=tensors), precision)
    rollout = RolloutWeights.pack(
        checkpoint.architecture, precision, checkpoint.tensors, get(active().name), version=0, n_positions=256
    )

    def why(t: Trajectory) -> str:
        return explain(rollout, learner.packed_weights(), learner.parameters, t)

    with pytest.raises(NumericsError, match=r"first at model\.layers\.1, position 0"):
        require_parity(learner.score(trajectories), trajectories, 0, why)
    honest = make_learner(checkpoint, precision)
    require_parity(honest.score(trajectories), trajectories, 0, why)
    bent = [replace(trajectories[0], logprobs=trajectories[0].logprobs + np.float32(1e-3))]
    with pytest.raises(NumericsError, match="no layer differs"):
        require_parity(
            honest.score(bent), bent, 0, lambda t: explain(rollout, honest.packed_weights(), honest.parameters, t)
        )
    require_parity(honest.score(bent), bent, 7, why)  # an older version may differ
