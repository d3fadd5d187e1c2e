"""What a step is fed: every group once, no older than allowed, in whatever order the rollouts get ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.envs import Prompt
from halfbyte.errors import CheckpointError
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import GuidanceRows, SamplingParams, Trajectory
from halfbyte.train.collect import prompt_keys
from halfbyte.train.feed import GroupFeed, Source, StepFeed
from halfbyte.train.flight import Flight
from halfbyte.train.rollouts import Job

PER_STEP, SAMPLES = 3, 2


def sampled(prompt: Prompt, group: int, sample: int, key: int, version: int) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array([2], np.int32),
        logprobs=np.zeros(1, np.float32),
        mask=np.ones(1, bool),
        versions=np.array([version], np.int32),
        sampling=SamplingParams(),
        precision=precision_from("bf16"),
        finish_reason="eos",
        group=group,
        sample=sample,
        info={"prompt": prompt.id, "key": key, "version": version},
    )


class Rollouts:
    """Jobs get ready in the order that ``choose`` picks them; each takes the version of its submission (the oldest it may)."""

    def __init__(self, choose: Callable[[list[int]], list[int]]) -> None:
        self.version, self.choose = 0, choose
        self.playing: dict[int, list[Trajectory]] = {}
        self.done: dict[int, list[Trajectory]] = {}
        self.submitted: list[int] = []
        self.waits = 0

    def submit(self, job: Job) -> None:
        assert job.number not in self.playing
        assert job.number not in self.done
        self.submitted.append(job.number)
        self.playing[job.number] = [
            sampled(prompt, place, i, key, self.version)
            for place, (prompt, key) in enumerate(zip(job.prompts, job.keys, strict=True))
            for i in range(job.samples)
        ]

    def ready(self, *, wait: bool = False) -> set[int]:
        if wait and not self.done:
            assert self.playing, "waits for ever"
            self.waits += 1
            for number in self.choose(sorted(self.playing)) or sorted(self.playing)[:1]:
                self.done[number] = self.playing.pop(number)
        return set(self.done)

    def take(self, number: int) -> list[Trajectory]:
        return self.done.pop(number) if number in self.done else self.playing.pop(number)


def source(steps: int, staleness: int, *, bound: bool = False) -> Source:
    prompts = lambda step: tuple(Prompt(id=f"{step}.{i}", text="?") for i in range(PER_STEP))  # noqa: E731
    return Source(prompts, SamplingParams(), SAMPLES, PER_STEP, steps, staleness, bound)


def check(batch: list[Trajectory]) -> list[str]:
    """The prompts of a batch, which is made of whole groups."""
    assert [(t.group, t.sample) for t in batch] == [(g, s) for g in range(PER_STEP) for s in range(SAMPLES)]
    prompts = [str(t.info["prompt"]) for t in batch[::SAMPLES]]
    assert [str(t.info["prompt"]) for t in batch] == [p for p in prompts for _ in range(SAMPLES)]
    for t in batch:
        step = int(str(t.info["prompt"]).split(".")[0])
        named = source(step + 1, 0).prompts(step)
        place = int(str(t.info["prompt"]).split(".")[1])
        assert t.info["key"] == prompt_keys(("train", step), named)[place], "a group is the same whenever it is played"
    return prompts


@settings(max_examples=150, deadline=None)
@given(data=st.data(), staleness=st.integers(0, 3), steps=st.integers(1, 7), stop=st.integers(0, 7))
def test_every_group_is_trained_on_once_and_none_is_older_than_the_bound(
    data: Any, staleness: int, steps: int, stop: int
) -> None:
    """Whatever gets ready when, with a resume from a checkpoint somewhere on the way."""
    rollouts = Rollouts(lambda playing: data.draw(st.lists(st.sampled_from(playing), unique=True)))
    feed = GroupFeed(rollouts, source(steps, staleness), 0)  # type: ignore[arg-type]
    seen: list[str] = []
    for step in range(steps):
        if step == stop:
            flight = feed.flight()
            rollouts.playing, rollouts.done = {}, {}
            feed = GroupFeed(rollouts, source(steps, staleness), step, flight)  # type: ignore[arg-type]
        batch = feed.next(step)
        seen += check(batch)
        assert all(step - int(t.info["version"]) <= staleness for t in batch)
        counts = feed.counts()
        assert counts["flight/taken"] == (step + 1) * PER_STEP
        assert counts["flight/submitted"] == len(rollouts.submitted)
        assert counts["flight/submitted"] == sum(counts[f"flight/{n}"] for n in ("taken", "dropped", "groups"))
        assert counts["flight/groups"] <= staleness * PER_STEP, "never more than k batches ahead"
        rollouts.version += 1
    assert sorted(seen) == sorted(f"{step}.{i}" for step in range(steps) for i in range(PER_STEP))


def test_a_long_group_is_carried_over_until_its_last_step() -> None:
    """Group 1 is never the first to get ready; the steps before its last one do not wait for it."""
    rollouts = Rollouts(lambda playing: [n for n in playing if n != 1])
    feed = GroupFeed(rollouts, source(4, 2), 0)  # type: ignore[arg-type]
    batches = []
    for step in range(4):
        batches.append(check(feed.next(step)))
        rollouts.version += 1
    assert "0.1" not in batches[0] + batches[1]
    assert "0.1" in batches[2]
    assert sorted(p for batch in batches for p in batch) == sorted(
        f"{s}.{i}" for s in range(4) for i in range(PER_STEP)
    )


def test_more_long_groups_than_a_step_takes_are_not_left_to_one_step() -> None:
    """Six groups are due with step 1: a step that trains on three cannot wait with all of them until then."""
    rollouts = Rollouts(lambda playing: [n for n in playing if n >= 6] or playing)
    feed = GroupFeed(rollouts, source(5, 1), 0)  # type: ignore[arg-type]
    for step in range(5):
        assert all(step - int(t.info["version"]) <= 1 for t in feed.next(step))
        rollouts.version += 1


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_batches_ahead_are_of_the_weights_so_many_steps_before(staleness: int) -> None:
    rollouts = Rollouts(lambda playing: playing)
    feed = StepFeed(rollouts, source(6, staleness, bound=True), 0)  # type: ignore[arg-type]
    for step in range(6):
        batch = feed.next(step)
        assert check(batch) == [f"{step}.{i}" for i in range(PER_STEP)]
        assert {t.info["version"] for t in batch} == {max(0, step - staleness)}
        assert feed.counts()["flight/groups"] == PER_STEP * min(staleness, 5 - step)
        rollouts.version += 1
    assert rollouts.submitted == list(range(6)), "nothing beyond the last step"


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("stop", range(1, 5))
def test_a_checkpoint_keeps_the_batches_in_flight(staleness: int, stop: int) -> None:
    rollouts = Rollouts(lambda playing: playing)
    feed = StepFeed(rollouts, source(5, staleness, bound=True), 0)  # type: ignore[arg-type]
    for step in range(5):
        if step == stop:
            flight = feed.flight()
            assert sorted(flight.batches) == list(range(step, min(step + staleness, 5)))
            rollouts.playing = {}
            feed = StepFeed(rollouts, source(5, staleness, bound=True), step, flight)  # type: ignore[arg-type]
        batch = feed.next(step)
        assert {t.info["version"] for t in batch} == {max(0, step - staleness)}
        rollouts.version += 1


def test_what_does_not_belong_to_the_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match="step 3"):
        StepFeed(Rollouts(list), source(9, 2), 3, Flight(batches={4: []}))  # type: ignore[arg-type]
    for flight in (Flight(groups=(9, 9), next_group=11), Flight(groups=(9,), next_group=12)):
        with pytest.raises(CheckpointError, match="in flight"):
            GroupFeed(Rollouts(list), source(9, 2), 3, flight)  # type: ignore[arg-type]


def test_guidance_of_the_wider_plan_is_left_out_of_a_mixed_batch() -> None:
    def rows(width: int) -> GuidanceRows:
        empty = np.zeros((1, width), np.uint8)
        return GuidanceRows(empty, empty, f"plan of {width}")

    rollouts = Rollouts(lambda playing: playing)
    feed = GroupFeed(rollouts, source(1, 0), 0)  # type: ignore[arg-type]
    taken = rollouts.take

    def mixed(number: int) -> list[Trajectory]:
        return [replace(t, guidance=rows(2 if number == 1 else 9)) for t in taken(number)]

    rollouts.take = mixed  # type: ignore[method-assign]
    batch = feed.next(0)
    assert [None if t.guidance is None else t.guidance.layout for t in batch] == [None] * 2 + ["plan of 2"] * 2 + [
        None
    ] * 2
