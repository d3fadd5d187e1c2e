"""Text as Markdown: whatever it holds, it stays text. Judged by a CommonMark parser that is not ours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from halfbyte.html.table import Table, fenced, inline, markdown
from halfbyte.html.text import visible

HOSTILE = [
    "<script>alert(1)</script>",
    "a | b || c",
    "[x](javascript:alert(1)) ![x](https://example.org/x.png)",
    "**bold** _em_ `code` ~~gone~~ # head",
    "&lt;b&gt; &amp; \\| \\\\",
    "https://example.org www.example.org <https://example.org>",
    "line\n\n# heading\n- item\n```\nfence",
    "nul \x00 ansi \x1b[31m bidi \u202e zero \u200b lone \ud800",
    "$x$ $$y$$",
]
#: what a line or a cell may become
PLAIN = {"text", "softbreak", "text_special", "entity"}

texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(codec=None, exclude_categories=()), max_size=60),
    st.text("`*_[]()<>|\\#!~&;:/-+= \n\tab\x00\u202e", max_size=40),
)
parser = MarkdownIt("commonmark", {"html": True}).enable("table")


def leaves(tokens: list[Token]) -> list[Token]:
    return [leaf for token in tokens for leaf in (leaves(token.children) if token.children else [token])]


def one_line(text: str) -> str:
    """White space folded, as a reader sees it."""
    return " ".join(visible(text).split())


@given(texts)
def test_a_cell_stays_one_cell_of_text(text: str) -> None:
    tokens = parser.parse(markdown([Table("title", [["a", "b"], [text, "x"]])]))
    cells = [tokens[i + 1] for i, token in enumerate(tokens) if token.type in ("th_open", "td_open")]
    assert len(cells) == 4
    assert {leaf.type for leaf in leaves(cells[2:3])} <= PLAIN | {"inline"}
    shown = "".join(leaf.content for leaf in leaves(cells[2:3]))
    assert one_line(shown) == one_line(text.replace("\n", " ").replace("\r", " "))
    assert cells[3].content == "x"


@given(texts)
def test_a_line_stays_a_line_of_text(text: str) -> None:
    tokens = parser.parse(f"- item {inline(text)} end\n")
    assert [token.type for token in tokens if token.block and token.type.endswith("_open")] == [
        "bullet_list_open",
        "list_item_open",
        "paragraph_open",
    ]
    assert {leaf.type for leaf in leaves(tokens) if not leaf.block} <= PLAIN


@given(texts)
def test_nothing_ends_a_block_of_code(text: str) -> None:
    tokens = parser.parse(f"before\n\n{fenced(text)}\nafter\n")
    blocks = [token for token in tokens if token.type == "fence"]
    outer = ["paragraph_open", "paragraph_close", "fence", "paragraph_open", "paragraph_close"]
    assert [token.type for token in tokens if token.level == 0] == outer
    assert blocks[0].content == f"{visible(text)}\n"
