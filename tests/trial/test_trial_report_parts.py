"""The parts of a trial's report: pairs, limits, charts, tables of both arms, the eight dimensions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trial_material import check, decision, material, pair, record, settings, task, usage

from halfbyte.trial.integrity import Finding
from halfbyte.trial.report.arms import arm_tables, tag_table
from halfbyte.trial.report.charts import MARGIN, STRIP_WIDTH, Bar, bars_chart, distribution_chart, limit_strip
from halfbyte.trial.report.content import cost_table, latency_table
from halfbyte.trial.report.dimensions import dimensions
from halfbyte.trial.report.limits import limit_rows
from halfbyte.trial.report.pairs import flips, outcomes, pair_up
from halfbyte.trial.report.words import memory, points, seconds, share


def rows(table: object) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in table.rows}  # type: ignore[attr-defined]


def pixels(svg: str, pattern: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, svg)]


def test_pairs_are_found_and_what_has_none_is_counted() -> None:
    records = [
        *pair("a", True, True),
        *pair("a", True, False, repeat=1),
        record("b", "baseline"),
        record("a", "baseline"),
    ]
    pairs, alone = pair_up(records)
    assert [(p.task, p.baseline.repeat) for p in pairs] == [("a", 0), ("a", 1)]
    assert alone == 2


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_flips_are_counted_both_ways(seen: list[tuple[bool, bool]]) -> None:
    records = [r for i, (before, after) in enumerate(seen) for r in pair(f"t{i}", before, after)]
    found = flips(pair_up(records)[0])
    assert found.pairs == len(seen)
    assert found.regressions == seen.count((True, False))
    assert found.gains == seen.count((False, True))
    lost = sum(outcome.drop for outcome in outcomes(pair_up(records)[0]))
    assert lost == sum(before for before, _ in seen) - sum(after for _, after in seen)


def test_what_is_missing_counts_against_the_candidate() -> None:
    gone = {"passed": None, "error": "timeout", "text": ""}
    both = [*pair("a", True, False), record("b", "baseline"), record("b", "candidate", **gone)]
    both += [record("c", "baseline", **gone), record("c", "candidate", passed=False)]
    assert flips(pair_up(both)[0]).regressions == 3


def test_noise_of_a_task_is_that_of_its_pilot() -> None:
    pilot = [*pair("a", True, False, phase="pilot"), *pair("a", True, True, phase="pilot", repeat=1)]
    (found,) = outcomes(pair_up(pair("a", True, False))[0], pair_up(pilot)[0])
    assert (found.noise, found.noise_pairs) == (1, 2)


def test_the_pair_shown_is_one_that_changed_as_the_task_did() -> None:
    records = [*pair("a", True, True), *pair("a", False, True, repeat=1)]
    records += [*pair("a", True, False, repeat=2), *pair("a", True, False, repeat=3)]
    (found,) = outcomes(pair_up(records)[0])
    assert (found.drop, found.shown.baseline.repeat) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"ok": True}, "holds"),
        ({"ok": False}, "broken"),
        ({"ok": None}, "open"),
        ({"ok": None, "estimate": None, "low": None, "high": None}, "open"),
        ({"ok": True, "limit": None}, "not asked"),
    ],
)
def test_a_limit_has_a_state(changes: dict[str, object], state: str) -> None:
    (row,) = limit_rows(decision("keep", check(**changes)))
    assert row.state == state
    assert bool(row.svg) == (changes.get("estimate", 0) is not None and changes.get("limit", 0) is not None)


def test_limits_speak_in_their_units() -> None:
    found = [
        check(estimate=-0.072, low=-0.12, high=-0.02, limit=-0.1),
        check("critical_tasks", unit="count", sense="at most", estimate=2.0, low=2.0, high=2.0, limit=0.0),
        check("failure_rate", unit="share", sense="at most", estimate=0.005, low=None, high=0.023, limit=0.05),
        check("latency_p50", unit="ratio", sense="at most", estimate=0.8, low=0.7, high=0.95, limit=1.1),
        check("latency_limit", unit="seconds", sense="at most", estimate=0.8, low=0.7, high=1.25, limit=2.0),
        check("peak_memory", unit="improvement", estimate=0.44, low=0.42, high=None, limit=0.3),
    ]
    assert [row.words for row in limit_rows(decision("keep", *found))] == [
        "-7.2 points; -12.0 to -2.0 points; limit: more than -10.0 points",
        "2; limit: at most 0",
        "0.5%; up to 2.3%; limit: at most 5.0%",
        "0.8 x; 0.7 to 0.95 x; limit: at most 1.1 x",
        "800 ms; 700 ms to 1.25 s; limit: at most 2 s",
        "+44.0%; from +42.0%; limit: more than +30.0%",
    ]


limits = st.floats(-5, 5, allow_nan=False)


@given(limits, limits, limits, limits, st.sampled_from(["above", "below"]))
def test_a_strip_shades_the_side_that_is_not_allowed(a: float, b: float, c: float, limit: float, allowed: str) -> None:
    low, estimate, high = sorted((a, b, c))
    svg = limit_strip("l", estimate=estimate, low=low, high=high, limit=limit, allowed=allowed)  # type: ignore[arg-type]
    (dot,) = pixels(svg, r'cx="([\d.]+)"')
    (mark,) = pixels(svg, r'class="limit" d="M([\d.]+),')
    (left,) = pixels(svg, r'class="forbidden" x="([\d.]+)"')
    (width,) = pixels(svg, r'class="forbidden"[^>]* width="([\d.]+)"')
    assert MARGIN - 0.1 <= dot <= STRIP_WIDTH - MARGIN + 0.1
    assert (dot - mark) * (estimate - limit) >= -0.1 * abs(estimate - limit)
    edge = left + width if allowed == "above" else left
    assert edge == pytest.approx(mark, abs=0.11)
    (line,) = re.findall(r'class="line c0" d="M([\d.]+),[\d.]+H([\d.]+)"', svg)
    assert float(line[0]) - 0.1 <= dot <= float(line[1]) + 0.1


def test_an_interval_without_an_end_runs_to_the_edge() -> None:
    svg = limit_strip("l", estimate=0.0, low=None, high=0.1, limit=1.0, allowed="below")
    assert re.search(rf'class="line c0" d="M{MARGIN}\.0,', svg)
    assert 'class="line' not in limit_strip("l", estimate=0.0, low=None, high=None, limit=1.0, allowed="below")


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars_chart("l", [Bar("peak", (500.0, 300.0), ("a", "b")), Bar("KV", (100.0, None), ("c", "d"))])
    widths = pixels(svg, r'<rect[^>]* width="([\d.]+)"')
    assert widths == pytest.approx([widths[0], 0.6 * widths[0], 0.2 * widths[0]], abs=0.11)
    assert bars_chart("l", [Bar("x", (None, None), ("", ""))]) == ""


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_a_distribution_rises_to_all_of_its_values(values: list[float]) -> None:
    svg = distribution_chart("l", [values, []], x_label="seconds")
    (path,) = re.findall(r'class="line c0" d="M([^"]+)"', svg)
    heights = [float(y) for y in re.findall(r"V([\d.]+)", path)]
    across = [float(x) for x in re.findall(r"H([\d.]+)", path)]
    assert heights == sorted(heights, reverse=True)
    assert across == sorted(across)
    assert heights[-1] == pytest.approx(12.0), "the top of the chart is 100%"
    assert distribution_chart("l", [[], []], x_label="x") == ""


def test_percentiles_that_the_sample_does_not_carry_are_refused() -> None:
    few = [r for i in range(30) for r in pair(f"t{i}", True, True)]
    found = rows(latency_table(material(few)))
    assert found["p50"] == ["500 ms", "500 ms", "1 x"]
    assert found["p95"] == ["needs 200 requests"] * 2 + [""]
    many = [r for i in range(200) for r in pair(f"t{i}", True, True)]
    assert rows(latency_table(material(many)))["p95"][2] == "1 x"


def test_the_table_of_arms_counts_what_the_records_say() -> None:
    records = [
        *pair("a", True, True, tool_calls=1),
        record("b", "baseline", tool_calls=1, completion_tokens=30, finish_reason="length", cached_tokens=10),
        record("b", "candidate", passed=None, error="http 500: x", text="", tool_calls=0, completion_tokens=None),
    ]
    requests, reasons, failures = arm_tables(material(records))
    found = rows(requests)
    assert found["failed"] == ["0 of 2 (0.0%)", "1 of 2 (50.0%)"]
    assert found["passed"] == ["2 of 2 (100.0%)", "1 of 2 (50.0%)"]
    assert found["response tokens, mean"] == ["20", "10"]
    assert found["prompt tokens from the cache"] == ["25.0%", "0.0%"]
    assert found["tool calls that parse"] == ["2 of 2 (100.0%)", "1 of 2 (50.0%)"]
    assert found["response tokens a second"] == ["4", "1"]
    assert rows(reasons)["length"] == ["1 of 2 (50.0%)", "0 of 2 (0.0%)"]
    assert rows(failures)["http 500"] == ["0 of 2 (0.0%)", "1 of 2 (50.0%)"]


def test_pass_rates_by_tag() -> None:
    records = [*pair("a", True, False), *pair("b", True, True), *pair("c", False, True)]
    tasks = [task("a", tags=["x"]), task("b", tags=["x", "y"]), task("c", tags=["y"])]
    found = tag_table(material(records, tasks=tasks))
    assert rows(found)["x"] == ["2", "100.0%", "50.0%", "1", "0"]
    assert rows(found)["y"] == ["2", "50.0%", "100.0%", "0", "1"]
    assert tag_table(material(records)) is None


def test_cost_and_break_even_are_in_words() -> None:
    slow = [*pair("a", True, True, latency=2.0)]
    slow[1] = record("a", "candidate", latency=1.0, started=1002.0, position=1)
    table, lines = cost_table(material(slow))
    assert rows(table)["serving, 1000 requests"] == ["2 USD", "1 USD"]
    assert lines[0] == "Break-even: day 3.0: set-up of 100 over a saving of 1000 a month."
    _, lines = cost_table(material(slow, given=settings(cost={"machine_per_hour": 3.6})))
    assert lines[0].startswith("Break-even is not known")


def test_all_eight_dimensions_are_named_with_evidence_or_without() -> None:
    found = {d.name: d for d in dimensions(material(given=settings(cost={})))}
    assert list(found) == [
        "quality",
        "compute",
        "latency",
        "operations",
        "compatibility",
        "security",
        "data and training",
        "reproducibility",
    ]
    assert {name for name, d in found.items() if not d.evaluated} == {
        "latency",  # one request carries no percentile
        "security",
        "data and training",
        "reproducibility",
    }
    nothing = dimensions(material([], found=decision("invalid"), used={}))
    assert [d.name for d in nothing if d.evaluated] == []
    assert all(d.missing for d in nothing)


def test_dimensions_take_their_evidence_from_checks_and_tags() -> None:
    checks = [
        Finding("overlap", "no overlap with tuning data", True, "13-grams"),
        Finding("chain", "chain of records", False, "broken at 7"),
        Finding("cache", "prefix cache", None, "not reported"),
    ]
    records = [*pair("a", True, False), *pair("b", True, True)]
    tasks = [task("a", tags=["security"], critical=True), task("b")]
    found = {d.name: d.evidence for d in dimensions(material(records, tasks=tasks, integrity=checks))}
    assert found["data and training"] == ("no overlap with tuning data: holds (13-grams).",)
    assert found["reproducibility"] == ("chain of records: does not hold (broken at 7).",)
    assert found["security"][1] == "candidate: 0 of 1 (0.0%) of tasks about security passed."
    assert "1 of 1 critical tasks got worse." in found["quality"]


def test_memory_of_a_remote_server_is_no_evidence_of_less() -> None:
    used = {"baseline": usage("baseline", None, "remote"), "candidate": usage("candidate", 300)}
    found = {d.name: d.evidence for d in dimensions(material(used=used))}  # type: ignore[arg-type]
    assert "baseline: memory not measured (remote)." in found["compute"]


def test_numbers_as_words() -> None:
    assert [memory(v) for v in (None, 12, 1536, 270 * 2**20, 13 * 2**30)] == [
        "not known",
        "12 bytes",
        "1.5 KiB",
        "270 MiB",
        "13 GiB",
    ]
    assert [seconds(v) for v in (0.0123, 0.9996, 1.25, 119.6, 300)] == [
        "12.3 ms",
        "1000 ms",
        "1.25 s",
        "120 s",
        "5 min",
    ]
    assert (points(-0.05), share(1, 3), share(0, 0)) == ("-5.0 points", "1 of 3 (33.3%)", "0 of 0")
