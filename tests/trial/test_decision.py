"""The verdict from records: what keeps, what retains, what stays open, what is invalid."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trial_records import cost, limits, one, run, table, tasks, usage

from halfbyte.errors import DataError
from halfbyte.trial.decision import decide
from halfbyte.trial.outcome import Decision
from halfbyte.trial.records import Arm, ArmUsage, Record


def verdict(records: list[Record], n: int, *, usages: dict[Arm, ArmUsage] | None = None, **changed: Any) -> Decision:
    return decide(records, tasks(n), limits(**changed), usage() if usages is None else usages, cost())


def ok(decision: Decision) -> dict[str, bool | None]:
    return {check.name: check.ok for check in decision.checks}


def test_all_limits_hold() -> None:
    found = verdict(table(3, 3, 100), 100)
    assert (found.verdict, found.exit_code, found.reasons, found.more_tasks) == ("keep", 0, (), None)
    assert all(ok(found).values())


def test_worse_with_confidence_retains() -> None:
    found = verdict(table(0, 12, 60), 60)
    assert (found.verdict, found.exit_code) == ("retain", 1)
    check = found.check("pass_rate")
    assert check is not None
    assert check.high is not None
    assert check.high < -0.05
    assert "12 lost" in found.reasons[0]


def test_too_few_tasks_is_inconclusive_and_says_how_many_more() -> None:
    found = verdict(table(0, 0, 40), 40)
    assert (found.verdict, found.exit_code, found.more_tasks) == ("inconclusive", 2, 19)
    again = verdict(table(0, 0, 59), 59)
    assert again.verdict == "keep"


def test_one_broken_limit_outweighs_what_is_open() -> None:
    found = verdict(table(0, 0, 40), 40, usages=usage(candidate=99 << 20))
    assert (found.verdict, ok(found)["pass_rate"], ok(found)["peak_memory"]) == ("retain", None, False)
    assert found.more_tasks is None


def test_order_of_records_does_not_matter() -> None:
    records = table(2, 3, 80)
    shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
    assert verdict(records, 80) == verdict(shuffled, 80)


def test_json_and_back() -> None:
    found = verdict(table(1, 2, 60), 60, benefit="throughput", benefit_min=0.0, latency_limit=5.0)
    text = json.loads(json.dumps(found.to_json()))
    assert Decision.from_json(text) == found
    with pytest.raises(DataError, match="verdict"):
        Decision.from_json({**text, "verdict": "perhaps"})


def spoiled(kind: str) -> list[Record]:
    records = table(0, 0, 20)
    first = records[0]
    match kind:
        case "records without their pair":
            return records[1:]
        case "unequal seeds":
            return [replace(first, seed=99), *records[1:]]
        case "unequal requests":
            return [replace(first, request_sha256="other"), *records[1:]]
        case "recorded twice":
            return [first, *records]
        case "unknown tasks":
            return [*records, one("baseline", "new"), one("candidate", "new")]
        case "tasks without records":
            return [r for r in records if r.task != "t0003"]
        case "unequal numbers of repeats":
            return [*records, one("baseline", "t0001", 1), one("candidate", "t0001", 1)]
        case "pilot":
            return [replace(first, phase="pilot"), *records[1:]]
        case _:
            return []


@pytest.mark.parametrize(
    "kind",
    [
        "records without their pair",
        "unequal seeds",
        "unequal requests",
        "recorded twice",
        "unknown tasks",
        "tasks without records",
        "unequal numbers of repeats",
        "pilot",
        "no records",
    ],
)
def test_records_that_carry_no_verdict_are_invalid(kind: str) -> None:
    found = verdict(spoiled(kind), 20)
    assert (found.verdict, found.exit_code, found.checks) == ("invalid", 3, ())
    assert any(kind in reason for reason in found.reasons)


def test_what_others_found_wrong_is_invalid() -> None:
    found = decide(table(0, 0, 60), tasks(60), limits(), usage(), cost(), invalid=["templates differ: t3"])
    assert (found.exit_code, found.reasons) == (3, ("templates differ: t3",))


def test_a_failed_request_counts_against_the_candidate_in_either_arm() -> None:
    """A baseline that timed out where the candidate passed is no gain; a candidate that failed is a loss."""

    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        failed = {"passed": None, "error": "timeout", "text": ""}
        if arm == "baseline" and task < 4:
            return failed
        return failed if arm == "candidate" and 4 <= task < 6 else {}

    check = verdict(run(outcome, 60), 60).check("pass_rate")
    assert check is not None
    assert (check.details["gains"], check.details["losses"], check.details["baseline_missing"]) == (0, 2, 4)


def test_critical_tasks_by_majority() -> None:
    """One lost critical task retains, whatever the pass rate says; losing one repeat of three does not."""

    def outcome(lost: int) -> Any:
        return lambda arm, task, repeat: {"passed": not (arm == "candidate" and task == 7 and repeat < lost)}

    infos = [replace(task, critical=task.id == "t0007") for task in tasks(80)]
    for lost, good in ((1, True), (2, False)):
        found = decide(run(outcome(lost), 80, repeats=3), infos, limits(), usage(), cost())
        check = found.check("critical_tasks")
        assert check is not None
        assert check.ok is good
        assert ("t0007" in check.note) is not good
        assert (found.verdict == "retain") is not good
    two = decide(run(outcome(2), 80, repeats=3), infos, limits(critical=1), usage(), cost())
    assert two.verdict == "keep"


def test_dgx_spark_89_tool_calls_silently_lost() -> None:
    """Every answer passes with finish_reason stop, but a third of the tool calls no longer parse."""

    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        return {"tool_calls": int(arm == "baseline" or task % 3 > 0), "finish_reason": "stop"}

    infos = [replace(task, tools=True) for task in tasks(60)]
    records = run(outcome, 60)
    found = decide(records, infos, limits(tool_parse_drop=0.05), usage(), cost())
    check = found.check("tool_parse")
    assert check is not None
    assert (found.verdict, check.ok) == ("retain", False)
    assert check.estimate == pytest.approx(-1 / 3)
    shown = decide(records, infos, limits(), usage(), cost()).check("tool_parse")
    assert shown is not None
    assert (shown.limit, shown.ok) == (None, True)


def test_tool_limit_without_tool_tasks_is_open() -> None:
    found = verdict(table(0, 0, 60), 60, tool_parse_drop=0.05)
    assert (found.verdict, found.more_tasks) == ("inconclusive", None)


def noisy(n: int, seed: int, *, repeats: int = 1, slower: float = 1.0, longer: float = 1.0) -> list[Record]:
    """Equal arms by chance: passes, latencies and lengths drawn anew for every request."""
    random = np.random.default_rng(seed)
    p = random.beta(2, 1, n)

    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        candidate = arm == "candidate"
        return {
            "passed": bool(random.random() < p[task]),
            "latency": float(random.lognormal(0, 0.4)) * (slower if candidate else 1),
            "completion_tokens": int(random.integers(20, 60) * (longer if candidate else 1)),
        }

    return run(outcome, n, repeats=repeats)


def test_latency_limits() -> None:
    records = noisy(120, 1, repeats=2, slower=2.0)
    found = verdict(records, 120, margin=0.2, latency_p50_ratio=1.2, latency_p95_ratio=5.0)
    assert (ok(found)["latency_p50"], ok(found)["latency_p95"]) == (False, True)
    p50 = found.check("latency_p50")
    assert p50 is not None
    assert p50.low is not None
    assert p50.high is not None
    assert p50.low < 2.0 < p50.high


def test_percentile_that_the_sample_cannot_carry_is_refused() -> None:
    found = verdict(noisy(60, 2), 60, margin=0.3, latency_p95_ratio=5.0)
    check = found.check("latency_p95")
    assert check is not None
    assert (check.ok, check.estimate, check.low, check.high) == (None, None, None, None)
    assert "200 requests" in check.note
    assert (found.verdict, found.more_tasks) == ("inconclusive", 140)


def test_too_few_blocks_are_refused() -> None:
    records = [replace(r, block=r.block // 2, position=r.position + 100 * (r.block % 2)) for r in noisy(60, 3)]
    check = verdict(records, 60, margin=0.3, latency_p50_ratio=5.0).check("latency_p50")
    assert check is not None
    assert check.ok is None
    assert "4 blocks" in check.note


def test_length_ratio() -> None:
    found = verdict(noisy(100, 4, longer=1.5), 100, margin=0.3, length_ratio=1.2)
    check = found.check("length_ratio")
    assert check is not None
    assert check.ok is False
    assert check.estimate == pytest.approx(1.5, abs=0.12)
    silent = [replace(r, completion_tokens=None) for r in noisy(100, 4)]
    assert ok(verdict(silent, 100, margin=0.3, length_ratio=1.2))["length_ratio"] is None


def failing(share: int, n: int) -> list[Record]:
    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        failed = arm == "candidate" and task < share
        return {"passed": None, "error": "http 503: busy", "text": ""} if failed else {}

    return run(outcome, n)


def test_failure_rate() -> None:
    assert ok(verdict(failing(0, 60), 60, failure_rate=0.05))["failure_rate"] is True  # upper limit 4.9%
    assert ok(verdict(failing(0, 40), 40, failure_rate=0.05))["failure_rate"] is None
    found = verdict(failing(12, 60), 60, failure_rate=0.05)
    check = found.check("failure_rate")
    assert check is not None
    assert check.ok is False
    assert "http 503" in check.note


def test_memory_is_the_improvement_over_the_worst_block() -> None:
    records = table(0, 0, 60)
    least = limits(benefit_min=0.45)
    found = decide(records, tasks(60), least, usage(), cost(), peaks={"candidate": [50 << 20, 56 << 20]})
    check = found.check("peak_memory")
    assert check is not None
    assert (check.estimate, check.low, check.high, check.ok) == (0.5, pytest.approx(0.44), 0.5, None)
    assert decide(records, tasks(60), least, usage(), cost()).verdict == "keep"


def test_a_remote_server_cannot_claim_memory() -> None:
    found = verdict(table(0, 0, 60), 60, usages=usage(candidate=None))
    assert (found.verdict, found.more_tasks) == ("inconclusive", None)
    assert any("cannot claim memory" in reason for reason in found.reasons)


def test_vllm_10207_memory_of_unequal_pools_is_not_compared() -> None:
    """A reserved pool fills the device in both arms, or another pool fits in the freed weights: peaks then say nothing."""
    arms = usage()
    arms["candidate"] = replace(arms["candidate"], kv_capacity_tokens=4096)
    check = verdict(table(0, 0, 60), 60, usages=arms).check("peak_memory")
    assert check is not None
    assert (check.ok, check.estimate) == (None, None)
    assert "1,024 and 4,096" in check.note


@pytest.mark.parametrize(
    ("sources", "expected"),
    [(("NVML", "PSS"), None), (("engine metrics + NVML", "RSS"), None), (("engine metrics + PSS", "PSS"), True)],
)
def test_peaks_measured_by_different_means_do_not_compare(sources: tuple[str, str], expected: bool | None) -> None:
    """A candidate that runs on the CPU takes none of the GPU's memory, and has not become smaller."""
    arms = usage()
    arms = {arm: replace(used, source=source) for (arm, used), source in zip(arms.items(), sources)}
    check = verdict(table(0, 0, 60), 60, usages=arms).check("peak_memory")
    assert check is not None
    assert check.ok is expected
    assert ("do not compare" in check.note) is (expected is None)


@pytest.mark.parametrize(("faster", "expected"), [(1.0, False), (2.0, True)])
def test_throughput(faster: float, expected: bool) -> None:
    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        return {"latency": 1.0 if arm == "baseline" else 1.0 / faster}

    found = verdict(run(outcome, 240, gap=0.0), 240, benefit="throughput", benefit_min=0.3, latency_limit=2.0)
    check = found.check("throughput")
    assert check is not None
    assert check.ok is expected
    assert check.estimate == pytest.approx(faster - 1, abs=1e-6)
    assert ok(found)["latency_limit"] is True


def test_throughput_beyond_the_latency_limit_does_not_count() -> None:
    found = verdict(table(0, 0, 240), 240, benefit="throughput", benefit_min=0.0, latency_limit=0.5)
    assert (found.verdict, ok(found)["latency_limit"]) == ("retain", False)


def test_cost_per_passed_counts_set_up_and_failures() -> None:
    """Half the time an answer, but half the answers wrong: nothing saved. And set-up can eat a saving."""

    def outcome(passing: float) -> Any:
        return lambda arm, task, repeat: {
            "latency": 1.0 if arm == "baseline" else 0.5,
            "passed": arm == "baseline" or task % 2 < 2 * passing - 0.5,
        }

    named = {"benefit": "cost_per_passed", "benefit_min": 0.3, "margin": 0.9}
    good = decide(run(outcome(1.0), 80, gap=0.0), tasks(80), limits(**named), usage(), cost()).check("cost_per_passed")
    assert good is not None
    assert (good.ok, good.estimate) == (True, pytest.approx(0.5, abs=1e-6))
    bad = decide(run(outcome(0.5), 80, gap=0.0), tasks(80), limits(**named), usage(), cost()).check("cost_per_passed")
    assert bad is not None
    assert (bad.ok, bad.estimate) == (False, pytest.approx(0.0, abs=1e-6))
    dear = cost(setup_hours=10, engineer_per_hour=100, horizon_months=10)  # 1e-3 a request beside 2.8e-4 saved
    eaten = decide(run(outcome(1.0), 80, gap=0.0), tasks(80), limits(**named), usage(), dear).check("cost_per_passed")
    assert eaten is not None
    assert eaten.ok is False


def identical(seed: int, n: int, **changed: Any) -> Decision:
    return decide(noisy(n, seed), tasks(n), limits(**{"margin": 0.25} | changed), usage(), cost())


def test_a_against_a_never_saves_memory() -> None:
    """Two identical servers use the same memory: whatever the luck of the answers, no trial keeps the change."""
    same = usage(candidate=100 << 20)
    for seed in range(20):
        found = decide(noisy(60, seed), tasks(60), limits(margin=0.25, benefit_min=0.0), same, cost())
        assert found.verdict in ("retain", "inconclusive")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("n", "named"),
    [(200, {"benefit": "throughput", "latency_limit": 100.0}), (60, {"benefit": "cost_per_passed"})],
    ids=["throughput", "cost"],
)
def test_a_against_a_keeps_by_luck_at_most_alpha(n: int, named: dict[str, Any]) -> None:
    """2000 trials of identical arms: "keep" at most 5% of the time, plus twice the simulation's own error.

    And more than never, or the limits would refuse everything: fewer than 200 requests have no p95 to hold.
    """
    kept = sum(identical(seed, n, benefit_min=0.0, **named).verdict == "keep" for seed in range(2000))
    print(f"{named['benefit']}: {kept} of 2000 kept")
    assert 0 < kept / 2000 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 2000)


def test_a_against_a_keeps_by_luck_at_most_alpha_in_sixty() -> None:
    """The same on 60 trials: more than 9 would be a chance of one in a thousand."""
    kept = sum(identical(seed, 40, benefit_min=0.0, benefit="cost_per_passed").verdict == "keep" for seed in range(60))
    assert kept <= 9
