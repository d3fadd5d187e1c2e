"""The wall between the run and an environment that is not ours."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.envs.environment import Environment, Episode, Prompt, Split, Turn
from halfbyte.envs.scoring import step_safely

__all__ = ["GuardedEnvironment", "GuardedEpisode"]


class GuardedEpisode:
    """An episode whose failures end it without a reward, with the traceback in ``info["error"]``."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def step(self, response_text: str, response_ids: Sequence[int]) -> Turn:
        """See ``step_safely``."""
        return step_safely(self._episode, response_text, response_ids)


class GuardedEnvironment:
    """Another environment, with its episodes guarded.

    Arguments:
        environment: the one to guard; if it does not say whether it is ``multi_turn``, it is taken to be.
        name: under which it was asked for.
    """

    def __init__(self, environment: Environment, name: str) -> None:
        self._environment, self.name = environment, name
        self.multi_turn = bool(getattr(environment, "multi_turn", True))

    def size(self, split: Split) -> int | None:
        """As the environment says."""
        return self._environment.size(split)

    def prompt(self, split: Split, index: int) -> Prompt:
        """As the environment says."""
        return self._environment.prompt(split, index)

    def start(self, prompt: Prompt) -> GuardedEpisode:
        """A guarded episode."""
        return GuardedEpisode(self._environment.start(prompt))
