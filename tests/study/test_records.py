"""Reading run folders: tolerant of kills, of other makers, and of damage; what a record says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_case import record, write_run

from halfbyte.errors import DataError
from halfbyte.files import write_object
from halfbyte.study.analysis import analyse
from halfbyte.study.arms import BUILT_IN, configured
from halfbyte.study.records import BINS, SERIES, RunRecord, collect_records, derived, read_run


def config_of(arm: str, seed: int = 0, **sets: object):  # type: ignore[no-untyped-def]
    keys = {key.replace("__", "."): value for key, value in sets.items()}
    return configured({}, {**BUILT_IN[arm].sets, "train.steps": 4, "train.seed": seed, **keys}, "test")


def test_a_run_made_elsewhere_is_read_without_a_label(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config_of("qat+tis", seed=3))
    found = read_run(tmp_path / "a")
    assert (found.arm, found.seed, found.status, found.steps, found.planned) == ("qat+tis", 3, "finished", 4, 4)
    assert found.metrics["gap/k3_kl"] == pytest.approx(1e-3 * (1 + 2 + 3 + 4) / 4)
    assert found.seconds == {"time/rollout": 4.0, "time/learner": 8.0}
    assert found.tokens == 400
    assert RunRecord.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    write_run(tmp_path, config_of("qat"), steps=2, finish=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "kind": "train", "gap/k3_kl": 7.0, "gap/mean_abs": NaN, "time/rollout": 1.0}\n')
        file.write('[]\n{"step": "x", "kind": "train"}\n{"step": 3, "kind": "tra')
    found = read_run(tmp_path)
    assert (found.status, found.steps, found.finished) == ("unfinished", 2, False)
    assert found.metrics == {"gap/k3_kl": pytest.approx((1e-3 + 7.0) / 2)}, "the later row counts, NaN does not"


def test_a_run_of_a_study_is_finished_by_its_last_file(tmp_path: Path) -> None:
    write_run(tmp_path, config_of("qat"))
    write_object(tmp_path / "label.json", {"arm": "mine", "seed": 7, "group": "g"})
    assert read_run(tmp_path).status == "unfinished"
    write_object(tmp_path / "deployed.json", {"bf16": {"eval/accuracy": 0.5}})
    found = read_run(tmp_path)
    assert (found.status, found.arm, found.seed, found.group, found.deployed) == (
        "finished",
        "mine",
        7,
        "g",
        {"bf16": 0.5},
    )


def test_a_broken_run_counts_with_nothing_from_there_on(tmp_path: Path) -> None:
    write_run(tmp_path, config_of("qat"), steps=2, finish=False)
    write_object(tmp_path / "outcome.json", {"outcome": "broken", "message": "a gradient is not finite"})
    found = read_run(tmp_path)
    assert (found.status, found.final, found.collapsed, found.finished) == ("broken", 0.0, True, True)
    start = found.accuracy[0][1]
    assert found.area == pytest.approx((start * 2 / 2 + 0 * 2) / 4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.randoms())
def test_the_area_is_that_of_trapezia(values: list[float], random: object) -> None:
    steps = sorted(random.sample(range(100), len(values)))  # type: ignore[attr-defined]
    found = record("qat", 0, 0.5, accuracy=tuple(zip(steps, values))).area
    assert found == pytest.approx(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


@pytest.mark.parametrize(
    ("accuracies", "collapsed"),
    [([0.4, 0.9, 0.46], False), ([0.4, 0.9, 0.44], True), ([0.4, 0.1], True), ([0.4], None)],
)
def test_collapse_is_below_half_of_the_best_before(accuracies: list[float], collapsed: bool | None) -> None:
    assert record("qat", 0, 0.5, accuracy=tuple(enumerate(accuracies))).collapsed is collapsed


def test_series_share_their_stretches_whatever_is_missing(tmp_path: Path) -> None:
    config = config_of("qat", train__steps=100)
    write_run(tmp_path / "a", config)
    write_run(tmp_path / "b", config, steps=41, finish=False)
    long, short = (dict(read_run(tmp_path / name).series["gap/k3_kl"]) for name in "ab")
    assert len(long) == BINS
    assert short.keys() < long.keys()
    assert long[2.5] == pytest.approx(1e-3 * 2.5), "the mean of steps 1 to 4 lies at their middle"


def test_post_hoc_takes_the_policies_of_bf16() -> None:
    runs = [record("bf16", 0, 0.9), record("bf16", 1, 0.8, deployed={"bf16": 0.8}), record("qat", 0, 0.7)]
    found = derived(runs)
    assert [(r.arm, r.seed, r.final) for r in found] == [("post-hoc", 0, pytest.approx(0.8))]
    assert found[0].area is None


def test_loose_runs_are_grouped_by_what_differs_and_join_a_study_of_their_setting(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config_of("qat", learner__lr=1e-4))
    write_run(tmp_path / "b", config_of("bf16", learner__lr=1e-4))
    write_run(tmp_path / "c", config_of("qat", learner__lr=3e-4))
    found = collect_records([tmp_path / name for name in "abc"])
    assert [r.group for r in found] == ["runs, learner.lr = 0.0001"] * 2 + ["runs, learner.lr = 0.0003"]
    write_object(tmp_path / "c" / "label.json", {"arm": "qat", "seed": 0, "group": "study"})
    write_run(tmp_path / "d", config_of("bf16", learner__lr=3e-4))
    assert [r.group for r in collect_records([tmp_path / "c", tmp_path / "d"])] == ["study", "study"]


def test_results_hold_all_runs_and_are_small_enough_to_commit(tmp_path: Path) -> None:
    curve = tuple((i + 0.5, 0.1234567 + i) for i in range(BINS))
    setting = {f"section.key_{i}": i for i in range(60)}
    runs = [
        record(f"arm{i}", seed, 0.5, series=dict.fromkeys(SERIES, curve), setting=setting)
        for i in range(16)
        for seed in range(5)
    ]
    write_object(tmp_path / "study.json", analyse(runs), indent=None)
    assert (tmp_path / "study.json").stat().st_size < 700_000
    assert sorted(collect_records([tmp_path / "study.json"]), key=lambda r: (r.arm, r.seed)) == sorted(
        runs, key=lambda r: (r.arm, r.seed)
    )


def test_what_is_no_run_or_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run"):
        collect_records([tmp_path])
    write_run(tmp_path / "a", config_of("qat"))
    write_run(tmp_path / "b", config_of("qat"))
    with pytest.raises(DataError, match="two runs of arm qat with seed 0"):
        collect_records([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "x.json").write_text('{"format": "other"}')
    with pytest.raises(DataError, match="not the results of a study"):
        collect_records([tmp_path / "x.json"])
    (tmp_path / "x.json").write_text('{"format": "halfbyte-study-1", "runs": [{"arm": "qat"}]}')
    with pytest.raises(DataError, match="damaged"):
        collect_records([tmp_path / "x.json"])
    (tmp_path / "a" / "config.json").write_text('{"train": {"seed": 0, "steps": 4}, "lerner": {}}')
    with pytest.raises(DataError, match="lerner"):
        collect_records([tmp_path / "a"])
