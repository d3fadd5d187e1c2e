"""Whole runs with bounded staleness: what a token is sampled from, what is trained on, what a kill leaves behind."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import assert_same_run, metrics, small_config, spawn
from store_versions import versions_of

from halfbyte.envs import make_env
from halfbyte.errors import NumericsError
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.train import run
from halfbyte.train.background import BackgroundRollouts
from halfbyte.train.prompts import prompt_index
from halfbyte.train.run_folder import RunFolder
from halfbyte.train.state import latest_checkpoint

pytestmark = pytest.mark.usefixtures("torch_single_thread")

OVERLAP = {"rollout__overlap": True}
IN_FLIGHT = OVERLAP | {"rollout__in_flight": True}
PARTIAL = IN_FLIGHT | {"rollout__partial": True}
MODES = {"between": {}, "beside": OVERLAP, "in flight": IN_FLIGHT, "partial": PARTIAL}
GROUPS, SAMPLES = 6, 4  # of a step of small_config


def config(policy: Path, out: Path, reward_module: str, staleness: int, mode: str, **sets: Any) -> Any:
    everything = {
        "train__save_trajectories_every": 1,
        "train__saved_trajectories": 1000,
        "learner__schedule": "constant",
    }
    sets = everything | {"rollout__staleness": staleness} | MODES[mode] | sets
    return small_config(policy, out, f"{reward_module}:sevens", **sets)


def train_rows(out: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(out) if row["kind"] == "train"]


def without_flight(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k.split("/")[0] not in ("stale", "flight")} for row in metrics(out)]


def saved(out: Path, step: int) -> list[dict[str, Any]]:
    path = out / "trajectories" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_every_group_once(out: Path, steps: int, seed: int = 0) -> None:
    """Every prompt of the run was trained on in one step, with all its samples; the counters agree."""
    env = make_env("arithmetic:sort")
    expected = [env.prompt("train", prompt_index(i, env.size("train"), seed)).text for i in range(steps * GROUPS)]
    trained: Counter[str] = Counter()
    for step in range(1, steps + 1):
        rows = saved(out, step)
        assert [(r["group"], r["sample"]) for r in rows] == [(g, s) for g in range(GROUPS) for s in range(SAMPLES)]
        for group in range(GROUPS):
            texts = {r["prompt_text"] for r in rows if r["group"] == group}
            assert len(texts) == 1
            trained[texts.pop()] += 1
    assert trained == Counter(expected)
    for step, row in enumerate(train_rows(out), start=1):
        assert row["flight/taken"] == step * GROUPS
        assert row["flight/submitted"] == row["flight/taken"] + row["flight/groups"] + row["flight/dropped"]
    assert train_rows(out)[-1]["flight/groups"] == 0


def check_tokens(out: Path, policy: Path, staleness: int) -> set[int]:
    """Every token has the log-prob that the weights of its version, read from the store, give it; the ages found."""
    arch = load_checkpoint(policy).architecture
    engines = {
        version: Engine(arch, precision_from("w4a4kv4"), tensors, options=EngineOptions(kv_memory_mb=2))
        for version, tensors in versions_of(out / "refit").items()
    }
    ages: set[int] = set()
    before = 0
    for step, row in enumerate(train_rows(out), start=1):
        for t in saved(out, step):
            versions = np.array(t["versions"])
            for version in np.unique(versions).tolist():
                again = engines[version].score(t["prompt_ids"], t["response_ids"])
                drawn = versions == version
                assert [round(float(x), 8) for x in again[drawn]] == np.array(t["logprobs"])[drawn].tolist()
            ages |= set((before - versions).tolist())
        assert row["stale/max"] <= staleness
        before = int(row["version"])
    assert min(ages) >= 0
    assert max(ages) <= staleness
    return ages


def test_without_staleness_every_way_gives_the_synchronous_run(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    whole = tmp_path / "synchronous"
    assert run(config(policy_folder, whole, reward_module, 0, "between", eval__every=2)) == 0
    assert not [key for row in metrics(whole) for key in row if key.startswith(("stale/", "flight/", "gap/stale"))]
    for mode in ("beside", "in flight", "partial"):
        out = tmp_path / mode
        assert run(config(policy_folder, out, reward_module, 0, mode, eval__every=2)) == 0
        assert without_flight(out) == metrics(whole)
        assert (out / "model" / "model.safetensors").read_bytes() == (
            whole / "model" / "model.safetensors"
        ).read_bytes()
        assert {row["stale/max"] for row in train_rows(out)} == {0.0}
        check_every_group_once(out, 4)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_batch_is_of_the_weights_so_many_updates_before(
    staleness: int, policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    between, beside = tmp_path / "between", tmp_path / "beside"
    assert run(config(policy_folder, between, reward_module, staleness, "between", eval__every=2)) == 0
    rows = train_rows(between)
    assert [row["version"] for row in rows] == [1.0, 2.0, 3.0, 4.0], "every step updates"
    for step, row in enumerate(rows):
        assert {v for t in saved(between, step + 1) for v in t["versions"]} == {max(0, step - staleness)}
        assert row["stale/mean"] == row["stale/max"] == min(step, staleness)
        assert row["stale/tokens"] == float(step > 0)
        assert row["flight/groups"] == GROUPS * min(staleness, 3 - step)
        assert (row.get("gap/stale/tokens", 0.0) > 0) == (step > 0)
    assert check_tokens(between, policy_folder, staleness) == set(range(staleness + 1))
    check_every_group_once(between, 4)
    assert run(config(policy_folder, beside, reward_module, staleness, "beside", eval__every=2)) == 0
    assert_same_run(between, beside)


@pytest.mark.parametrize("mode", ["in flight", "partial"])
def test_updates_in_flight_stay_within_the_bound(
    mode: str, policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    out = tmp_path / "run"
    assert run(config(policy_folder, out, reward_module, 2, mode, train__steps=6, eval__every=3)) == 0
    check_tokens(out, policy_folder, 2)
    check_every_group_once(out, 6)
    assert all(row["flight/groups"] <= 2 * GROUPS for row in train_rows(out)), "never more than k batches ahead"
    assert all(row["flight/dropped"] == 0 for row in train_rows(out))


def test_guidance_of_older_weights_is_used_as_far_as_allowed(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    for lag, unguided in ((0, [0.0, 1.0, 1.0, 1.0]), (1, [0.0, 0.0, 1.0, 1.0]), (2, [0.0] * 4)):
        out = tmp_path / str(lag)
        assert run(config(policy_folder, out, reward_module, 2, "between", alignment__max_version_lag=lag)) == 0
        rows = train_rows(out)
        assert [row["align/unguided"] for row in rows] == unguided
        assert [row.get("align/stale", 0.0) for row in rows] == unguided


def test_a_plan_that_is_chosen_on_the_way_guides_later_batches(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    """``alignment.layers = auto``: batches in flight keep the plan they were recorded by, or are recorded anew."""
    auto = {"alignment__layers": "auto", "alignment__bytes_per_token": 60.0, "alignment__max_version_lag": 1}
    sizes = {}
    for mode in ("between", "beside", "partial"):
        out = tmp_path / mode
        assert run(config(policy_folder, out, reward_module, 1, mode, **auto)) == 0
        sizes[mode] = [row["align/bytes_per_token"] for row in train_rows(out)]
        check_every_group_once(out, 4)
    assert_same_run(tmp_path / "between", tmp_path / "beside")
    wide, narrow = sizes["between"][0], sizes["between"][-1]
    assert narrow < wide
    assert sizes["between"] == [wide] * 2 + [narrow] * 2, "a batch was in flight when it was chosen"
    assert sizes["partial"][0] == wide
    assert sizes["partial"][-1] == narrow


def test_old_tokens_are_not_diagnosed_and_their_gap_is_told_apart(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    """With the rollout's own kernels in the learner the gap of present tokens is 0: what is left is staleness alone."""
    out = tmp_path / "run"
    sets = {"objective__correction": "triage", "learner__execution": "native"}
    assert run(config(policy_folder, out, reward_module, 1, "between", **sets)) == 0
    first, *later = train_rows(out)
    assert first["gap/max_abs"] == 0.0
    assert "gap/stale/max_abs" not in first
    for row in later:
        assert row["segment/count"] == 0
        assert row["correction/stale_tokens"] == 1.0
        assert row["weight/mean"] == 1.0
        assert row["gap/current/tokens"] == 0.0
        assert row["gap/stale/max_abs"] == row["gap/max_abs"] > 0.0
        assert row["parity/max_gap"] == 0.0


def test_rewards_rise_two_updates_behind(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    sets = {"train__steps": 20, "objective__correction": "token_tis", "train__checkpoint_every": 0}
    assert run(config(policy_folder, out, reward_module, 2, "partial", **sets)) == 0
    rewards = [row["reward/mean"] for row in train_rows(out)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    assert np.mean([row["stale/mean"] for row in train_rows(out)]) > 0.5, "what it learnt from was old"
    check_every_group_once(out, 20)


def test_an_uncorrected_run_says_so_once(
    policy_folder: Path, tmp_path: Path, reward_module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, sets, told in (
        ("none", {}, 1),
        ("tis", {"objective__correction": "token_tis"}, 0),
        ("ratio", {"objective__proximal": "rollout"}, 0),
    ):
        assert run(config(policy_folder, tmp_path / name, reward_module, 1, "between", train__steps=2, **sets)) == 0
        assert capfd.readouterr().err.count("nothing corrects old tokens") == told


def killed(out: Path, path: Path, lines: int, wait: float, how: int = signal.SIGKILL) -> int:
    """Start a run in a process and send it a signal once it has written so many lines; its exit code."""
    process = spawn(path, "new")
    deadline = time.monotonic() + 300
    while process.poll() is None and len(RunFolder(out).rows()) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(wait)  # not to wait for anything: the moment of the kill is random
    process.send_signal(how)
    return process.wait()


@pytest.mark.parametrize("mode", ["between", "beside"])
@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 2))])
def test_kill_9_at_a_random_point_of_a_run_with_batches_ahead(
    mode: str, attempt: int, policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    whole, out, path = tmp_path / "whole", tmp_path / "killed", tmp_path / "config.json"
    assert run(config(policy_folder, whole, reward_module, 2, mode, train__steps=6)) == 0
    mine = config(policy_folder, out, reward_module, 2, mode, train__steps=6, train__checkpoint_every=2)
    path.write_text(json.dumps(mine.to_json()))
    rng = random.Random(f"{mode} {attempt}")
    killed(out, path, rng.randrange(2, 6), rng.random() * 0.3)
    if (out / "summary.json").exists():
        pytest.skip("finished before the kill")
    assert run(mine, resume=True) == 0
    assert_same_run(whole, out)
    check_every_group_once(out, 6)


@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 2))])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_partial_run_that_was_stopped_trains_on_every_group_once(
    how: int, attempt: int, policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    out, path = tmp_path / "killed", tmp_path / "config.json"
    mine = config(policy_folder, out, reward_module, 2, "partial", train__steps=8, train__checkpoint_every=2)
    path.write_text(json.dumps(mine.to_json()))
    rng = random.Random(f"{how} {attempt}")
    code = killed(out, path, rng.randrange(4, 7), rng.random() * 0.3, how)
    if (out / "summary.json").exists():
        pytest.skip("finished before the signal")
    assert code == (130 if how == signal.SIGINT else -signal.SIGKILL)
    checkpoint = latest_checkpoint(out / "checkpoints")
    assert checkpoint is not None
    groups = json.loads((checkpoint / "groups.json").read_text())
    assert groups["groups"], "some were in flight"
    assert run(mine, resume=True) == 0
    check_every_group_once(out, 8)
    last = train_rows(out)[-1]
    assert last["flight/dropped"] == len(groups["groups"]), "played again, and counted"
    check_tokens(out, policy_folder, 2)


@pytest.mark.parametrize("mode", ["beside", "partial"])
def test_an_error_in_the_thread_ends_the_run_and_a_resume_completes_it(
    mode: str, policy_folder: Path, tmp_path: Path, reward_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, passes = tmp_path / "run", Engine.step, 0

    def failing(self: Engine) -> Any:
        nonlocal passes
        passes += 1
        if passes == 25:
            raise NumericsError("a logit is not finite", where="layer 1")
        return real(self)

    monkeypatch.setattr(Engine, "step", failing)
    started: list[BackgroundRollouts] = []
    connect = BackgroundRollouts.connect
    monkeypatch.setattr(
        BackgroundRollouts, "connect", lambda self, source: (started.append(self), connect(self, source))[1]
    )
    mine = config(policy_folder, out, reward_module, 2, mode, train__steps=6)
    with pytest.raises(NumericsError, match="layer 1"):
        run(mine)
    assert not started[0]._thread.is_alive(), "nothing goes on behind the error"
    monkeypatch.setattr(Engine, "step", real)
    assert run(mine, resume=True) == 0
    check_every_group_once(out, 6)


def test_damaged_batches_in_flight_are_refused(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    from halfbyte.errors import CheckpointError

    out = tmp_path / "run"
    mine = config(policy_folder, out, reward_module, 2, "between", train__checkpoint_every=2, train__keep_checkpoints=9)
    assert run(mine) == 0
    (out / "checkpoints" / "step_000004").rename(tmp_path / "gone")
    kept = out / "checkpoints" / "step_000002" / "batches.safetensors"
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="unreadable trajectories"):
        run(mine, resume=True)
    kept.with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match="unreadable trajectories"):
        run(mine, resume=True)
