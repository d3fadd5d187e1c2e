"""Identical arms through servers, records and verdict: how often luck alone says "keep"."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from identical_arms import BLOCKS, TASKS, Arms, run_trials
from trial_records import cost

from halfbyte.trial.conclude import Outcome
from halfbyte.trial.decision import decide
from halfbyte.trial.records import TaskInfo
from halfbyte.trial.settings import Limits

ALPHA = 0.05


def at_most(trials: int) -> int:
    """Trials that may be kept: alpha of them, and twice the simulation's own error."""
    return math.floor(trials * ALPHA + 2 * math.sqrt(trials * ALPHA * (1 - ALPHA)))


def faster(outcome: Outcome) -> bool | None:
    """The check of throughput on the same records; a verdict would also want 200 requests an arm, for the p95."""
    infos = [TaskInfo(name, False, (), False) for name in sorted({record.task for record in outcome.records})]
    limits = Limits(margin=0.3, failure_rate=0.1, benefit="throughput", benefit_min=0.0, latency_limit=1e6)
    check = decide(outcome.records, infos, limits, outcome.usage, cost()).check("throughput")
    assert check is not None
    return check.ok


@pytest.mark.parametrize(
    "trials", [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.heavy)]
)
def test_identical_arms_are_kept_by_luck_at_most_alpha(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int
) -> None:
    """benefit_min = 0 is the hardest case: nothing but the improvement's lower bound stands between luck and "keep"."""
    seen = run_trials(tmp_path, trials, Arms(seed=8), monkeypatch, lambda o: (o.decision.verdict, faster(o)))
    verdicts = Counter(verdict for verdict, _ in seen)
    faster_by_luck = sum(better is True for _, better in seen)
    print(f"{trials} trials: {dict(verdicts)}, throughput better in {faster_by_luck}; at most {at_most(trials)}")
    assert verdicts.keys() <= {"keep", "retain", "inconclusive"}
    assert 0 < verdicts["keep"] <= at_most(trials)
    assert 0 < faster_by_luck <= at_most(trials)


def test_the_simulation_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies in the records are those drawn, arms get the same requests, and outcomes differ from trial to trial."""
    drawn: dict[tuple[int, str, int], float] = {}
    outcomes = run_trials(tmp_path, 3, Arms(seed=1, latencies=drawn), monkeypatch, lambda outcome: outcome)
    assert len(drawn) == 3 * 2 * TASKS
    for number, outcome in enumerate(outcomes):
        assert len(outcome.blocks) == BLOCKS
        for arm in ("baseline", "candidate"):
            records = sorted((r for r in outcome.records if r.arm == arm), key=lambda r: (r.block, r.position))
            found = [record.latency for record in records]
            assert found == pytest.approx([drawn[number, arm, i + 1] for i in range(TASKS)], abs=1e-6)
            assert {record.completion_tokens for record in records} <= set(range(20, 60))
            assert len({record.completion_tokens for record in records}) > 10
            assert 0.5 < sum(record.passed is True for record in records) / TASKS < 1
    passed = [{(r.arm, r.task) for r in outcome.records if r.passed} for outcome in outcomes]
    assert passed[0] != passed[1] != passed[2]
    for arms in zip(*([{t for a, t in kept if a == arm} for kept in passed] for arm in ("baseline", "candidate"))):
        assert arms[0] != arms[1]  # the arms draw apart


def test_a_candidate_at_half_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same limits: they refuse luck, not a difference."""
    arms = Arms(seed=2, slower=0.5)
    verdicts = run_trials(tmp_path, 6, arms, monkeypatch, lambda outcome: outcome.decision.verdict)
    assert verdicts.count("keep") >= 4
