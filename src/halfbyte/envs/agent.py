"""``agent:<task>``: tasks of many turns, answered by an opponent or a tool, small enough for character-level policies.

=========== =================== =========================================== ==============================================
task        prompt              the policy says                             the environment says
=========== =================== =========================================== ==============================================
guess       ``17:42?``          a number: ``29``                            ``+`` it is larger, ``-`` smaller, ``?`` no number
calculator  ``(47-8)*12=``      one operation: ``47-8``, or the answer      ``=39`` and a new line; ``?`` cannot be read
=========== =================== =========================================== ==============================================

An episode has at most ``turns`` turns (2 to 16); what the environment says is masked out of the loss by the training
loop. The reward is given at the end: 1 for success, 0 otherwise, so credit has to travel over all turns. A longer path
may be charged: success in turn k then earns ``1 - turn_cost * (k - 1)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from halfbyte.config import Section
from halfbyte.envs.drawing import draw_prompt
from halfbyte.envs.environment import Prompt, Split, Turn
from halfbyte.envs.split import Draws
from halfbyte.errors import ConfigError

__all__ = ["AgentEnvironment", "AgentEpisode", "AgentOptions"]


class AgentOptions(Section):
    """Options of every task.

    Arguments:
        turns: most turns of an episode.
        turn_cost: what each turn after the first takes from the reward of success.
    """

    turns: Annotated[int, Field(ge=2, le=16)] = 8
    turn_cost: Annotated[float, Field(ge=0, le=0.0625)] = 0.0
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.125
    seed: int = 0
    eval_seed: int = 0


class AgentEpisode(ABC):
    """One conversation: counts turns, and ends in success, in a wrong answer, or when the turns are used up."""

    def __init__(self, prompt: Prompt, options: AgentOptions) -> None:
        self.prompt, self.options, self.taken = prompt, options, 0

    def step(self, response_text: str, response_ids: Sequence[int]) -> Turn:
        """See ``Episode.step``; ``info`` has ``correct`` and ``turns`` (how many were taken) when it is over."""
        self.taken += 1
        success, observation = self.answer(response_text.strip())
        if observation is not None and self.taken < self.options.turns:
            return Turn(done=False, observation=observation)
        reward = 1.0 - self.options.turn_cost * (self.taken - 1) if success else 0.0
        return Turn(done=True, reward=reward, info={"correct": success, "turns": self.taken})

    @abstractmethod
    def answer(self, said: str) -> tuple[bool, str | None]:
        """(success, what to say): nothing to say (None) ends the episode."""


class AgentEnvironment(ABC):
    """Base of the tasks of the module's table. Endless: any index costs the same.

    Arguments:
        name: ``agent:<task>``.
        options: validated options.
        reward: must be None: the reward comes from the episode.

    Raises:
        ConfigError: a reward function was given.
    """

    multi_turn = True

    def __init__(self, name: str, options: AgentOptions, reward: object = None) -> None:
        if reward is not None:
            raise ConfigError(
                "a reward function does not apply to an environment of many turns",
                where="env.reward",
                expected=f"{name} gives its rewards itself",
                fix="remove env.reward",
            )
        self.name, self.options = name, options

    def size(self, split: Split) -> int | None:
        """None: there is no end."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """See ``Environment.prompt`` and ``draw_prompt``."""
        seed = self.options.eval_seed if split == "eval" else self.options.seed
        return draw_prompt(self.name, seed, split, index, self.options.eval_share, self.draw)

    @abstractmethod
    def draw(self, draws: Draws) -> tuple[str, Any]:
        """A text and the answer that the episode needs."""

    @abstractmethod
    def start(self, prompt: Prompt) -> AgentEpisode:
        """A new episode."""
