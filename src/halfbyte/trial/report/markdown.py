"""The report as Markdown. Texts of models and tasks stand in code blocks that nothing in them can end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte import __version__
from halfbyte.html.table import Table, fenced, inline
from halfbyte.html.table import markdown as tables
from halfbyte.html.text import flatten
from halfbyte.trial.records import ARMS
from halfbyte.trial.report.arms import arm_tables, tag_table
from halfbyte.trial.report.cases import Case, case, named
from halfbyte.trial.report.content import (
    arm_name,
    cost_table,
    facts,
    latency_table,
    memory_lines,
    noise_lines,
    verdict,
)
from halfbyte.trial.report.dimensions import NOT_EVALUATED, dimensions
from halfbyte.trial.report.limits import limit_table
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.pairs import Outcome
from halfbyte.trial.report.words import memory

__all__ = ["markdown"]

_STATES = {True: "holds", False: "**does not hold**", None: "for the reader"}


def markdown(material: Material) -> str:
    """The report in the order of the page; settings and tasks are left to the folder's own files."""
    return "\n".join(_parts(material)).rstrip("\n") + "\n"


def _parts(material: Material) -> Iterator[str]:
    said = verdict(material)
    arms = [arm_name(material.settings.target(arm), arm) for arm in ARMS]
    yield f"# {inline(material.settings.trial.name)}: {said.title}\n"
    yield f"{inline(arms[1])} against {inline(arms[0])}. {inline(said.sentence)}\n"
    yield _bullets(said.reasons)
    yield _table("In short", [["", "", ""], *facts(material)])
    yield "## Limits\n"
    yield tables([limit_table(material.decision)])
    yield "## Memory and cost\n"
    yield _table("Memory", _memory(material))
    yield _bullets(memory_lines(material))
    cost, lines = cost_table(material)
    yield tables([cost])
    yield _bullets(lines)
    yield "## Regressions\n"
    yield from _cases(material, material.regressions, "No task is passed less often by the candidate.\n")
    yield "## Flips against noise\n"
    yield f"{inline(noise_lines(material))}\n"
    tags = tag_table(material)
    yield tables([*([] if tags is None else [tags]), latency_table(material), *arm_tables(material)])
    yield "## Integrity\n"
    yield "| check | result | found |\n| --- | --- | --- |"
    for check in material.integrity:
        yield f"| {inline(check.name)} | {_STATES[check.ok]} | {inline(f'{check.detail} {check.fix}'.strip())} |"
    yield "\n## Eight dimensions\n"
    for dimension in dimensions(material):
        yield f"**{dimension.name.capitalize()}**{'' if dimension.evaluated else f': {NOT_EVALUATED}'}\n"
        yield _bullets([*dimension.evidence, f"not looked at: {'; '.join(dimension.missing)}."])
    yield "## Environment\n"
    yield _table("Environment", [["key", "value"], *flatten(material.environment)])
    yield f"Written by halfbyte {__version__} from the trial's folder alone."


def _memory(material: Material) -> list[list[str]]:
    rows = [["", *ARMS]]
    for name, field in (("weights", "weights_bytes"), ("KV pool", "kv_bytes"), ("peak", "peak_bytes")):
        found = (getattr(material.usage[arm], field) if arm in material.usage else None for arm in ARMS)
        rows.append([name, *map(memory, found)])
    return rows


def _cases(material: Material, outcomes: Sequence[Outcome], none: str) -> Iterator[str]:
    shown, rest = named(outcomes)
    if not shown:
        yield none if material.pairs else "Nothing was compared.\n"
    for outcome in shown:
        yield from _case(case(material, outcome))
    if rest:
        yield f"And {len(rest)} more: {inline(', '.join(rest))}.\n"


def _case(shown: Case) -> Iterator[str]:
    yield f"### {inline(shown.task)}\n"
    if shown.remarks:
        yield f"{inline('; '.join(shown.remarks))}\n"
    if shown.notes:
        yield _bullets([f"note of {note}" for note in shown.notes])
    yield f"Prompt:\n\n{fenced(shown.prompt)}"
    yield f"Expected:\n\n{fenced(shown.expected)}"
    for arm, score, end, text in zip(ARMS, shown.scores, shown.ends, shown.texts):
        yield f"{arm.capitalize()}, {score}, {inline(end)}:\n\n{fenced(text)}"


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {inline(line)}\n" for line in lines)


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    return tables([Table(title, rows)])
