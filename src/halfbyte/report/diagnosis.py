"""The page of ``halfbyte diagnose``: tables and pictures of the mismatch, one offline HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from halfbyte.html.page import render
from halfbyte.html.panel import Panel
from halfbyte.html.table import Table
from halfbyte.html.text import visible

__all__ = ["DiagnosisPage", "render_diagnosis"]


@dataclass(frozen=True)
class DiagnosisPage:
    """What the page shows.

    Arguments:
        source: where the tokens come from.
        facts: (name, value, remark) for the head.
        panels: pictures; those without data are listed as such.
        tables: numbers.
    """

    source: str
    facts: Sequence[tuple[str, str, str]]
    panels: Sequence[Panel]
    tables: Sequence[Table]


def render_diagnosis(page: DiagnosisPage) -> str:
    """The page as HTML that loads nothing."""
    return render(
        Path(__file__).with_name("diagnosis.html.j2"),
        source=visible(page.source),
        facts=page.facts,
        panels=[(panel, Markup(panel.svg)) for panel in page.panels if panel.svg],
        absent=[panel.title for panel in page.panels if not panel.svg],
        tables=page.tables,
    )
