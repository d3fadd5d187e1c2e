"""Comparing responses with answers."""

from __future__ import annotations

import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.envs import Prompt, score_safely
from halfbyte.envs.answers import answer_problem, final_answer, last_number, make_scorer
from halfbyte.errors import MissingExtraError


def correct(scoring: str, response: str, answer: Any, **options: Any) -> bool:
    result = score_safely(make_scorer(scoring, **options), Prompt("p", text="q", answer=answer), response)
    assert result.error is None, result.error
    assert result.reward == float(result.correct)
    return result.correct


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("  42\n", "42"),
        ("so <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> no, <answer>2</answer> yes", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>42", "<answer>42"),
        ("</answer>42<answer>", "</answer>42<answer>"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_final_answer(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@given(st.text(), st.text(), st.text())
def test_an_answer_in_tags_is_found_between_any_texts(before: str, answer: str, after: str) -> None:
    if not any(tag in text for tag in ("<answer>", "</answer>") for text in (before, answer, after)):
        assert final_answer(f"{before}<answer>{answer}</answer>{after}") == answer.strip()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 72.", 72),
        ("#### 1,234,567.50", Fraction(2469135, 2)),
        ("$-5", -5),
        ("= \u22123", -3),
        ("7-3", 3),
        ("(2)-3", 3),
        ("range 3-4", 4),
        ("it costs $18 per day, 50% off", 50),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("1/0", 0),
        (".5", Fraction(1, 2)),
        ("1.5e-3", Fraction(3, 2000)),
        ("72km", 72),
        ("12,34", 34),
        ("1,2345", 2345),
        ("\\boxed{42}", 42),
        ("version 1.5.2", Fraction(3, 2)),
        ("x5 and H2O", None),
        ("none", None),
        ("", None),
        ("9" * 401, None),
        ("1" + ",000" * 200, None),
        ("3 or 1e-9999", 3),
        ("1e9999", None),
    ],
)
def test_last_number(text: str, number: int | Fraction | None) -> None:
    assert last_number(text) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=6))
def test_last_number_reads_decimals_exactly(value: Decimal) -> None:
    assert last_number(f"I get {value:f}.") == Fraction(value)
    assert last_number(f"I get {value:,f} in all") == Fraction(value)


@given(st.text(alphabet="0123456789,.-+/eE \u2212", max_size=3000))
def test_last_number_takes_any_text_quickly(text: str) -> None:
    start = time.perf_counter()
    last_number(text * 3)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("scoring", "response", "answer", "expected"),
    [
        ("exact", "Paris", "Paris", True),
        ("exact", "paris", "Paris", False),
        ("exact", "<answer>Paris</answer>", " Paris ", True),
        ("exact", "7", 7, True),
        ("numeric", "It is 7.00 in total", "7", True),
        ("numeric", "1/2", 0.5, True),
        ("numeric", "3 + 4 = 7", "#### 7", True),
        ("numeric", "7.0001", "7", False),
        ("numeric", "nothing", "7", False),
        ("numeric", "<answer>7</answer> as 8 is wrong", "7", True),
        ("numeric", "1e300", "7", False),
        ("contains", "I think it is Paris, France", "Paris", True),
        ("contains", "Parisian", "Paris", False),
        ("contains", "100", "10", False),
        ("contains", "1.5", "1", False),
        ("contains", "1.", "1", True),
        ("contains", "new\nyork", "new york", True),
        ("contains", "a.c", "a.c", True),
        ("contains", "abc", "a.c", False),
        ("contains", "price: $5!", "$5", True),
    ],
)
def test_scorings(scoring: str, response: str, answer: Any, expected: bool) -> None:
    assert correct(scoring, response, answer) is expected


@given(
    st.fractions(-(10**12), 10**12, max_denominator=10**9),
    st.fractions(min_value=0, max_value=1, max_denominator=10**6),
)
def test_tolerance_is_relative_to_the_answer(answer: Fraction, error: Fraction) -> None:
    text = f"{answer.numerator}/{answer.denominator}"
    given_value = answer * (1 + error)
    response = f"{given_value.numerator}/{given_value.denominator}"
    expected = answer == 0 or error <= Fraction(0.25)
    assert correct("numeric", response, text, tolerance=0.25) is expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is $\\frac{1}{2}$", "0.5", True),
        ("$0.5$", "\\frac{1}{2}", True),
        ("<answer>\\boxed{7}</answer>", "7", True),
        ("$x^2+2x+1$", "$(x+1)^2$", True),
        ("$x^2$", "$(x+1)^2$", False),
        ("no idea", "7", False),
        ("<answer>the red one</answer>", "the red one", True),
    ],
)
def test_math_verify(response: str, answer: str, expected: bool) -> None:
    assert correct("math_verify", response, answer) is expected


def test_math_verify_works_beside_the_main_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(correct("math_verify", "$\\frac{2}{4}$", "1/2")))
    thread.start()
    thread.join()
    assert found == [True]


def test_an_answer_that_is_no_mathematics_fails_the_sample() -> None:
    result = score_safely(make_scorer("math_verify"), Prompt("p", text="q", answer="\\\\"), "7")
    assert result.reward is None
    assert "no expression in the answer" in str(result.error)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'halfbyte\[tasks\]'"):
        make_scorer("math_verify")


@pytest.mark.parametrize("answer", [None, True, [1], {"a": 1}, "", "  "])
@pytest.mark.parametrize("scoring", ["exact", "numeric", "contains", "math_verify"])
def test_answers_that_nothing_can_equal_are_found_early(scoring: str, answer: object) -> None:
    assert answer_problem(scoring, answer) is not None


def test_numeric_answers_need_a_number() -> None:
    assert "no number" in str(answer_problem("numeric", "seven"))
    assert answer_problem("exact", "seven") is None
    assert answer_problem("numeric", 7) is None
