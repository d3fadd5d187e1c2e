"""The protocol carries more than one turn; the registry finds environments by name."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halfbyte.envs import ENVIRONMENTS, Environment, Episode, Prompt, Split, Turn, make_env, step_safely, stream
from halfbyte.errors import ConfigError

GUESSING = """
from halfbyte.envs import Prompt, Turn


class GuessEpisode:
    def __init__(self, number, turns):
        self.number, self.left = number, turns

    def step(self, response_text, response_ids):
        self.left -= 1
        guess = int(response_text)
        if guess == self.number:
            return Turn(True, 1.0, info={"correct": True, "left": self.left, "ids": list(response_ids)})
        if self.left == 0:
            return Turn(True, 0.0, info={"correct": False})
        return Turn(False, observation="higher " if guess < self.number else "lower ")


class Guess:
    name = "guess"

    def __init__(self, limit=100, turns=7):
        self.limit, self.turns = limit, turns

    def size(self, split):
        return self.limit // 2

    def prompt(self, split, index):
        number = 2 * index + (split == "eval")
        return Prompt(f"{split}/{index}", text=f"0..{self.limit - 1}? ", answer=number)

    def start(self, prompt):
        return GuessEpisode(prompt.answer, self.turns)
"""


@pytest.fixture
def guess(tmp_path: Path) -> str:
    file = tmp_path / "guessing.py"
    file.write_text(GUESSING)
    return f"python:{file}:Guess"


def play(environment: Environment, prompt: Prompt, limit: int) -> tuple[float, list[Turn]]:
    """A policy that bisects, driven as the training loop drives one."""
    low, high = 0, limit - 1
    episode: Episode = environment.start(prompt)
    turns: list[Turn] = []
    while not turns or not turns[-1].done:
        middle = (low + high) // 2
        turns.append(episode.step(str(middle), [middle]))
        if turns[-1].observation == "higher ":
            low = middle + 1
        elif turns[-1].observation == "lower ":
            high = middle - 1
    return sum(t.reward or 0.0 for t in turns), turns


def test_an_episode_of_many_turns(guess: str) -> None:
    environment = make_env(guess)
    assert environment.multi_turn
    assert environment.name == guess
    played = [play(environment, prompt, 100) for prompt in stream(environment, "eval")]
    assert len(played) == 50
    assert all(reward == 1.0 and turns[-1].correct for reward, turns in played)  # 7 turns are enough for 100 numbers
    assert max(len(turns) for _, turns in played) == 7
    assert all(t.reward is None and t.observation for _, turns in played for t in turns[:-1])
    assert not any(t.error for _, turns in played for t in turns)


def test_options_reach_an_own_environment(guess: str) -> None:
    played = [
        play(environment, p, 100) for environment in [make_env(guess, turns=2)] for p in stream(environment, "train")
    ]
    assert sum(reward for reward, _ in played) == 2  # 49 misses (odd), then 24 and 74 are the second guesses
    assert {len(turns) for _, turns in played} == {2}


def test_episodes_do_not_share_state(guess: str) -> None:
    environment = make_env(guess)
    prompt = environment.prompt("train", 10)
    a, b = environment.start(prompt), environment.start(prompt)
    for _ in range(6):
        assert not a.step("99", [1]).done
    assert b.step("99", [1]).observation == "lower "
    assert a.step("99", [1]).done


def test_an_own_environment_that_fails_costs_one_sample(guess: str) -> None:
    environment = make_env(guess)
    episode = environment.start(environment.prompt("train", 3))
    turn = episode.step("not a number", [5])
    assert turn.done
    assert turn.reward is None
    assert turn.correct is False
    assert "invalid literal" in str(turn.error)
    assert "guessing.py" in str(turn.error)


class Says:
    def __init__(self, turn: Any) -> None:
        self.turn = turn

    def step(self, response_text: str, response_ids: Sequence[int]) -> Turn:
        if isinstance(self.turn, BaseException):
            raise self.turn
        return self.turn  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "turn",
    [Turn(True, math.nan), Turn(True, "1"), Turn(False), None, SystemExit(3)],  # type: ignore[arg-type]
)
def test_turns_that_make_no_sense_end_the_episode(turn: Any) -> None:
    result = step_safely(Says(turn), "text", [1])
    assert result.done
    assert result.reward is None
    assert result.error


def test_sensible_turns_pass_unchanged() -> None:
    for turn in (Turn(True, 0.5, info={"correct": True}), Turn(False, 0.25, "more"), Turn(False, None, ""), Turn(True)):
        assert step_safely(Says(turn), "text", [1]) == turn
    with pytest.raises(KeyboardInterrupt):
        step_safely(Says(KeyboardInterrupt()), "text", [1])


def test_single_turn_environments_end_after_one_response() -> None:
    environment = make_env("arithmetic:add")
    assert not environment.multi_turn
    assert environment.start(environment.prompt("eval", 0)).step("0", [3]).done


@pytest.mark.parametrize("split", ["train", "eval"])
def test_streams_start_where_asked(split: Split) -> None:
    environment = make_env("arithmetic:add")
    assert next(stream(environment, split, 17)) == environment.prompt(split, 17)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("aritmetic:sort", "did you mean arithmetic:<task>"),
        ("sort", "jsonl:<path>"),
        ("", "unknown environment ''"),
        ("arithmetic", "names no task"),
        ("arithmetic:", "names no task"),
        ("arithmetic:sorted", "did you mean sort"),
        ("arithmetic:multiply", "sort, add, chain_sum"),
        ("jsonl", "names no task"),
        ("python:json", "module:function"),
        ("python:os:getcwd", "without name, size, prompt, start"),
        ("python:json:loads", "fails"),
    ],
)
def test_unknown_names_list_the_known(spec: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_env(spec)


def test_every_kind_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        make_env("nothing:here")
    assert all(form in str(caught.value) for form in ENVIRONMENTS.values())


def test_importing_environments_is_light() -> None:
    code = (
        "import sys, halfbyte.envs\n"
        "halfbyte.envs.make_env('arithmetic:sort').prompt('train', 0)\n"
        "print([m for m in ('torch', 'numpy', 'reasoning_gym', 'math_verify', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
