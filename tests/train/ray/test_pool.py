"""Workers that die, that are too many or too few, and jobs that must come out the same for it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_cluster import FakeActor, FakeCluster, formula
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.envs import Prompt
from halfbyte.errors import ClusterError, DataError
from halfbyte.guidance.plan import Plan
from halfbyte.models.trajectory import SamplingParams
from halfbyte.train.ray.events import Events, read_events, write_wanted
from halfbyte.train.ray.pool import LONGEST_PAUSE, PATIENCE, Pool, actor_options
from halfbyte.train.ray.rollouts import RayRollouts
from halfbyte.train.rollouts import Job


def make_pool(cluster: FakeCluster, wanted: int, folder: Path | None = None, **more: Any) -> Pool:
    return Pool(
        cast(Any, cluster),
        cast(Any, "a spec"),
        wanted,
        options={"num_cpus": 1.0},
        capacity=more.pop("capacity", 1000),
        events=Events(folder),
        clock=cluster.clock,
        **more,
    )


def make_rollouts(cluster: FakeCluster, workers: int, folder: Path | None = None, **more: Any) -> RayRollouts:
    served = SimpleNamespace(weights=SimpleNamespace(version=0))
    rollouts = RayRollouts(
        cast(Any, cluster),
        lambda *_: make_pool(cluster, workers, folder, **more),
        cast(Any, served),
        Plan(),
        folder=folder,
        serve=False,
        events=Events(folder),
        clock=cluster.clock,
        sleep=cluster.sleep,
    )
    rollouts.pool = rollouts.make_pool("", {}, "")
    return rollouts


def job(number: int = 0, prompts: int = 5, samples: int = 3) -> Job:
    texts = tuple(Prompt(str(i), "x" * (i + 1)) for i in range(prompts))
    return Job(number, texts, tuple(range(100, 100 + prompts)), SamplingParams(max_tokens=4), samples, version=0)


def played(rollouts: RayRollouts, what: Job) -> list[tuple[int, ...]]:
    return [tuple(t.ids.tolist()) for t in rollouts.play(what)]


def expected(what: Job) -> list[tuple[int, ...]]:
    samples = ((key, g, s) for g, key in enumerate(what.keys) for s in range(what.samples))
    return [tuple(formula(*each).ids.tolist()) for each in samples]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 5), st.sampled_from([1, 4, 1000]))
def test_deaths_at_any_time_lose_nothing_and_count_nothing_twice(
    workers: int, seed: int, prompts: int, samples: int, capacity: int
) -> None:
    draw = random.Random(seed)
    deaths = 0

    def answer(actor: FakeActor, call: str) -> str | None:
        nonlocal deaths
        chance = draw.random()
        if chance < 0.15 and deaths < PATIENCE:  # more in a row would end the run
            deaths += 1
            return "die"
        return "wait" if chance < 0.4 else None

    cluster = FakeCluster(answer)
    rollouts = make_rollouts(cluster, workers, capacity=capacity)
    for number in range(3):
        what = job(number, prompts, samples)
        assert played(rollouts, what) == expected(what)
    pool = rollouts.pool
    assert pool is not None
    assert all(w.load.samples == w.load.tokens == 0 for w in pool.workers)  # nothing is left in the books
    assert len(cluster.started) - len(cluster.killed) == len(pool.workers) <= workers


def test_jobs_in_flight_together_are_told_apart() -> None:
    draw = random.Random(5)
    cluster = FakeCluster(lambda actor, call: "wait" if draw.random() < 0.5 else None)
    rollouts = make_rollouts(cluster, 2)
    jobs = [job(number, prompts=number + 1) for number in range(4)]
    for what in jobs:
        rollouts.submit(what)
    left = {what.number: what for what in jobs}
    while left:
        for number in rollouts.ready(wait=True):
            assert [tuple(t.ids.tolist()) for t in rollouts.take(number)] == expected(left.pop(number))
    assert rollouts.ready() == set()


def test_jobs_of_any_version_go_out_together_and_bound_ones_on_their_own() -> None:
    cluster = FakeCluster()
    rollouts = make_rollouts(cluster, 1)
    rollouts.play(job(99))  # the worker is there
    cluster.bundles.clear()
    jobs = [replace(job(number, prompts=1), version=None, keys=(7 * number,)) for number in range(6)]
    for what in jobs:
        rollouts.submit(what)
    rollouts.submit(job(6))
    assert rollouts.ready(wait=True) == set(range(7))
    for what in jobs:
        assert [tuple(t.ids.tolist()) for t in rollouts.take(what.number)] == expected(what)
    assert [tuple(t.ids.tolist()) for t in rollouts.take(6)] == expected(job(6))
    assert sorted(len({p.job for p in bundle.pieces}) for bundle in cluster.bundles) == [1, 6]


def test_a_dead_worker_is_replaced_at_once_and_then_with_growing_pauses() -> None:
    cluster = FakeCluster(lambda actor, call: "die")
    pool = make_pool(cluster, 1)
    starts = []

    def watch() -> None:
        while True:
            before = len(cluster.started)
            pool.tend()
            if len(cluster.started) > before:
                starts.append(cluster.now)
            for ref in cluster.wait([w.opening for w in pool.workers], 0.01):
                pool.opened(ref)

    with pytest.raises(ClusterError, match=f"died {PATIENCE + 1} times in a row"):
        watch()
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert len(starts) == PATIENCE + 1
    assert gaps[0] <= 0.02
    assert all(later > earlier for earlier, later in itertools.pairwise(gaps))
    assert gaps[-1] <= LONGEST_PAUSE + 1


def test_deaths_between_work_that_is_done_do_not_add_up() -> None:
    bundles = itertools.count()
    cluster = FakeCluster(lambda actor, call: "die" if call == "play" and next(bundles) % 2 else None)
    rollouts = make_rollouts(cluster, 1)
    for number in range(4 * PATIENCE):
        assert played(rollouts, job(number)) == expected(job(number))
    assert len(cluster.started) > 2 * PATIENCE


def test_no_room_in_the_cluster_is_said_with_what_is_wanted_and_what_is_there() -> None:
    cluster = FakeCluster(lambda actor, call: "wait")
    rollouts = make_rollouts(cluster, 1, start_patience=50.0)
    with pytest.raises(ClusterError, match="no worker has started for 50 s") as caught:
        rollouts.play(job())
    assert "each wants CPU 1; the cluster has CPU 0" in str(caught.value)


def test_a_user_error_in_a_worker_is_the_run_s() -> None:
    error = DataError("a prompt encodes to no token", where="prompt 7")
    cluster = FakeCluster(lambda actor, call: cast(Any, error) if call == "play" else None)
    with pytest.raises(DataError, match="prompt 7"):
        make_rollouts(cluster, 2).play(job())


def test_workers_join_and_leave_while_a_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cluster = FakeCluster()
    rollouts = make_rollouts(cluster, 2, tmp_path)
    pool = rollouts.pool
    assert pool is not None
    for number, wanted in enumerate((2, 5, 1, 3)):
        write_wanted(tmp_path, wanted)
        for turn in range(4):  # the first of them sees it, the next are played by that many
            what = job(10 * number + turn)
            assert played(rollouts, what) == expected(what)
            cluster.now += 2.0
            rollouts.ready()
        assert len(pool.takers) == wanted
    assert [e["workers"] for e in read_events(tmp_path) if e["event"] == "want"] == [5, 1, 3]


def test_a_worker_that_is_to_leave_finishes_first() -> None:
    hold = True
    cluster = FakeCluster(lambda actor, call: "wait" if call == "play" and hold else None)
    rollouts = make_rollouts(cluster, 2)
    rollouts.submit(job())
    pool = rollouts.pool
    assert pool is not None
    pool.wanted = 1
    rollouts.ready()
    assert cluster.killed == []
    assert sum(w.leaving for w in pool.workers) == 1
    hold = False
    assert [tuple(t.ids.tolist()) for t in rollouts.take(0)] == expected(job())
    assert len(cluster.killed) == 1
    assert len(cluster.started) == 2  # nobody was started for it


def test_resources_become_ray_s_options_and_threads_follow_the_processors() -> None:
    options = actor_options(
        {"CPU": 3, "GPU": 0.5, "memory": 2e9, "fp4": 1}, {"OMP_WAIT_POLICY": "PASSIVE", "HOME": "/"}
    )
    assert options["num_cpus"] == 3
    assert options["num_gpus"] == 0.5
    assert options["memory"] == 2_000_000_000
    assert options["resources"] == {"fp4": 1}
    variables = options["runtime_env"]["env_vars"]
    assert variables == {"OMP_NUM_THREADS": "3", "HALFBYTE_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}
    assert actor_options({"CPU": 0.5}, {})["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
