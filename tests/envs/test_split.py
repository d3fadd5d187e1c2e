"""Splits by hash, and the counter-based generator."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.envs import Prompt, prompt_key, split_of
from halfbyte.envs.split import Draws
from halfbyte.errors import DataError


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_raising_the_share_only_moves_prompts_to_eval(key: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert not (split_of(key, low) == "eval" and split_of(key, high) == "train")


@given(st.text())
def test_shares_of_nothing_and_of_everything(key: str) -> None:
    assert split_of(key, 0.0) == "train"
    assert split_of(key, 1.0) == "eval"


def test_split_is_the_same_on_every_machine() -> None:
    # A change here would put prompts that shipped policies were warmed up on into the evaluation.
    held_out = [str(i) for i in range(40) if split_of(str(i), 0.25) == "eval"]
    assert held_out == ["9", "10", "12", "17", "25", "30", "34", "37"]


def test_held_out_share_is_the_share_asked_for() -> None:
    n = 20_000
    count = sum(split_of(f"prompt {i}", 0.125) == "eval" for i in range(n))
    assert abs(count - n / 8) < 5 * (n / 8 * 7 / 8) ** 0.5


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Prompt("1", text=" 2 +\n3 "), Prompt("2", text="2 + 3")),
        (Prompt("1", text="caf\u00e9"), Prompt("2", text="cafe\u0301")),
        (Prompt("1", text="Hi"), Prompt("2", messages=({"role": "user", "content": "Hi"},))),
    ],
)
def test_prompts_that_read_the_same_have_one_key(a: Prompt, b: Prompt) -> None:
    assert prompt_key(a) == prompt_key(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Prompt("1", text="x\u00b2"), Prompt("2", text="x2")),
        (Prompt("1", text="23"), Prompt("2", text="2 3")),
        (
            Prompt("1", messages=({"role": "user", "content": "Hi"},)),
            Prompt("2", messages=({"role": "system", "content": "S"}, {"role": "user", "content": "Hi"})),
        ),
    ],
)
def test_prompts_that_differ_have_two_keys(a: Prompt, b: Prompt) -> None:
    assert prompt_key(a) != prompt_key(b)


@pytest.mark.parametrize("fields", [{}, {"text": ""}, {"messages": ()}, {"text": "a", "messages": ({"role": "user"},)}])
def test_a_prompt_is_text_or_messages(fields: dict[str, object]) -> None:
    with pytest.raises(DataError, match="prompt-7"):
        Prompt("prompt-7", **fields)  # type: ignore[arg-type]


def test_draws_depend_on_their_key_alone() -> None:
    def values(*key: object) -> list[int]:
        draws = Draws(*key)
        return [draws.below(1000) for _ in range(50)]

    assert values("a", 1) == values("a", 1)
    assert values("a", 1) != values("a", 2)
    assert values("a", 11) != values("a1", 1)


@given(st.integers(1, 2**32), st.integers())
def test_draws_stay_in_range(n: int, key: int) -> None:
    assert 0 <= Draws(key).below(n) < n


def test_draws_are_uniform() -> None:
    draws = Draws("uniform")
    n = 60_000
    counts = Counter(draws.below(6) for _ in range(n))
    chi_square = sum((counts[i] - n / 6) ** 2 / (n / 6) for i in range(6))
    assert chi_square < 25.7  # 5 degrees of freedom, p = 1e-4
    firsts = Counter(Draws("key", i).below(6) for i in range(n))
    assert sum((firsts[i] - n / 6) ** 2 / (n / 6) for i in range(6)) < 25.7


@given(st.integers(1, 40), st.integers())
def test_numbers_have_their_length(n: int, key: int) -> None:
    number = Draws(key).number(n)
    assert len(number) == n
    assert number == str(int(number))
