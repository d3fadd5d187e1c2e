"""Runs on a real Ray: the same numbers as in one process, whatever happens to the workers."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_runs import assert_same_run, numbers, run_config

from halfbyte.errors import ConfigError
from halfbyte.refit.patch import Update
from halfbyte.refit.store import FilesystemStore
from halfbyte.refit.verify import verify_store
from halfbyte.train import run
from halfbyte.train.ray.cluster import Cluster
from halfbyte.train.ray.events import read_events, write_wanted
from halfbyte.train.ray.pool import actor_options
from halfbyte.train.ray.rollouts import RayRollouts
from halfbyte.train.rollouts import Deployed

pytestmark = pytest.mark.usefixtures("cluster", "torch_single_thread")

KILLER = """
import os, signal
from pathlib import Path

def reward(*, prompt, response, answer, **_):
    marks = sorted(Path(os.environ["HALFBYTE_TEST_MARKS"]).glob("*.kill"))
    for mark in marks:
        try:
            mark.unlink()
        except FileNotFoundError:
            continue  # another worker was quicker
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(response) % 3)
"""


def events(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run_folder) if e["event"] == kind]


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something beside the run as soon as a condition holds."""

    def watch() -> None:
        end = time.monotonic() + 120
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def rows_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (2, {"rollout__store": "http"}),
        pytest.param(1, {"env__name": "agent:guess", "env__max_prompt_tokens": 96}, marks=pytest.mark.slow),
        pytest.param(3, {"rollout__prompts_per_step": 2, "rollout__samples_per_prompt": 9}, marks=pytest.mark.slow),
        pytest.param(2, {"rollout__staleness": 1, "train__steps": 6}, marks=pytest.mark.slow),
        pytest.param(2, {"rollout__max_sequences": 3, "precision": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_workers_give_the_numbers_of_one_process(tmp_path: Path, workers: int, more: dict[str, Any]) -> None:
    run(run_config(tmp_path / "local", **more))
    run(run_config(tmp_path / "ray", workers, **more))
    learns = "env__name" not in more  # the policy has not seen the guessing game: no reward, but turns
    assert_same_run(tmp_path / "local", tmp_path / "ray", learns=learns)
    gone = events(tmp_path / "ray", "closed")
    assert len(gone) == workers
    assert all(e["refits"] >= learns for e in gone)  # each followed the store
    if more.get("rollout__store") == "http":
        assert events(tmp_path / "ray", "served")[0]["bytes"] >= max(e["fetched_bytes"] for e in gone)
    assert verify_store(FilesystemStore(tmp_path / "ray" / "refit")).good


def test_a_worker_killed_in_mid_batch_is_replaced_and_nothing_changes(
    tmp_path: Path, worker_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = worker_modules / "marks"
    marks.mkdir(exist_ok=True)
    (worker_modules / "killing_reward.py").write_text(
        KILLER.replace('os.environ["HALFBYTE_TEST_MARKS"]', repr(str(marks)))
    )
    more = {"env__reward": "killing_reward:reward", "rollout__max_sequences": 12}
    run(run_config(tmp_path / "local", **more))
    (marks / "1.kill").touch()
    thread = when(lambda: rows_in(tmp_path / "ray") >= 3, (marks / "2.kill").touch)
    run(run_config(tmp_path / "ray", 2, **more))
    thread.join()
    assert_same_run(tmp_path / "local", tmp_path / "ray")
    assert len(events(tmp_path / "ray", "died")) == 2
    assert sum(e["samples"] for e in events(tmp_path / "ray", "reissued")) >= 2
    assert events(tmp_path / "ray", "duplicates") == []


def test_workers_join_and_leave_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(run_config(tmp_path / "local", train__steps=6))
    folder, deploy = tmp_path / "ray", RayRollouts.deploy

    def deploy_and_resize(self: RayRollouts, update: Update) -> Deployed:
        done = deploy(self, update)
        wanted = {1: 3, 3: 1}.get(update.target.version)
        if wanted is not None:
            write_wanted(folder, wanted)
            assert self.pool is not None
            while len(self.pool.open) != wanted:
                self.ready()
        return done

    monkeypatch.setattr(RayRollouts, "deploy", deploy_and_resize)
    run(run_config(folder, 1, train__steps=6))
    assert_same_run(tmp_path / "local", folder)
    assert [e["workers"] for e in events(folder, "want")] == [3, 1]
    late = [e for e in events(folder, "open") if e["version"] > 0]
    assert len(late) == 2  # they began with the version of the day
    assert len(events(folder, "left")) == 2
    assert {e["worker"] for e in events(folder, "closed")} == {"worker-0.1"}


BRINGER = """
import numpy as np
from halfbyte.models.precision import PRESETS
from halfbyte.models.trajectory import GuidanceRows, SamplingParams, Trajectory

ROWS = np.arange(2_000_000, dtype=np.uint8).reshape(1000, -1)  # of many samples, as the engine takes them

class Bringer:
    def bring(self):
        ids, logprobs = np.arange(401, dtype=np.int32), np.zeros(401, np.float32)
        guidance = GuidanceRows(ROWS[100:900], ROWS[100:900, :1000].copy(), "{}")
        routes = np.zeros((801, 2, 2), np.int16)
        mask = np.ones(401, bool)
        return [Trajectory(
            ids, ids, logprobs, mask, ids, SamplingParams(), PRESETS["bf16"], "eos", routes=routes, guidance=guidance
        )]
"""


def test_arrays_come_back_as_views_of_the_object_store(cluster: Cluster, worker_modules: Path) -> None:
    (worker_modules / "bringing.py").write_text(BRINGER)
    bringing = importlib.import_module("bringing")
    actor = cluster.actor(bringing.Bringer, actor_options({}, {}))
    (trajectory,) = cluster.value(cluster.call(actor.bring, "play"))
    for array in (trajectory.guidance.rows, trajectory.guidance.kv, trajectory.routes, trajectory.logprobs):
        assert not array.flags.owndata
        assert not array.flags.writeable  # a view of shared memory, not a copy of it
    assert np.array_equal(trajectory.guidance.rows, bringing.ROWS[100:900])
    cluster.kill(actor)


def test_what_a_worker_cannot_open_is_told_as_the_run_s_error(tmp_path: Path, worker_modules: Path) -> None:
    path = worker_modules / "only_here.py"
    path.write_text(
        "import os\n"
        f"if os.getpid() != {os.getpid()}:\n    raise ImportError('not on this machine')\n"
        "def reward(**_):\n    return 0.0\n"
    )
    with pytest.raises(ConfigError, match="only_here"):
        run(run_config(tmp_path / "ray", 1, env__reward="only_here:reward"))


@pytest.mark.slow
def test_new_weights_reach_workers_in_flight_and_no_token_is_too_old(tmp_path: Path) -> None:
    more = {"rollout__staleness": 2, "rollout__overlap": True, "rollout__in_flight": True, "rollout__partial": True}
    run(run_config(tmp_path / "ray", 2, train__steps=10, **more, objective__correction="token_tis"))
    rows = [r for r in numbers(tmp_path / "ray") if r["kind"] == "train"]
    assert len(rows) == 10
    assert max(r["stale/max"] for r in rows) in (1.0, 2.0)
    assert rows[-1]["flight/submitted"] == rows[-1]["flight/taken"] == 60  # six groups a step, each once
    assert rows[-1]["version"] >= 5


@pytest.mark.slow
def test_the_run_goes_on_with_another_backend(tmp_path: Path) -> None:
    run(run_config(tmp_path / "local"))
    folder = tmp_path / "mixed"
    code = run(run_config(folder, learner__schedule="constant", train__steps=2))
    assert code == 0
    run(run_config(tmp_path / "whole", learner__schedule="constant"))
    run(run_config(folder, 1, learner__schedule="constant"), resume=True)
    rows = [r for r in numbers(folder) if r["kind"] == "train"]
    assert rows == [r for r in numbers(tmp_path / "whole") if r["kind"] == "train"]
