"""Scorers: from a task and a response to passed or not. Pure, so that `verify` can score every record again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from halfbyte.envs.answers import last_number, make_scorer
from halfbyte.envs.environment import Prompt
from halfbyte.envs.rewards import load_object
from halfbyte.envs.scoring import failure, finite_reward
from halfbyte.errors import ConfigError, DataError, MissingExtraError
from halfbyte.trial.canonical import digest
from halfbyte.trial.tasks import ScorerSpec, Task
from halfbyte.trial.tool_calls import parsed_calls

__all__ = ["Response", "Scorer", "Verdict", "make_scorers", "score", "source_hashes"]

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_LONGEST_ERROR = 300


@dataclass(frozen=True)
class Response:
    """What a scorer sees: text, the server's tool calls as JSON ("" for none), and why it ended."""

    text: str
    calls: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Passed or not and a number, or the reason why there is neither."""

    passed: bool | None
    score: float | None
    error: str | None = None


Scorer: TypeAlias = Callable[[Response], "bool | float"]
Load: TypeAlias = Callable[[str, str], Any]


def make_scorers(tasks: Sequence[Task], folder: Path) -> dict[str, Scorer]:
    """Task id -> its scorer.

    Arguments:
        folder: of trial.toml; ``file.py:function`` is looked for there.

    Raises:
        ConfigError: a pattern, schema or function that cannot be used.
        DataError: an expected outcome that the scorer cannot compare with.
        MissingExtraError: math-verify or jsonschema is not installed.
    """
    loaded: dict[str, Any] = {}

    def load(function: str, where: str) -> Any:
        if function not in loaded:
            module, _, attribute = function.rpartition(":")
            loaded[function] = load_object(
                f"{folder / module}:{attribute}" if module.endswith(".py") else function, where
            )
        return loaded[function]

    return {task.id: _MAKERS[task.scorer.type](task.scorer, task, load) for task in tasks}


def score(scorer: Scorer, response: Response, threshold: float = 1.0) -> Verdict:
    """Call a scorer. One that raises, or returns no finite number, fails this response only, with the error kept."""
    try:
        value = scorer(response)
        number = finite_reward(value)
        return Verdict(value if isinstance(value, bool) else number >= threshold, number)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # sys.exit() in a scorer, or math-verify's timeout
        lines = failure().strip().splitlines()
        return Verdict(None, None, f"scorer: {lines[-1][:_LONGEST_ERROR]}")


def source_hashes(tasks: Sequence[Task], folder: Path) -> dict[str, str]:
    """Function of every python scorer -> SHA-256 of the file that defines it.

    Raises:
        ConfigError: a file that is not there.
    """
    return {function: digest(_source(function, folder).read_bytes()) for function in sorted(_functions(tasks))}


def _functions(tasks: Sequence[Task]) -> set[str]:
    return {task.scorer.function for task in tasks if task.scorer.function is not None}


def _source(function: str, folder: Path) -> Path:
    module, _, _ = function.rpartition(":")
    if module.endswith(".py"):
        path = folder / module
    else:
        spec = find_spec(module)
        path = Path(spec.origin) if spec is not None and spec.origin else folder / f"{module}.py"
    if not path.is_file():
        raise ConfigError("the file of a python scorer is not there", where=f"{function} ({path})")
    return path


def _folded(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text


def _text(task: Task) -> str:
    if isinstance(task.expected, bool) or not isinstance(task.expected, str | int | float):
        raise _bad(task, "text or a number")
    return str(task.expected)


def _bad(task: Task, expected: str) -> DataError:
    what = f"a {task.scorer.type} scorer cannot compare with {task.expected!r}"
    return DataError(what, where=f"task {task.id}", expected=expected)


def _exact(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    wanted = _folded(_text(task).strip(), spec.ignore_case)
    return lambda response: _folded(response.text.strip(), spec.ignore_case) == wanted


def _contains(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    """Every expected text stands there as words or a number of its own: 1 is neither in 10 nor in 1.5."""
    listed = task.expected if isinstance(task.expected, list) else [_text(task)]
    if not listed or not all(isinstance(item, str) and item.strip() for item in listed):
        raise _bad(task, "text, or a list of texts")
    same = make_scorer("contains")

    def found(text: str, item: str) -> bool:
        return same(Prompt("", text="-", answer=_folded(item, spec.ignore_case)), text).correct

    return lambda response: all(found(_folded(response.text, spec.ignore_case), item) for item in listed)


def _regex(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    try:
        pattern = re.compile(spec.pattern or "", re.IGNORECASE if spec.ignore_case else 0)
    except re.error as error:
        raise ConfigError(f"not a regular expression: {error}", where=f"task {task.id}, scorer.pattern") from error
    return lambda response: pattern.search(response.text) is not None


def _numeric(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    wanted = last_number(_text(task))
    if wanted is None:
        raise _bad(task, "a number")
    allowed = Fraction(spec.tolerance) * abs(wanted)

    def same(response: Response) -> bool:
        given = last_number(response.text)
        return given is not None and abs(given - wanted) <= allowed

    return same


def _json_schema(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    try:
        import jsonschema
    except ImportError as error:
        raise _missing("jsonschema", "trial", error) from error
    kind = jsonschema.validators.validator_for(spec.schema_, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(spec.schema_)
    except jsonschema.SchemaError as error:
        where = f"task {task.id}, scorer.schema"
        raise ConfigError(f"not a JSON Schema: {error.message}", where=where) from error
    validator = kind(spec.schema_)

    def fits(response: Response) -> bool:
        blocks = _FENCE.findall(response.text)
        try:
            value = json.loads(blocks[-1] if blocks else response.text)
        except (ValueError, RecursionError):
            return False
        return validator.is_valid(value) and (task.expected is None or value == task.expected)

    return fits


def _math_verify(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    same, prompt = make_scorer("math_verify"), Prompt(task.id, text="-", answer=_text(task))
    return lambda response: same(prompt, response.text).correct


def _tool_call(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    wanted = task.expected
    if not task.tools:
        raise DataError("a tool_call scorer needs tools", where=f"task {task.id}")
    arguments = wanted.get("arguments", {}) if isinstance(wanted, Mapping) else None
    if not isinstance(wanted, Mapping) or not isinstance(wanted.get("name"), str) or not isinstance(arguments, Mapping):
        raise _bad(task, '{"name": ..., "arguments": {...}}; further arguments of a call do not matter')
    tools = task.tools

    def called(response: Response) -> bool:
        return any(
            call.name == wanted["name"]
            and all(key in call.arguments and call.arguments[key] == value for key, value in arguments.items())
            for call in parsed_calls(response.text, response.calls, tools)
        )

    return called


def _python(spec: ScorerSpec, task: Task, load: Load) -> Scorer:
    function, data = load(spec.function or "", f"task {task.id}, scorer.function"), task.to_json()

    def judged(response: Response) -> bool | float:
        given = {
            "text": response.text,
            "finish_reason": response.finish_reason,
            "tool_calls": json.loads(response.calls) if response.calls else [],
        }
        value: bool | float = function(data, given)
        return value

    return judged


def _missing(package: str, extra: str, error: ImportError) -> MissingExtraError:
    what = f"{package} cannot be imported: {error}"
    return MissingExtraError(what, expected=f"{package} installed", fix=f"pip install 'halfbyte[{extra}]'")


_MAKERS: Mapping[str, Callable[[ScorerSpec, Task, Load], Scorer]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "numeric": _numeric,
    "json_schema": _json_schema,
    "math_verify": _math_verify,
    "tool_call": _tool_call,
    "python": _python,
}
