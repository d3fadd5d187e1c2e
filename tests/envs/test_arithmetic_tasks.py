"""The character-level tasks against Python's own arithmetic."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.envs import Environment, Prompt, Split, make_env, split_of, stream
from halfbyte.envs.arithmetic import ALPHABET, TASKS
from halfbyte.errors import ConfigError


def reward(environment: Environment, prompt: Prompt, response: str) -> float | None:
    turn = environment.start(prompt).step(response, [])
    assert turn.done
    assert turn.correct == (turn.reward == 1.0)
    return turn.reward


def texts(environment: Environment, split: Split, n: int) -> list[str]:
    return [str(p.text) for p in itertools.islice(stream(environment, split), n)]


def test_default_sort_is_the_recipe() -> None:
    environment = make_env("arithmetic:sort")
    lengths = set()
    for prompt in itertools.islice(stream(environment, "train"), 300):
        digits = str(prompt.text).removesuffix("=")
        assert prompt.answer == "".join(sorted(digits))
        lengths.add(len(digits))
    assert lengths == {9, 10, 11, 12}


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**40))
@settings(max_examples=50)
def test_add(low: int, more: int, index: int) -> None:
    environment = make_env("arithmetic:add", min_digits=low, max_digits=low + more, eval_share=0.5)
    prompt = environment.prompt("train", index)
    match = re.fullmatch(r"(\d+)\+(\d+)=", str(prompt.text))
    assert match is not None
    a, b = match.groups()
    assert low <= len(a) <= low + more
    assert low <= len(b) <= low + more
    assert prompt.answer == str(int(a) + int(b))


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 2**40))
@settings(max_examples=50)
def test_chain_sum(low: int, more: int, index: int) -> None:
    environment = make_env("arithmetic:chain_sum", min_terms=low, max_terms=low + more, eval_share=0.5)
    prompt = environment.prompt("eval", index)
    terms = re.findall(r"[+-]?\d+", str(prompt.text).removesuffix("="))
    assert "".join(terms) + "=" == prompt.text
    assert low <= len(terms) <= low + more
    assert prompt.answer == str(sum(map(int, terms)))


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_by_hash_of_the_prompt_whatever_the_seed(task: str) -> None:
    # A space small enough that both splits are drawn nearly completely: overlap would show.
    small: dict[str, Any] = (
        {"min_digits": 2, "max_digits": 2} if task != "chain_sum" else {"max_terms": 2, "max_digits": 1}
    )
    seen: dict[str, set[str]] = {"train": set(), "eval": set()}
    for seed in (0, 1, 12345):
        environment = make_env(f"arithmetic:{task}", seed=seed, eval_seed=seed, **small)
        seen["train"] |= set(texts(environment, "train", 1000))
        seen["eval"] |= set(texts(environment, "eval", 300))
    assert len(seen["train"]) > 70
    assert len(seen["eval"]) > 5
    assert not seen["train"] & seen["eval"]
    assert all(split_of(text, 0.125) == split for split, members in seen.items() for text in members)


def test_seeds_change_the_stream_and_eval_has_its_own() -> None:
    a, b = make_env("arithmetic:sort", seed=0), make_env("arithmetic:sort", seed=1)
    assert texts(a, "train", 20) != texts(b, "train", 20)
    assert texts(a, "eval", 20) == texts(b, "eval", 20)
    assert texts(a, "eval", 20) != texts(make_env("arithmetic:sort", eval_seed=1), "eval", 20)


@given(st.integers(0, 2**45), st.sampled_from(["train", "eval"]))
@settings(max_examples=30)
def test_a_prompt_is_a_function_of_its_index(index: int, split: Split) -> None:
    first, second = make_env("arithmetic:sort"), make_env("arithmetic:sort")
    second.prompt("train", 3)
    assert first.prompt(split, index) == second.prompt(split, index)


def test_prompts_do_not_change_between_releases() -> None:
    # The shipped policy was warmed up on the train split; another stream would be another benchmark.
    environment = make_env("arithmetic:sort")
    assert texts(environment, "train", 2) == ["527758798895=", "557171789="]
    assert environment.prompt("eval", 2**40).text == "22256251444="


def test_neighbouring_prompts_are_unrelated() -> None:
    assert len(set(texts(make_env("arithmetic:sort"), "train", 2000))) == 2000


def test_ids_are_unique() -> None:
    environment = make_env("arithmetic:add", min_digits=1, max_digits=1)
    ids = [environment.prompt(split, i).id for split in ("train", "eval") for i in range(200)]
    assert len(set(ids)) == 400


@pytest.mark.parametrize("task", TASKS)
def test_alphabet_holds_every_character(task: str) -> None:
    for prompt in itertools.islice(stream(make_env(f"arithmetic:{task}"), "train"), 200):
        assert set(f"{prompt.text}{prompt.answer}") <= set(ALPHABET)


def test_exact_match() -> None:
    environment = make_env("arithmetic:sort")
    prompt = Prompt("p", text="5301=", answer="0135")
    assert reward(environment, prompt, "0135") == 1.0
    assert reward(environment, prompt, " 0135\n") == 1.0
    for wrong in ("", "135", "01350", "0135=", "5301", "0 135"):
        assert reward(environment, prompt, wrong) == 0.0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_digit": 3}, "did you mean max_digits"),
        ({"max_terms": 3}, "max_terms"),
        ({"min_digits": 0}, "min_digits"),
        ({"min_digits": 13}, "min_digits = 13"),
        ({"eval_share": 0.0}, "eval_share"),
        ({"eval_share": 1.0}, "eval_share"),
        ({"max_digits": "many"}, "max_digits"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        make_env("arithmetic:sort", **options)
    assert "arithmetic:sort" in str(caught.value)


def test_a_task_without_held_out_prompts_says_so() -> None:
    # Ten prompts, "0=" to "9=": at this share none is held out.
    environment = make_env("arithmetic:sort", min_digits=1, max_digits=1, eval_share=1e-6)
    assert environment.prompt("train", 0)
    with pytest.raises(ConfigError, match="no eval prompt"):
        environment.prompt("eval", 0)


def test_negative_indices_are_refused() -> None:
    with pytest.raises(IndexError):
        make_env("arithmetic:sort").prompt("train", -1)
