"""The configuration of a run: all sections, loaded from a file, flags and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from halfbyte.config.problems import Origins, explain
from halfbyte.config.sections import (
    AlignmentConfig,
    EnvConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    PrecisionChoice,
    RolloutConfig,
    Section,
    TrainConfig,
)
from halfbyte.config.settings import apply_flags, apply_settings, read_file
from halfbyte.errors import ConfigError


class Config(Section):
    """All of a run.

    ``precision`` is a preset (``bf16``, ``fp32``, ``w4a4kv4``, ``experts-w4a4kv4``, ``w4a16``), or a table with
    ``preset`` and overrides by phase and site; ``halfbyte.models.precision`` reads it.
    """

    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    precision: PrecisionChoice = "w4a4kv4"
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    alignment: AlignmentConfig = Field(default_factory=AlignmentConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.learner.minibatches > samples:
            raise ValueError(f"learner.minibatches = {self.learner.minibatches}, but a step has {samples} samples")
        if self.alignment.layers.strip() == "auto" and self.alignment.bytes_per_token is None:
            raise ValueError("alignment.layers = auto needs alignment.bytes_per_token, its budget")
        return self

    def to_json(self) -> dict[str, Any]:
        """Every key with its value, JSON types only; :meth:`from_json` restores an equal object."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "config.json") -> Config:
        """The configuration that :meth:`to_json` described.

        Raises:
            ConfigError: naming every key that is unknown or has a value that cannot be used.
        """
        return _resolved(dict(data), Origins(where))


def load_config(
    path: str | Path | None = None, sets: list[str] | tuple[str, ...] = (), flags: Mapping[str, object] | None = None
) -> Config:
    """The resolved configuration.

    Arguments:
        path: a TOML file, or the ``config.json`` of a run; None for defaults.
        sets: ``section.key=value``; the value is read as TOML, or as bare text where the key takes text. ``none``
            clears an optional key. ``precision.kv=bf16`` starts from the preset in force.
        flags: dotted key -> value; None means that the flag was not given.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; all are named with where they came from.
    """
    origins = Origins("defaults" if path is None else str(path))
    data = {} if path is None else read_file(Path(path))
    defaults = Config().to_json()
    apply_flags(data, flags or {}, defaults, origins)
    apply_settings(data, sets, Config, defaults, origins)
    return _resolved(data, origins)


def difference(a: Config | Mapping[str, Any], b: Config | Mapping[str, Any]) -> list[str]:
    """What differs, one ``section.key: value in a -> value in b`` an entry, sorted; empty for equal configurations.

    For refusing to resume a run with another configuration. A key that one side lacks reads ``(absent)``.
    """
    left, right = (dict(_leaves(x.to_json() if isinstance(x, Config) else x)) for x in (a, b))
    keys = sorted(left.keys() | right.keys())
    return [
        f"{k}: {left.get(k, '(absent)')} -> {right.get(k, '(absent)')}" for k in keys if left.get(k) != right.get(k)
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and JSON text of every leaf; an empty table has none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value)


def _resolved(data: dict[str, Any], origins: Origins) -> Config:
    # Strict JSON mode: `steps = "3"` or `steps = true` in a file is a mistake, while an array may become a tuple.
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        expected = "text, numbers, booleans, arrays and tables"
        raise ConfigError(f"a value has no JSON form: {error}", where=origins.default, expected=expected) from error
    try:
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise explain(error, Config, origins) from error
