"""The study file: what it may say, what follows from it, and errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.errors import ConfigError
from halfbyte.study.arms import setting
from halfbyte.study.plan import Plan, load_plan

ROOT = Path(__file__).resolve().parents[2]


def plan_of(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return load_plan(path)


def test_runs_come_seed_by_seed_with_axes_and_own_arms(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        """
        [study]
        name = "s"
        arms = ["bf16", "mine", "post-hoc"]
        seeds = [3, 5]
        [base.train]
        steps = 9
        [axes]
        "learner.lr" = [1e-4, 3e-4]
        "objective.dual_clip" = [3.0, "none"]
        [arms.mine]
        extends = ["trace", "triage"]
        about = "both, with two bits"
        alignment.bits = 2
        "objective.correction_options" = { q_max = 0.3 }
        """,
    )
    jobs = plan.jobs()
    assert [job.seed for job in jobs] == [3] * 8 + [5] * 8
    assert len({job.folder for job in jobs}) == len(jobs)
    mine = next(job for job in jobs if job.arm == "mine")
    assert mine.config.alignment.bits == 2
    assert mine.config.alignment.layers == "deep:0.5"
    assert mine.config.objective.correction == "triage"
    assert mine.config.objective.correction_options == {"q_max": 0.3}
    assert {job.config.learner.lr for job in jobs} == {1e-4, 3e-4}
    assert {job.config.objective.dual_clip for job in jobs} == {3.0, None}
    assert {job.config.train.steps for job in jobs} == {9}
    assert {job.config.train.seed for job in jobs if job.seed == 3} == {3}


def test_arms_of_a_point_share_everything_but_the_arm(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, '[axes]\n"learner.minibatches" = [1, 4]\n')
    for point in plan.points():
        jobs = [job for job in plan.jobs() if job.point == point]
        assert len(jobs) == 16 * 5
        first = setting(jobs[0].config.to_json())
        assert all(setting(job.config.to_json()) == first for job in jobs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[stduy]\n", "unknown tables: stduy"),
        ("study = 3\n", "study is not a table"),
        ('[study]\narms = ["qta"]\n', "did you mean qat"),
        ('[study]\narms = ["qat", "qat"]\n', "twice"),
        ("[study]\nseeds = []\n", "seeds"),
        ("[study]\nsede = [1]\n", "study: sede|sede"),
        ("[study]\nprocesses = 0\n", "processes"),
        ('[study]\nname = "a/b"\n', "name"),
        ('[study]\narms = ["post-hoc"]\n', "add bf16"),
        ('[study]\narms = ["bf16", "post-hoc"]\ndeployed = ["bf16"]\n', "add w4a4kv4"),
        ("[base.train]\nseed = 3\n", "train.seed is set by the study"),
        ("[base.learner]\nlearning_rate = 3\n", "did you mean learner.lr"),
        ('[axes]\n"train.seed" = [1]\n', "train.seed is set by the study"),
        ('[axes]\n"learner.lr" = 3e-4\n', "an axis needs its values"),
        ('[axes]\n"learner.lr" = [1, 1]\n', "twice"),
        ('[axes]\n"learner.lrr" = [1]\n', "learner.lr"),
        ('[axes]\n"alignment.bits" = [1, 4]\n', "an axis, and arm"),
        ('[arms.mine]\n"train.steps" = 3\n', "an arm sets train.steps"),
        ('[arms.qat]\n"learner.lr" = 3\n', "built-in"),
        ('[arms.mine]\nextends = "nothing"\n', "unknown arm 'nothing'"),
        ('[arms.mine]\nextends = "post-hoc"\n', "unknown arm"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(tmp_path, text)


def test_any_key_can_be_an_axis_of_arms_that_leave_it_alone(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        '[study]\narms = ["plain"]\nseeds = [0]\n[arms.plain]\n'
        '[axes]\nprecision = ["bf16", { preset = "w4a4kv4", kv = "bf16" }]\n"alignment.layers" = ["all", "2,3"]\n',
    )
    jobs = plan.jobs()
    assert [job.config.precision for job in jobs[::2]] == ["bf16", {"preset": "w4a4kv4", "kv": "bf16"}]
    assert len({job.folder for job in jobs}) == 4
    assert all(
        set(job.folder.parent.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+=-")
        for job in jobs
    )


def test_the_digest_is_of_what_decides_numbers(tmp_path: Path) -> None:
    plain = plan_of(tmp_path, "[study]\nseeds = [0]\n")
    assert plain.digest() == plan_of(tmp_path, '[study]\nseeds = [0]\nprocesses = 7\nout = "x"\n').digest()
    assert plain.digest() != plan_of(tmp_path, "[study]\nseeds = [0, 1]\n").digest()
    assert plain.digest() != plan_of(tmp_path, "[study]\nseeds = [0]\nthreads = 2\n").digest()


@pytest.mark.parametrize("name", ["study-gentle.toml", "study-harsh.toml"])
def test_the_example_studies_are_sound(name: str) -> None:
    plan = load_plan(ROOT / "examples" / name)
    assert len(plan.section.seeds) >= 5
    names = {arm.name for arm in plan.arms}
    assert names >= {"bf16", "fp4-naive", "qat", "trace", "parity", "post-hoc"}
    assert any("triage" in name for name in names)
    constant = {job.config.learner.schedule for job in plan.jobs()} == {"constant"}
    assert constant == (name == "study-harsh.toml")
