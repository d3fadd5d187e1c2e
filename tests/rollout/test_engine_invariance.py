"""A sample depends on its own request alone: bit for bit, whatever the engine does around it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request

PRECISIONS = ("w4a4kv4", "bf16", "experts-w4a4kv4", "w4a16")
SHARED = tuple(range(2, 40))


@lru_cache
def checkpoint(folder: Path) -> Checkpoint:
    return load_checkpoint(folder)


def engine(folder: Path, precision: str, **options: object) -> Engine:
    held = checkpoint(folder)
    defaults = {"kv_memory_mb": 2.0}
    return Engine(
        held.architecture, precision_from(precision), held.tensors, options=EngineOptions(**{**defaults, **options})
    )  # type: ignore[arg-type]


def requests(seed: int) -> list[Request]:
    """Mixed lengths, shared beginnings, several samples, filters, greedy."""
    rng = np.random.default_rng(seed)
    out = []
    for key in range(5):
        head = SHARED[: int(rng.integers(1, len(SHARED)))] if rng.random() < 0.6 else ()
        tail = tuple(int(x) for x in rng.integers(2, 64, int(rng.integers(1, 12))))
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_k=int(rng.choice([0, 0, 8])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.02])),
            max_tokens=int(rng.integers(1, 12)),
            seed=seed,
        )
        out.append(Request(head + tail, sampling, n=int(rng.integers(1, 4)), key=key + 100 * seed, group=key))
    return out


def same(a: Trajectory, b: Trajectory) -> bool:
    return (
        np.array_equal(a.response_ids, b.response_ids)
        and a.logprobs.tobytes() == b.logprobs.tobytes()
        and a.finish_reason == b.finish_reason
        and (a.routes is None) == (b.routes is None)
        and (a.routes is None or np.array_equal(a.routes, b.routes))  # type: ignore[arg-type]
    )


def by_sample(trajectories: list[Trajectory]) -> dict[tuple[int, int], Trajectory]:
    return {(t.group, t.sample): t for t in trajectories}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    order=st.permutations(range(5)),
    page_size=st.sampled_from([16, 32, 48]),
    max_batch_tokens=st.sampled_from([3, 17, 64, 4096]),
    max_sequences=st.sampled_from([1, 2, 7, 64]),
    prefix_cache=st.booleans(),
    share_prompts=st.booleans(),
    few_pages=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
)
def test_sample_is_the_same_in_any_company(
    seed: int,
    order: list[int],
    page_size: int,
    max_batch_tokens: int,
    max_sequences: int,
    prefix_cache: bool,
    share_prompts: bool,
    few_pages: bool,
    precision: str,
    family_folders: dict[str, Path],
) -> None:
    folder = family_folders["qwen3_moe"]
    wanted = requests(seed)
    alone: dict[tuple[int, int], Trajectory] = {}
    for request in wanted:
        for i in range(request.n):
            single = replace(request, n=1, first_sample=i)
            alone |= by_sample(engine(folder, precision).generate([single]))
    busy = engine(
        folder,
        precision,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        prefix_cache=prefix_cache,
        share_prompts=share_prompts,
    )
    if few_pages:  # room for two of the longest samples: preemption and recomputation
        busy = engine(
            folder,
            precision,
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            prefix_cache=prefix_cache,
            share_prompts=share_prompts,
            kv_memory_mb=pages_mb(busy, 2 * -(-64 // page_size)),
        )
    together = by_sample(busy.generate([wanted[i] for i in order]))
    assert together.keys() == alone.keys()
    for key, trajectory in alone.items():
        assert same(trajectory, together[key]), (key, trajectory, together[key])
    assert busy.pool.available == busy.pool.n_pages, "every page came back"


def pages_mb(of: Engine, pages: int) -> float:
    from halfbyte.rollout.pages import PagePool

    return pages * PagePool.page_bytes(of.arch, of.precision, of.options.page_size) / 2**20 + 1e-9


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_teacher_forced_logprobs_equal_sampled_ones(
    family: str, precision: str, family_folders: dict[str, Path]
) -> None:
    run = engine(family_folders[family], precision, max_batch_tokens=13)
    for t in run.generate(requests(7)):
        again = run.score(t.prompt_ids.tolist(), t.response_ids.tolist(), t.sampling, t.supports)
        assert again.tobytes() == t.logprobs.tobytes()


def test_preemption_happens_and_changes_nothing(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    wanted = [
        Request(tuple(range(2, 20)), SamplingParams(max_tokens=30, ignore_eos=True), n=4, key=k, group=k)
        for k in range(3)
    ]
    roomy = engine(folder, "w4a4kv4")
    tight = engine(folder, "w4a4kv4", kv_memory_mb=pages_mb(roomy, 6))
    expected, got = by_sample(roomy.generate(wanted)), by_sample(tight.generate(wanted))
    assert roomy.scheduler.preemptions == 0
    assert tight.scheduler.preemptions > 0
    assert all(same(expected[k], got[k]) for k in expected)
