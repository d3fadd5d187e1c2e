"""Scorers and tasks: what passes, what fails, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import ConfigError, DataError
from halfbyte.trial.records import Record
from halfbyte.trial.scorers import Response, make_scorers, score, source_hashes
from halfbyte.trial.settings import load_settings
from halfbyte.trial.tasks import Task, load_tasks

SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
CASES: list[tuple[dict[str, Any], Any, str, bool]] = [
    ({"type": "exact"}, "Yes", " Yes\n", True),
    ({"type": "exact"}, "Yes", "yes", False),
    ({"type": "exact", "ignore_case": True}, "Yes", "yES", True),
    ({"type": "exact"}, 4, "4", True),
    ({"type": "contains"}, "1", "it is 10", False),
    ({"type": "contains"}, "1", "it is 1.", True),
    ({"type": "contains"}, ["Rome", "Oslo"], "Oslo, then Rome", True),
    ({"type": "contains"}, ["Rome", "Oslo"], "Oslo", False),
    ({"type": "contains", "ignore_case": True}, "rome", "in ROME", True),
    ({"type": "regex", "pattern": r"^\d{3}$"}, None, "123", True),
    ({"type": "regex", "pattern": r"^\d{3}$"}, None, "1234", False),
    ({"type": "regex", "pattern": "^no", "ignore_case": True}, None, "No.", True),
    ({"type": "numeric"}, 41.5, "That makes $41.50.", True),
    ({"type": "numeric"}, 41.5, "That makes 41.", False),
    ({"type": "numeric", "tolerance": 0.02}, 41.5, "That makes 41.", True),
    ({"type": "numeric"}, 3, "no number", False),
    ({"type": "json_schema", "schema": SCHEMA}, None, '{"year": 1843}', True),
    ({"type": "json_schema", "schema": SCHEMA}, None, 'Here:\n```json\n{"year": 1843}\n```\n', True),
    ({"type": "json_schema", "schema": SCHEMA}, None, '{"year": "1843"}', False),
    ({"type": "json_schema", "schema": SCHEMA}, None, "1843", False),
    ({"type": "json_schema", "schema": SCHEMA}, None, "{year", False),
    ({"type": "json_schema", "schema": SCHEMA}, {"year": 1843}, '{"year": 1844}', False),
    ({"type": "math_verify"}, "1/2", "so it is $\\frac{2}{4}$", True),
    ({"type": "math_verify"}, "1/2", "so it is $\\frac{2}{3}$", False),
]


def task(scorer: dict[str, Any], expected: Any = None, **more: Any) -> Task:
    line = json.dumps({"id": "t", "prompt": "p", "scorer": scorer, "expected": expected, **more})
    return Task.model_validate_json(line, strict=True)


@pytest.mark.parametrize(("scorer", "expected", "text", "passed"), CASES)
def test_verdicts(scorer: dict[str, Any], expected: Any, text: str, passed: bool, tmp_path: Path) -> None:
    scorers = make_scorers([task(scorer, expected)], tmp_path)
    verdict = score(scorers["t"], Response(text))
    assert (verdict.passed, verdict.score, verdict.error) == (passed, float(passed), None)


def test_dgx_spark_89_a_tool_call_that_no_longer_parses_fails(tmp_path: Path) -> None:
    """finish_reason is "stop" and the text looks fine: only the call itself tells."""
    tools = [{"type": "function", "function": {"name": "book", "parameters": {"required": ["day"]}}}]
    wanted = {"name": "book", "arguments": {"day": "monday"}}
    scorers = make_scorers([task({"type": "tool_call"}, wanted, tools=tools)], tmp_path)
    good = '<tool_call>{"name": "book", "arguments": {"day": "monday", "note": "x"}}</tool_call>'
    assert score(scorers["t"], Response(good, "", "stop")).passed is True
    listed = json.dumps([{"name": "book", "arguments": '{"day": "monday"}'}])
    assert score(scorers["t"], Response("", listed, "tool_calls")).passed is True
    for broken in (
        good.replace("</tool_call>", ""),
        good.replace("monday", "tuesday"),
        good.replace("}}", "}"),
        "booked!",
    ):
        assert score(scorers["t"], Response(broken, "", "stop")).passed is False


def test_python_scorers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def share(task, response):\n    return len(response['text']) / 10\n"
        "def crash(task, response):\n    return 1 / 0\n"
        "def leave(task, response):\n    sys.exit()\n"
        "def nan(task, response):\n    return float('nan')\n"
        "def calls(task, response):\n    return response['tool_calls'][0]['name'] == task['expected']\n"
    )
    spec = {"type": "python", "function": "mine.py:share", "threshold": 0.5}
    made = make_scorers([task(spec)], tmp_path)["t"]
    assert score(made, Response("x" * 5), 0.5).passed is True
    assert score(made, Response("x" * 4), 0.5).score == 0.4
    for name in ("crash", "leave", "nan"):
        made = make_scorers([task({"type": "python", "function": f"mine.py:{name}"})], tmp_path)["t"]
        verdict = score(made, Response("x"))
        assert (verdict.passed, verdict.score) == (None, None)
        assert (verdict.error or "").startswith("scorer: ")
    made = make_scorers([task({"type": "python", "function": "mine.py:calls"}, "book")], tmp_path)["t"]
    assert score(made, Response("", '[{"name": "book", "arguments": "{}"}]')).passed is True


def test_sources_of_python_scorers_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(task, response):\n    return True\n")
    tasks = [
        task({"type": "python", "function": "mine.py:f"}),
        task({"type": "python", "function": "json.decoder:scanstring"}),
    ]
    before = source_hashes(tasks, tmp_path)
    assert set(before) == {"mine.py:f", "json.decoder:scanstring"}
    (tmp_path / "mine.py").write_text("def f(task, response):\n    return False\n")
    after = source_hashes(tasks, tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["mine.py:f"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "a", "prompt": "p", "scorer": {"type": "exact"}}', "needs expected"),
        ('{"id": "a", "prompt": "p", "scorer": {"type": "regex"}}', "needs pattern"),
        (
            '{"id": "a", "prompt": "p", "scorer": {"type": "exact", "pattern": "x"}, "expected": "x"}',
            "pattern is nothing",
        ),
        ('{"id": "a", "prompt": "p", "messages": [], "scorer": {"type": "exact"}, "expected": "x"}', "messages"),
        ('{"id": "a", "scorer": {"type": "exact"}, "expected": "x"}', "prompt or messages"),
        (
            '{"id": "a", "prompt": "p", "scorer": {"type": "exact"}, "expected": "x", "critcal": true}',
            "did you mean critical",
        ),
        ('{"id": "a", "prompt": "p", "scorer": {"type": "exakt"}, "expected": "x"}', "scorer.type"),
        ('{"id": 3, "prompt": "p", "scorer": {"type": "exact"}, "expected": "x"}', "id"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_wrong_tasks_are_refused_with_their_line(tmp_path: Path, line: str, says: str) -> None:
    good = '{"id": "z", "prompt": "p", "scorer": {"type": "exact"}, "expected": "x"}'
    (tmp_path / "tasks.jsonl").write_text(f"# a comment\n{good}\n{line}\n")
    with pytest.raises(DataError, match=r"(?s)line 3") as caught:
        load_tasks(tmp_path / "tasks.jsonl")
    assert says in str(caught.value)


def test_ids_are_unique_and_lines_end_at_line_ends_only(tmp_path: Path) -> None:
    line = '{"id": "z", "prompt": "a\u2028b\x85c", "scorer": {"type": "exact"}, "expected": "x"}\n'
    (tmp_path / "tasks.jsonl").write_text(line, encoding="utf-8")
    assert load_tasks(tmp_path / "tasks.jsonl")[0].prompt == "a\u2028b\x85c"
    (tmp_path / "tasks.jsonl").write_text(line * 2, encoding="utf-8")
    with pytest.raises(DataError, match="two tasks"):
        load_tasks(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        ({"type": "regex", "pattern": "("}, None),
        ({"type": "json_schema", "schema": {"type": "objekt"}}, None),
        ({"type": "python", "function": "nowhere.py:f"}, None),
        ({"type": "python", "function": "json:no_such"}, None),
        ({"type": "numeric"}, "none"),
        ({"type": "exact"}, ["a"]),
        ({"type": "contains"}, []),
        ({"type": "tool_call"}, {"name": "x"}),
    ],
)
def test_scorers_that_cannot_be_made(tmp_path: Path, scorer: dict[str, Any], expected: Any) -> None:
    with pytest.raises((ConfigError, DataError)):
        make_scorers([task(scorer, expected)], tmp_path)


SETTINGS = """
[baseline]
url = "http://a/v1"
[candidate]
serve = ["x", "{port}"]
[limits]
margin = 0.05
benefit = "peak_memory"
benefit_min = 0.3
"""


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("margin", "margn", "limits.margn: unknown key"),
        ("[limits]", "[limit]", "limit: unknown key"),
        ('url = "http://a/v1"', 'url = "a"', "baseline"),
        ('"{port}"', '"8000"', "needs {port}"),
        ('url = "http://a/v1"', "", "needs url"),
        ("margin = 0.05", "margin = 5", "limits.margin"),
        ("benefit_min = 0.3", "", "limits.benefit_min: is required"),
        ('"peak_memory"', '"throughput"', "needs latency_limit"),
        ('"peak_memory"', '"cost_per_passed"', "needs cost.machine_per_hour"),
        ("[limits]", "[run]\nexclusive = true\n[limits]", "run.exclusive needs both"),
        ("[limits]", "[sampling]\nextra = {seed = 1}\n[limits]", "extra may not set seed"),
        ("[limits]", "[run]\nrepeats = true\n[limits]", "run.repeats"),
        ("[limits]", "[cost]\nprice_by = 'memory'\n[limits]", "needs machine_memory_gib"),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path: Path, before: str, after: str, says: str) -> None:
    path = tmp_path / "trial.toml"
    path.write_text(SETTINGS)
    load_settings(path)
    assert before in SETTINGS
    path.write_text(SETTINGS.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_record_refuses_other_fields() -> None:
    from trial_records import one

    record = one("baseline", "t")
    data = record.to_json()
    assert Record.from_json(json.loads(json.dumps(data))) == record
    for changed in ({"more": 1}, {"block": "0"}, {"passed": 1}, {"latency": None}, {"arm": "third"}, {"seed": 1.5}):
        with pytest.raises(DataError, match=next(iter(changed))):
            Record.from_json({**data, **changed})
    for name in data:
        with pytest.raises(DataError, match=name):
            Record.from_json({key: value for key, value in data.items() if key != name})
