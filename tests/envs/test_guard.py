"""An environment of the user's own that misbehaves: a failed sample or a message, never a traceback of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from halfbyte.envs import GuardedEnvironment, Prompt, Split, Turn
from halfbyte.errors import DataError


class Own:
    """Sound unless told otherwise; a value that is an exception is raised."""

    name = "own"
    multi_turn = True

    def __init__(self, size: Any = 4, prompt: Any = None, start: Any = None, turn: Any = None) -> None:
        self.values = {"size": size, "prompt": prompt, "start": start, "turn": turn}

    def _say(self, key: str, default: Any) -> Any:
        value = self.values[key]
        if isinstance(value, BaseException):
            raise value
        return default if value is None else value

    def size(self, split: Split) -> Any:
        return self._say("size", None)

    def prompt(self, split: Split, index: int) -> Any:
        if not 0 <= index < 4:
            raise IndexError(index)
        return self._say("prompt", Prompt(f"{split}/{index}", text="1+1="))

    def start(self, prompt: Prompt) -> Any:
        return self._say("start", self)

    def step(self, response_text: str, response_ids: Sequence[int]) -> Any:
        return self._say("turn", Turn(True, 1.0))


def guarded(**values: Any) -> GuardedEnvironment:
    return GuardedEnvironment(Own(**values), "python:own:Own")


def test_a_sound_environment_passes_unchanged() -> None:
    environment = guarded()
    assert environment.size("train") == 4
    prompt = environment.prompt("eval", 3)
    assert prompt == Prompt("eval/3", text="1+1=")
    assert environment.start(prompt).step("2", [1]) == Turn(True, 1.0)
    with pytest.raises(IndexError):
        environment.prompt("train", 4)
    with pytest.raises(IndexError):
        environment.prompt("train", -1)


@pytest.mark.parametrize("size", [0, -1, "4", 2.0, True, ValueError("no size"), SystemExit(1)])
def test_a_size_that_is_no_number_of_prompts_is_a_message(size: Any) -> None:
    with pytest.raises(DataError, match=r"python:own:Own: size\('eval'\)"):
        guarded(size=size).size("eval")


@pytest.mark.parametrize(
    "prompt",
    [
        "hello",
        ValueError("no prompt \ud800"),
        IndexError("inside the environment"),
        SystemExit(1),
        Prompt("a", text=5),  # type: ignore[arg-type]
        Prompt("a", messages="hello"),  # type: ignore[arg-type]
        Prompt("a", messages=("hello",)),  # type: ignore[arg-type]
        Prompt(7, text="a"),  # type: ignore[arg-type]
        Prompt("a", text="a", metadata=[1]),  # type: ignore[arg-type]
        Prompt("a\ud800", text="a"),
        Prompt("a", text="\ud800"),
    ],
)
def test_a_prompt_that_cannot_be_one_is_a_message(prompt: Any) -> None:
    with pytest.raises(DataError, match=r"prompt\('train', 2\)") as caught:
        guarded(prompt=prompt).prompt("train", 2)
    str(caught.value).encode("utf-8")


@pytest.mark.parametrize(
    "values",
    [
        {"start": ValueError("no start \ud800")},
        {"start": SystemExit(3)},
        {"start": "not an episode"},
        {"turn": Turn(False, observation=5)},  # type: ignore[arg-type]
        {"turn": Turn(False, observation="\ud800")},
        {"turn": Turn(True, 1.0, observation=b"x")},  # type: ignore[arg-type]
        {"turn": {"done": True}},
        {"turn": RuntimeError("\ud800")},
    ],
)
def test_an_episode_that_fails_costs_its_sample_and_can_be_written(values: Any) -> None:
    environment = guarded(**values)
    turn = environment.start(environment.prompt("train", 0)).step("2", [1])
    assert turn.done
    assert turn.reward is None
    assert turn.error
    json.dumps(dict(turn.info), ensure_ascii=False).encode("utf-8")


def test_ctrl_c_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        guarded(start=KeyboardInterrupt()).start(Prompt("a", text="a"))
    with pytest.raises(KeyboardInterrupt):
        guarded(size=KeyboardInterrupt()).size("train")
