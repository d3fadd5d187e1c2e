"""The built-in arms resolve, are told apart, and share task and budget."""

from __future__ import annotations

import pytest

from halfbyte.config import load_config
from halfbyte.errors import ConfigError
from halfbyte.guidance.plan import Plan as GuidancePlan
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.objective import make_correction
from halfbyte.study.arms import BUILT_IN, configured, recognise, require_arm_keys, setting
from halfbyte.train.alignment import make_alignment

TRAINED = [arm for arm in BUILT_IN.values() if arm.source is None]
ASKED_FOR = {
    "bf16", "fp4-naive", "asymmetric", "qat", "qat+tis", "qat+icepop", "opsm", "trace", "trace-full", "triage",
    "trace+triage", "parity", "post-hoc", "fp4-prefill", "fp4-decode",
}  # fmt: skip


def test_the_arms_of_the_comparison_are_there() -> None:
    assert BUILT_IN.keys() >= ASKED_FOR
    assert (BUILT_IN["post-hoc"].source, BUILT_IN["post-hoc"].evaluated) == ("bf16", "w4a4kv4")


@pytest.mark.parametrize("arm", TRAINED, ids=lambda arm: arm.name)
def test_an_arm_is_a_run_that_can_start(arm: object) -> None:
    config = configured({}, arm.sets, "test")  # type: ignore[attr-defined]
    rollout = precision_from(config.precision)
    learner = rollout if config.learner.precision == "same" else precision_from(config.learner.precision)
    make_correction(config.objective.correction, **config.objective.correction_options)
    alignment, guidance = make_alignment(config.alignment, open_model("tiny")[0].architecture, rollout, learner)
    guided = arm.name.startswith("trace")  # type: ignore[attr-defined]
    assert (alignment is not None) == guided
    assert (guidance != GuidancePlan()) == guided


@pytest.mark.parametrize("arm", TRAINED, ids=lambda arm: arm.name)
@pytest.mark.parametrize("sets", [{}, {"learner.lr": 1e-4, "train.steps": 7, "rollout.prompts_per_step": 3}])
def test_a_run_made_elsewhere_is_recognised(arm: object, sets: dict[str, object]) -> None:
    config = configured({}, {**arm.sets, **sets}, "test")  # type: ignore[attr-defined]
    assert recognise(config.to_json()) == arm.name  # type: ignore[attr-defined]


def test_an_unknown_run_is_named_by_what_it_sets() -> None:
    config = load_config(sets=["alignment.method=scale_only", "precision=experts-w4a4kv4"])
    name = recognise(config.to_json())
    assert "precision=experts-w4a4kv4" in name
    assert "alignment.method=scale_only" in name


def test_all_arms_share_the_setting() -> None:
    settings = [setting(configured({}, arm.sets, "test").to_json()) for arm in TRAINED]
    assert all(found == settings[0] for found in settings)
    assert {"rollout.prompts_per_step", "learner.lr", "train.steps", "env.name"} <= settings[0].keys()
    assert "train.seed" not in settings[0]


@pytest.mark.parametrize("key", ["train.steps", "rollout.samples_per_prompt", "env.name", "eval.prompts", "model.path"])
def test_an_arm_may_not_change_task_or_budget(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        require_arm_keys([key], "test")


def test_a_phased_arm_runs_fp4_in_one_phase_only() -> None:
    prefill, decode = (precision_from(dict(BUILT_IN[n].sets["precision"])) for n in ("fp4-prefill", "fp4-decode"))
    assert (prefill.prefill.experts, prefill.decode.experts, prefill.kv) == ("w4a4", "bf16", "fp4")
    assert (decode.prefill.experts, decode.decode.experts, decode.kv) == ("bf16", "w4a4", "fp4")


def test_none_clears_what_can_be_unset_and_is_a_name_elsewhere() -> None:
    config = configured({}, {"objective.dual_clip": "none", "objective.correction": "none"}, "test")
    assert config.objective.dual_clip is None
    assert config.objective.correction == "none"


def test_none_in_the_base_clears_what_can_be_unset_for_every_arm() -> None:
    base = {"objective": {"dual_clip": "none", "correction": "none"}}
    config = configured(base, {"learner.lr": 1e-5}, "test")
    assert config.objective.dual_clip is None
    assert config.objective.correction == "none"
    assert configured(base, {"objective.dual_clip": 2.0}, "test").objective.dual_clip == 2.0
