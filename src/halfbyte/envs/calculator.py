"""``agent:calculator``: a nested expression, and a calculator that does one operation a turn."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from halfbyte.config import validated
from halfbyte.envs.agent import AgentEnvironment, AgentEpisode, AgentOptions
from halfbyte.envs.environment import Prompt
from halfbyte.envs.split import Draws

__all__ = ["CalculatorEnvironment", "CalculatorEpisode", "CalculatorOptions"]

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_CALL = re.compile(r"(-?[0-9]{1,18})([-+*])(-?[0-9]{1,18})")
_INTEGER = re.compile(r"-?[0-9]{1,40}")


class CalculatorOptions(AgentOptions):
    """Expressions have ``min_operations`` to ``max_operations`` operations on numbers of 1 to ``digits`` digits.

    One call does one operation, so a policy that cannot calculate needs one turn more than there are operations.
    """

    min_operations: Annotated[int, Field(ge=1, le=15)] = 1
    max_operations: Annotated[int, Field(ge=1, le=15)] = 3
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    operations: Annotated[str, Field(pattern=r"^[-+*]+$")] = "+-"

    @model_validator(mode="after")
    def _ordered(self) -> CalculatorOptions:
        if self.min_operations > self.max_operations:
            raise ValueError(f"min_operations = {self.min_operations} is above max_operations = {self.max_operations}")
        if self.max_operations >= self.turns:
            raise ValueError(f"max_operations = {self.max_operations} needs more than turns = {self.turns} turns")
        return self


class CalculatorEpisode(AgentEpisode):
    """Calculates for the policy until it gives an answer."""

    def answer(self, said: str) -> tuple[bool, str | None]:
        """An integer ends the episode; ``47-8`` is answered by ``=39``; anything else by ``?``."""
        if _INTEGER.fullmatch(said):
            return int(said) == self.prompt.answer, None
        call = _CALL.fullmatch(said)
        if call is None:
            return False, "?\n"
        a, operation, b = call.groups()
        return False, f"={_OPERATIONS[operation](int(a), int(b))}\n"


class CalculatorEnvironment(AgentEnvironment):
    """Expressions in which every operation but the outermost stands in parentheses.

    Arguments:
        options: of ``CalculatorOptions``.
    """

    options: CalculatorOptions

    def __init__(self, *, reward: object = None, **options: Any) -> None:
        name = "agent:calculator"
        super().__init__(name, validated(CalculatorOptions, options, f"options of {name}"), reward)

    def draw(self, draws: Draws) -> tuple[str, int]:
        """An expression with its ``=``, and its value."""
        options = self.options
        text, value = self._number(draws)
        count = draws.between(options.min_operations, options.max_operations)
        for i in range(count):
            sign = options.operations[draws.below(len(options.operations))]
            other, number = self._number(draws)
            inner = text if i == 0 else f"({text})"
            if draws.below(2):
                text, value = f"{inner}{sign}{other}", _OPERATIONS[sign](value, number)
            else:
                text, value = f"{other}{sign}{inner}", _OPERATIONS[sign](number, value)
        return f"{text}=", value

    def start(self, prompt: Prompt) -> CalculatorEpisode:
        """A new episode."""
        return CalculatorEpisode(prompt, self.options)

    def _number(self, draws: Draws) -> tuple[str, int]:
        text = draws.number(draws.between(1, self.options.digits))
        return text, int(text)
