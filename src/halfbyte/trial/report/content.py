"""What the page and its Markdown twin both say: verdict, facts, memory, cost, latency, noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from halfbyte.html.table import Table
from halfbyte.trial.cost import CostComparison, compare_costs
from halfbyte.trial.records import ARMS, Arm
from halfbyte.trial.report.arms import latencies, pass_rate
from halfbyte.trial.report.limits import limit_rows
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.pairs import flips
from halfbyte.trial.report.words import NONE, memory, money, per_cent, points, ratio, seconds, share
from halfbyte.trial.settings import Target
from halfbyte.trial.statistics.percentiles import percentile, requests_needed

__all__ = [
    "Verdict",
    "arm_name",
    "cost_table",
    "facts",
    "latency_table",
    "memory_lines",
    "noise_lines",
    "verdict",
]

_TITLES = {
    "keep": (
        "Keep the candidate",
        "Every limit holds, and the metric that the change is for improves by what was asked.",
    ),
    "retain": ("Retain the baseline", "At least one limit is broken."),
    "inconclusive": (
        "Inconclusive: retain the baseline for now",
        "No limit is broken, but at least one cannot be shown to hold with these records.",
    ),
    "invalid": ("Invalid: no verdict", "The records cannot carry a verdict. Mend what is named, and run again."),
}


@dataclass(frozen=True)
class Verdict:
    """The verdict in words; ``kind`` is the machine's word for it."""

    kind: str
    title: str
    sentence: str
    reasons: tuple[str, ...]


def verdict(material: Material) -> Verdict:
    """The decision in words: limits that are broken, then those that are open, then what else it says."""
    decision = material.decision
    title, sentence = _TITLES[decision.verdict]
    rows = sorted(limit_rows(decision), key=lambda row: row.state != "broken")
    reasons = [f"{row.state}: {row.name}: {row.words}" for row in rows if row.state in ("broken", "open")]
    names = tuple(check.name for check in decision.checks)
    reasons += [reason for reason in decision.reasons if not names or not reason.startswith(names)]
    return Verdict(decision.verdict, title, sentence, tuple(reasons))


def arm_name(target: Target, arm: Arm) -> str:
    """A target in a few words: its precision and model, as far as trial.toml says."""
    words = [word for word in (target.precision, target.model) if word]
    return f"{arm} ({', '.join(words)})" if words else arm


def facts(material: Material) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark) for the head of the page."""
    rates = [pass_rate(material.of(arm)) for arm in ARMS]
    counts = [len({r.task for r in material.of(arm)}) for arm in ARMS]
    for arm, rate, count in zip(ARMS, rates, counts):
        yield f"pass rate, {arm}", per_cent(rate), f"{count} tasks, {len(material.of(arm))} requests"
    check = material.decision.check("pass_rate")
    if check is not None and check.estimate is not None:
        interval = ""
        if check.low is not None and check.high is not None:
            interval = f"{100 * check.low:+.1f} to {points(check.high)}"
        yield "difference", points(check.estimate), interval
    seen = flips(material.pairs)
    yield "regressions", str(len(material.regressions)), f"tasks; {len(material.gains)} gained"
    peaks = [material.usage[arm].peak_bytes if arm in material.usage else None for arm in ARMS]
    if peaks[0] and peaks[1] is not None:
        yield "peak memory", f"{100 * (peaks[1] / peaks[0] - 1):+.0f}%", f"{memory(peaks[0])} to {memory(peaks[1])}"
    if material.noise.pairs:
        noise = material.noise
        yield (
            "noise",
            per_cent(noise.flipped / noise.pairs),
            f"of A/A pairs flip; {_per_cent_of(seen.flipped, seen.pairs)} here",
        )
    spent = [u.seconds for u in material.usage.values()]
    if spent:
        yield "serving time", seconds(sum(spent)), f"{material.settings.run.concurrency} requests in flight"


def _per_cent_of(part: int, whole: int) -> str:
    """A share of a count, or that there is none."""
    return per_cent(part / whole) if whole else NONE


def memory_lines(material: Material) -> list[str]:
    """How memory was measured, and what cannot be claimed."""
    lines = []
    for arm in ARMS:
        usage = material.usage.get(arm)
        if usage is None:
            lines.append(f"{arm}: not measured.")
        elif usage.peak_bytes is None:
            lines.append(f"{arm}: a remote server cannot claim memory ({usage.source}).")
        else:
            lines.append(f"{arm}: {usage.source}.")
    capacities = {u.kv_capacity_tokens for u in material.usage.values() if u.kv_capacity_tokens is not None}
    if len(capacities) == 1:
        lines.append(f"Both KV pools hold {capacities.pop()} tokens, so peaks compare at the same capacity.")
    elif len(capacities) > 1:
        lines.append("The KV pools differ in tokens: peaks do not compare at the same capacity.")
    return lines


def cost_table(material: Material) -> tuple[Table, list[str]]:
    """Cost of both arms, and break-even in words."""
    found = compare_costs(material.records, material.usage, material.settings.cost)
    return _cost_rows(found), _cost_lines(found, material)


def _cost_rows(found: CostComparison) -> Table:
    def row(name: str, value: Any) -> list[str]:
        return [name, *(money(value(arm), found.currency) for arm in (found.baseline, found.candidate))]

    rows: list[tuple[str, Any]] = [
        ("serving, 1000 requests", lambda a: a.serving_per_1k),
        ("set-up, spread", lambda a: a.setup_per_1k),
        ("upkeep, spread", lambda a: a.operating_per_1k),
        ("all, 1000 requests", lambda a: a.per_1k),
        ("all, 1000 passed tasks", lambda a: None if a.per_passed is None else 1000 * a.per_passed),
    ]
    return Table("Cost", [["", *ARMS], *(row(name, value) for name, value in rows)])


def _cost_lines(found: CostComparison, material: Material) -> list[str]:
    """Set-up, saving, break-even, and how serving is priced."""
    cost = material.settings.cost
    lines = [
        f"Break-even: {found.note}." if found.breaks_even is not None else f"Break-even is not known: {found.note}."
    ]
    if found.saving_per_month is not None:
        lines.append(f"Saving a month after upkeep: {money(found.saving_per_month, found.currency)}.")
    by = "all of the machine" if cost.price_by == "machine" else "the share of the machine's memory that the peak takes"
    lines.append(f"Serving time is priced at {money(cost.machine_per_hour, cost.currency)} an hour for {by}.")
    return lines


def latency_table(material: Material) -> Table:
    """Percentiles of latency and of the first token, where the sample carries them, and their ratio."""
    whole = [latencies(material.of(arm)) for arm in ARMS]
    first = [[r.ttft for r in material.of(arm) if r.ttft is not None and r.error is None] for arm in ARMS]
    rows = [["", *ARMS, "ratio"]]
    for name, values in (("", whole), ("first token, ", first)):
        if not any(values):
            continue
        for q in (0.5, 0.95):
            found = [percentile(v, q) if len(v) >= requests_needed(q) else None for v in values]
            if found[0] is None or found[1] is None:
                few = f"needs {requests_needed(q)} requests"
                rows.append([f"{name}p{100 * q:.0f}", *(few if f is None else seconds(f) for f in found), ""])
            else:
                of = ratio(found[1] / found[0]) if found[0] > 0 else NONE
                rows.append([f"{name}p{100 * q:.0f}", seconds(found[0]), seconds(found[1]), of])
    return Table("Latency", rows)


def noise_lines(material: Material) -> str:
    """How flips of the run lie to flips of the baseline against itself."""
    seen, noise = flips(material.pairs), material.noise
    text = f"Run: {share(seen.regressions, seen.pairs)} of pairs worse, {share(seen.gains, seen.pairs)} better; "
    text += f"{share(seen.texts, seen.pairs)} differ in text. "
    if not noise.pairs:
        return text + "No A/A pilot was run, so nobody knows how much of that is noise."
    reseeded = any(pair.baseline.seed != pair.candidate.seed for pair in material.pilot_pairs)
    text += f"A/A pilot, the baseline against itself{' with other seeds' if reseeded else ''}: "
    text += f"{share(noise.flipped, noise.pairs)} of pairs flip, "
    return text + f"{share(noise.texts, noise.pairs)} differ in text."
