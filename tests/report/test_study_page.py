"""The page and tables of a study: a function of study.json, offline, nothing hidden, nothing obeyed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from study_case import record

from halfbyte.html.table import markdown
from halfbyte.report.estimates import Interval, Small, Spot, forest_chart, scatter_chart, small_multiples
from halfbyte.report.study import render_study
from halfbyte.report.study_tables import status_line, study_tables
from halfbyte.study.analysis import analyse

ARMS = ("bf16", "fp4-naive", "qat", "trace", "triage", "parity")
HOSTILE = 'x"><script>alert(1)</script>'


def results(**changes: Any) -> dict[str, Any]:
    runs = [record(arm, seed, 0.8 - 0.05 * i + 0.01 * seed) for i, arm in enumerate(ARMS) for seed in range(3)]
    return json.loads(json.dumps(analyse(runs, **changes)))  # type: ignore[no-any-return]


class Checker(HTMLParser):
    """Every tag that is opened is closed, and nothing points elsewhere."""

    VOID = frozenset({"meta", "path", "circle", "rect", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "xlink:href", "onload", "onclick"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_loads_nothing_and_shows_every_arm() -> None:
    page = render_study(results(), "s")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not checker.tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import", page)
    for arm in (*ARMS, "post-hoc"):
        assert page.count(f">{arm}<") >= 4, arm
    assert page == render_study(results(), "s"), "the same results give the same page"


def test_hostile_names_are_text() -> None:
    data = analyse(
        [record(HOSTILE, 0, 0.5, note=HOSTILE, status="broken", group=HOSTILE), record("bf16", 0, 0.5, group=HOSTILE)]
    )
    page = render_study(data, HOSTILE)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    Checker().feed(page)


def test_the_page_says_what_is_missing_and_what_was_changed() -> None:
    data = results(planned=40) | {"history": [{"finished_runs": 0}, {"finished_runs": 7}]}
    page = render_study(data, "s")
    assert "18 of 40 runs finished: an interim look" in page
    assert "The plan was changed after 7 finished runs" in page
    assert status_line(results()) == "18 of 18 runs finished"
    assert "No run is finished yet" in render_study(analyse([], planned=2), "s")


def test_tables_hold_the_numbers_of_the_analysis() -> None:
    data = results()
    ((name, tables),) = study_tables(data)
    assert name == "g"
    accuracy = {row[0].rstrip(" *"): row for row in tables[0].rows}
    assert accuracy["qat"][1:3] == ["3", "0.710"]
    paired = next(table for table in tables if table.title.startswith("Difference to bf16"))
    row = next(row for row in paired.rows if row[:2] == ["qat", "final"])
    assert row[2:] == ["3", "-10.0", "-10.0 to -10.0", "-10.0 to -10.0"]
    assert all(len({len(row) for row in table.rows}) == 1 for table in tables)


def test_markdown_is_a_table() -> None:
    lines = markdown(study_tables(results())[0][1]).splitlines()
    heads = [i for i, line in enumerate(lines) if re.fullmatch(r"\|( --- \|)+", line)]
    assert len(heads) >= 4
    for i in heads:
        assert lines[i - 1].count("|") == lines[i].count("|") == lines[i + 1].count("|")


def test_a_forest_puts_estimates_where_they_belong() -> None:
    rows = [Interval("a", -0.5, (-0.6, -0.4)), Interval("b", 0.0, None), Interval("c", 0.5, (0.4, 0.6), (0.1, 0.9))]
    svg = forest_chart("l", rows, x_label="x", line=0.0)
    places = [float(x) for x in re.findall(r'<circle[^>]*cx="([\d.]+)"', svg)]
    assert places[0] < places[1] < places[2]
    zero = float(re.search(r'class="axis" d="M([\d.]+),', svg).group(1))  # type: ignore[union-attr]
    assert places[1] == pytest.approx(zero)
    assert len(re.findall('class="line faint', svg)) == 1, "the wide interval"
    assert forest_chart("l", [], x_label="x") == ""


def test_a_scatter_joins_its_front_in_order() -> None:
    spots = [Spot("b", 2, 0.8, (1.5, 2.5), (0.7, 0.9)), Spot("a", 1, 0.5, None, None), Spot("c", 3, 0.4, None, None)]
    svg = scatter_chart("l", spots, x_label="x", y_label="y", front=["a", "b"])
    (path,) = re.findall(r'class="line faint c1" d="M([^"]+)"', svg)
    xs = [float(part.split(",")[0]) for part in path.split("L")]
    assert xs == sorted(xs)
    assert len(xs) == 2
    assert len(re.findall('class="whisker', svg)) == 2


def test_small_multiples_share_axes_and_leave_zeros_out_of_decades() -> None:
    a = Small("a", [(1, 1e-4, 1e-5, 1e-3), (2, 1e-2, 1e-3, 1e-1)])
    zero = Small("parity", [(1, 0.0, 0.0, 0.0), (2, 0.0, 0.0, 0.0)])
    svg = small_multiples("l", [a, zero, Small("empty", [])], reference=a, logarithmic=True)
    assert "parity" in svg
    assert "empty" not in svg
    assert len(re.findall('class="line c0"', svg)) == 1
    assert len(re.findall('class="line faint c1"', svg)) == 1, "the reference, in every chart but its own"
    assert small_multiples("l", [zero, a]) != ""
    assert small_multiples("l", []) == ""
