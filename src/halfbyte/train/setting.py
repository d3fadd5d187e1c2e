"""What a run is set up from: model, tokenizer, environment, and the lengths and precisions that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from halfbyte.config import Config
from halfbyte.envs import Environment, make_env
from halfbyte.errors import ConfigError
from halfbyte.guidance.batch import Alignment
from halfbyte.guidance.plan import Plan
from halfbyte.models.architecture import Architecture
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import Precision, precision_from
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.train.alignment import make_alignment

__all__ = ["Setting", "learner_precision", "open_setting"]


@dataclass(frozen=True)
class Setting:
    """What a configuration opens before anything is written.

    Arguments:
        tensors: the model's, by checkpoint name, read on access.
        tokenizer_path: folder of the tokenizer's files, for workers elsewhere.
        prompt_limit, longest: tokens of a prompt, and of a sequence.
        precision: of the rollout.
        alignment, guidance: the learner's part and the rollout's; None and nothing where there is nothing to guide.
    """

    arch: Architecture
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    tokenizer_path: Path | None
    environment: Environment
    prompt_limit: int
    longest: int
    precision: Precision
    alignment: Alignment | None
    guidance: Plan


def open_setting(config: Config) -> Setting:
    """Open the model and the environment, and settle what follows from them.

    Raises:
        UserError: one of them cannot be used, or they do not go together.
    """
    checkpoint, tokenizer = open_model(config.model.path)
    arch, options = checkpoint.architecture, dict(config.env.options)
    if config.env.reward is not None:
        options["reward"] = config.env.reward
    environment = make_env(config.env.name, **options)
    room = arch.max_positions - config.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"max_tokens {config.rollout.max_tokens} leaves no room for a prompt",
            where="rollout.max_tokens",
            expected=f"fewer than the model's {arch.max_positions} positions",
        )
    prompt_limit, precision = min(config.env.max_prompt_tokens, room), precision_from(config.precision)
    if config.learner.execution == "native":  # both sides round alike: there is nothing to guide
        alignment, guidance = None, Plan()
    else:
        alignment, guidance = make_alignment(config.alignment, arch, precision, learner_precision(config))
    return Setting(
        arch,
        checkpoint.tensors,
        tokenizer,
        checkpoint.tokenizer_path,
        environment,
        prompt_limit,
        arch.max_positions if environment.multi_turn else prompt_limit + config.rollout.max_tokens,
        precision,
        alignment,
        guidance,
    )


def learner_precision(config: Config) -> Precision:
    """The learner's, which may be the rollout's."""
    return precision_from(config.precision if config.learner.precision == "same" else config.learner.precision)
