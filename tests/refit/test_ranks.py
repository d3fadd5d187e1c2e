"""Ranks commit together or not at all, whichever of them fails and when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashing_disk import CrashingDisk
from refit_case import OPTIONS, EngineHooks, Trainer, arrays_target, same

from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.errors import CorruptError, RefitError, StoreUnavailableError
from halfbyte.refit.patch import write_block
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.ranks import StoreVotes
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.store.faults import Crash, Fault, FaultyStore
from halfbyte.refit.subscriber import Subscriber

SIZE = 4


class Rank(ArraysTarget):
    """A rank that may fail (or die) in one of its calls, half-way."""

    def __init__(
        self, arrays: dict[str, Any], hooks: EngineHooks, fail: str = "", error: BaseException | None = None
    ) -> None:
        super().__init__({n: a.copy() for n, a in arrays.items()}, hooks=hooks, survives=True)
        self.fail, self.error = fail, error or RuntimeError("a broken link")

    def stage(self, update: Any) -> None:
        if self.fail == "stage":
            raise self.error
        super().stage(update)

    def commit(self, update: Any) -> None:
        if self.fail == "commit":
            for change in update.changes[:2]:
                for block in change.blocks:
                    write_block(self.arrays[change.name].reshape(-1).view(np.uint8), block, "new")
            raise self.error
        super().commit(update)
        if self.fail == "committed":
            raise self.error


class Group:
    """Four ranks in threads, each with its own journal; votes lie in a store of their own."""

    def __init__(self, store: Any, first: dict[str, Any], tmp_path: Path, timeout: float = 5.0) -> None:
        self.store, self.tmp_path, self.timeout = store, tmp_path, timeout
        self.votes = MemoryStore()
        self.hooks = [EngineHooks() for _ in range(SIZE)]
        self.targets = [Rank(first, hooks) for hooks in self.hooks]
        self.subscribers: list[Any] = [None] * SIZE

    def open(self, rank: int) -> Any:
        self.subscribers[rank] = Subscriber(
            self.store,
            self.targets[rank],
            folder=self.tmp_path / f"rank{rank}",
            name=f"rank{rank}",
            votes=StoreVotes(self.votes, "engine", rank, SIZE, timeout=self.timeout, interval=0.002),
            disk=CrashingDisk(),
        )
        return self.subscribers[rank]

    def refit(self, ranks: range = range(SIZE)) -> list[Any]:
        """All ranks at once: what each returned or raised."""
        results: list[Any] = [None] * SIZE

        def run(rank: int) -> None:
            try:
                results[rank] = (self.subscribers[rank] or self.open(rank)).refit()
            except (RefitError, Crash) as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def all_hold(self, weights: dict[str, Any]) -> bool:
        return all(same(target.arrays, weights) for target in self.targets)


@pytest.fixture
def case(tmp_path: Path) -> tuple[Trainer, Publisher, Group]:
    trainer, store = Trainer(size=12), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    group = Group(store, trainer.weights, tmp_path)
    assert all(not isinstance(r, BaseException) for r in group.refit())
    return trainer, publisher, group


def test_all_ranks_go_from_version_to_version(case: tuple[Trainer, Publisher, Group]) -> None:
    trainer, publisher, group = case
    for _ in range(5):
        trainer.step()
        publisher.publish(trainer.weights)
        results = group.refit()
        assert [r.target.version for r in results] == [publisher.head.version] * SIZE
        assert group.all_hold(trainer.weights)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("fail", ["stage", "commit", "committed"])
def test_one_of_four_ranks_fails_and_all_keep_the_old_version(
    case: tuple[Trainer, Publisher, Group], rank: int, fail: str
) -> None:
    trainer, publisher, group = case
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    group.targets[rank].fail = fail
    for hooks in group.hooks:
        hooks.events.clear()
    results = group.refit()
    assert all(isinstance(r, RefitError) for r in results), results
    assert group.all_hold(old)
    assert all(hooks.serving for hooks in group.hooks)
    assert all(("pause" in hooks.events) == (fail != "stage") for hooks in group.hooks)
    group.targets[rank].fail = ""
    results = group.refit()
    assert [r.kinds for r in results] == [("delta",)] * SIZE
    assert group.all_hold(trainer.weights)


@pytest.mark.parametrize("fail", ["stage", "commit", "committed"])
def test_one_of_four_ranks_dies_and_all_agree_when_it_comes_back(tmp_path: Path, fail: str) -> None:
    """The dead rank left half-written weights; the others went back in the meantime; so does it, by its log."""
    trainer, store = Trainer(size=12), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    group = Group(store, trainer.weights, tmp_path, timeout=0.6)
    group.timeout = 5.0
    group.refit()
    for subscriber in group.subscribers:
        subscriber.votes.timeout = 0.6
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    group.targets[2].fail, group.targets[2].error = fail, Crash("rank 2")
    results = group.refit()
    assert isinstance(results[2], Crash)
    assert all(isinstance(results[r], RefitError) for r in (0, 1, 3))
    assert all(same(group.targets[r].arrays, old) for r in (0, 1, 3))
    assert all(group.hooks[r].serving for r in (0, 1, 3))
    group.targets[2].fail = ""
    group.open(2)  # a new process
    assert same(group.targets[2].arrays, old)
    for subscriber in group.subscribers:
        subscriber.votes.timeout = 5.0
    results = group.refit()
    assert all(not isinstance(r, BaseException) for r in results), results
    assert group.all_hold(trainer.weights)


def test_a_rank_that_died_after_all_had_voted_completes(tmp_path: Path) -> None:
    """It dies between its vote and its journal: the verdict was yes, so it goes forward."""
    trainer, store = Trainer(size=12), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    group = Group(store, trainer.weights, tmp_path)
    group.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    group.hooks[1].resume = lambda: (_ for _ in ()).throw(Crash("rank 1"))  # type: ignore[method-assign]
    results = group.refit()
    assert isinstance(results[1], Crash)
    for name in ("embed.weight", "step"):  # as if these writes had not reached the disk
        group.targets[1].arrays[name][...] = old[name]
    group.targets[1].hooks = EngineHooks()
    group.open(1)
    assert group.all_hold(trainer.weights)
    assert group.subscribers[1].held == group.subscribers[0].held
    assert group.refit() == [None] * SIZE


def test_a_fresh_rank_catches_up_alone(case: tuple[Trainer, Publisher, Group], tmp_path: Path) -> None:
    trainer, publisher, group = case
    first = trainer.copy()
    for _ in range(3):
        trainer.step()
        publisher.publish(trainer.weights)
        group.refit()
    group.targets[3] = Rank(first, EngineHooks())
    group.tmp_path = tmp_path / "new"
    group.open(3)
    refit = group.subscribers[3].refit()  # the others need not vote
    assert refit.target.version == 3
    assert same(group.targets[3].arrays, trainer.weights)
    trainer.step()
    publisher.publish(trainer.weights)
    assert all(not isinstance(r, BaseException) for r in group.refit())
    assert group.all_hold(trainer.weights)


def test_ranks_that_see_different_heads_agree_on_one(case: tuple[Trainer, Publisher, Group]) -> None:
    """Rank 0 opens a round; a version is published; the others join the round instead of opening their own."""
    trainer, publisher, group = case
    trainer.step()
    publisher.publish(trainer.weights)
    wanted = trainer.copy()
    votes = group.subscribers[0].votes
    goal = votes.goal(group.subscribers[0].held, publisher.head)
    trainer.step()
    publisher.publish(trainer.weights)
    for rank in range(1, SIZE):
        assert group.subscribers[rank].votes.goal(group.subscribers[rank].held, publisher.head) == goal
    group.refit()
    assert group.all_hold(wanted)
    group.refit()
    assert group.all_hold(trainer.weights)


def test_a_verdict_is_given_once() -> None:
    store, now = MemoryStore(), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 1

    votes = [StoreVotes(store, "g", r, 3, timeout=5, clock=lambda: now[0], sleep=sleep) for r in range(3)]
    assert votes[0].agree("000001/prepared", True) is False  # the others are missed
    assert votes[1].agree("000001/prepared", True) is False  # too late
    assert votes[2].verdict("000001/prepared") is False
    assert votes[1].verdict("000002/committed") is False  # asked before anybody voted: closed
    assert votes[1].agree("000002/committed", True) is False
    assert votes[0].agree("/prepared", True) is True  # alone
    assert votes[0].agree("000003/prepared", False) is False


def test_votes_of_old_rounds_are_removed() -> None:
    trainer, store, votes = Trainer(size=6), MemoryStore(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    target = arrays_target(trainer.weights)
    subscriber = Subscriber(store, target, votes=StoreVotes(votes, "g", 0, 1))
    for _ in range(20):
        publisher.publish(trainer.weights)
        subscriber.refit()
        trainer.step()
    rounds = {entry.key.split("/")[2] for entry in votes.list("votes/g")} - {"goal"}
    assert len(rounds) == 16


def test_a_goal_that_is_none_is_an_error() -> None:
    votes = MemoryStore()
    votes.swap("votes/g/goal", b"{}", None)
    trainer, store = Trainer(size=6), MemoryStore()
    Publisher(store, "run", options=OPTIONS).publish(trainer.weights)
    with pytest.raises(CorruptError, match="not a goal"):
        Subscriber(store, arrays_target(trainer.weights), votes=StoreVotes(votes, "g", 0, 1)).refit()


def test_votes_that_do_not_answer_in_the_pause_are_asked_until_they_do() -> None:
    trainer, store, memory = Trainer(size=12), MemoryStore(), MemoryStore()
    down, failing = [0], [0]  # operations that fail now; how many will from the next pause on

    class Pausing(EngineHooks):
        def pause(self) -> None:
            super().pause()
            down[0] = failing[0]

    def plan(op: Any) -> Fault | None:
        down[0] -= down[0] > 0
        return Fault(503) if down[0] else None

    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    hooks = Pausing()
    target = arrays_target(trainer.weights, hooks=hooks)
    votes = StoreVotes(FaultyStore(memory, plan), "g", 0, 1)
    subscriber = Subscriber(store, target, votes=votes, sleep=lambda s: None)
    subscriber.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    failing[0] = 4
    with pytest.raises(RefitError, match="old version again"):  # its vote was lost, so the verdict is no
        subscriber.refit()
    assert hooks.serving
    assert same(target.arrays, old)
    failing[0] = 10**6
    with pytest.raises(StoreUnavailableError):
        subscriber.refit()
    assert not hooks.serving  # what the others decided is not known: it must not draw a token
    down[0] = failing[0] = 0
    subscriber.refit()  # first back to what the ranks last agreed on, block by block
    assert hooks.serving
    assert same(target.arrays, old)
    subscriber.refit()
    assert hooks.events[-1] == "resume"
    assert same(target.arrays, trainer.weights)
