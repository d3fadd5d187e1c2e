"""Records as pairs: the same task, repeat and seed in both arms, and what makes a set of records unfit for a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfbyte.trial.records import ARMS, Arm, Record, TaskInfo

__all__ = ["Block", "Pair", "blocks", "integrity", "pairs"]

_SHOWN = 3


@dataclass(frozen=True)
class Pair:
    """Both arms' records of one repeat of a task."""

    baseline: Record
    candidate: Record

    @property
    def task(self) -> str:
        """The task's id."""
        return self.baseline.task

    @property
    def answered(self) -> bool:
        """Both requests came back."""
        return self.baseline.error is None and self.candidate.error is None

    @property
    def baseline_passed(self) -> bool:
        """True also where the baseline has no verdict: what is missing counts against the candidate."""
        return self.baseline.passed is not False

    @property
    def candidate_passed(self) -> bool:
        """False where the candidate has no verdict."""
        return self.candidate.passed is True


@dataclass(frozen=True)
class Block:
    """What one block of the schedule holds of both arms.

    Arguments:
        records: by arm, in order of their position.
        seconds: by arm: wall time during which one of its requests was in flight.
    """

    records: dict[Arm, tuple[Record, ...]]
    seconds: dict[Arm, float]


def integrity(records: Sequence[Record], tasks: Sequence[TaskInfo]) -> list[str]:
    """Why these records carry no verdict, in sentences: unknown tasks, records without their pair, unequal seeds or requests.

    Changed templates, broken chains and cache hits are found by those who know the settings; this needs the records alone.
    """
    if not records:
        return ["there are no records"]
    known = {task.id for task in tasks}
    found = []
    if unknown := sorted({r.task for r in records} - known):
        found.append(f"records of unknown tasks: {_some(unknown)}")
    if missing := sorted(known - {r.task for r in records}):
        found.append(f"tasks without records: {_some(missing)}")
    if len({r.phase for r in records}) > 1:
        found.append("records of the pilot and of the run are mixed")
    count = Counter((r.task, r.repeat, r.arm) for r in records)
    if twice := sorted(f"{task} repeat {repeat} {arm}" for (task, repeat, arm), n in count.items() if n > 1):
        found.append(f"recorded twice: {_some(twice)}")
    by_arm = {arm: {(r.task, r.repeat): r for r in records if r.arm == arm} for arm in ARMS}
    baseline, candidate = by_arm["baseline"], by_arm["candidate"]
    if lone := sorted(f"{task} repeat {repeat}" for task, repeat in baseline.keys() ^ candidate.keys()):
        found.append(f"records without their pair in the other arm: {_some(lone)}")
    both = sorted(baseline.keys() & candidate.keys())
    if seeds := [f"{t} repeat {k}" for t, k in both if baseline[t, k].seed != candidate[t, k].seed]:
        found.append(f"pairs with unequal seeds: {_some(seeds)}")
    if bodies := [
        f"{t} repeat {k}" for t, k in both if baseline[t, k].request_sha256 != candidate[t, k].request_sha256
    ]:
        found.append(f"pairs with unequal requests: {_some(bodies)}")
    repeats = Counter(task for task, _ in both)
    if len(set(repeats.values())) > 1:
        found.append(f"tasks with unequal numbers of repeats: {min(repeats.values())} to {max(repeats.values())}")
    return found


def pairs(records: Iterable[Record]) -> dict[str, list[Pair]]:
    """Pairs by task, repeats in order. The records have passed :func:`integrity`."""
    half: dict[tuple[str, int], Record] = {}
    found: dict[str, list[Pair]] = {}
    for record in sorted(records, key=lambda r: (r.task, r.repeat, r.arm)):  # "baseline" before "candidate"
        key = record.task, record.repeat
        if record.arm == "baseline":
            half[key] = record
        else:
            found.setdefault(record.task, []).append(Pair(half.pop(key), record))
    return found


def blocks(records: Iterable[Record]) -> list[Block]:
    """Blocks in order; a block that holds one arm alone is joined to the one before (or after)."""
    numbered: dict[int, list[Record]] = {}
    for record in records:
        numbered.setdefault(record.block, []).append(record)
    joined: list[list[list[Record]]] = []
    for number in sorted(numbered):
        part = sorted(numbered[number], key=lambda r: r.position)
        if joined and (not _whole(joined[-1]) or not _whole([part])):
            joined[-1].append(part)
        else:
            joined.append([part])
    if len(joined) > 1 and not _whole(joined[-1]):
        last = joined.pop()
        joined[-1] += last
    return [_block(parts) for parts in joined]


def _whole(parts: list[list[Record]]) -> bool:
    return len({record.arm for part in parts for record in part}) == len(ARMS)


def _block(parts: list[list[Record]]) -> Block:
    held: dict[Arm, tuple[Record, ...]] = {
        arm: tuple(record for part in parts for record in part if record.arm == arm) for arm in ARMS
    }
    return Block(held, {arm: _in_flight(held[arm]) for arm in ARMS})


def _in_flight(records: Iterable[Record]) -> float:
    """Seconds during which at least one of the requests was in flight; pauses between segments do not count."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((r.started, r.started + r.latency) for r in records):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
