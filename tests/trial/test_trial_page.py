"""The page of a trial: what it says, in which order, and that nothing it shows is obeyed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trial_material import check, decision, material, pair, record, settings as trial_settings, task, usage  # isort: skip

from halfbyte.errors import DataError
from halfbyte.html.text import visible
from halfbyte.trial.integrity import Finding
from halfbyte.trial.report import Material, markdown, page, write
from halfbyte.trial.review import Note

HOSTILE = '</pre><script>alert(1)</script><img src=x onerror=alert(1)>" \x00 \x1b[31mred \u202eright to left'


class Checker(HTMLParser):
    """Every tag that is opened is closed, nothing points elsewhere; keeps what stands in ``pre``."""

    VOID = frozenset({"meta", "path", "circle", "rect", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.pre: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []
        assert not self.tags & {"script", "link", "img", "iframe", "object", "a", "form", "base", "foreignobject"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = {name for name, _ in attrs}
        assert not names & {"src", "href", "xlink:href", "style"}
        assert not [name for name in names if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.pre[-1] += data
        elif "style" not in self.open:
            self.text += data


def sections(text: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", text)


def regressed(**changes: object) -> Material:
    records = pair("kept", True, True) + pair("lost", True, False, texts=("the answer is 42", "the answer is 41"))
    return material(records, found=decision("retain", check(ok=False)), **changes)  # type: ignore[arg-type]


def test_the_verdict_stands_first_and_the_rest_in_order() -> None:
    text = page(regressed())
    assert sections(text) == [
        "Retain the baseline",
        "Limits",
        "Memory and cost",
        "Regressions",
        "Flips against noise",
        "Latency, length, failures",
        "Integrity",
        "Eight dimensions",
        "Details",
    ]
    assert text == page(regressed()), "the same material gives the same page"


@pytest.mark.parametrize(
    ("verdict", "title"),
    [
        ("keep", "Keep the candidate"),
        ("retain", "Retain the baseline"),
        ("inconclusive", "Inconclusive: retain the baseline for now"),
        ("invalid", "Invalid: no verdict"),
    ],
)
def test_every_verdict_has_its_words(verdict: str, title: str) -> None:
    found = decision(verdict, reasons=["because of this"])  # type: ignore[arg-type]
    text = page(material(found=found))
    assert sections(text)[0] == title
    assert f'class="verdict {verdict}"' in text
    assert "<li>because of this</li>" in text


def test_reasons_are_limits_in_words_the_broken_ones_first() -> None:
    checks = [check(ok=None), check("critical_tasks", unit="count", sense="at most", estimate=2.0, limit=0.0, ok=False)]
    found = decision("retain", *checks, reasons=["pass_rate more than -0.05: not shown", "a new trial could conclude"])
    text = page(material(found=found))
    shown = re.findall(r"<li>([^<]*)</li>", text[: text.index("</section>")])
    assert [reason.split(":")[0] for reason in shown] == ["broken", "open", "a new trial could conclude"]
    assert (
        shown[1]
        == "open: pass rate, candidate less baseline: -1.0 points; -4.0 to +2.0 points; limit: more than -5.0 points"
    )


def test_the_page_loads_nothing() -> None:
    text = page(regressed(given=trial_settings(trial={"name": "http://elsewhere.example/x.js"})))
    Checker(text)
    head = text[: text.index("</head>")]
    assert "default-src 'none'" in head
    assert not re.search(r"url\(|@import|@font-face", head)
    assert "prefers-color-scheme: dark" in head
    assert "@media print" in head
    assert "width=device-width" in head


def test_outputs_stand_beside_each_other() -> None:
    found = Checker(page(regressed()))
    assert found.pre == ["What is 6 times 7?", "42\n(contains)", "the answer is 42", "the answer is 41"]
    assert '<span class="same">the answer is 4</span>2</pre>' in page(regressed())


def test_regressions_come_before_gains_and_critical_ones_before_others() -> None:
    records = [
        *pair("a-gain", False, True),
        *pair("b-once", True, False),
        *pair("b-once", True, True, repeat=1),
        *pair("c-always", True, False),
        *pair("c-always", True, False, repeat=1),
        *pair("d-critical", True, False),
        *pair("d-critical", True, True, repeat=1),
    ]
    names = ("a-gain", "b-once", "c-always", "d-critical")
    text = page(material(records, tasks=[task(name, critical=name.startswith("d")) for name in names]))
    shown = re.findall(r"<h3>([a-d]-\w+)</h3>", text)
    assert shown == ["d-critical", "c-always", "b-once", "a-gain"]
    assert text.index("<summary>Gains (1)") > text.index("<h2>Details")


def test_notes_of_reviewers_stand_with_their_task() -> None:
    notes = [Note("lost", "Ada", "the <b>old</b> answer was wrong too", 1.0), Note("kept", "Bob", "fine", 2.0)]
    text = page(regressed(notes=notes))
    assert "<b>note</b> Ada: the &lt;b&gt;old&lt;/b&gt; answer was wrong too" in text
    assert "Bob" not in text
    assert "- note of Ada: the &lt;b&gt;old&lt;/b&gt; answer" in markdown(regressed(notes=notes))


def test_many_regressions_are_named_but_not_all_shown() -> None:
    records = [r for i in range(60) for r in pair(f"task-{i:02}", True, False)]
    text = page(material(records))
    assert len(re.findall("<article", text)) == 40
    assert "And 20 more: task-40, task-41" in text


def test_a_failed_candidate_shows_its_failure() -> None:
    failure = record("a", "candidate", passed=None, text="", error="http 500: gone", finish_reason=None, ttft=None)
    text = page(material([record("a", "baseline"), failure]))
    assert "failed: http 500: gone" in text
    assert "<h3>Failures</h3>" in text
    assert "<th>http 500</th><td>0 of 1 (0.0%)</td><td>1 of 1 (100.0%)</td>" in text


def test_hostile_text_is_text_everywhere() -> None:
    hostile = pair(
        HOSTILE, True, False, texts=(HOSTILE + "\ud800", HOSTILE + "x"), finish_reason=HOSTILE, calls=HOSTILE
    )
    failed = [record("b", "baseline"), record("b", "candidate", passed=None, text="", error=f"{HOSTILE}: {HOSTILE}")]
    found = decision("retain", check(HOSTILE, note=HOSTILE), reasons=[HOSTILE])
    text = page(
        material(
            hostile + failed,
            tasks=[task(HOSTILE, prompt=HOSTILE, expected=HOSTILE, tags=[HOSTILE])],
            found=found,
            used={"baseline": usage("baseline", source=HOSTILE), "candidate": usage("candidate", None, HOSTILE)},
            integrity=[Finding("chain", HOSTILE, False, HOSTILE, HOSTILE)],
            environment={HOSTILE: [HOSTILE]},
        )
    )
    seen = Checker(text)
    assert visible(HOSTILE) in seen.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert r"\x1b[31m" in text
    assert r"\u202e" in text
    assert r"\ud800" in text


anything = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)


@settings(max_examples=40, deadline=None)
@given(prompt=st.text(min_size=1, max_size=40).filter(str.strip), before=anything, after=anything)
def test_any_text_comes_out_as_it_went_in(prompt: str, before: str, after: str) -> None:
    text = page(material(pair("a", True, False, texts=(before, after)), tasks=[task("a", prompt=prompt)]))
    found = Checker(text)
    # A newline straight after <pre> is dropped by HTML, not by this parser; the page may keep it.
    assert found.pre == [visible(prompt), "42\n(contains)", visible(before), visible(after)]
    text.encode("utf-8")


def test_a_remote_server_cannot_claim_memory() -> None:
    used = {arm: usage(arm, None, "remote") for arm in ("baseline", "candidate")}
    text = page(material(used=used))  # type: ignore[arg-type]
    assert text.count("a remote server cannot claim memory") == 2
    assert 'aria-label="Memory' not in text
    assert "memory not measured (remote)" in text
    assert 'aria-label="Memory' in page(material())


def test_nothing_at_all_still_is_a_page() -> None:
    text = page(material([], found=decision("invalid", reasons=["there are no records"]), used={}))
    Checker(text)
    assert "there are no records" in text
    assert "Nothing was compared." in text


def test_both_files_are_written_whole_or_refused(tmp_path: Path) -> None:
    files = write(tmp_path, regressed())
    assert [file.name for file in files] == ["report.html", "report.md"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.md"]
    assert files[0].read_text(encoding="utf-8") == page(regressed())
    with pytest.raises(DataError, match="cannot be written"):
        write(tmp_path / "missing", regressed())
