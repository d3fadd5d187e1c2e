"""Rewards of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from halfbyte.envs import Prompt, make_env, score_safely
from halfbyte.envs.rewards import RewardFunction, load_object, load_reward
from halfbyte.errors import ConfigError

MESSAGES = ({"role": "user", "content": "Hi"},)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of a fresh name that can be imported, and returns its name."""

    def write(source: str, name: str) -> str:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def call(function: Any, prompt: Prompt, response: str = "r") -> float | None:
    result = score_safely(RewardFunction(function).scorer(None), prompt, response)
    assert result.error is None, result.error
    return result.reward


def test_a_reward_sees_prompt_response_answer_and_metadata(module: Any) -> None:
    source = """
def score(*, prompt, response, answer, level, **rest):
    assert (prompt, response, answer, level, rest) == ("q", "r", "a", 3, {"other": [1]})
    return 0.5
"""
    reward = load_reward(module(source, "hb_reward_kwargs") + ":score")
    prompt = Prompt("p", text="q", answer="a", metadata={"level": 3, "other": [1]})
    assert score_safely(reward.scorer(None), prompt, "r").reward == 0.5


def test_a_reward_gets_only_what_it_names() -> None:
    prompt = Prompt("p", text="q", answer="a", metadata={"level": 3})
    assert call(lambda response: len(response), prompt, "abc") == 3.0
    assert call(lambda answer, level=1: level, prompt) == 3.0


def test_metadata_does_not_shadow_the_response() -> None:
    prompt = Prompt("p", text="q", answer="a", metadata={"response": "of the data set", "prompt": "x"})
    assert call(lambda prompt, response: float((prompt, response) == ("q", "r")), prompt) == 1.0


def test_a_chat_prompt_arrives_as_a_list_of_messages_that_is_a_copy() -> None:
    prompt = Prompt("p", messages=MESSAGES)

    def spoil(prompt: list[dict[str, str]]) -> float:
        assert prompt == [{"role": "user", "content": "Hi"}]
        prompt[0]["content"] = "changed"
        prompt.clear()
        return 1.0

    assert call(spoil, prompt) == 1.0
    assert prompt.messages == ({"role": "user", "content": "Hi"},)


def test_a_missing_argument_fails_the_sample_and_names_it() -> None:
    def needs_level(response: str, level: int) -> float:
        return 1.0

    result = score_safely(RewardFunction(needs_level).scorer(None), Prompt("p", text="q"), "r")
    assert result.reward is None
    assert result.error is not None
    assert "level" in result.error


def test_the_environment_still_judges_what_is_correct(module: Any) -> None:
    name = module("def shaped(response, answer):\n    return len(response) / 100\n", "hb_reward_shaped")
    environment = make_env("arithmetic:sort", reward=f"{name}:shaped")
    prompt = environment.prompt("eval", 0)
    right, wrong = (environment.start(prompt).step(r, []) for r in (prompt.answer, "1" * 100))
    assert right.reward == pytest.approx(len(prompt.answer) / 100)
    assert (right.correct, wrong.correct) == (True, False)
    assert wrong.reward == 1.0


def test_a_reward_that_raises_on_some_responses_leaves_the_others(module: Any) -> None:
    source = "def fragile(response):\n    return float(response)\n"
    environment = make_env("arithmetic:sort", reward=module(source, "hb_reward_fragile") + ":fragile")
    prompt = environment.prompt("train", 0)
    turns = [environment.start(prompt).step(r, []) for r in ("1.5", "nonsense", "nan", "2")]
    assert [t.reward for t in turns] == [1.5, None, None, 2.0]
    assert "could not convert" in str(turns[1].error)
    assert "finite" in str(turns[2].error)


def test_a_file_can_be_named_directly(tmp_path: Path) -> None:
    file = tmp_path / "my.rewards.py"
    file.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Shape:\n    weight: float = 2.0\n\n"
        "    def score(self, response):\n        return self.weight\n\nscore = Shape().score\n"
    )
    assert score_safely(load_reward(f"{file}:score").scorer(None), Prompt("p", text="q"), "r").reward == 2.0


def test_dotted_names_reach_into_classes() -> None:
    assert load_object("pathlib:Path.exists", "test") is Path.exists


@pytest.mark.parametrize("spec", ["hb_nothing", ":f", "mod:", "mod:1f", "a:b c", "mod:f()"])
def test_specs_of_another_form_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="module:function"):
        load_reward(spec)


def test_a_missing_module_says_where_to_put_it() -> None:
    with pytest.raises(ConfigError, match="no module 'hb_absent'") as caught:
        load_reward("hb_absent.inner:score")
    assert "PYTHONPATH" in str(caught.value)
    with pytest.raises(ConfigError, match="there is no file"):
        load_reward("hb/absent.py:score")


def test_a_module_that_fails_shows_its_own_error(module: Any) -> None:
    name = module("import hb_dependency_that_is_absent\n", "hb_reward_imports")
    with pytest.raises(ConfigError, match="hb_dependency_that_is_absent") as caught:
        load_reward(f"{name}:score")
    assert "fails while it is imported" in str(caught.value)
    assert "hb_reward_imports.py" in str(caught.value)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(module("1 / 0\n", "hb_reward_divides") + ":score")


def test_a_misspelt_function_lists_close_names(module: Any) -> None:
    name = module("def score_answer():\n    return 1\n", "hb_reward_close")
    with pytest.raises(ConfigError, match="did you mean score_answer"):
        load_reward(f"{name}:score_anwser")


def test_what_cannot_be_called_by_keyword_is_refused(module: Any) -> None:
    source = "constant = 3\ndef positional(x, /):\n    return 1\nasync def later(**k):\n    return 1\n"
    name = module(source, "hb_reward_kinds")
    for function, match in (("constant", "cannot be called"), ("positional", "positional"), ("later", "coroutine")):
        with pytest.raises(ConfigError, match=match):
            load_reward(f"{name}:{function}")


def test_own_environments_refuse_a_reward(module: Any) -> None:
    with pytest.raises(ConfigError, match=r"env\.reward"):
        make_env("python:json:loads", reward="json:dumps")
