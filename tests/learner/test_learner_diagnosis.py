"""The training step's diagnosis: segments from trajectories, metrics of every step, memory of reference statistics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.errors import CheckpointError, ConfigError, NumericsError
from halfbyte.kernels import active
from halfbyte.learner.diagnosis import Tokens
from halfbyte.learner.learner import Learner
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import Trajectory
from halfbyte.objective import CORRECTIONS, CorrectionInput, CorrectionResult, Triage
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request, SamplingParams
from halfbyte.train.state import Progress, load_state, save_state


@pytest.fixture
def checkpoint(family_folders: dict[str, Path]) -> Checkpoint:
    return load_checkpoint(family_folders["qwen3_moe"])


def rollouts(checkpoint: Checkpoint, seed: int = 0, *, shift: float = 0.0, versions: int = 0) -> list[Trajectory]:
    """Six samples of two prompts; ``shift`` is added to the rollout's log-probs of bad samples: an amplifying gap."""
    engine = Engine(
        checkpoint.architecture, precision_from("fp32"), checkpoint.tensors, options=EngineOptions(kv_memory_mb=2)
    )
    params = SamplingParams(max_tokens=24, seed=seed, ignore_eos=True)
    out = engine.generate([Request(tuple(range(3, 7 + 3 * g)), params, n=3, key=g, group=g) for g in range(2)])
    for i, t in enumerate(out):
        t.reward = float(i % 3 == 0)
        t.versions = np.full_like(t.versions, versions)
        if t.reward == 0.0:
            t.logprobs = np.minimum(t.logprobs + np.float32(shift), 0).astype(np.float32)
    return out


def learner(checkpoint: Checkpoint, objective: dict[str, Any], **config: Any) -> Learner:
    settings: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, **config}
    return Learner(
        checkpoint.architecture,
        checkpoint.tensors,
        precision=precision_from("fp32"),
        rollout_precision=precision_from("fp32"),
        config=LearnerConfig(**settings),
        objective_config=ObjectiveConfig(**objective),
        kernels=active(),
        total_steps=10,
    )


def test_tokens_carry_turns_versions_and_masks(checkpoint: Checkpoint) -> None:
    a, b, *_ = rollouts(checkpoint)
    a = replace(a, turns=(0, 5, 11), mask=np.arange(24) % 6 != 4)
    tokens = Tokens.of([a, b])
    assert tokens.turn_starts.nonzero()[:, 0].tolist() == [0, 5, 11, 24]
    assert tokens.mask.tolist() == [*a.mask.tolist(), *b.mask.tolist()]
    assert tokens.sequence.tolist() == [0] * 24 + [1] * 24
    assert tokens.ids.tolist() == [*a.response_ids.tolist(), *b.response_ids.tolist()]


def test_every_step_reports_quadrants_and_segments_with_or_without_a_scoring_pass(checkpoint: Checkpoint) -> None:
    batch = rollouts(checkpoint, shift=0.4)
    plain = learner(checkpoint, {"correction": "none", "segmenter": "fixed"}).step(batch, 0).metrics
    scored = learner(checkpoint, {"correction": "none", "segmenter": "fixed"}, minibatches=2).step(batch, 0).metrics
    names = {k for k in plain if k.startswith(("quadrant/", "segment/", "gap/"))}
    assert {"quadrant/mass_neg_neg", "quadrant/amplification", "segment/over_threshold", "gap/k3_kl"} <= names
    for name in names:
        assert scored[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
    assert plain["quadrant/share_neg_neg"] > 0.5
    assert plain["quadrant/amplification"] > 0.9


def test_masses_are_those_after_the_correction(checkpoint: Checkpoint) -> None:
    batch = rollouts(checkpoint, shift=0.4)
    before = learner(checkpoint, {}).step(batch, 0).metrics
    after = learner(checkpoint, {"correction": "token_tis"}).step(batch, 0).metrics
    assert after["quadrant/mass_neg_neg"] < before["quadrant/mass_neg_neg"]
    assert after["quadrant/gap_neg_neg"] == pytest.approx(before["quadrant/gap_neg_neg"], rel=1e-5)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_every_correction_trains_with_rejected_tokens_out_of_the_denominators(
    checkpoint: Checkpoint, name: str
) -> None:
    of = learner(checkpoint, {"correction": name, "count_rejected": False}, minibatches=2)
    result = of.step(rollouts(checkpoint, shift=0.4), 0)
    assert np.isfinite(list(result.metrics.values())).all()


class Counting:
    """Counts calls and passes what it was given on."""

    name, uses_ratio = "counting", False

    def __init__(self) -> None:
        self.seen: list[CorrectionInput] = []

    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        self.seen.append(tokens)
        return Triage()(tokens)


def test_i10_weights_are_made_once_a_step_for_all_epochs_and_mini_batches(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Counting()
    of = learner(checkpoint, {}, epochs=3, minibatches=2)
    of._correction = rule  # type: ignore[assignment]
    given: list[dict[int, float]] = []
    real = of._loss

    def spy(plan: Any, part: list[int], *rest: Any) -> Any:
        assert plan.weights is not None
        given.append({i: float(plan.weights[plan.rows[i]].double().sum()) for i in part})
        return real(plan, part, *rest)

    monkeypatch.setattr(of, "_loss", spy)
    of.step(rollouts(checkpoint, shift=0.4), 0)
    assert len(rule.seen) == 1
    by_sample: dict[int, set[float]] = {}
    for part in given:
        for sample, total in part.items():
            by_sample.setdefault(sample, set()).add(total)
    assert len(given) >= 6
    assert all(len(totals) == 1 for totals in by_sample.values())


def test_older_weight_versions_are_not_diagnosed(checkpoint: Checkpoint) -> None:
    old = rollouts(checkpoint, shift=0.4, versions=2)
    assert learner(checkpoint, {"correction": "triage"}).step(old, 0, version=3).metrics["segment/count"] == 0
    assert learner(checkpoint, {"correction": "triage"}).step(old, 0, version=2).metrics["segment/count"] > 0


def test_memory_survives_a_checkpoint_and_a_failed_step_leaves_it_alone(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"correction": "triage", "correction_options": {"reference_batches": 3}}
    one = learner(checkpoint, options)
    assert one.memory() == {"monitor": {}, "correction": {}}
    one.step(rollouts(checkpoint, 0), 0)
    first = one.memory()
    assert first["monitor"] == first["correction"]
    assert first["correction"]["batches"] == 1.0
    path = save_state(tmp_path, one, Progress(step=1), keep=2)

    def fail(*_: Any, **__: Any) -> Any:
        raise NumericsError("a gradient is nan")

    with monkeypatch.context() as patch:
        patch.setattr(one.optimiser, "step", fail)
        with pytest.raises(NumericsError):
            one.step(rollouts(checkpoint, 1), 1)
    assert one.memory() == first

    other = learner(checkpoint, options)
    load_state(path, other)
    assert other.memory() == first
    batch = rollouts(checkpoint, 1)
    assert other.step(batch, 1).metrics == one.step(batch, 1).metrics
    assert other.memory() == one.memory() != first
    (path / "memory.json").write_text("{}")
    with pytest.raises(CheckpointError, match="reference statistics"):
        load_state(path, other)
    (path / "memory.json").write_text(json.dumps({"monitor": {"loc": 1}, "correction": {}}))
    with pytest.raises(CheckpointError, match="reference statistics"):
        load_state(path, other)
    (path / "memory.json").unlink()
    load_state(path, learner(checkpoint, options))


def test_wrong_segmenters_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="unknown segmenter"):
        learner(checkpoint, {"segmenter": "sentence"})
    with pytest.raises(ConfigError, match=r"segmenter_options\.size"):
        learner(checkpoint, {"segmenter": "fixed", "segmenter_options": {"size": "16"}})
    with pytest.raises(ConfigError, match="proximal"):
        learner(checkpoint, {"correction": "triage", "proximal": "rollout"})
    learner(
        checkpoint,
        {"correction": "triage", "proximal": "rollout", "correction_options": {"variant": "cross_quadrant"}},
    )


def test_segments_of_the_delimiter_rule_follow_the_flags(checkpoint: Checkpoint) -> None:
    of = learner(checkpoint, {"segmenter": "delimiter"})
    batch = rollouts(checkpoint)
    with pytest.raises(ConfigError, match="delimiters"):
        of.step(batch, 0)
    of._monitor.delimiters = torch.arange(checkpoint.architecture.vocab_size) % 2 == 0
    assert of.step(batch, 0).metrics["segment/count"] > 2
