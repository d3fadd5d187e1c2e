"""Environments by name: ``make_env("arithmetic:sort", max_digits=10)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from halfbyte.config import close_names
from halfbyte.envs.arithmetic import ArithmeticEnvironment
from halfbyte.envs.calculator import CalculatorEnvironment
from halfbyte.envs.environment import Environment
from halfbyte.envs.guard import GuardedEnvironment
from halfbyte.envs.guess import GuessEnvironment
from halfbyte.envs.jsonl import JsonlEnvironment
from halfbyte.envs.reasoning import ReasoningGymEnvironment
from halfbyte.envs.rewards import load_object, load_reward
from halfbyte.envs.scoring import failure
from halfbyte.errors import ConfigError, UserError

__all__ = ["ENVIRONMENTS", "make_env"]


def make_env(spec: str, /, *, reward: str | None = None, correct_at: float = 1.0, **options: Any) -> Environment:
    """The environment that ``spec`` names.

    Arguments:
        spec: ``arithmetic:<task>``, ``agent:<task>``, ``reasoning_gym:<dataset>``, ``jsonl:<path>``, or
            ``python:<module>:<function>`` for one of your own: the function is called with the options and returns an
            ``Environment``.
        reward: ``module:function`` in place of the environment's own reward, see ``rewards.py``.
        correct_at: with such a reward: a response counts as correct from here on, where nothing else decides.
            reasoning_gym: a score from here on counts as correct.
        options: of the environment; its own documentation lists them.

    Raises:
        ConfigError: an unknown name (known and close ones are listed), option, value, or reward.
        DataError, MissingExtraError: see the environments.
    """
    kind, _, argument = spec.partition(":")
    if kind not in ENVIRONMENTS or not argument:
        close = close_names(kind, ENVIRONMENTS)
        raise ConfigError(
            f"unknown environment {spec!r}" if kind not in ENVIRONMENTS else f"environment {spec!r} names no task",
            where="env.name",
            expected=f"one of: {', '.join(ENVIRONMENTS.values())}",
            fix=f"did you mean {ENVIRONMENTS[close[0]]}?" if close and kind not in ENVIRONMENTS else "",
        )
    if kind == "python":
        return _own(spec, argument, reward, options)
    function = None if reward is None else load_reward(reward, correct_at=correct_at)
    if kind == "reasoning_gym":
        return ReasoningGymEnvironment(argument, reward=function, correct_at=correct_at, **options)
    return _BUILT_IN[kind](argument, reward=function, **options)


ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "arithmetic": "arithmetic:<task>",
        "agent": "agent:<task>",
        "reasoning_gym": "reasoning_gym:<dataset>",
        "jsonl": "jsonl:<path>",
        "python": "python:<module>:<function>",
    }
)
"""Kind -> how it is written."""

_AGENTS: Mapping[str, Callable[..., Environment]] = {
    "guess": GuessEnvironment,
    "calculator": CalculatorEnvironment,
}


def _agent(task: str, /, **options: Any) -> Environment:
    if task not in _AGENTS:
        close = close_names(task, _AGENTS)
        raise ConfigError(
            f"unknown agent task {task!r}{f' (did you mean {close[0]}?)' if close else ''}",
            where="env.name",
            expected=f"agent:<task> with one of: {', '.join(_AGENTS)}",
        )
    return _AGENTS[task](**options)


_BUILT_IN: Mapping[str, Callable[..., Environment]] = {
    "agent": _agent,
    "arithmetic": ArithmeticEnvironment,
    "jsonl": JsonlEnvironment,
}


def _own(spec: str, argument: str, reward: str | None, options: Mapping[str, Any]) -> Environment:
    if reward is not None:
        raise ConfigError(
            "a reward function does not apply to an environment of your own",
            where="env.reward",
            expected=f"{spec} gives its rewards itself",
        )
    make = load_object(argument, "env.name")
    try:
        made = make(**options)
        lacking = [name for name in ("name", "size", "prompt", "start") if not hasattr(made, name)]
        guarded = GuardedEnvironment(made, spec)
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit() in it as well
        raise ConfigError(
            f"{argument} fails:\n{failure()}",
            where=f"{argument}(**env.options), options {dict(options)}",
            expected="an environment",
        ) from error
    if lacking:
        raise ConfigError(
            f"{argument} made a {type(made).__name__} without {', '.join(lacking)}",
            where="env.name",
            expected="a halfbyte.envs.Environment",
        )
    return guarded
