"""The report of a trial: one offline HTML file and Markdown. ``outcome.json`` is the machine's form of the same verdict."""

from __future__ import annotations

from pathlib import Path

from halfbyte.html.page import write as write_text
from halfbyte.trial.report.markdown import markdown
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.page import page

__all__ = ["Material", "markdown", "page", "write"]


def write(folder: Path, material: Material) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.md`` into the trial's folder.

    Returns:
        The two files.

    Raises:
        DataError: one cannot be written.
    """
    out = folder / "report.html", folder / "report.md"
    write_text(out[0], page(material))
    write_text(out[1], markdown(material))
    return out
