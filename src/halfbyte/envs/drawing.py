"""Endless prompts by index: candidates are drawn until one belongs to the split that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfbyte.envs.environment import Prompt, Split
from halfbyte.envs.split import Draws, prompt_key, split_of
from halfbyte.errors import ConfigError

__all__ = ["draw_prompt"]

_ATTEMPTS = 4096


def draw_prompt(
    name: str, seed: int, split: Split, index: int, eval_share: float, make: Callable[[Draws], tuple[str, Any]]
) -> Prompt:
    """The ``index``-th prompt of a split, a pure function of the arguments.

    Arguments:
        name: the environment, part of the generator's key and of the prompt's id.
        seed: of this split.
        make: a text and its answer from random draws.

    Raises:
        IndexError: index is negative.
        ConfigError: the task has so few prompts that none belongs to ``split``.
    """
    if index < 0:
        raise IndexError(f"prompt index {index}")
    draws = Draws(name, seed, split, index)
    for _ in range(_ATTEMPTS):
        text, answer = make(draws)
        prompt = Prompt(f"{name}/{split}/{seed}/{index}", text=text, answer=answer)
        if split_of(prompt_key(prompt), eval_share) == split:
            return prompt
    raise ConfigError(
        f"{name} has no {split} prompt among {_ATTEMPTS} drawn",
        where="env.options",
        expected="a task with enough different prompts for both splits",
        fix="widen the range of the task's options, or move eval_share towards 0.5",
    )
