"""Whether a trial's records can be believed: same inputs, same template, cold caches, the order that was planned. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte.trial.blocks import BlockRecord
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.records import ARMS, Arm, Phase, Record, Strict
from halfbyte.trial.requests import request_body, request_digest

__all__ = ["CACHE_TOLERANCE", "Finding", "Topic", "assess", "hit_share", "problems"]

#: What a finding is about; the report's dimensions draw on it.
Topic = Literal["lock", "chain", "pairing", "template", "cache", "memory", "overlap", "preflight", "environment"]

#: With prefix_cache = "reset" arms may differ by this much in the share of prompt tokens found in the cache: prefixes that tasks
#: share are hit or missed by the timing of concurrent requests.
CACHE_TOLERANCE = 0.02
_SHOWN = 3


@dataclass(frozen=True)
class Finding(Strict):
    """One thing that was looked at.

    Arguments:
        ok: False makes the trial invalid (or, in the preflight, stops it); None is for the reader to judge.
        fix: what to do about it.
    """

    topic: Topic
    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def problems(findings: Sequence[Finding]) -> list[Finding]:
    """Those that are not right."""
    return [finding for finding in findings if finding.ok is False]


def assess(
    folder: TrialFolder, phase: Phase, records: Sequence[Record], blocks: Sequence[BlockRecord]
) -> list[Finding]:
    """What the records of the finished blocks show.

    Arguments:
        records: whose chain has been checked.
    """
    pairs = _pairs(records)
    findings = [_order(folder, phase, records, blocks), _inputs(folder, records)]
    findings += [_templates(folder, pairs), _caches(folder, phase, records, blocks)]
    if abandoned := sum(block.abandoned for block in blocks):
        detail = f"{abandoned} records of blocks that were cut short and done again are in abandoned.jsonl"
        findings.append(Finding("chain", "abandoned records", None, detail))
    return findings


def hit_share(records: Sequence[Record], blocks: Sequence[BlockRecord], arm: Arm) -> float | None:
    """Share of an arm's prompt tokens that its prefix cache held; None where neither usage nor metrics say.

    From the usage of the responses; where that has no such field, from the engine's counters.
    """
    seen = [r for r in records if r.arm == arm and r.cached_tokens is not None and r.prompt_tokens]
    if seen:
        return sum(r.cached_tokens or 0 for r in seen) / sum(r.prompt_tokens or 0 for r in seen)
    hits = queries = 0
    for block in blocks:
        for segment in block.segments:
            before, after = segment.before, segment.after
            if segment.arm == arm and after.cache_queries is not None and after.cache_hits is not None:
                queries += after.cache_queries - (before.cache_queries or 0)
                hits += after.cache_hits - (before.cache_hits or 0)
    return hits / queries if queries > 0 else None


def _order(folder: TrialFolder, phase: Phase, records: Sequence[Record], blocks: Sequence[BlockRecord]) -> Finding:
    """Every request of every finished block was sent once, where the schedule has it, one segment after the other."""
    schedule = folder.schedule(phase)
    expected = {
        (slot.block, slot.position): (slot.arm, slot.task, slot.repeat)
        for block in schedule[: len(blocks)]
        for slot in block.slots()
    }
    found = {(r.block, r.position): (r.arm, r.task, r.repeat) for r in records}
    wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if wrong or len(found) != len(records):
        detail = (
            f"{len(wrong)} requests are not those of the schedule, the first in block {wrong[0][0] if wrong else '?'}"
        )
        return Finding("pairing", "order", False, detail)
    if [block.order for block in blocks] != [block.order for block in schedule[: len(blocks)]]:
        return Finding("pairing", "order", False, "blocks ran in another order than planned")
    orders = "".join(sorted({block.order for block in blocks}))
    balanced = all(block.order in ("ABBA", "BAAB") for block in blocks)
    detail = (
        f"{len(blocks)} of {len(schedule)} blocks, counterbalanced" if balanced else f"not counterbalanced: {orders}"
    )
    return Finding("pairing", "order", True if balanced else None, detail)


def _inputs(folder: TrialFolder, records: Sequence[Record]) -> Finding:
    """Every body was the one that tasks and settings give: the same in both arms."""
    tasks = {task.id: task for task in folder.tasks}
    digests: dict[tuple[str, int], str] = {}
    wrong = []
    for record in records:
        key = (record.task, record.seed)
        if key not in digests and record.task in tasks:
            digests[key] = request_digest(request_body(folder.settings, tasks[record.task], record.seed, ""))
        if digests.get(key) != record.request_sha256:
            wrong.append(record.task)
    if wrong:
        return Finding(
            "pairing", "inputs", False, f"{len(wrong)} requests are not what tasks and settings give: {_some(wrong)}"
        )
    seeds = {(r.task, r.repeat, r.arm): r.seed for r in records if r.phase == "run"}
    unequal = [t for (t, n, arm), s in seeds.items() if arm == "baseline" and seeds.get((t, n, "candidate"), s) != s]
    if unequal:
        return Finding("pairing", "inputs", False, f"other seeds in one arm: {_some(unequal)}")
    return Finding(
        "pairing", "inputs", True, f"{len(records)} requests, identical in both arms but for the model's name"
    )


def _templates(folder: TrialFolder, pairs: Sequence[tuple[Record, Record]]) -> Finding:
    """Both servers made the same number of tokens of the same messages."""
    known = [(a, b) for a, b in pairs if a.prompt_tokens is not None and b.prompt_tokens is not None]
    differ = [(a, b) for a, b in known if a.prompt_tokens != b.prompt_tokens]
    if not known:
        return Finding("template", "chat template", None, "the servers do not report prompt tokens: not checked")
    if not differ:
        return Finding("template", "chat template", True, f"prompt tokens are equal in all {len(known)} pairs")
    a, b = differ[0]
    detail = (
        f"prompt tokens differ in {len(differ)} of {len(known)} pairs, as in task {a.task}: {a.prompt_tokens} for the baseline, "
        f"{b.prompt_tokens} for the candidate"
    )
    if folder.settings.run.allow_template_change:
        return Finding("template", "chat template", None, f"{detail}; allowed by run.allow_template_change")
    fix = "give both servers the same chat template; or, if its change is part of the trial, run.allow_template_change = true"
    return Finding("template", "chat template", False, detail, fix)


def _caches(folder: TrialFolder, phase: Phase, records: Sequence[Record], blocks: Sequence[BlockRecord]) -> Finding:
    """A warm prefix cache flatters whoever comes second (vLLM #54227: up to 2.3 times)."""
    mode = folder.settings.run.prefix_cache
    shares = {arm: hit_share(records, blocks, arm) for arm in ARMS}
    known = [share for share in shares.values() if share is not None]
    shown = ", ".join(f"{arm} {'unknown' if share is None else f'{share:.1%}'}" for arm, share in shares.items())
    detail = f"prompt tokens found in the prefix cache: {shown}"
    if not known:
        return Finding(
            "cache", "prefix cache", None, "neither usage nor metrics say what the prefix cache held: not checked"
        )
    if mode == "off" and max(known) > 0:
        fix = 'switch the servers\' prefix cache off, or set run.prefix_cache = "reset" or "measure"'
        return Finding("cache", "prefix cache", False, f"{detail}; it should be off", fix)
    apart = len(known) == 2 and abs(known[0] - known[1]) > CACHE_TOLERANCE
    if mode == "reset" and apart:
        return Finding("cache", "prefix cache", False, f"{detail}; emptied before every segment, they should be equal")
    return Finding("cache", "prefix cache", None if apart else True, detail)


def _pairs(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """(baseline, candidate) of every task and repeat that has both."""
    first = {(r.task, r.repeat): r for r in records if r.arm == "baseline"}
    second = {(r.task, r.repeat): r for r in records if r.arm == "candidate"}
    return [(record, second[key]) for key, record in first.items() if key in second]


def _some(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:_SHOWN]) + (f" and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else "")
