"""A scorer that fails costs one sample, never the run."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.envs import Prompt, Score, score_safely
from halfbyte.envs.rewards import RewardFunction
from halfbyte.envs.scoring import finite_reward, json_info

PROMPT = Prompt("p", text="question", answer="7", metadata={"level": 3})


def outcome(function: Any) -> Any:
    return score_safely(RewardFunction(function).scorer(None), PROMPT, "response")


def raising(error: BaseException) -> Any:
    def reward(**_: object) -> float:
        raise error

    return reward


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even the message fails")


@pytest.mark.parametrize(
    "error",
    [ValueError("no parse"), KeyError("k"), RecursionError(), MemoryError(), SystemExit(1), AssertionError(), Broken()],
)
def test_a_reward_that_raises_fails_that_sample_and_keeps_the_traceback(error: BaseException) -> None:
    result = outcome(raising(error))
    assert result.reward is None
    assert not result.correct
    assert type(error).__name__ in result.error
    assert "in reward" in result.error  # the user's frame
    turn = result.turn()
    assert turn.done
    assert turn.reward is None
    assert turn.error == result.error
    assert turn.correct is False


class TimeoutOfALibrary(BaseException):
    """math-verify's timeout derives from BaseException."""


def test_exceptions_beside_exception_do_not_escape() -> None:
    assert "TimeoutOfALibrary" in outcome(raising(TimeoutOfALibrary())).error


def test_ctrl_c_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome(raising(KeyboardInterrupt()))


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        1e39,  # finite, but infinite in the float32 tensor of rewards
        10**400,
        None,
        "1.0",
        b"1",
        [1.0],
        {"reward": 1.0},
        1 + 0j,
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor(math.nan),
        np.float32("inf"),
        Decimal("nan"),
    ],
)
def test_a_reward_that_is_no_finite_number_fails_that_sample(value: object) -> None:
    result = outcome(lambda **_: value)
    assert result.reward is None
    assert "Error" in result.error


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (-2.5, -2.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.25), 0.25),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_of_all_kinds_are_rewards(value: object, number: float) -> None:
    result = outcome(lambda **_: value)
    assert result.reward == number
    assert type(result.reward) is float
    assert result.error is None


@given(st.floats())
def test_a_reward_is_kept_or_refused_never_changed(value: float) -> None:
    with np.errstate(over="ignore"):
        representable = bool(np.isfinite(np.float32(value))) and abs(value) <= np.finfo(np.float32).max
    if representable:
        assert finite_reward(value) == value
    else:
        with pytest.raises(Exception, match="finite float32"):
            finite_reward(value)


def test_correct_follows_the_threshold_unless_the_function_says() -> None:
    assert outcome(lambda **_: 1.0).correct
    assert not outcome(lambda **_: 0.99).correct
    assert score_safely(RewardFunction(lambda **_: 0.5, correct_at=0.5).scorer(None), PROMPT, "").correct
    assert outcome(lambda **_: Score(0.1, True, {"why": "format"})).correct


def test_a_score_with_a_bad_reward_fails_too() -> None:
    assert outcome(lambda **_: Score(math.nan, True)).reward is None


class Odd:
    def __repr__(self) -> str:
        return "odd" * 200


def test_info_is_json_whatever_the_scorer_puts_there() -> None:
    info: Any = {"a": (1, {2: Odd()}), "nan": math.nan, 3: np.float32(1.5), "deep": [[[[[[[[[[1]]]]]]]]]], "b": {1, 2}}
    result = outcome(lambda **_: Score(1.0, True, info))
    assert result.error is None
    text = json.dumps(dict(result.turn().info), allow_nan=False)
    assert json.loads(text)["a"][0] == 1
    assert len(text) < 1000


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
@settings(max_examples=50)
def test_json_info_leaves_json_alone(info: dict[str, Any]) -> None:
    assert json_info(info) == info


def test_long_tracebacks_are_shortened_at_the_middle() -> None:
    result = outcome(raising(ValueError("x" * 100_000 + "end")))
    assert len(result.error) < 10_000
    assert result.error.startswith("Traceback")
    assert result.error.rstrip().endswith("end")


def utf8(info: Any) -> bytes:
    return json.dumps(dict(info), ensure_ascii=False).encode("utf-8")


def test_lone_surrogates_do_not_reach_the_trajectory_file() -> None:
    failed = outcome(raising(ValueError("half \ud800")))
    assert b"half \\\\ud800" in utf8(failed.turn().info)
    info: Any = {
        "\ud800": "\udfff",
        "list": ["\ud801"],
        "table": {"\ud802": 1},
        "object": {1: ("\ud803",)},
        "long": 10**9999,
    }
    result = outcome(lambda **_: Score(1.0, True, info))
    assert result.error is None
    assert b"ud801" in utf8(result.turn().info)
