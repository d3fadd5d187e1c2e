"""The configuration of a run: hand-written TOML in, resolved JSON out, every unknown key an error.

One class a section; the defaults are the learning recipe of the demo (issue #2: 64 prompts x 8 samples at temperature
1, AdamW with beta2 .95, 3e-4 after 5 warm-up steps falling linearly, clipping at 1, 300 steps). Values come from,
weakest first: defaults, the file, command-line flags, ``--set section.key=value``. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from halfbyte.errors import ConfigError

__all__ = [
    "Config",
    "EnvConfig",
    "EvalConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RolloutConfig",
    "Section",
    "TrainConfig",
    "close_names",
    "difference",
    "load_config",
    "validated",
]

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
AnySection = TypeVar("AnySection", bound=BaseModel)
PrecisionChoice = Text | dict[str, Any]
#: What other trainers call our keys, for suggestions.
_ALIASES = {
    "learning_rate": "lr", "max_grad_norm": "clip_norm", "num_generations": "samples_per_prompt",
    "max_new_tokens": "max_tokens", "max_steps": "steps", "num_train_epochs": "epochs", "output_dir": "out",
}  # fmt: skip


class Section(BaseModel):
    """What all sections share: unknown keys, NaN and infinity are errors, also on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy to start from.

    Arguments:
        path: a model folder, or ``tiny`` for the policy in the package.
    """

    path: Text = "tiny"


class EnvConfig(Section):
    """Tasks and rewards.

    Arguments:
        name: ``arithmetic:<task>``, ``reasoning_gym:<dataset>``, ``jsonl:<path>`` or ``python:<module>:<function>``.
        options: passed to that environment, which checks them.
        reward: ``module:function`` in place of the environment's own reward.
        max_prompt_tokens: longer prompts are an error.
    """

    name: Text = "arithmetic:sort"
    options: dict[str, Any] = Field(default_factory=dict)
    reward: Text | None = None
    max_prompt_tokens: Count = 1024


class RolloutConfig(Section):
    """Sampling for training, and the engine's budgets.

    Arguments:
        temperature: 0.001 to 1000; greedy samples of a group would all be alike.
        top_k, top_p, min_p: filters; 0, 1 and 0 switch them off.
        max_tokens: response tokens of a turn.
        stop: texts that end a response.
        max_batch_tokens: tokens of one forward pass.
        kv_memory_mb: KV pages, MiB.
        page_size: tokens a page, a multiple of 16.
        max_sequences: samples in flight.
    """

    prompts_per_step: Count = 64
    samples_per_prompt: Count = 8
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    max_tokens: Count = 16
    stop: tuple[Text, ...] = ()
    max_batch_tokens: Count = 4096
    kv_memory_mb: Positive = 256.0
    page_size: Annotated[int, Field(ge=16, multiple_of=16)] = 16
    max_sequences: Count = 1024


class LearnerConfig(Section):
    """The update.

    Arguments:
        execution: ``emulated``: framework products of operands rounded at the rollout's sites.
        precision: ``same`` as the rollout's, or a precision of its own.
        lr: peak rate; 0 leaves the weights alone (a control).
        schedule: after the warm-up: linear to 0, cosine to 0, or constant.
        clip_norm: bound on the global gradient norm; None for none.
        epochs, minibatches: passes over a rollout, and updates a pass.
        activation_memory_mb: the micro-batch is as large as activations of this many MiB allow.
        max_tokens_per_microbatch: sets its size in tokens instead.
        router_replay: use the rollout's expert choices.
    """

    execution: Literal["emulated"] = "emulated"
    precision: PrecisionChoice = "same"
    lr: NotNegative = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    schedule: Literal["linear", "constant", "cosine"] = "linear"
    warmup_steps: Natural = 5
    clip_norm: Positive | None = 1.0
    epochs: Count = 1
    minibatches: Count = 1
    activation_memory_mb: Positive = 1024.0
    max_tokens_per_microbatch: Count | None = None
    packing: bool = True
    activation_checkpointing: bool = False
    router_replay: bool = True

    @field_validator("precision")
    @classmethod
    def _has_preset(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(value, dict) and value.get("preset") == "same":
            raise ValueError("overrides need a preset by name to start from: set learner.precision.preset too")
        return value


class ObjectiveConfig(Section):
    """The loss; see ``halfbyte.objective`` for what each choice means.

    Arguments:
        eps_low, eps_high: the ratio is clipped to [1 - eps_low, 1 + eps_high]; a higher eps_high is "clip-higher".
        dual_clip: bound on the ratio of negative advantages, above 1; None for none.
        proximal: what the ratio is taken against: the learner at the start of the step, or the rollout.
        kl_coef: factor of the KL to the initial policy; 0 keeps no reference.
        correction, correction_options: a rule of ``halfbyte.objective.corrections`` and its parameters.
        count_rejected: tokens that a correction rejects stay in the denominators.
        skip_zero_advantage: leave samples without advantage out of the passes (not out of the denominators).
    """

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    eps_low: Share = 0.2
    eps_high: NotNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    ratio: Literal["token", "sequence_sum", "sequence_mean"] = "token"
    proximal: Literal["learner", "rollout"] = "learner"
    denominator: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    kl_coef: NotNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    correction: Text = "none"
    correction_options: dict[str, Any] = Field(default_factory=dict)
    count_rejected: bool = True
    skip_zero_advantage: bool = True


class EvalConfig(Section):
    """Accuracy on held-out prompts, before and after training.

    Arguments:
        prompts, samples: held-out prompts, and responses to each.
        every: steps between evaluations during training; 0 for none.
        temperature: 0 is greedy; otherwise 0.001 to 1000.
    """

    prompts: Count = 256
    samples: Count = 1
    every: Natural = 0
    temperature: Annotated[float, Field(ge=0, le=0)] | Temperature = 1.0


class TrainConfig(Section):
    """The run.

    Arguments:
        seed: of sampling and of the order of prompts and mini-batches.
        out: run folder.
        checkpoint_every, save_trajectories_every: steps; 0 for never (a checkpoint is written at the end anyway).
        keep_checkpoints: older ones are removed.
        tracker: also send metrics to trackio or wandb.
        threads: torch's threads; None leaves it to the thread policy of the command line.
    """

    steps: Count = 300
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    out: Text = "runs/train"
    checkpoint_every: Natural = 50
    keep_checkpoints: Count = 2
    tracker: Literal["trackio", "wandb"] | None = None
    save_trajectories_every: Natural = 50
    threads: Count | None = None


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
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.learner.minibatches > samples:
            raise ValueError(f"learner.minibatches = {self.learner.minibatches}, but a step has {samples} samples")
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
        return _resolved(dict(data), _Origins(where))


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
    origins = _Origins("defaults" if path is None else str(path))
    data = {} if path is None else _read_file(Path(path))
    defaults = Config().to_json()
    _apply_flags(data, flags or {}, defaults, origins)
    _apply_settings(data, sets, Config, defaults, origins)
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


def _resolved(data: dict[str, Any], origins: _Origins) -> Config:
    # Strict JSON mode: `steps = "3"` or `steps = true` in a file is a mistake, while an array may become a tuple.
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        expected = "text, numbers, booleans, arrays and tables"
        raise ConfigError(f"a value has no JSON form: {error}", where=origins.default, expected=expected) from error
    try:
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise _explain(error, Config, origins) from error


@dataclass
class _Origins:
    """Which source set a key, for messages. ``default`` covers keys that no flag or ``--set`` touched."""

    default: str
    keys: dict[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """The source of ``key``, or of a key inside it."""
        inside = [source for name, source in self.keys.items() if f"{name}.".startswith(f"{key}.")]
        around = [source for name, source in self.keys.items() if f"{key}.".startswith(f"{name}.")]
        return (around or inside or [self.default])[-1]


def _read_file(path: Path) -> dict[str, Any]:
    """The table in a TOML file, or the object in a ``.json`` file.

    Raises:
        ConfigError: no such file, or not TOML / JSON; with line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = f"the configuration file cannot be read: {error}"
        raise ConfigError(what, where=str(path), expected="a TOML file in UTF-8") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"not {kind}: {error}", where=str(path), fix="mend it; text needs quotes") from error
    if not isinstance(data, dict):
        raise ConfigError("not a table", where=str(path), expected="sections with keys")
    return data


def _apply_flags(
    data: dict[str, Any], flags: Mapping[str, object], defaults: Mapping[str, Any], origins: _Origins
) -> None:
    """Write the flags that were given (value not None) into ``data``."""
    for key, value in flags.items():
        if value is not None:
            _write(data, key, str(value) if isinstance(value, Path) else value, defaults, "command-line flag")
            origins.keys[key] = "command-line flag"


def _apply_settings(
    data: dict[str, Any], sets: Iterable[str], model: type[BaseModel], defaults: Mapping[str, Any], origins: _Origins
) -> None:
    """Write ``key=value`` texts into ``data``, each value read by the type of its key.

    Raises:
        ConfigError: no ``=``, an empty key, or a key inside a plain value.
    """
    for setting in sets:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(
                f"{setting!r} sets nothing", where="--set", expected="section.key=value, such as learner.lr=1e-5"
            )
        origin = f"--set {setting}"
        _write(data, key, _read_value(text.strip(), dict(_names(model)).get(key)), defaults, origin)
        origins.keys[key] = origin


def validated(model: type[AnySection], data: Mapping[str, Any], where: str) -> AnySection:
    """``model(**data)``, for small option tables of other modules.

    Raises:
        ConfigError: naming every key that is unknown or has a value that cannot be used.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise _explain(error, model, _Origins(where)) from error


def _explain(error: ValidationError, model: type[BaseModel], origins: _Origins) -> ConfigError:
    """One message with a line for each wrong key: its dotted name, what is wrong, what it may have meant."""
    problems: dict[str, list[str]] = {}
    for entry in error.errors(include_url=False):
        key = _key(model, entry["loc"])
        if entry["type"] == "extra_forbidden":
            text = f"unknown key{_suggestion(model, key)}"
        elif entry["type"] == "value_error":
            text = str(entry["ctx"]["error"])
        elif entry["type"] == "missing" and isinstance(entry["loc"][-1], int):  # of betas, our one pair
            text = f"takes two numbers, got {_short(entry['input'])}"
        elif entry["type"] == "missing":
            text = "is required"
        else:
            text = f"{entry['msg'][0].lower()}{entry['msg'][1:]}, got {_short(entry['input'])}"
        texts = problems.setdefault(key, [])
        if text not in texts:
            texts.append(text)
    lines = [f"{key}: {'; or '.join(texts)}" if key else "; ".join(texts) for key, texts in problems.items()]
    sources = list(dict.fromkeys(origins.of(key) for key in problems))
    return ConfigError("; ".join(lines), where=", ".join(sources))


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three of ``known`` that look like ``name``, best first."""
    lowered = {item.lower(): item for item in known}
    return [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]


def _suggestion(model: type[BaseModel], key: str) -> str:
    names = dict(_names(model))
    parent, _, leaf = key.rpartition(".")
    siblings = [n.rpartition(".")[2] for n in names if n.rpartition(".")[0] == parent]
    elsewhere = [n for n in names if n.rpartition(".")[2] == leaf]
    prefix = f"{parent}." if parent else ""
    meant = [n for n in names if n.rpartition(".")[2] == _ALIASES.get(leaf.lower())]
    guesses = meant + [prefix + n for n in close_names(leaf, siblings)] + elsewhere
    if guesses:
        return f" (did you mean {' or '.join(dict.fromkeys(guesses))}?)"
    return f" (known{f' in {parent}' if parent else ''}: {', '.join(siblings)})"


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        if (section := _section(info)) is not None:
            yield from _names(section, f"{prefix}{name}.")


def _key(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Dotted key of an error: pydantic adds the member of a union, which means nothing to a user."""
    names, key = dict(_names(model)), ""
    for part in location:
        if key in names and _section(names[key]) is None:
            break
        key = f"{key}.{part}" if key else str(part)
    return key


def _write(data: dict[str, Any], key: str, value: object, defaults: Mapping[str, Any], origin: str) -> None:
    *parents, leaf = key.split(".")
    table: dict[str, Any] = data
    default: Any = defaults
    for i, name in enumerate(parents):
        default = default.get(name) if isinstance(default, Mapping) else None
        inner = table.get(name, {} if isinstance(default, Mapping) or default is None else default)
        if isinstance(inner, str) and name == "precision":
            inner = {"preset": inner}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(parents[: i + 1])} is a value, not a table", where=origin, expected="a key of a section"
            )
        table[name] = inner = dict(inner)
        table = inner
    table[leaf] = value


def _read_value(text: str, info: FieldInfo | None) -> Any:
    """The reading of ``text`` that the key's type accepts: none, TOML, bare text, or a list without its brackets."""
    toml = _toml(text)
    readings = [reading for reading in (toml, text) if reading is not None]
    if info is None or _section(info) is not None:
        return readings[0]
    if get_origin(info.annotation) is tuple and not isinstance(toml, list):
        readings = [reading for reading in (_toml(f"[{text}]"), [text]) if reading is not None]
    adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
    for reading in [None, *readings] if text.lower() in ("none", "null") else readings:
        try:
            return adapter.validate_python(reading)
        except ValidationError:
            continue
    return readings[0]


def _toml(text: str) -> Any:
    try:
        data = tomllib.loads(f"value = {text}")
    except ValueError:
        return None
    return data["value"] if data.keys() == {"value"} else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
