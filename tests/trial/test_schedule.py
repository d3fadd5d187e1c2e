"""Counterbalancing, as properties of any schedule."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.trial.records import ARMS
from halfbyte.trial.schedule import make_schedule


@given(n=st.integers(1, 70), repeats=st.integers(1, 5), block_tasks=st.integers(0, 40), seed=st.integers(0, 2**31 - 1))
def test_every_arm_gets_every_task_in_mirrored_order(n: int, repeats: int, block_tasks: int, seed: int) -> None:
    tasks = [f"task {i}" for i in range(n)]
    blocks = make_schedule(tasks, repeats, block_tasks, seed)
    slots = [slot for block in blocks for slot in block.slots()]
    for arm in ARMS:
        counted = Counter((slot.task, slot.repeat) for slot in slots if slot.arm == arm)
        assert counted == {(task, repeat): 1 for task in tasks for repeat in range(repeats)}
    for number, block in enumerate(blocks):
        assert block.number == number
        whole, half = ("ABBA", "AB") if number % 2 == 0 else ("BAAB", "BA")
        assert block.order == whole or (block.order == half and block is blocks[-1])
        assert [slot.position for slot in block.slots()] == list(range(sum(len(s.slots) for s in block.segments)))
        for first, second in zip(block.segments[::2], block.segments[1::2]):  # a pair: one chunk, both arms
            assert [s.task for s in first.slots] == [s.task for s in second.slots]
            assert first.arm != second.arm
        if (
            len(block.segments) == 4 and n > 1
        ):  # B follows B, but with other tasks, or with other repeats of all of them
            inner = [{(s.task, s.repeat) for s in segment.slots} for segment in block.segments[1:3]]
            assert not inner[0] & inner[1]
        if block_tasks:
            assert max(len(segment.slots) for segment in block.segments) <= block_tasks
    assert blocks == make_schedule(tasks, repeats, block_tasks, seed)


def test_eight_blocks_by_default() -> None:
    tasks = [str(i) for i in range(100)]
    for repeats in (1, 2, 3, 5):
        blocks = make_schedule(tasks, repeats, 0, 0)
        assert len(blocks) >= 8
        assert {block.order for block in blocks} == {"ABBA", "BAAB"}


def test_the_seed_and_the_repeat_shuffle() -> None:
    tasks = [str(i) for i in range(40)]
    first, second = (
        [slot.task for block in make_schedule(tasks, 1, 0, seed) for slot in block.slots()] for seed in (0, 1)
    )
    assert first != second
    by_repeat: dict[int, list[str]] = {0: [], 1: []}
    for block in make_schedule(tasks, 2, 0, 0):
        for slot in block.slots():
            by_repeat[slot.repeat].append(slot.task)
    assert by_repeat[0] != by_repeat[1]


def test_a_repeat_of_a_lone_task_is_no_block_of_its_own() -> None:
    """vLLM #54227: in ABBA with one chunk the second B would find its prompts in the cache; chunks differ wherever they can."""
    blocks = make_schedule(["a", "b"], 1, 0, 0)
    assert [block.order for block in blocks] == ["ABBA"]
    assert [segment.slots[0].task for segment in blocks[0].segments][1] != blocks[0].segments[2].slots[0].task
