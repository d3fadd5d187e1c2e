"""Trials of two identical arms, at full length: requests over HTTP, records on the disk, the verdict computed from them.

Time is simulated. The scripted servers move a clock by a random latency before they answer, and the client reads that clock;
nobody sleeps. Right answers, latencies and token counts are drawn from the same distributions in both arms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from fake_server import FakeServer, Script
from loop_server import in_this_loop
from trial_case import answers, make_tasks, said, write_trial

from halfbyte.trial.check import static_findings
from halfbyte.trial.conclude import Outcome, recompute
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.hardware import this_machine
from halfbyte.trial.lock import genesis, make_lock, require_lock
from halfbyte.trial.preflight import require_preflight, write_preflight
from halfbyte.trial.probe import live_findings
from halfbyte.trial.run import execute

Seen = TypeVar("Seen")

__all__ = ["BLOCKS", "TASKS", "Arms", "run_trials"]

TASKS = 32
BLOCKS = 8  # the default schedule's
_IN_A_BLOCK = TASKS // BLOCKS  # requests to each arm


class Clock:
    """What stands where a module has ``time``; it stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        """Seconds."""
        return self.now

    perf_counter = monotonic = time


@dataclass(frozen=True)
class Arms:
    """How the arms answer.

    Arguments:
        seed: of everything that is drawn.
        slower: factor on the candidate's latencies; 1 for identical arms.
        latencies: takes every latency that was drawn: (trial, arm, number from 1) -> seconds.
    """

    seed: int
    slower: float = 1.0
    latencies: dict[tuple[int, str, int], float] | None = None


def run_trials(
    folder: Path, trials: int, arms: Arms, monkeypatch: pytest.MonkeyPatch, look: Callable[[Outcome], Seen]
) -> list[Seen]:
    """What ``look`` makes of the outcomes of trials under one lock, each run from its first request."""
    clock = Clock()
    for module in ("client", "run"):
        monkeypatch.setattr(f"halfbyte.trial.{module}.time", clock)
    # What a power cut leaves is not looked at here, and waiting for disks would take most of the time.
    monkeypatch.setattr("halfbyte.trial.journal.os.fsync", lambda _: None)
    return asyncio.run(_run_trials(folder, trials, arms, clock, look))


async def _run_trials(
    folder: Path, trials: int, arms: Arms, clock: Clock, look: Callable[[Outcome], Seen]
) -> list[Seen]:
    chances = dict(zip(map(said, range(TASKS)), np.linspace(0.7, 1.0, TASKS).tolist(), strict=True))
    async with AsyncExitStack() as stack:
        servers = {
            arm: await stack.enter_async_context(
                in_this_loop(FakeServer(Script(answers=answers(TASKS), passing_of=chances)))
            )
            for arm in ("baseline", "candidate")
        }
        write_trial(
            folder,
            *({"url": server.url} for server in servers.values()),
            make_tasks(TASKS),
            run={"concurrency": 1, "warmup": 0},
            limits={"margin": 0.3, "failure_rate": 0.1, "benefit": "cost_per_passed", "benefit_min": 0.0},
        )
        trial = TrialFolder.open(folder)
        write_preflight(trial, static_findings(trial, this_machine()) + await live_findings(trial))
        require_preflight(trial)
        make_lock(trial)
        return [look(await _run(trial, number, servers, arms, clock)) for number in range(trials)]


async def _run(trial: TrialFolder, number: int, servers: dict[str, FakeServer], arms: Arms, clock: Clock) -> Outcome:
    for path in (trial.records("run"), trial.blocks("run")):
        path.unlink(missing_ok=True)
    random = np.random.default_rng([arms.seed, number])
    moods = random.lognormal(0, 0.3, BLOCKS)  # a block's, shared by both arms
    for arm, server in servers.items():
        server.bodies.clear()
        server.script.name = f"{arm} {arms.seed} {number}"  # right or wrong is drawn by name, task and seed
        server.on_request = _answering(server, arm, number, arms, moods.tolist(), random, clock)
    assert await execute(trial, "run", genesis(require_lock(trial)), lambda line: None) == []
    return recompute(trial)


def _answering(
    server: FakeServer,
    arm: str,
    trial: int,
    arms: Arms,
    moods: list[float],
    random: np.random.Generator,
    clock: Clock,
) -> Callable[[int], None]:
    factor = arms.slower if arm == "candidate" else 1.0

    def answer(request: int) -> None:
        latency = factor * moods[(request - 1) // _IN_A_BLOCK] * float(random.lognormal(0, 0.5))
        if arms.latencies is not None:
            arms.latencies[trial, arm, request] = latency
        clock.now += latency
        server.script.tokens = int(random.integers(20, 60))

    return answer
