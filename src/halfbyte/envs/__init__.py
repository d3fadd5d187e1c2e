"""Tasks and rewards: single-turn built in, multi-turn through the same protocol.

:func:`make_env` makes an environment by name. Nothing here imports torch, and optional packages are imported when used.
"""

from __future__ import annotations

from halfbyte.envs.agent import AgentEnvironment, AgentEpisode
from halfbyte.envs.arithmetic import ArithmeticEnvironment
from halfbyte.envs.calculator import CalculatorEnvironment
from halfbyte.envs.environment import Environment, Episode, Message, Prompt, Split, Turn, stream
from halfbyte.envs.guard import GuardedEnvironment, GuardedEpisode
from halfbyte.envs.guess import GuessEnvironment
from halfbyte.envs.jsonl import JsonlEnvironment
from halfbyte.envs.reasoning import ReasoningGymEnvironment
from halfbyte.envs.registry import ENVIRONMENTS, make_env
from halfbyte.envs.rewards import RewardFunction, load_reward
from halfbyte.envs.scoring import Score, ScoreOutcome, Scorer, score_safely, step_safely
from halfbyte.envs.single_turn import SingleTurnEnvironment, SingleTurnEpisode
from halfbyte.envs.split import prompt_key, split_of

__all__ = [
    "ENVIRONMENTS",
    "AgentEnvironment",
    "AgentEpisode",
    "ArithmeticEnvironment",
    "CalculatorEnvironment",
    "Environment",
    "Episode",
    "GuardedEnvironment",
    "GuardedEpisode",
    "GuessEnvironment",
    "JsonlEnvironment",
    "Message",
    "Prompt",
    "ReasoningGymEnvironment",
    "RewardFunction",
    "Score",
    "ScoreOutcome",
    "Scorer",
    "SingleTurnEnvironment",
    "SingleTurnEpisode",
    "Split",
    "Turn",
    "load_reward",
    "make_env",
    "prompt_key",
    "score_safely",
    "split_of",
    "step_safely",
    "stream",
]
