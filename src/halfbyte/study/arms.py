"""What is compared: an arm is a named set of configuration keys. The table of the built-in arms, and who a run belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from halfbyte.config import Config, load_config
from halfbyte.config.problems import Origins
from halfbyte.config.settings import apply_flags, apply_settings
from halfbyte.errors import ConfigError

__all__ = ["BUILT_IN", "Arm", "configured", "recognise", "require_arm_keys", "setting"]

#: Sections whose keys an arm may set. The others are the task and the budget, which all arms of a study share.
ARM_SECTIONS = ("precision", "learner", "alignment", "objective")
#: Keys by which the built-in arms differ; what is left of a configuration is the setting that they are compared in.
SIGNATURE = (
    "precision",
    "learner.precision",
    "learner.execution",
    "learner.router_replay",
    "alignment",
    "objective.correction",
    "objective.correction_options",
)
#: Keys that change no number, or only which of the seeds a run is.
FREE = (
    "train.out",
    "train.seed",
    "train.tracker",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.save_trajectories_every",
    "train.saved_trajectories",
    "train.threads",
    "train.delta_precision",
    "alignment.memory_mb",
    "learner.require_parity",
)
_LAYERS = ("attention", "mlp", "experts")


@dataclass(frozen=True)
class Arm:
    """A named set of configuration keys.

    Arguments:
        name: of the arm.
        sets: dotted key -> value.
        about: one line for tables.
        source, evaluated: of an arm that is not trained: the arm whose policies are taken, and the precision they run in.
    """

    name: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    source: str | None = None
    evaluated: str | None = None


_OFF = {"alignment.method": "none"}
_QAT = {"precision": "w4a4kv4", "learner.precision": "same", **_OFF}
_TRACE = {
    **_QAT,
    "alignment.method": "trace",
    "alignment.bits": 1,
    "alignment.layers": "deep:0.5",
    "alignment.sites": ["expert_in", "k", "v"],
}
_FULL = {**_QAT, "alignment.method": "trace", "alignment.bits": 4, "alignment.layers": "all"}
_TRIAGE = {"objective.correction": "triage"}


def _phased(phase: str) -> dict[str, Any]:
    """w4a4kv4 with the matrix products of ``phase`` in BF16; the KV cache is FP4 in both phases."""
    return {**_QAT, "precision": {"preset": "w4a4kv4", phase: dict.fromkeys(_LAYERS, "bf16")}}


BUILT_IN: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("bf16", {"precision": "bf16", "learner.precision": "same", **_OFF}, "BF16 on both sides"),
        Arm(
            "fp4-naive",
            {**_QAT, "learner.precision": "bf16", "learner.router_replay": False},
            "FP4 rollout; the BF16 learner knows nothing of it",
        ),
        Arm(
            "fp4-replay", {**_QAT, "learner.precision": "bf16"}, "the same, with the rollout's expert choices replayed"
        ),
        Arm("asymmetric", {**_QAT, "learner.precision": "w4a16"}, "FP4 rollout; the learner rounds weights only"),
        Arm("w4a16", {**_QAT, "precision": "w4a16"}, "FP4 weights, BF16 activations and KV cache on both sides"),
        Arm("qat", _QAT, "the learner rounds where the rollout does, on its own"),
        Arm("qat+tis", {**_QAT, "objective.correction": "token_tis"}, "qat with truncated importance weights"),
        Arm("qat+icepop", {**_QAT, "objective.correction": "icepop"}, "qat with IcePop"),
        Arm("opsm", {**_QAT, "objective.correction": "opsm"}, "qat with off-policy sequence masking"),
        Arm("trace", _TRACE, "1 bit, deeper half of the layers, expert input and KV"),
        Arm("trace-full", _FULL, "4 bits, every layer and site"),
        Arm("triage", {**_QAT, **_TRIAGE}, "qat with TRIAGE"),
        Arm("trace+triage", {**_TRACE, **_TRIAGE}, "both"),
        Arm("parity", {**_QAT, "learner.execution": "native"}, "the learner runs the rollout's kernels: gap 0"),
        Arm("post-hoc", {}, "policies of bf16, quantised after training", source="bf16", evaluated="w4a4kv4"),
        Arm("fp4-prefill", _phased("decode"), "prompts in FP4, responses in BF16 (KV cache FP4)"),
        Arm("fp4-decode", _phased("prefill"), "prompts in BF16, responses in FP4 (KV cache FP4)"),
    )
}


def require_arm_keys(keys: Iterable[str], where: str) -> None:
    """Refuse keys of the task or the budget.

    Raises:
        ConfigError: naming the key.
    """
    for key in keys:
        if key.split(".")[0] not in ARM_SECTIONS:
            raise ConfigError(
                f"an arm sets {key}, which all arms share",
                where=where,
                expected=f"keys of {', '.join(ARM_SECTIONS)}",
                fix="set it in [base] for all arms, or make it an axis",
            )


def configured(base: Mapping[str, Any], sets: Mapping[str, Any], where: str) -> Config:
    """The configuration ``base`` with dotted keys set; in both, the text ``none`` clears a key that can be unset.

    Raises:
        ConfigError: naming every key that is unknown or has a value that cannot be used.
    """
    data, defaults, origins = dict(base), Config().to_json(), Origins(where)
    cleared = {key: value for key, value in _leaves(base) if value == "none"}
    for key, value in {**cleared, **sets}.items():
        if value == "none":
            apply_settings(data, [f"{key}=none"], Config, defaults, origins)
        else:
            apply_flags(data, {key: value}, defaults, origins)
    return Config.from_json(data, where)


def setting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted leaves of a resolved configuration without the keys that tell arms, seeds and folders apart."""
    apart = (*SIGNATURE, *FREE)
    return {
        key: value
        for key, value in _leaves(config)
        if not any(key == name or key.startswith(f"{name}.") for name in apart)
    }


def recognise(config: Mapping[str, Any]) -> str:
    """The built-in arm that a resolved configuration is, or a name made of what it sets.

    Raises:
        ConfigError: not a configuration of this version.
    """
    mine = _signature(Config.from_json(dict(config)).to_json())
    for name, known in _known().items():
        if known == mine:
            return name
    plain = _known()["qat"]
    return " ".join(f"{key}={_short(value)}" for key, value in mine.items() if value != plain.get(key)) or "qat"


@cache
def _known() -> dict[str, dict[str, Any]]:
    base = load_config().to_json()
    return {
        arm.name: _signature(configured(base, arm.sets, arm.name).to_json())
        for arm in BUILT_IN.values()
        if not arm.source
    }


def _signature(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that tell arms apart, with those left out that have no effect."""
    found = {
        key: value
        for key, value in _leaves(config)
        if any(key == name or key.startswith(f"{name}.") for name in SIGNATURE) and key not in FREE
    }
    if found.get("learner.precision") == found.get("precision"):
        found["learner.precision"] = "same"
    off = found["alignment.method"] == "none" or found["learner.execution"] == "native"
    # nothing is rounded to FP4 on both sides
    off = off or found.get("precision") in ("bf16", "fp32", "w4a16")
    off = off or found.get("learner.precision") in ("bf16", "fp32", "w4a16")
    if off:
        found = {key: value for key, value in found.items() if not key.startswith("alignment.")}
    if found.get("precision") in ("bf16", "fp32"):
        found.pop("learner.router_replay")
    if found["objective.correction"] == "none":
        found = {key: value for key, value in found.items() if not key.startswith("objective.correction_options")}
    return found


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [
            leaf for key, inner in value.items() for leaf in _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, value)]


def _short(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
