"""Scores, and the wall between a scorer and the run.

A reward function is the user's code and meets every string a model can write. One that raises, or returns NaN, infinity
or something that is no number, fails that sample only: its reward is None and the traceback is kept (issue #2). Every
scorer, ours as well, is called through :func:`score_safely`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from halfbyte.envs.environment import Episode, Prompt, Turn
from halfbyte.errors import DataError

__all__ = [
    "Score",
    "ScoreOutcome",
    "Scorer",
    "failure",
    "finite_reward",
    "json_info",
    "score_safely",
    "step_safely",
    "writable",
]

#: largest float32: rewards become float32 tensors, where anything above is infinite
LARGEST = 3.4028234663852886e38
_KEPT = 8000
_LONGEST_INTEGER = 1024  # bits


@dataclass(frozen=True)
class Score:
    """A scorer's verdict.

    Arguments:
        reward: finite.
        correct: whether the answer counts as right, for accuracy; a shaped reward may say little about it.
        info: details for the trajectory file; values without a JSON form are kept as their ``repr``.
    """

    reward: float
    correct: bool
    info: Mapping[str, Any] = field(default_factory=dict)


Scorer: TypeAlias = Callable[[Prompt, str], Score]


@dataclass(frozen=True)
class ScoreOutcome:
    """A score, or the reason why there is none.

    Arguments:
        reward: finite, or None if scoring failed.
        correct: False if scoring failed.
        info: JSON values only.
        error: the traceback if scoring failed.
    """

    reward: float | None
    correct: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def turn(self) -> Turn:
        """The last turn of an episode with this outcome."""
        info: dict[str, Any] = {**self.info, "correct": self.correct}
        if self.error is not None:
            info["error"] = self.error
        return Turn(done=True, reward=self.reward, info=info)


def score_safely(scorer: Scorer, prompt: Prompt, response: str) -> ScoreOutcome:
    """Call ``scorer``; whatever it raises or returns, the result is an outcome. Only Ctrl-C passes through."""
    try:
        score = scorer(prompt, response)
        return ScoreOutcome(finite_reward(score.reward), bool(score.correct), json_info(score.info))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # sys.exit() in a reward, or math-verify's timeout, is a failed sample as well
        return ScoreOutcome(None, error=failure())


def step_safely(episode: Episode, response_text: str, response_ids: Sequence[int]) -> Turn:
    """``episode.step``, behind the same wall: a failure ends the episode without a reward."""
    try:
        turn = episode.step(response_text, response_ids)
        _check_observation(turn)
        reward = None if turn.reward is None else finite_reward(turn.reward)
        return Turn(bool(turn.done), reward, turn.observation, json_info(turn.info))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:
        return ScoreOutcome(None, error=failure()).turn()


def finite_reward(value: object) -> float:
    """``value`` as a float; bool, int, NumPy and torch scalars are numbers too.

    Raises:
        DataError: no number, NaN, infinite, or infinite in float32.
    """
    convert = getattr(type(value), "__float__", None)
    if convert is None:
        raise DataError(f"the reward is {_short(value)}, of type {type(value).__name__}", expected="a number")
    try:
        number = float(convert(value))
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise DataError(f"the reward is {_short(value)}", expected="a finite float32")
    return number


def json_info(value: Any) -> dict[str, Any]:
    """``value`` (a mapping) with JSON values only, so that it can be written with the trajectory, in UTF-8."""
    return {writable(str(key)): _json(item, 0) for key, item in dict(value).items()}


def writable(text: str) -> str:
    """``text`` with lone surrogates, which UTF-8 cannot write, spelled out (``\\ud800``)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def failure() -> str:
    """The traceback of the exception being handled, shortened in the middle, as text that can be written."""
    text = writable(traceback.format_exc())
    return text if len(text) <= _KEPT else f"{text[:1000]}\n...\n{text[1000 - _KEPT :]}"


def _check_observation(turn: Turn) -> None:
    if not turn.done and turn.observation is None:
        raise DataError("a turn that is not done has no observation", expected="text to continue from")
    if turn.observation is not None and not isinstance(turn.observation, str):
        raise DataError(f"the observation is {_short(turn.observation)}", expected="text to continue from")
    if turn.observation is not None and writable(turn.observation) != turn.observation:
        raise DataError(
            f"the observation {_short(turn.observation)} holds a lone surrogate", expected="text that UTF-8 can write"
        )


def _json(value: Any, depth: int) -> Any:
    if type(value) is str:
        return writable(value)
    if type(value) is int and value.bit_length() > _LONGEST_INTEGER:  # Python refuses to write very long ones
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    if depth < 8 and isinstance(value, Mapping):
        return {writable(str(key)): _json(item, depth + 1) for key, item in value.items()}
    if depth < 8 and isinstance(value, list | tuple):
        return [_json(item, depth + 1) for item in value]
    return _short(value)


def _short(value: object) -> str:
    text = writable(repr(value))
    return text if len(text) <= 200 else f"{text[:197]}..."
