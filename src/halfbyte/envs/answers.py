"""Ways to compare a response with the answer of a data set: exact, numeric, contains, math_verify.

All look at :func:`final_answer` first: the content of the last ``<answer>...</answer>``, or the whole response.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from halfbyte.envs.environment import Prompt
from halfbyte.envs.scoring import Score, Scorer
from halfbyte.errors import DataError, MissingExtraError

__all__ = ["SCORINGS", "answer_problem", "final_answer", "last_number", "make_scorer"]

_OPEN, _CLOSE = "<answer>", "</answer>"
_MATH_SECONDS = 5
# A sign counts only where no operand stands before it ("7-3" ends in 3). Commas group thousands ("1,234").
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?(?<![\w.])(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE]([-+]?\d+))?"
)
_LONGEST, _LARGEST_EXPONENT = 400, 999  # comparing is exact, so a short "1e999999999" must not become a long number


def final_answer(response: str) -> str:
    """What stands in the last complete pair of answer tags, or all of the response; without white space around it."""
    end = response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, max(end, 0))
    return (response if start < 0 else response[start + len(_OPEN) : end]).strip()


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, exactly; ``a/b`` is one number. Currency and percent signs are ignored."""
    numbers = [match for match in _NUMBER.finditer(text) if _sane(match)]
    if not numbers:
        return None
    last = numbers[-1]
    value = _fraction(last.group())
    if len(numbers) > 1:
        before = numbers[-2]
        if text[before.end() : last.start()].strip() == "/" and value != 0 and last.group()[0] not in "+-\u2212":
            return _fraction(before.group()) / value
    return value


def answer_problem(scoring: str, answer: Any) -> str | None:
    """Why ``answer`` cannot be compared with by this scoring, or None."""
    if type(answer) not in (str, int, float):
        return f"answer is {type(answer).__name__}, expected text or a number"
    text = str(answer).strip()
    if not text:
        return "answer is empty"
    if scoring == "numeric" and last_number(text) is None:
        return f"answer {text[:60]!r} holds no number, which numeric scoring needs"
    return None


def make_scorer(scoring: str, *, tolerance: float = 0.0) -> Scorer:
    """The scorer of that name: reward 1 or 0.

    Arguments:
        scoring: a key of ``SCORINGS``.
        tolerance: for ``numeric``: relative error allowed; 0 is exact.

    Raises:
        MissingExtraError: ``math_verify`` without the package.
    """
    if scoring == "numeric":
        return _numeric(tolerance)
    return SCORINGS[scoring]()


def _binary(same: Callable[[str, str], bool]) -> Scorer:
    def score(prompt: Prompt, response: str) -> Score:
        correct = same(final_answer(response), str(prompt.answer).strip())
        return Score(float(correct), correct)

    return score


def _exact() -> Scorer:
    return _binary(lambda given, answer: given == answer)


def _contains() -> Scorer:
    """The answer stands in the response as words or a number of its own: 1 is not in 10, nor in 1.5.

    A response that lists many answers is right too: a policy will find that out.
    """

    def same(given: str, answer: str) -> bool:
        words = r"\s+".join(map(re.escape, answer.split()))
        left = r"(?<!\w)(?<!\d[.,])" if answer[0].isalnum() else ""
        right = r"(?!\w|[.,]\d)" if answer[-1].isalnum() else ""
        return re.search(left + words + right, given) is not None

    return _binary(same)


def _numeric(tolerance: float = 0.0) -> Scorer:
    """The last number of the response equals the last number of the answer."""
    allowed = Fraction(tolerance)

    def same(given: str, answer: str) -> bool:
        value, expected = last_number(given), last_number(answer)
        if expected is None:
            raise DataError(f"answer {answer[:60]!r} holds no number")
        return value is not None and abs(value - expected) <= allowed * abs(expected)

    return _binary(same)


def _math_verify() -> Scorer:
    """Equal as mathematics, by the package math-verify: LaTeX and plain expressions, sets, intervals.

    Each step is given up after 5 seconds by a signal, which only the main thread has; elsewhere it may take for ever.
    """
    try:
        package = importlib.import_module("math_verify")
    except ImportError as error:
        raise MissingExtraError(
            f"math_verify scoring needs the package math-verify: {error}",
            expected="math-verify installed",
            fix="pip install 'halfbyte[tasks]'",
        ) from error

    def same(given: str, answer: str) -> bool:
        if given == answer:
            return True
        main = threading.current_thread() is threading.main_thread()
        seconds = _MATH_SECONDS if main else None
        gold = package.parse(answer, parsing_timeout=seconds) or package.parse(f"${answer}$", parsing_timeout=seconds)
        if not gold:
            raise DataError(f"math-verify finds no expression in the answer {answer[:60]!r}")
        found = package.parse(given, parsing_timeout=seconds)
        return bool(package.verify(gold, found, timeout_seconds=seconds))

    return _binary(same)


SCORINGS: Mapping[str, Callable[[], Scorer]] = {
    "exact": _exact,
    "numeric": _numeric,
    "contains": _contains,
    "math_verify": _math_verify,
}
"""Name -> maker of the scorer."""


def _sane(match: re.Match[str]) -> bool:
    exponent = match.group(1) or "0"
    return len(match.group()) <= _LONGEST and len(exponent) <= 4 and abs(int(exponent)) <= _LARGEST_EXPONENT


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("\u2212", "-"))
