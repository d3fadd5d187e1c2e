"""Tasks of many turns: what the environment says, when an episode ends, and that a policy can win."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from halfbyte.envs import Environment, Prompt, Turn, make_env
from halfbyte.errors import ConfigError

VOCABULARY = set(
    json.loads((Path(__file__).parents[2] / "src/halfbyte/models/tiny/tokenizer.json").read_text())["model"]["vocab"]
)


def play_guess(environment: Environment, prompt: Prompt) -> list[Turn]:
    """Halve the range until the number is found."""
    low, high = map(int, str(prompt.text).rstrip("?").split(":"))
    episode, turns = environment.start(prompt), list[Turn]()
    while not turns or not turns[-1].done:
        middle = (low + high) // 2
        turns.append(episode.step(str(middle), [0]))
        if turns[-1].observation == "+":
            low = middle + 1
        elif turns[-1].observation == "-":
            high = middle - 1
    return turns


def play_calculator(environment: Environment, prompt: Prompt) -> list[Turn]:
    """Evaluate the innermost operation by the calculator until an integer is left."""
    text, episode, turns = str(prompt.text).rstrip("="), environment.start(prompt), list[Turn]()
    while not turns or not turns[-1].done:
        inner = text[text.rfind("(") + 1 :].split(")")[0]
        turns.append(episode.step(inner, [0]))
        if turns[-1].observation is not None:
            value = turns[-1].observation.strip("=\n")
            text = text.replace(f"({inner})", value) if f"({inner})" in text else value
    return turns


def test_halving_always_wins_within_the_logarithm_of_the_width() -> None:
    environment = make_env("agent:guess")
    lengths: Counter[int] = Counter()
    for index in range(200):
        prompt = environment.prompt("eval", index)
        low, high = map(int, str(prompt.text).rstrip("?").split(":"))
        assert 0 <= low <= prompt.answer <= high <= 99
        turns = play_guess(environment, prompt)
        assert turns[-1].correct
        assert turns[-1].reward == 1.0
        assert len(turns) <= math.ceil(math.log2(high - low + 2))
        assert all(t.reward is None for t in turns[:-1])
        lengths[len(turns)] += 1
    assert max(lengths) >= 6


def test_fewer_turns_than_halving_needs_lose_some() -> None:
    environment = make_env("agent:guess", turns=2)
    played = [play_guess(environment, environment.prompt("train", i)) for i in range(100)]
    assert {len(turns) for turns in played} == {1, 2}
    assert 0 < sum(bool(turns[-1].correct) for turns in played) < 30
    assert all(turns[-1].reward == float(bool(turns[-1].correct)) for turns in played)


@pytest.mark.parametrize("said", ["", "x", "-3", "1.5", "٣", "12345678901", "3 4"])
def test_what_is_no_number_costs_a_turn(said: str) -> None:
    environment = make_env("agent:guess", turns=2)
    prompt = environment.prompt("train", 0)
    episode = environment.start(prompt)
    assert episode.step(said, []) == Turn(done=False, observation="?")
    assert episode.step(said, []) == Turn(done=True, reward=0.0, info={"correct": False, "turns": 2})
    assert episode is not environment.start(prompt)


def test_each_turn_after_the_first_costs() -> None:
    environment = make_env("agent:guess", turn_cost=0.05)
    for index in range(40):
        turns = play_guess(environment, environment.prompt("train", index))
        assert turns[-1].reward == pytest.approx(1.0 - 0.05 * (len(turns) - 1))


@pytest.mark.parametrize("operations", [1, 3, 15])
def test_a_policy_that_cannot_calculate_wins_with_the_calculator(operations: int) -> None:
    environment = make_env(
        "agent:calculator", min_operations=operations, max_operations=operations, turns=16, operations="+-"
    )
    for index in range(40):
        prompt = environment.prompt("eval", index)
        # two independent readings of the expression: Python's, and one operation a turn
        assert eval(str(prompt.text).rstrip("=")) == prompt.answer
        turns = play_calculator(environment, prompt)
        assert turns[-1].correct
        assert len(turns) == operations + 1
        assert turns[-1].info["turns"] == operations + 1


def test_the_calculator_answers_what_it_can_read() -> None:
    environment = make_env("agent:calculator", operations="*", turns=16)
    episode = environment.start(environment.prompt("train", 0))
    calls = {
        "12*-3": "=-36\n",
        "7-9": "=-2\n",
        "0007+1": "=8\n",
        "1/0": "?\n",
        "2**9": "?\n",
        "": "?\n",
        "1+2+3": "?\n",
    }
    for call, answer in calls.items():
        assert episode.step(call, []) == Turn(done=False, observation=answer)
    assert episode.step("999999999", []).reward == 0.0


@pytest.mark.parametrize("name", ["agent:guess", "agent:calculator"])
def test_everything_said_is_in_the_packaged_policys_vocabulary(name: str) -> None:
    environment = make_env(name)
    for index in range(30):
        prompt = environment.prompt("train", index)
        play = play_guess if name.endswith("guess") else play_calculator
        said = str(prompt.text) + "".join(t.observation or "" for t in play(environment, prompt))
        said += str(environment.start(prompt).step("nonsense", []).observation)
        assert set(said) <= VOCABULARY


@pytest.mark.parametrize("name", ["agent:guess", "agent:calculator"])
def test_prompts_are_repeatable_and_the_splits_share_none(name: str) -> None:
    environment = make_env(name)
    train = [environment.prompt("train", i) for i in range(300)]
    held_out = [environment.prompt("eval", i) for i in range(300)]
    assert train == [make_env(name).prompt("train", i) for i in range(300)]
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert train != [make_env(name, seed=1).prompt("train", i) for i in range(300)]
    assert held_out == [make_env(name, seed=1).prompt("eval", i) for i in range(300)]
    assert environment.multi_turn
    assert environment.size("train") is None


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("agent:gess", {}, "did you mean guess"),
        ("agent:chess", {}, "guess, calculator"),
        ("agent:guess", {"turns": 1}, "turns"),
        ("agent:guess", {"turns": 17}, "turns"),
        ("agent:guess", {"largest": 9, "max_width": 11}, "does not fit"),
        ("agent:guess", {"largest": "many"}, "largest"),
        ("agent:guess", {"min_width": 9, "max_width": 8}, "above max_width"),
        ("agent:calculator", {"max_operations": 8}, "needs more than turns = 8"),
        ("agent:calculator", {"min_operations": 5}, "above max_operations"),
        ("agent:calculator", {"operations": "/"}, "operations"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_env(name, **options)


def test_a_reward_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(prompt, response, answer, **metadata):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="does not apply to an environment of many turns"):
        make_env("agent:guess", reward=f"{file}:score")
