"""``arithmetic:<task>``: endless character-level tasks for tiny policies, scored by exact match.

========== ================ ======== =====================================================
task       prompt           answer   options
========== ================ ======== =====================================================
sort       ``5301=``        ``0135`` min_digits 9, max_digits 12
add        ``47+85=``       ``132``  min_digits 2, max_digits 2 (of each operand)
chain_sum  ``12+7-30=``     ``-11``  min_terms 2, max_terms 4, min_digits 1, max_digits 2
========== ================ ======== =====================================================

All of them: ``eval_share`` (which part of all prompts is held out, decided by hash of the prompt, see ``split.py``),
``seed`` of the train prompts and ``eval_seed`` of the held-out ones, so that runs with different seeds share one
evaluation set. Prompt ``index`` comes from a generator keyed by (task, seed, split, index): any index costs the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from halfbyte.config import Section, close_names, validated
from halfbyte.envs.drawing import draw_prompt
from halfbyte.envs.environment import Prompt, Split
from halfbyte.envs.rewards import RewardFunction, with_reward
from halfbyte.envs.scoring import Score
from halfbyte.envs.single_turn import SingleTurnEnvironment
from halfbyte.envs.split import Draws
from halfbyte.errors import ConfigError

__all__ = ["ALPHABET", "TASKS", "ArithmeticEnvironment"]

ALPHABET = "0123456789+-="
"""Every character of every prompt and answer: a vocabulary for tiny policies."""

Count = Annotated[int, Field(ge=1, le=1000)]


class DigitOptions(Section):
    """Options of every task."""

    min_digits: Count = 2
    max_digits: Count = 2
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.125
    seed: int = 0
    eval_seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> DigitOptions:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits = {self.min_digits} is above max_digits = {self.max_digits}")
        return self

    def length(self, draws: Draws) -> int:
        """A uniform number of digits."""
        return draws.between(self.min_digits, self.max_digits)


class SortOptions(DigitOptions):
    """Options of ``sort``."""

    min_digits: Count = 9
    max_digits: Count = 12


class ChainOptions(DigitOptions):
    """Options of ``chain_sum``."""

    min_digits: Count = 1
    min_terms: Count = 2
    max_terms: Count = 4

    @model_validator(mode="after")
    def _terms_ordered(self) -> ChainOptions:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms = {self.min_terms} is above max_terms = {self.max_terms}")
        return self


def _sort(draws: Draws, options: DigitOptions) -> tuple[str, str]:
    digits = draws.digits(options.length(draws))
    return f"{digits}=", "".join(sorted(digits))


def _add(draws: Draws, options: DigitOptions) -> tuple[str, str]:
    a, b = (draws.number(options.length(draws)) for _ in range(2))
    return f"{a}+{b}=", str(int(a) + int(b))


def _chain_sum(draws: Draws, options: DigitOptions) -> tuple[str, str]:
    assert isinstance(options, ChainOptions)
    text, total = "", 0
    for i in range(draws.between(options.min_terms, options.max_terms)):
        sign = "+" if i == 0 else "+-"[draws.below(2)]
        term = draws.number(options.length(draws))
        text += term if i == 0 else sign + term
        total += int(sign + term)
    return f"{text}=", str(total)


@dataclass(frozen=True)
class _Task:
    make: Callable[[Draws, DigitOptions], tuple[str, str]]
    options: type[DigitOptions]


_TASKS: Mapping[str, _Task] = {
    "sort": _Task(_sort, SortOptions),
    "add": _Task(_add, DigitOptions),
    "chain_sum": _Task(_chain_sum, ChainOptions),
}
TASKS: tuple[str, ...] = tuple(_TASKS)
"""The task names."""


class ArithmeticEnvironment(SingleTurnEnvironment):
    """One task of the module's table. Endless: prompts repeat only as often as independent draws do.

    Arguments:
        task: one of ``TASKS``.
        reward: replaces the reward; ``correct`` stays exact match.
        options: the task's options.

    Raises:
        ConfigError: unknown task, unknown option, or a value out of range.
    """

    def __init__(self, task: str, /, *, reward: RewardFunction | None = None, **options: Any) -> None:
        name = f"arithmetic:{task}"
        if task not in _TASKS:
            close = close_names(task, TASKS)
            raise ConfigError(
                f"unknown arithmetic task {task!r}{f' (did you mean {close[0]}?)' if close else ''}",
                where="env.name",
                expected=f"arithmetic:<task> with one of: {', '.join(TASKS)}",
            )
        super().__init__(name, with_reward(_exact, reward))
        self._task = _TASKS[task]
        self.options = validated(self._task.options, options, f"options of {name}")

    def size(self, split: Split) -> int | None:
        """None: there is no end."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """See ``Environment.prompt`` and ``draw_prompt``."""
        options = self.options
        seed = options.eval_seed if split == "eval" else options.seed
        return draw_prompt(
            self.name, seed, split, index, options.eval_share, lambda draws: self._task.make(draws, options)
        )


def _exact(prompt: Prompt, response: str) -> Score:
    correct = response.strip() == prompt.answer
    return Score(float(correct), correct)
