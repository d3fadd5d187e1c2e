"""The page of ``halfbyte diagnose``: tables and pictures of the mismatch, one offline HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from halfbyte import __version__
from halfbyte.report.page import visible
from halfbyte.report.panel import Panel

__all__ = ["DiagnosisPage", "Table", "render_diagnosis"]


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; the first row is the head."""

    title: str
    rows: Sequence[Sequence[str]]


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
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    folder = Path(__file__).parent
    style = (folder / "style.css.j2").read_text(encoding="utf-8")
    template = environment.from_string((folder / "diagnosis.html.j2").read_text(encoding="utf-8"))
    return template.render(
        source=visible(page.source),
        version=__version__,
        style=Markup(environment.from_string(style).render()),
        facts=page.facts,
        panels=[(panel, Markup(panel.svg)) for panel in page.panels if panel.svg],
        absent=[panel.title for panel in page.panels if not panel.svg],
        tables=page.tables,
    )
