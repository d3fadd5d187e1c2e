"""Both arms in numbers: requests, failures, tokens, latency, finish reasons, tool calls, pass rates by tag. Tables of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from halfbyte.html.scale import number
from halfbyte.html.table import Table
from halfbyte.trial.records import ARMS, Arm, Record
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.pairs import change
from halfbyte.trial.report.words import NONE, memory, per_cent, seconds, share

__all__ = ["arm_tables", "latencies", "mean", "pass_rate", "tag_table", "tool_rate"]


def pass_rate(records: Sequence[Record]) -> float | None:
    """The share that passed; a failed request did not. None without a record."""
    return sum(bool(r.passed) for r in records) / len(records) if records else None


def tool_rate(material: Material, arm: Arm) -> tuple[int, int]:
    """Responses to tasks with tools in which at least one call could be parsed, and all such responses."""
    offered = [r for r in material.of(arm) if r.tool_calls is not None]
    return sum(bool(r.tool_calls) for r in offered), len(offered)


def latencies(records: Sequence[Record]) -> list[float]:
    """Seconds of the requests that did not fail."""
    return [r.latency for r in records if r.error is None]


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def arm_tables(material: Material) -> list[Table]:
    """Requests, finish reasons and failures."""
    of: Mapping[Arm, list[Record]] = {arm: material.of(arm) for arm in ARMS}
    rows = [["", *ARMS]]

    def row(name: str, cell: Callable[[Arm], str]) -> None:
        rows.append([name, *(cell(arm) for arm in ARMS)])

    row("requests", lambda arm: str(len(of[arm])))
    row("failed", lambda arm: share(sum(r.error is not None for r in of[arm]), len(of[arm])))
    row("passed", lambda arm: share(sum(bool(r.passed) for r in of[arm]), len(of[arm])))
    row("prompt tokens, mean", lambda arm: _mean(of[arm], lambda r: r.prompt_tokens))
    row("response tokens, mean", lambda arm: _mean(of[arm], lambda r: r.completion_tokens))
    row("prompt tokens from the cache", lambda arm: _cached(of[arm]))
    if any(r.tool_calls is not None for r in material.records):
        row("tool calls that parse", lambda arm: share(*tool_rate(material, arm)))
    row("serving time", lambda arm: seconds(material.usage[arm].seconds) if arm in material.usage else NONE)
    row("response tokens a second", lambda arm: _throughput(material, arm, of[arm]))
    row("KV pool", lambda arm: _pool(material, arm))
    tables = [Table("Requests", rows)]
    tables.append(
        _counts("Finish reasons", of, lambda r: (r.finish_reason or "none given") if r.error is None else None)
    )
    if any(r.error is not None for r in material.records):
        tables.append(_counts("Failures", of, lambda r: r.failure))
    return tables


def tag_table(material: Material) -> Table | None:
    """Pass rates by tag; None where no task has one."""
    tags = list(dict.fromkeys(tag for task in material.tasks for tag in task.tags))
    if not tags:
        return None
    rows = [["tag", "tasks", *ARMS, "lost", "gained"]]
    for tag in tags:
        names = {task.id for task in material.tasks if tag in task.tags}
        rates = [per_cent(pass_rate([r for r in material.of(arm) if r.task in names])) for arm in ARMS]
        changes = Counter(change(pair) for pair in material.pairs if pair.task in names)
        rows.append([tag, str(len(names)), *rates, str(changes["regression"]), str(changes["gain"])])
    return Table("Pass rate by tag", rows)


def _counts(title: str, of: Mapping[Arm, Sequence[Record]], kind: Callable[[Record], str | None]) -> Table:
    found = {arm: Counter(k for r in of[arm] if (k := kind(r)) is not None) for arm in ARMS}
    names = sorted({name for counts in found.values() for name in counts}, key=lambda n: (-found["baseline"][n], n))
    return Table(
        title, [["", *ARMS], *([name, *(share(found[arm][name], len(of[arm])) for arm in ARMS)] for name in names)]
    )


def _mean(records: Sequence[Record], value: Callable[[Record], int | None]) -> str:
    found = mean([v for r in records if r.error is None and (v := value(r)) is not None])
    return NONE if found is None else number(found)


def _cached(records: Sequence[Record]) -> str:
    known = [(r.cached_tokens, r.prompt_tokens) for r in records if r.cached_tokens is not None and r.prompt_tokens]
    if not known:
        return "not reported"
    return per_cent(sum(c or 0 for c, _ in known) / sum(p or 0 for _, p in known))


def _throughput(material: Material, arm: Arm, records: Sequence[Record]) -> str:
    usage = material.usage.get(arm)
    tokens = [r.completion_tokens for r in records if r.completion_tokens is not None]
    return number(sum(tokens) / usage.seconds) if usage and usage.seconds > 0 and tokens else NONE


def _pool(material: Material, arm: Arm) -> str:
    usage = material.usage.get(arm)
    if usage is None or usage.kv_capacity_tokens is None:
        return NONE
    return f"{usage.kv_capacity_tokens} tokens, {memory(usage.kv_bytes)}"
