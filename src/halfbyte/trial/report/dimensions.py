"""The eight dimensions of an evaluation, each with what this trial knows of it, or "not evaluated"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halfbyte.html.scale import number
from halfbyte.trial.integrity import Finding, Topic
from halfbyte.trial.records import ARMS
from halfbyte.trial.report.arms import latencies, pass_rate, tool_rate
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.pairs import flips
from halfbyte.trial.report.words import memory, per_cent, seconds, share
from halfbyte.trial.statistics.percentiles import percentile, requests_needed

__all__ = ["NOT_EVALUATED", "Dimension", "dimensions"]

NOT_EVALUATED = "not evaluated"
#: Tags by which a task says that it is about security.
_SECURITY = frozenset({"security", "safety", "privacy", "injection", "jailbreak"})


@dataclass(frozen=True)
class Dimension:
    """One dimension.

    Arguments:
        evidence: what was found, a sentence each; empty where nothing was.
        missing: what the trial did not look at.
    """

    name: str
    evidence: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def evaluated(self) -> bool:
        """There is some evidence."""
        return bool(self.evidence)


def dimensions(material: Material) -> tuple[Dimension, ...]:
    """All eight, in the order of the page."""
    found: tuple[tuple[str, Callable[[Material], Iterator[str]], tuple[str, ...]], ...] = (
        ("quality", _quality, ("tasks that are not in the task file",)),
        ("compute", _compute, ("energy",)),
        ("latency", _latency, ("other loads than this trial's concurrency",)),
        ("operations", _operations, ("upgrades, monitoring, incidents over weeks",)),
        ("compatibility", _compatibility, ("clients other than this trial's",)),
        ("security", _security, ("attacks, leaks of data, supply chain of the weights",)),
        ("data and training", _data, ("what the model itself was trained on",)),
        ("reproducibility", _reproducibility, ("other machines",)),
    )
    return tuple(Dimension(name, tuple(evidence(material)), missing) for name, evidence, missing in found)


def _quality(material: Material) -> Iterator[str]:
    if not material.pairs:
        return
    rates = [per_cent(pass_rate(material.of(arm))) for arm in ARMS]
    seen = flips(material.pairs)
    yield f"{len(material.outcomes)} tasks in pairs: the baseline passes {rates[0]}, the candidate {rates[1]}."
    yield f"{seen.regressions} of {seen.pairs} pairs got worse, {seen.gains} better."
    critical = [outcome for outcome in material.outcomes if material.critical(outcome.task)]
    if critical:
        worse = sum(outcome.drop > 0 for outcome in critical)
        yield f"{worse} of {len(critical)} critical tasks got worse."


def _compute(material: Material) -> Iterator[str]:
    for arm in ARMS:
        usage = material.usage.get(arm)
        if usage is None:
            continue
        if usage.peak_bytes is None:
            yield f"{arm}: memory not measured ({usage.source})."
        else:
            parts = [
                f"{words} {memory(value)}"
                for words, value in (("weights", usage.weights_bytes), ("KV pool", usage.kv_bytes))
                if value is not None
            ]
            yield f"{arm}: peak {memory(usage.peak_bytes)} ({', '.join([*parts, usage.source])})."
        tokens = [r.completion_tokens for r in material.of(arm) if r.completion_tokens is not None]
        if tokens and usage.seconds > 0:
            yield f"{arm}: {number(sum(tokens) / usage.seconds)} response tokens a second."


def _latency(material: Material) -> Iterator[str]:
    for arm in ARMS:
        values = latencies(material.of(arm))
        carried = [q for q in (0.5, 0.95) if len(values) >= requests_needed(q)]
        if carried:
            words = [f"p{100 * q:.0f} {seconds(percentile(values, q))}" for q in carried]
            yield f"{arm}: {', '.join(words)} over {len(values)} requests, {material.settings.run.concurrency} in flight."


def _operations(material: Material) -> Iterator[str]:
    for arm in ARMS:
        if records := material.of(arm):
            failed = [r for r in records if r.error is not None]
            kinds = sorted({r.failure or "" for r in failed})
            yield f"{arm}: {share(len(failed), len(records))} requests failed{': ' + ', '.join(kinds) if kinds else ''}."
    cost = material.settings.cost
    if material.records and (cost.setup_hours or cost.operating_per_month):
        yield (
            f"assumed: {number(cost.setup_hours)} hours of set-up, {number(cost.operating_per_month)} {cost.currency} "
            "a month to look after the candidate."
        )


def _compatibility(material: Material) -> Iterator[str]:
    yield from _checks(material, "template", "preflight")
    offered = [tool_rate(material, arm) for arm in ARMS]
    if any(whole for _, whole in offered):
        yield f"tool calls that parse: baseline {share(*offered[0])}, candidate {share(*offered[1])}."
    counts = [sum(r.finish_reason == "length" for r in material.of(arm)) for arm in ARMS]
    if material.records:
        yield f"responses cut at the token limit: baseline {counts[0]}, candidate {counts[1]}."


def _security(material: Material) -> Iterator[str]:
    tagged = {task.id for task in material.tasks if _SECURITY & set(task.tags)}
    if not tagged:
        return
    for arm in ARMS:
        records = [r for r in material.of(arm) if r.task in tagged]
        if records:
            yield f"{arm}: {share(sum(bool(r.passed) for r in records), len(records))} of tasks about security passed."


def _data(material: Material) -> Iterator[str]:
    yield from _checks(material, "overlap")


def _reproducibility(material: Material) -> Iterator[str]:
    yield from _checks(material, "lock", "chain", "pairing", "cache")
    noise = material.noise
    if noise.pairs:
        yield (
            f"the baseline against itself: {share(noise.texts, noise.pairs)} of pairs differ in text, "
            f"{share(noise.flipped, noise.pairs)} in outcome."
        )


def _checks(material: Material, *topics: Topic) -> Iterator[str]:
    for check in material.integrity:
        if check.topic in topics and check.ok is not None:
            yield _sentence(check)


def _sentence(check: Finding) -> str:
    state = "holds" if check.ok else "does not hold"
    return f"{check.name}: {state}{f' ({check.detail})' if check.detail else ''}."
