"""Tasks that only score: one response, one reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from halfbyte.envs.environment import Prompt, Split, Turn
from halfbyte.envs.scoring import Scorer, score_safely

__all__ = ["SingleTurnEnvironment", "SingleTurnEpisode"]


class SingleTurnEpisode:
    """Scores its one response."""

    def __init__(self, prompt: Prompt, scorer: Scorer) -> None:
        self._prompt, self._scorer = prompt, scorer

    def step(self, response_text: str, response_ids: Sequence[int]) -> Turn:
        """The score of the response; scoring that fails gives a turn without reward, never an exception."""
        return score_safely(self._scorer, self._prompt, response_text).turn()


class SingleTurnEnvironment(ABC):
    """Base of the built-in tasks: a subclass says what its prompts are.

    Arguments:
        name: see ``Environment``.
        scorer: gives a response its score.
    """

    multi_turn = False

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.name, self.scorer = name, scorer

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """See ``Environment.size``."""

    @abstractmethod
    def prompt(self, split: Split, index: int) -> Prompt:
        """See ``Environment.prompt``."""

    def start(self, prompt: Prompt) -> SingleTurnEpisode:
        """An episode of one turn."""
        return SingleTurnEpisode(prompt, self.scorer)
