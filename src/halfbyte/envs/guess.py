"""``agent:guess``: find a hidden number of a range; the environment says whether it is larger or smaller."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from halfbyte.config import validated
from halfbyte.envs.agent import AgentEnvironment, AgentEpisode, AgentOptions
from halfbyte.envs.environment import Prompt
from halfbyte.envs.split import Draws

__all__ = ["GuessEnvironment", "GuessEpisode", "GuessOptions"]


class GuessOptions(AgentOptions):
    """Ranges lie in 0 .. ``largest`` and hold ``min_width`` to ``max_width`` numbers.

    Halving finds every number in log2(width + 1) turns, rounded up; with fewer turns luck is needed.
    """

    largest: Annotated[int, Field(ge=1, le=10**9)] = 99
    min_width: Annotated[int, Field(ge=2)] = 2
    max_width: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> GuessOptions:
        if self.min_width > self.widest:
            raise ValueError(f"min_width = {self.min_width} is above max_width = {self.widest}")
        if self.widest > self.largest + 1:
            raise ValueError(f"max_width = {self.widest} does not fit 0 .. largest = {self.largest}")
        return self

    @property
    def widest(self) -> int:
        """``max_width``, by default all of 0 .. ``largest``."""
        return self.largest + 1 if self.max_width is None else self.max_width


class GuessEpisode(AgentEpisode):
    """Answers guesses about the number in ``prompt.answer``."""

    def answer(self, said: str) -> tuple[bool, str | None]:
        """``+``: the number is larger; ``-``: smaller; ``?``: that was no number (it costs the turn all the same)."""
        if not (said.isascii() and said.isdigit() and len(said) <= 10):
            return False, "?"
        guess, number = int(said), self.prompt.answer
        if guess == number:
            return True, None
        return False, "+" if number > guess else "-"


class GuessEnvironment(AgentEnvironment):
    """Ranges ``low:high?`` with both ends included. Held out are ranges, so an evaluation asks about unseen ones.

    Arguments:
        options: of ``GuessOptions``.
    """

    options: GuessOptions

    def __init__(self, *, reward: object = None, **options: Any) -> None:
        super().__init__("agent:guess", validated(GuessOptions, options, "options of agent:guess"), reward)

    def draw(self, draws: Draws) -> tuple[str, int]:
        """A range and the number to find."""
        width = draws.between(self.options.min_width, self.options.widest)
        low = draws.between(0, self.options.largest + 1 - width)
        return f"{low}:{low + width - 1}?", low + draws.below(width)

    def start(self, prompt: Prompt) -> GuessEpisode:
        """A new episode."""
        return GuessEpisode(prompt, self.options)
