"""The example of examples/trial and its report in docs: what they claim of themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfbyte.trial.scorers import Response, make_scorers, score
from halfbyte.trial.settings import load_settings
from halfbyte.trial.tasks import load_tasks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trial"
SAMPLE = ROOT / "docs" / "samples" / "trial-smollm2.html"
TASKS = load_tasks(EXAMPLE / "tasks.jsonl")
#: SmolLM2-135M: layers x (keys and values) x heads x channels
VALUES = 30 * 2 * 3 * 64


def test_there_are_as_many_tasks_as_said() -> None:
    assert len(TASKS) == 126
    assert sum(task.critical for task in TASKS) == 6
    assert len({task.prompt for task in TASKS}) == len(TASKS)
    assert "126 of one or two sentences" in (ROOT / "docs" / "trial-example.md").read_text(encoding="utf-8")


def test_scorers_pass_a_right_answer_and_fail_an_empty_one() -> None:
    scorers = make_scorers(TASKS, EXAMPLE)
    plain = [task for task in TASKS if task.scorer.type in ("contains", "numeric")]
    assert len(plain) > 50
    for task in plain:
        assert score(scorers[task.id], Response(f"It is {task.expected}.")).passed is True, task.id
    for task in TASKS:
        assert score(scorers[task.id], Response("I do not know.")).passed is False, task.id


def test_both_arms_have_the_same_model_and_room_for_the_same_tokens() -> None:
    settings = load_settings(EXAMPLE / "trial.toml")
    arms = (settings.baseline, settings.candidate)
    assert len({arm.artefact for arm in arms}) == 1
    bits = {"bf16": 16.0, "w4a4kv4": 4 + 8 / 16}
    for arm in arms:
        assert arm.kv_memory_mb is not None
        assert arm.precision is not None
        assert arm.kv_memory_mb * 2**20 / (VALUES * bits[arm.precision] / 8) == pytest.approx(8192)
        assert arm.serve is not None
        assert arm.serve[arm.serve.index("--precision") + 1] == arm.precision
    assert [part for part in settings.baseline.serve or () if part != "bf16"] == [
        part for part in settings.candidate.serve or () if part != "w4a4kv4"
    ]


def test_the_sample_report_loads_nothing_and_is_small() -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"<(script|link|img|iframe|object|base|form)\b|url\(|@import|\s(src|href)=", text)
    assert "default-src 'none'" in text
    limits = text[text.index("<h2>Limits") : text.index("<h2>Memory")]
    assert len(re.findall('class="limit-row"', limits)) == 7
