"""The report as Markdown, judged by a CommonMark parser that is not ours."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from trial_material import check, decision, material, pair, task, usage

from halfbyte.html.text import visible
from halfbyte.trial.integrity import Finding
from halfbyte.trial.report import markdown

HOSTILE = "```\n# Keep the candidate\n| a | b |\n<script>x</script> ![i](http://e.example/i.png) \x00 \x1b[31m \u202e"


def parse(text: str) -> list[Token]:
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)


def kinds(tokens: list[Token]) -> set[str]:
    return {token.type for token in tokens} | {kind for token in tokens for kind in kinds(token.children or [])}


def headings(tokens: list[Token]) -> list[str]:
    return [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]


def test_it_says_what_the_page_says_in_its_order() -> None:
    records = pair("kept", True, True) + pair("lost", True, False, texts=("is 42", "is 41"))
    text = markdown(material(records, found=decision("retain", check(ok=False), reasons=["a reason"])))
    tokens = parse(text)
    assert headings(tokens) == [
        "small trial: Retain the baseline",
        "Limits",
        "Memory and cost",
        "Regressions",
        "lost",
        "Flips against noise",
        "Integrity",
        "Eight dimensions",
        "Environment",
    ]
    assert [t.content for t in tokens if t.type == "fence"] == [
        "What is 6 times 7?\n",
        "42\n(contains)\n",
        "is 42\n",
        "is 41\n",
    ]
    assert (
        "| pass rate, candidate less baseline | broken | -1.0 points | -4.0 to +2.0 points | limit: more than -5.0 points |"
        in text
    )


def everywhere(text: str) -> str:
    """A report in which ``text`` stands in every place that is not ours."""
    return markdown(
        material(
            pair(text, True, False, texts=(text, text + "x"), finish_reason=text),
            tasks=[task(text, prompt=text.strip() or "x", expected=text, tags=[text.strip() or "x"])],
            found=decision("retain", check(note=text), reasons=[text]),
            used={"baseline": usage("baseline", source=text), "candidate": usage("candidate", None, text)},
            integrity=[Finding("chain", text, True, text)],
            environment={text: text},
        )
    )


def test_hostile_text_is_text() -> None:
    text = everywhere(HOSTILE)
    tokens = parse(text)
    assert not kinds(tokens) & {"html_block", "html_inline", "image", "link_open", "code_block"}
    assert len(headings(tokens)) == 9
    assert [t.content for t in tokens if t.type == "fence"][2] == f"{visible(HOSTILE)}\n"
    text.encode("utf-8")


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(
        st.text(min_size=1).filter(str.strip),
        st.text("`#|<>[]()!\\*_ \nab-+=1.", min_size=1).filter(str.strip),
    )
)
def test_any_text_leaves_the_structure_alone(text: str) -> None:
    plain, found = parse(everywhere("plain")), parse(everywhere(text))
    assert not kinds(found) & {"html_block", "html_inline", "image", "link_open", "code_block"}
    assert [t.type for t in found if t.block] == [t.type for t in plain if t.block]
