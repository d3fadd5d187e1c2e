"""``module:function`` rewards: the user's own Python function scores responses.

``reward = "my_rewards:score"`` is called as ``score(prompt=..., response=..., answer=..., **metadata)`` and returns a
number, or a ``Score`` to say what counts as correct. ``prompt`` is the text, or the list of messages. A function
without ``**kwargs`` is given only the arguments it names. ``path/to/file.py:function`` works too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from halfbyte.config import close_names
from halfbyte.envs.environment import Prompt
from halfbyte.envs.scoring import Score, Scorer, finite_reward
from halfbyte.errors import ConfigError

__all__ = ["RewardFunction", "load_object", "load_reward", "with_reward"]


class RewardFunction:
    """A loaded reward function.

    Arguments:
        function: called with keyword arguments.
        correct_at: a response counts as correct from this reward on, where nothing else decides.
        where: its name, for messages.

    Raises:
        ConfigError: it cannot be called with keyword arguments, or is a coroutine function.
    """

    def __init__(self, function: Callable[..., Any], *, correct_at: float = 1.0, where: str = "reward") -> None:
        self._function, self._correct_at = function, correct_at
        self._accepted = _accepted(function, where)

    def scorer(self, own: Scorer | None) -> Scorer:
        """A scorer with this reward; what is correct is still for ``own``, the environment's scorer, to say.

        A shaped reward (length, format, partial credit) should not redefine accuracy. Without ``own`` the reward
        decides by ``correct_at``; a function that returns a ``Score`` always decides.
        """

        def score(prompt: Prompt, response: str) -> Score:
            value = self._call(prompt, response)
            if isinstance(value, Score):
                return value
            reward = finite_reward(value)
            return Score(reward, reward >= self._correct_at if own is None else own(prompt, response).correct)

        return score

    def _call(self, prompt: Prompt, response: str) -> Any:
        given = {"prompt": prompt.content, "response": response, "answer": prompt.answer}
        arguments = {**prompt.metadata, **given}
        if self._accepted is not None:
            arguments = {key: value for key, value in arguments.items() if key in self._accepted}
        return self._function(**arguments)


def with_reward(own: Scorer, reward: RewardFunction | None) -> Scorer:
    """``own``, or ``reward`` with ``own`` as the judge of what is correct."""
    return own if reward is None else reward.scorer(own)


def load_reward(spec: str, *, correct_at: float = 1.0) -> RewardFunction:
    """The reward function that ``module:function`` names.

    Raises:
        ConfigError: see :func:`load_object` and :class:`RewardFunction`.
    """
    where = f"reward {spec}"
    return RewardFunction(load_object(spec, where), correct_at=correct_at, where=where)


def load_object(spec: str, where: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names; the name may have dots.

    Raises:
        ConfigError: not of that form; the module does not exist, or fails while it is imported (its traceback is in the
            message); it has no such name (close ones are listed); or the object cannot be called.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{spec!r} names no function", where=where, expected="module:function, or path/to/file.py:function"
        )
    found: Any = _load_file(Path(source), where) if source.endswith(".py") else _load_module(source, where)
    for part in name.split("."):
        if not hasattr(found, part):
            close = close_names(part, [n for n in dir(found) if not n.startswith("_")])
            hint = f"did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"{source} has no {name!r}", where=where, expected="a function defined there", fix=hint)
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{spec} is {type(found).__name__}, which cannot be called", where=where, expected="a function"
        )
    return found


def _load_module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"there is no module {error.name!r}",
                where=where,
                expected="a module that this Python can import",
                fix="add its folder to PYTHONPATH, or name the file: path/to/file.py:function",
            ) from error
        raise _import_failed(name, where) from error
    except Exception as error:
        raise _import_failed(name, where) from error


def _load_file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", where=where, expected="a Python file")
    spec = importlib.util.spec_from_file_location(f"halfbyte_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _import_failed(str(path), where) from error
    return module


def _import_failed(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"{name} fails while it is imported:\n{traceback.format_exc()}", where=where, fix="mend the module"
    )


def _accepted(function: Callable[..., Any], where: str) -> frozenset[str] | None:
    """Names of the arguments the function takes; None if it takes any."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError("the reward is a coroutine function", where=where, expected="a plain function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature
        return None
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise ConfigError(
                f"argument {p.name!r} of the reward is positional only",
                where=where,
                expected="f(prompt, response, answer, **metadata), called by keyword",
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
