"""Tables of text, and text as Markdown that means nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.html.text import visible

__all__ = ["Table", "fenced", "inline", "markdown"]

_MARKS = re.compile(r"[\\`*_\[\]|#~!$]")
#: what would begin a list, or underline a heading
_START = re.compile(r"^(\d{0,9})([-+.)])(?=\s|$)|^()([-=])(?=[-=\s]*$)")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "://": "&#58;//", "www.": "www&#46;"}
_ENTITY = re.compile("|".join(map(re.escape, _ENTITIES)))


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; the first row is the head."""

    title: str
    rows: Sequence[Sequence[str]]


def markdown(tables: Sequence[Table]) -> str:
    """Tables as Markdown; their text is escaped."""
    out = []
    for table in tables:
        head, *rows = [[inline(cell) for cell in row] for row in table.rows]
        lines = [head, ["---"] * len(head), *rows]
        out.append("\n".join([f"**{inline(table.title)}**", "", *("| " + " | ".join(r) + " |" for r in lines)]) + "\n")
    return "\n".join(out)


def inline(text: str) -> str:
    """Text for a line or a table's cell: no mark-up, no HTML, no link comes of it; line ends become spaces."""
    text = visible(re.sub(r"[\t\n\r]+", " ", text)).strip()
    text = _START.sub(r"\1\3\\\2\4", _MARKS.sub(r"\\\g<0>", text))
    return _ENTITY.sub(lambda m: _ENTITIES[m.group()], text)


def fenced(text: str) -> str:
    """Text as a code block whose fence is longer than any run of backticks in it, so nothing in it ends the block."""
    text = visible(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}\n"
