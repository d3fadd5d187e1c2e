"""The wall between the run and an environment that is not ours.

A sample that goes wrong costs that sample; sizes and prompts that go wrong are errors of the user's data, with the
traceback of the environment in the message.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from halfbyte.envs.environment import Environment, Episode, Prompt, Split, Turn
from halfbyte.envs.scoring import ScoreOutcome, failure, step_safely, writable
from halfbyte.errors import DataError, UserError

__all__ = ["GuardedEnvironment", "GuardedEpisode"]

Result = TypeVar("Result")


class GuardedEpisode:
    """An episode whose failures end it without a reward, with the traceback in ``info["error"]``.

    Arguments:
        start: makes the episode; if it fails, the first step says so.
    """

    def __init__(self, start: Callable[[], Episode]) -> None:
        self._episode: Episode | None = None
        self._error = ""
        try:
            self._episode = start()
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            self._error = failure()

    def step(self, response_text: str, response_ids: Sequence[int]) -> Turn:
        """See ``step_safely``."""
        if self._error:
            return ScoreOutcome(None, error=self._error).turn()
        assert self._episode is not None
        return step_safely(self._episode, response_text, response_ids)


class GuardedEnvironment:
    """Another environment, with its answers checked and its episodes guarded.

    Arguments:
        environment: the one to guard; if it does not say whether it is ``multi_turn``, it is taken to be.
        name: under which it was asked for.
    """

    def __init__(self, environment: Environment, name: str) -> None:
        self._environment, self.name = environment, name
        self.multi_turn = bool(getattr(environment, "multi_turn", True))

    def size(self, split: Split) -> int | None:
        """As the environment says.

        Raises:
            DataError: it fails, or says neither None nor a number above 0.
        """
        where = f"{self.name}: size({split!r})"
        size = _guarded(lambda: self._environment.size(split), where)
        if size is None:
            return None
        expected = "a number of prompts, at least 1, or None for an endless stream"
        try:
            number = operator.index(size)
        except TypeError as error:
            raise DataError(
                f"the environment says that its size is {type(size)}", where=where, expected=expected
            ) from error
        if isinstance(size, bool) or number < 1:
            raise DataError(f"the environment says that it has {size} {split} prompts", where=where, expected=expected)
        return number

    def prompt(self, split: Split, index: int) -> Prompt:
        """As the environment says.

        Raises:
            IndexError: index is negative, or not below the size.
            DataError: the environment fails, or gives something that cannot be a prompt.
        """
        where = f"{self.name}: prompt({split!r}, {index})"
        try:
            prompt = _guarded(lambda: self._environment.prompt(split, index), where, (IndexError,))
        except IndexError as error:
            size = self.size(split)
            if index < 0 or (size is not None and index >= size):
                raise
            _fail(where, error)
        _check_prompt(prompt, where)
        return prompt

    def start(self, prompt: Prompt) -> GuardedEpisode:
        """A guarded episode."""
        return GuardedEpisode(lambda: self._environment.start(prompt))


def _guarded(call: Callable[[], Result], where: str, passing: tuple[type[BaseException], ...] = ()) -> Result:
    passing = (UserError, KeyboardInterrupt, GeneratorExit, *passing)
    try:
        return call()
    except passing:
        raise
    except BaseException as error:
        _fail(where, error)


def _fail(where: str, error: BaseException) -> NoReturn:
    raise DataError(f"the environment fails:\n{failure()}", where=where, fix="mend the environment") from error


def _check_prompt(prompt: object, where: str) -> None:
    if not isinstance(prompt, Prompt):
        raise DataError(
            f"the environment gives a {type(prompt).__name__}", where=where, expected="halfbyte.envs.Prompt"
        )
    for name, good, expected in (
        ("id", isinstance(prompt.id, str), "text"),
        ("text", prompt.text is None or isinstance(prompt.text, str), "text, or None"),
        ("messages", prompt.messages is None or _are_messages(prompt.messages), "a tuple of mappings, or None"),
        ("metadata", isinstance(prompt.metadata, Mapping), "a mapping"),
    ):
        if not good:
            kind = type(getattr(prompt, name)).__name__
            raise DataError(f"{name} of the prompt cannot be used: {kind}", where=where, expected=expected)
    for name, text in (("id", prompt.id), ("text", prompt.text or "")):
        if writable(text) != text:
            raise DataError(
                f"{name} of the prompt holds a lone surrogate", where=where, expected="text that UTF-8 can write"
            )


def _are_messages(messages: object) -> bool:
    return isinstance(messages, (tuple, list)) and all(isinstance(message, Mapping) for message in messages)
