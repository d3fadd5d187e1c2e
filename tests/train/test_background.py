"""Rollouts in a thread: what is bound to a version keeps it, the rest meets every update at a token boundary, errors come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_case import Tensors, step, update_of

from halfbyte.envs import Prompt, make_env
from halfbyte.errors import DataError, NumericsError
from halfbyte.guidance.plan import Plan, make_plan
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import GuidanceRows, SamplingParams, Trajectory
from halfbyte.refit.patch import Stamp
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.weights import published
from halfbyte.train.background import BackgroundRollouts
from halfbyte.train.collect import prompt_keys
from halfbyte.train.rollouts import Job, LocalRollouts, WeightSource

pytestmark = pytest.mark.usefixtures("torch_single_thread")

CHECKPOINT, TOKENIZER = open_model("tiny")
ARCH, PRECISION = CHECKPOINT.architecture, precision_from("w4a4kv4")
WIDE, NARROW = (make_plan(ARCH, PRECISION, sites=("expert_in", "k"), layers=layers, bits=1) for layers in ("all", "1"))
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
#: Some tokens end a turn, so that episodes of several turns have several.
TURNS = SamplingParams(max_tokens=12, ignore_eos=True, stop_ids=tuple(range(6)))


class Weights:
    """Versions that each change a few weights, and the learner's side of a deployment."""

    def __init__(self) -> None:
        first: Tensors = {name: t.bfloat16() for name, t in CHECKPOINT.tensors.items()}
        self.versions = [first, step(first, 1, 0.2)]
        self.versions.append(step(self.versions[1], 2, 0.2))
        self.now = 0

    def engine(self, version: int = 0, plan: Plan = WIDE) -> Engine:
        options = EngineOptions(kv_memory_mb=4, max_length=64)
        return Engine(
            ARCH,
            PRECISION,
            self.versions[version],
            detokeniser=TOKENIZER,
            options=options,
            version=version,
            guidance=plan,
        )

    def source(self) -> WeightSource:
        return WeightSource(Path(), Stamp("r", 0, "a"), lambda: published(ARCH, PRECISION, self.versions[self.now]))

    def deploy(self, rollouts: BackgroundRollouts) -> None:
        self.now += 1
        before, after = self.versions[self.now - 1 : self.now + 1]
        done = rollouts.deploy(update_of(before, after, self.now))
        assert done.codes.changed_codes > 0


def job(number: int, env: str = "arithmetic:sort", *, version: int | None = None, recorded: bool = True) -> Job:
    made = make_env(env)
    prompts = tuple(made.prompt("train", 4 * number + i) for i in range(3))
    sampling = TURNS if env.startswith("agent") else SAMPLING
    return Job(number, prompts, prompt_keys(("train", number), prompts), sampling, 2, recorded, version)


def background(weights: Weights, env: str = "arithmetic:sort", width: int = 6) -> BackgroundRollouts:
    rollouts = BackgroundRollouts(weights.engine(), make_env(env), TOKENIZER, WIDE, width=width)
    rollouts.connect(weights.source())
    return rollouts


@contextmanager
def stopping_at(rollouts: BackgroundRollouts, number: int) -> Iterator[Callable[[], None]]:
    """The thread waits in its pass ``number`` until somebody holds the gate: samples are then in flight for certain."""
    passes, real, gate = 0, rollouts.engine.step, rollouts.gate
    reached = False

    def stepping() -> Any:
        nonlocal passes, reached
        passes += 1
        out = real()
        if passes == number:
            with gate.changed:
                reached = True
                gate.changed.notify_all()
                assert gate.changed.wait_for(lambda: gate._holders > 0, timeout=120)
        return out

    def wait() -> None:
        with gate.changed:
            assert gate.changed.wait_for(lambda: reached, timeout=120)

    rollouts.engine.step = stepping  # type: ignore[method-assign]
    yield wait


def assert_same(a: list[Trajectory], b: list[Trajectory]) -> None:
    assert len(a) == len(b)
    for t, u in zip(a, b):
        for field in fields(t):
            left, right = getattr(t, field.name), getattr(u, field.name)
            if isinstance(left, GuidanceRows):
                assert (left.layout, left.version) == (right.layout, right.version)
                assert np.array_equal(left.rows, right.rows)
                assert np.array_equal(left.kv, right.kv)
            elif isinstance(left, np.ndarray):
                assert np.array_equal(left, right), field.name
            else:
                assert left == right, field.name


def at_once(
    weights: Weights, version: int, work: Job, env: str = "arithmetic:sort", plan: Plan = WIDE
) -> list[Trajectory]:
    return LocalRollouts(weights.engine(version, plan), make_env(env), TOKENIZER).play(replace(work, version=version))


def test_bound_jobs_are_those_of_their_version_whatever_happens_meanwhile() -> None:
    """Updates, another plan of guidance and an evaluation while samples are in flight change nothing in them."""
    weights = Weights()
    with closing(background(weights)) as rollouts, stopping_at(rollouts, 4) as mid_flight:
        for number in range(2):
            rollouts.submit(job(number, version=0))
        mid_flight()
        weights.deploy(rollouts)
        assert rollouts.version == 1
        rollouts.guide(NARROW)
        evaluated = rollouts.play(job(7, recorded=False))
        rollouts.submit(job(2, version=1))
        weights.deploy(rollouts)
        rollouts.submit(job(3, version=2))
        for number, version, plan in ((2, 1, NARROW), (0, 0, WIDE), (3, 2, NARROW), (1, 0, WIDE)):
            got = rollouts.take(number)
            assert {int(v) for t in got for v in t.versions} == {version}
            assert_same(got, at_once(weights, version, job(number), plan=plan))
        assert_same(evaluated, at_once(weights, 1, job(7, recorded=False)))
        assert rollouts.ready() == set()


@pytest.mark.parametrize("env", ["arithmetic:sort", "agent:guess"])
def test_updates_reach_samples_in_flight_at_a_token_boundary(env: str) -> None:
    """Every token is stamped with the version that drew it, and has the log-prob that this version gives it there."""
    weights = Weights()
    with closing(background(weights, env)) as rollouts, stopping_at(rollouts, 5) as mid_flight:
        rollouts.submit(job(0, env))
        mid_flight()
        weights.deploy(rollouts)
        got = rollouts.take(0)
    assert any({0, 1} <= {int(v) for v in t.versions[t.mask]} for t in got), "some sample was in flight"
    engines = [weights.engine(version) for version in (0, 1)]
    for t in got:
        assert (np.diff(t.versions[t.mask]) >= 0).all()
        generated = [False] * len(t.prompt_ids) + t.mask.tolist()
        for version, engine in enumerate(engines):
            again = engine.score(t.prompt_ids.tolist(), t.response_ids.tolist(), t.sampling, generated=generated)
            drawn = t.mask & (t.versions == version)
            assert np.array_equal(again[drawn], t.logprobs[drawn])
        assert t.guidance is not None
        assert t.guidance.version == t.versions[-1], "recomputed under the weights that ended it"
        assert t.routes is not None
        assert (t.routes >= 0).all()


def test_turns_are_played_as_in_one_batch() -> None:
    weights = Weights()
    with closing(background(weights, "agent:guess", width=3)) as rollouts:
        for number in range(2):
            rollouts.submit(job(number, "agent:guess", version=0))
        got = [rollouts.take(number) for number in range(2)]
    assert any(len(t.turns) > 1 for t in got[0])
    for number in range(2):
        assert_same(got[number], at_once(weights, 0, job(number, "agent:guess"), "agent:guess"))


def test_another_plan_is_recorded_in_samples_in_flight() -> None:
    weights = Weights()
    with closing(background(weights)) as rollouts, stopping_at(rollouts, 4) as mid_flight:
        rollouts.submit(job(0))
        mid_flight()
        rollouts.guide(NARROW)
        got = rollouts.take(0)
    assert_same(got, at_once(weights, 0, job(0), plan=NARROW))


def test_an_engine_that_fails_says_so_to_whoever_asks() -> None:
    rollouts = background(Weights())
    real, passes = rollouts.engine.step, 0

    def failing() -> Any:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise NumericsError("a logit is not finite", where="layer 1")
        return real()

    rollouts.engine.step = failing  # type: ignore[method-assign]
    rollouts.submit(job(0))
    for ask in (lambda: rollouts.take(0), lambda: rollouts.ready(wait=True), lambda: rollouts.submit(job(1))):
        with pytest.raises(NumericsError, match="layer 1"):
            ask()
    rollouts.close()
    rollouts.close()
    assert not rollouts._thread.is_alive()


def test_a_prompt_that_cannot_be_encoded_is_named() -> None:
    with closing(background(Weights())) as rollouts:
        bad = Job(0, (Prompt(id="long", text="1" * 60),), (1,), SAMPLING, 2)
        rollouts.submit(bad)
        with pytest.raises(DataError, match="60 tokens"):
            rollouts.take(0)


def test_close_does_not_wait_for_what_is_queued() -> None:
    rollouts = background(Weights())
    for number in range(50):
        rollouts.submit(job(number))
    rollouts.close()
    assert not rollouts._thread.is_alive()
    assert len(rollouts._queue) > 0
