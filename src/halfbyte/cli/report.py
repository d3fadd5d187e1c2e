"""``halfbyte report``: the HTML report of a run folder, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["report"]


def report(
    run: Annotated[Path, Parameter(help="Run folder, of a run finished, stopped or still going.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="HTML file; report.html in the run folder by default.")] = None,
) -> int:
    """Write the report of a run: one offline HTML file."""
    from halfbyte.report import build

    print(build(run, out))
    return 0
