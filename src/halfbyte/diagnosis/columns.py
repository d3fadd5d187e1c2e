"""What other trainers call the columns that a diagnosis needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from halfbyte.errors import ConfigError, DataError

__all__ = ["ALIASES", "OPTIONAL", "REQUIRED", "find_columns", "parse_columns"]

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "response_ids": ("response_ids", "completion_ids", "responses", "output_ids", "tokens"),
        "rollout_logprobs": (
            "rollout_logprobs",
            "logprobs",
            "rollout_log_probs",
            "sampling_per_token_logps",
            "inference_logprobs",
            "generation_logprobs",
            "completion_logprobs",
        ),
        "learner_logprobs": (
            "learner_logprobs",
            "old_log_probs",
            "old_per_token_logps",
            "trainer_logprobs",
            "prev_logprobs",
            "action_log_probs",
            "log_probs",
        ),
        "advantages": ("advantages", "advantage"),
        "mask": ("mask", "response_mask", "completion_mask", "loss_mask", "token_mask", "action_mask"),
        "versions": ("versions", "weight_versions"),
        "turns": ("turns",),
        "step": ("step", "global_step"),
        "reward": ("reward", "rewards", "score"),
    }
)
"""Our name -> names under which it is looked for, in this order (ours; verl; TRL; prime-rl; NeMo RL; OpenRLHF; slime)."""
REQUIRED = ("response_ids", "rollout_logprobs", "learner_logprobs", "advantages")
OPTIONAL = tuple(name for name in ALIASES if name not in REQUIRED)


def parse_columns(settings: Iterable[str]) -> dict[str, str]:
    """``learner_logprobs=my_column`` -> a mapping from our names to those of the file.

    Raises:
        ConfigError: no ``=``, or not one of our names.
    """
    out: dict[str, str] = {}
    for setting in settings:
        name, equals, column = setting.partition("=")
        if not equals or not column or name not in ALIASES:
            raise ConfigError(
                f"{setting!r} names no column",
                where="--column",
                expected=f"NAME=COLUMN, NAME one of {', '.join(ALIASES)}",
            )
        out[name] = column
    return out


def find_columns(present: Iterable[str], chosen: Mapping[str, str], where: str) -> dict[str, str]:
    """Our name -> the file's, for what the file has.

    Arguments:
        present: columns of the file. chosen: what the user said.

    Raises:
        DataError: a column that the user named, or one that is needed, is not there.
    """
    have = list(present)
    found: dict[str, str] = {}
    for name, aliases in ALIASES.items():
        candidates = (chosen[name],) if name in chosen else aliases
        match = next((alias for alias in candidates if alias in have), None)
        if match is not None:
            found[name] = match
        elif name in REQUIRED or name in chosen:
            raise DataError(
                f"there is no column for {name}",
                where=where,
                expected=f"one of {', '.join(candidates)}; found {', '.join(sorted(have)) or 'none'}",
                fix=f"name it with --column {name}=COLUMN",
            )
    return found
