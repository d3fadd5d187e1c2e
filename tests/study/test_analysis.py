"""The analysis: paired, independent of order and of earlier looks, honest about what is missing."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from study_case import record

from halfbyte.study.analysis import analyse, pareto
from halfbyte.study.arms import BUILT_IN

FINALS = {"bf16": [0.90, 0.80, 0.85], "qat": [0.88, 0.79, 0.86], "fp4-naive": [0.70, 0.10, 0.60]}
RUNS = [record(arm, seed, value) for arm, values in FINALS.items() for seed, value in enumerate(values)]


def rows_of(data: dict) -> dict:  # type: ignore[type-arg]
    return {row["arm"]: row for row in data["groups"][0]["arms"]}


def test_differences_are_paired_by_seed() -> None:
    rows = rows_of(analyse(RUNS))
    deltas = np.array(FINALS["qat"]) - np.array(FINALS["bf16"])
    means = np.sort([np.mean(draw) for draw in itertools.product(deltas, repeat=3)])
    found = rows["qat"]["differences"]["final"]
    assert found["mean"] == pytest.approx(deltas.mean())
    assert (found["low"], found["high"]) == (pytest.approx(means[0]), pytest.approx(means[-1]))
    assert found["n"] == 3
    spread = found["high"] - found["low"]
    assert spread < rows["qat"]["final"]["high"] - rows["qat"]["final"]["low"], "pairing takes the seeds' spread out"
    assert rows["bf16"]["differences"] == {}
    assert rows["qat"]["differences"]["area"]["mean"] == pytest.approx(deltas.mean() / 2)
    assert rows["qat"]["differences"]["deployed/w4a4kv4"]["mean"] == pytest.approx(deltas.mean())


def test_pairs_without_a_partner_are_left_out_not_imputed() -> None:
    runs = [r for r in RUNS if not (r.arm == "bf16" and r.seed == 1)]
    found = rows_of(analyse(runs))["qat"]["differences"]["final"]
    assert found["n"] == 2
    assert found["mean"] == pytest.approx(((0.88 - 0.90) + (0.86 - 0.85)) / 2)


def test_the_order_of_runs_changes_nothing() -> None:
    shuffled = list(RUNS)
    random.Random(0).shuffle(shuffled)
    assert json.dumps(analyse(shuffled)) == json.dumps(analyse(RUNS))


def test_looking_early_changes_nothing_later() -> None:
    """An interim look is the analysis of the runs that are there; it leaves no trace in the final one."""
    final = analyse(RUNS, planned=len(RUNS))
    for n in range(len(RUNS)):
        look = analyse(RUNS[:n], planned=len(RUNS))
        assert (look["complete"], look["finished"]) == (False, n)
        assert look["rules"] == final["rules"]
        one = {r.arm for r in RUNS[:n]}
        for arm in one & {r.arm for r in RUNS if not [q for q in RUNS[n:] if q.arm == r.arm]}:
            assert rows_of(look)[arm]["final"] == rows_of(final)[arm]["final"], (
                "a complete arm reads as it will at the end"
            )
    assert analyse(RUNS, planned=len(RUNS)) == final


def test_unfinished_runs_are_counted_and_not_used() -> None:
    going = record("qat", 9, 0.1, status="unfinished")
    data = analyse([*RUNS, going])
    assert (data["finished"], data["planned"], data["complete"]) == (9, 10, False)
    assert rows_of(data)["qat"]["seeds"] == [0, 1, 2]
    assert len(data["runs"]) == 10


def test_collapse_is_counted_with_exact_limits() -> None:
    found = rows_of(analyse(RUNS))["fp4-naive"]["collapse"]
    assert (found["runs"], found["collapsed"]) == (3, 1)
    assert (found["low"], found["high"]) == (pytest.approx(0.0084, abs=1e-4), pytest.approx(0.9057, abs=1e-4))


def test_a_broken_run_is_not_left_out() -> None:
    broken = record("qat", 3, 0.0, status="broken", steps=4, accuracy=((0, 0.4),), deployed={})
    rows = rows_of(analyse([*RUNS, broken, record("bf16", 3, 0.9)]))
    assert rows["qat"]["final"]["n"] == 4
    assert rows["qat"]["differences"]["final"]["n"] == 4
    assert rows["qat"]["differences"]["deployed/w4a4kv4"]["n"] == 4
    assert rows["qat"]["collapse"]["collapsed"] == 1


def test_post_hoc_is_an_arm_that_was_not_trained() -> None:
    row = rows_of(analyse(RUNS))["post-hoc"]
    assert not row["trained"]
    assert row["final"]["mean"] == pytest.approx(np.mean(FINALS["bf16"]) - 0.1)
    assert row["differences"]["final"]["mean"] == pytest.approx(-0.1)
    assert row["collapse"]["runs"] == 0
    assert row["metrics"] == row["seconds"] == {}


def test_guidance_and_cost_come_from_tokens() -> None:
    row = rows_of(analyse(RUNS))["qat"]
    assert row["guidance_bytes"]["mean"] == 100.0 * 2000
    assert row["rollout_seconds_per_1k_tokens"]["mean"] == 2.5


def test_groups_are_not_mixed_and_unfair_ones_are_named() -> None:
    other = [
        record(arm, 0, 0.3, group="h", setting={"train.steps": steps}) for arm, steps in (("bf16", 10), ("qat", 20))
    ]
    data = analyse([*RUNS, *other])
    assert [group["name"] for group in data["groups"]] == ["g", "h"]
    assert data["groups"][0]["differing_settings"] == {}
    assert data["groups"][1]["differing_settings"] == {"train.steps": ["10", "20"]}
    assert [row["final"]["n"] for row in data["groups"][1]["arms"] if row["trained"]] == [1, 1]


def test_arms_come_in_the_order_of_the_plan_and_unknown_ones_last() -> None:
    arms = (BUILT_IN["qat"], BUILT_IN["bf16"])
    names = [row["arm"] for row in analyse([*RUNS, record("zeta", 0, 0.5)], arms=arms)["groups"][0]["arms"]]
    assert names == ["qat", "bf16", "fp4-naive", "zeta"]


def test_the_pareto_front_is_what_nothing_beats() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        points = {f"a{i}": (float(c), float(a)) for i, (c, a) in enumerate(generator.integers(0, 5, (6, 2)))}
        rows = [
            {"arm": name, "trained": True, "final": {"mean": a}, "seconds": {"time/rollout": {"mean": c}}}
            for name, (c, a) in points.items()
        ]
        expected = [
            name
            for name, (c, a) in points.items()
            if not any((d <= c and b > a) or (d < c and b >= a) for d, b in points.values())
        ]
        assert pareto(rows) == expected


def test_no_run_is_no_error() -> None:
    data = analyse([], planned=3)
    assert (data["groups"], data["finished"], data["complete"]) == ([], 0, False)
