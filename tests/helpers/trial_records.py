"""Records of trials that never ran: two arms with given chances, latencies and failures, in counterbalanced blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from halfbyte.trial.records import Arm, ArmUsage, Record, TaskInfo
from halfbyte.trial.settings import Cost, Limits

SEQUENCES: tuple[tuple[Arm, ...], ...] = (
    ("baseline", "candidate", "candidate", "baseline"),
    ("candidate", "baseline", "baseline", "candidate"),
)


def one(arm: Arm, task: str, repeat: int = 0, **changed: Any) -> Record:
    """A record that passed in a second."""
    plain = Record(
        phase="run", block=0, position=0, arm=arm, task=task, repeat=repeat, seed=repeat, started=1e9, ttft=0.1, latency=1.0,
        prompt_tokens=20, completion_tokens=50, cached_tokens=0, finish_reason="stop", text="x", tool_calls=None, calls="",
        passed=True, score=1.0, error=None, attempts=1, request_sha256=f"{task}-{repeat}", response_sha256="y",
    )  # fmt: skip
    return replace(plain, **changed)


def tasks(n: int, **changed: Any) -> list[TaskInfo]:
    """Tasks t0... that are not critical and have no tools."""
    return [replace(TaskInfo(f"t{i:04d}", False, (), False), **changed) for i in range(n)]


def run(
    outcome: Callable[[Arm, int, int], dict[str, Any]], n: int, *, repeats: int = 1, blocks: int = 8, gap: float = 0.01
) -> list[Record]:
    """A run of n tasks in blocks ABBA and BAAB: each segment asks half of the block's tasks, one request after the other.

    Arguments:
        outcome: (arm, task, repeat) -> fields of the record; ``latency`` moves the clock.
    """
    found, clock = [], 1e9
    for block, part in enumerate(np.array_split(np.arange(n), blocks)):
        halves = np.array_split(part, 2)
        position = 0
        for place, arm in enumerate(SEQUENCES[block % 2]):
            for task in halves[place // 2]:
                for repeat in range(repeats):
                    fields = outcome(arm, int(task), repeat)
                    record = one(arm, f"t{task:04d}", repeat, block=block, position=position, started=clock, **fields)
                    found.append(record)
                    clock += record.latency + gap
                    position += 1
    return found


def table(gains: int, losses: int, n: int, **fields: Any) -> list[Record]:
    """Single pairs with so many gains and losses; the rest passes in both arms."""

    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        lost = losses if arm == "candidate" else gains
        first = 0 if arm == "candidate" else losses
        return {"passed": not first <= task < first + lost, **fields}

    return run(outcome, n)


def usage(baseline: int | None = 100 << 20, candidate: int | None = 50 << 20, **changed: Any) -> dict[Arm, ArmUsage]:
    """Peaks of both arms, with equal KV pools."""

    def arm(name: Arm, peak: int | None) -> ArmUsage:
        source = "remote" if peak is None else "PSS"
        return replace(ArmUsage(name, 60.0, None, None, peak, 1024, source), **changed)

    return {"baseline": arm("baseline", baseline), "candidate": arm("candidate", candidate)}


def limits(**changed: Any) -> Limits:
    """A margin of 5 points and 30% less memory; failures up to 10%."""
    return Limits(**{"margin": 0.05, "benefit": "peak_memory", "benefit_min": 0.3, "failure_rate": 0.1} | changed)


def cost(**changed: Any) -> Cost:
    """A machine for 2 an hour."""
    return Cost(**{"machine_per_hour": 2.0, "requests_per_month": 1e5} | changed)
