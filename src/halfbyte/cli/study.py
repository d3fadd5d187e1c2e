"""``halfbyte study``: arms x seeds in a pool of processes, and the analysis of any runs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

__all__ = ["make_study"]


def make_study() -> App:
    """The commands."""
    app = App(
        name="study", help="Compare methods: arms x seeds on identical prompts and budgets.", help_format="plaintext"
    )
    app.command(run)
    app.command(report)
    return app


def run(
    file: Annotated[Path, Parameter(help="TOML file with the study.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Study folder; that of the file by default.")] = None,
    processes: Annotated[int | None, Parameter(help="Runs at a time; that of the file by default.")] = None,
    plan_only: Annotated[bool, Parameter(negative="", help="Check the file, list the runs, and run nothing.")] = False,
) -> int:
    """Run what is missing of a study; study.json and study.html are written after every run. Killed, call it again."""
    from halfbyte.cli.study_progress import StudyProgress
    from halfbyte.study import load_plan, run_study

    plan = load_plan(file, out, processes)
    jobs = plan.jobs()
    if plan_only:
        for job in jobs:
            print(f"{job.label}  {job.folder}")
        return 0

    def publish(data: dict[str, Any]) -> None:
        _write(plan.folder / "study.json", plan.folder / "study.html", data, plan.section.name)

    # A study in the background often cannot hear Ctrl-C's signal: an ordinary kill stops it as gently.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with StudyProgress(jobs) as display:
            outcome = run_study(plan, say=display.say, publish=publish, watch=display.watch)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(plan.folder / "study.html")
    if outcome.stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    if outcome.failed:
        print(f"{len(outcome.failed)} runs failed; the same command tries them again", file=sys.stderr)
        return 1
    return 0


def report(
    runs: Annotated[tuple[Path, ...], Parameter(help="Run folders, study folders, or study.json files.", negative="")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="HTML file; none by default.")] = None,
    json: Annotated[Path | None, Parameter(help="Also write the numbers to this file.")] = None,
    markdown: Annotated[Path | None, Parameter(help="Also write the tables as Markdown to this file.")] = None,
    reference: Annotated[str, Parameter(help="Arm that others are compared with.")] = "bf16",
) -> int:
    """Compare runs, also runs made elsewhere: tables, and a page with pictures."""
    from rich.console import Console
    from rich.table import Table

    from halfbyte.files import write_text
    from halfbyte.html.table import markdown as as_markdown
    from halfbyte.report.study_tables import status_line, study_tables
    from halfbyte.study import analyse, collect_records

    data = analyse(collect_records(runs), reference=reference)
    console = Console(soft_wrap=True)
    console.print(status_line(data), highlight=False)
    shown = study_tables(data)
    for name, tables in shown:
        console.print(f"\n{name}", highlight=False, markup=False)
        for table in tables:
            printed = Table(*table.rows[0], title=table.title, title_justify="left")
            for row in table.rows[1:]:
                printed.add_row(*row)
            console.print(printed)
    if markdown is not None:
        write_text(markdown, "\n".join(f"{name}\n\n{as_markdown(tables)}" for name, tables in shown))
    if json is not None or out is not None:
        _write(json, out, data, ", ".join(path.name for path in runs[:3]) + (", ..." if len(runs) > 3 else ""))
    if out is not None:
        print(out)
    return 0


def _write(json: Path | None, html: Path | None, data: dict[str, Any], name: str) -> None:
    from halfbyte.files import write_object, write_text
    from halfbyte.report.study import render_study

    if json is not None:
        write_object(json, data, indent=None)
    if html is not None:
        write_text(html, render_study(data, name))
