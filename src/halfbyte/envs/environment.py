"""What a task is to the rest of halfbyte: prompts by index, and episodes that answer responses turn by turn.

The protocol is multi-turn from the start (issue #2): a single-turn task is an episode whose first turn is its last.
Text goes in for scoring, token ids go in beside it, and only an observation's text comes back; the loop encodes that
once and never re-tokenises a response (ms-swift #10012, verl #6719).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from halfbyte.errors import DataError

__all__ = ["Environment", "Episode", "Message", "Prompt", "Split", "Turn", "stream"]

Split: TypeAlias = Literal["train", "eval"]
Message: TypeAlias = Mapping[str, Any]
"""A chat message: ``role`` and ``content``, and whatever else the model's chat template reads."""


@dataclass(frozen=True)
class Prompt:
    """A question and what is needed to score a response.

    Arguments:
        id: the same for the same prompt in every run; unique within a split.
        text: plain text; or
        messages: a conversation for the model's chat template. Exactly one of the two.
        answer: what the scorer compares with; its form is the scorer's business.
        metadata: anything else a reward function may want.

    Raises:
        DataError: both or neither of text and messages, or an empty one.
    """

    id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise DataError("a prompt has both text and messages, or neither", where=self.id, expected="one of them")
        if not self.text and not self.messages:
            raise DataError("a prompt is empty", where=self.id, expected="text, or at least one message")

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The text, or a copy of the messages: the ``prompt`` that reward functions see."""
        return self.text if self.text is not None else [dict(m) for m in self.messages or ()]


@dataclass(frozen=True)
class Turn:
    """What an environment says to one response.

    Arguments:
        done: the episode ends here.
        reward: for this response; the sample's reward is the sum over its turns. None: nothing yet, or, at the end,
            scoring failed (``error`` says why) and the sample must not be trained on.
        observation: text to continue from; needed unless done.
        info: JSON values only. ``correct`` (bool) feeds accuracy, ``error`` (str) keeps the traceback of a failure.
    """

    done: bool
    reward: float | None = None
    observation: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correct(self) -> bool | None:
        """``info["correct"]``, or None where the environment does not say."""
        value = self.info.get("correct")
        return None if value is None else bool(value)

    @property
    def error(self) -> str | None:
        """Why scoring failed, or None."""
        value = self.info.get("error")
        return None if value is None else str(value)


class Episode(Protocol):
    """One sample of one prompt, from its first response to its end. Not used again after a turn that is done."""

    def step(self, response_text: str, response_ids: Sequence[int]) -> Turn:
        """Judge a response (the text without its end-of-sequence token, and its ids) and say what comes next."""
        ...


class Environment(Protocol):
    """A task. Everything is a pure function of the arguments, so that a resumed run sees the same prompts."""

    @property
    def name(self) -> str:
        """What :func:`halfbyte.envs.make_env` was asked for."""
        ...

    @property
    def multi_turn(self) -> bool:
        """Whether an episode may have more than one turn; the engine reserves room for it."""
        ...

    def size(self, split: Split) -> int | None:
        """Number of prompts, or None where the stream has no end."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """The ``index``-th prompt. No prompt of ``train`` is in ``eval``.

        Raises:
            IndexError: index is negative, or not below the size.
        """
        ...

    def start(self, prompt: Prompt) -> Episode:
        """A new episode."""
        ...


def stream(environment: Environment, split: Split, start: int = 0) -> Iterator[Prompt]:
    """The prompts of a split in order from ``start``; endless where the split is."""
    size, index = environment.size(split), start
    while size is None or index < size:
        yield environment.prompt(split, index)
        index += 1
