"""Many subscribers follow many versions while everything is killed at random, publisher and garbage collector included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashing_disk import CrashingDisk
from refit_case import Trainer, checkpoint, read_checkpoint, same, zeros_like

from halfbyte.errors import RefitError
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.adapters.folder import FolderTarget
from halfbyte.refit.errors import FencedError
from halfbyte.refit.patch import BlockPatch, write_block
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.retention import Retention, collect
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.store.faults import Crash, Fault, FaultyStore, Operation
from halfbyte.refit.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = PublishOptions(block=256, anchor_every=16, skip_levels=4, object_bytes=4000)
#: Errors that a store shows now and then.
ERRORS = (404, 409, 412, 500, 503, "crash")


class Chance:
    """A store's faults and a memory's death, at random with a seed."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random, self.rate = np.random.default_rng(seed), rate

    def fault(self, operation: Operation) -> Fault | None:
        if self.random.random() > self.rate:
            return None
        error = ERRORS[self.random.integers(len(ERRORS))]
        if operation.kind != "swap" and not operation.key.startswith("leases") and self.random.random() < 0.2:
            return Fault(damage=lambda data: data[: len(data) // 2])
        if error == 404 and operation.kind not in ("get", "get_range"):
            error = 503
        return Fault(error, after=bool(self.random.random() < 0.5))

    def dies(self, among: float = 1.0) -> bool:
        return bool(self.random.random() < self.rate / among)


class Mortal(ArraysTarget):
    """Shared memory whose process may die in the middle of a block."""

    def __init__(self, arrays: dict[str, Any], chance: Chance) -> None:
        super().__init__(arrays, survives=True)
        self.chance = chance

    def _write(self, change: Any, side: Any, *, checked: bool = False) -> None:
        data = self.arrays[change.name].reshape(-1).view(np.uint8)
        for block in change.blocks:
            if self.chance.dies(10):
                half = block.count // 2
                positions = None if block.positions is None else block.positions[:half]
                write_block(data, BlockPatch(block.begin, positions, block.old[:half], block.new[:half]), side)
                raise Crash("in a block")
            write_block(data, block, side, expect=("old",) if checked else ())


class Reader:
    """One subscriber, opened again whenever it dies. Odd ones keep a checkpoint folder, even ones shared memory."""

    def __init__(self, number: int, store: MemoryStore, first: dict[str, Any], root: Path, rate: float) -> None:
        self.store, self.chance = FaultyStore(store, lambda op: self.chance.fault(op)), Chance(1000 + number, rate)
        self.number, self.root, self.first = number, root, first
        self.arrays = zeros_like(first)
        self.subscriber: Subscriber | None = None
        self.deaths = self.errors = self.refits = 0

    def disk(self) -> CrashingDisk:
        return CrashingDisk(int(self.chance.random.integers(60)) if self.chance.dies() else None)

    def look(self) -> None:
        """One attempt, of whatever comes of it."""
        disk = None
        try:
            if self.subscriber is None:
                disk = self.disk()
                target: Any = Mortal(self.arrays, self.chance)
                if self.number % 2:
                    target = FolderTarget(self.root / "out", source=self.root / "source", disk=disk)
                name = f"reader{self.number}"
                self.subscriber = Subscriber(self.store, target, folder=self.root / "state", name=name, disk=disk)
            self.refits += self.subscriber.refit() is not None
        except Crash:
            self.deaths, self.subscriber = self.deaths + 1, None
        except RefitError:
            self.errors += 1

    def holds(self, weights: dict[str, Any]) -> bool:
        return same(read_checkpoint(self.root / "out" / "current") if self.number % 2 else self.arrays, weights)


def soak(tmp_path: Path, readers: int, versions: int, rate: float, size: int) -> dict[str, int]:
    """Run it; every reader has to end byte-equal to the trainer. What happened on the way."""
    clock = [1e9]
    memory, trainer, chance = MemoryStore(lambda: clock[0]), Trainer(size=size), Chance(7, rate)
    store = FaultyStore(memory, chance.fault)
    collector = FaultyStore(memory, Chance(8, rate / 20).fault)  # a collection takes hundreds of operations
    followers = []
    for number in range(readers):
        root = tmp_path / f"reader{number}"
        checkpoint(root / "source", trainer.weights)
        followers.append(Reader(number, memory, trainer.weights, root, rate))
    publisher: Publisher | None = None
    published = deaths = collections = 0
    while published < versions:
        assert deaths < 10 * versions
        trainer.step(0.02 if chance.random.random() > 0.05 else 0.0)
        clock[0] += 30
        for _ in range(20):
            try:
                publisher = publisher or Publisher(store, "run", options=OPTIONS)
                publisher.publish(trainer.weights)
                published += 1
                break
            except (Crash, FencedError):
                publisher, deaths = None, deaths + 1
            except RefitError:
                continue
        for follower in followers:
            for _ in range(int(chance.random.integers(0, 3))):
                follower.look()
        if chance.random.random() < 0.2:
            try:
                collect(collector, Retention(versions=24, grace=120))
                collections += 1
            except (Crash, RefitError):
                continue
    for follower in followers:
        follower.chance.rate = 0.0
        for _ in range(3):
            follower.look()
        assert follower.holds(trainer.weights), follower.number
        assert follower.subscriber is not None
        assert follower.subscriber.audit() == {}
    return {
        "versions": published,
        "publisher deaths": deaths,
        "collections": collections,
        "reader deaths": sum(f.deaths for f in followers),
        "reader errors": sum(f.errors for f in followers),
        "refits": sum(f.refits for f in followers),
        "objects left": len([*memory.list("objects")]),
    }


def test_three_subscribers_follow_twenty_versions_under_kills(tmp_path: Path) -> None:
    seen = soak(tmp_path, readers=3, versions=20, rate=0.1, size=10)
    assert seen["reader deaths"] > 1
    assert seen["reader errors"] > 3


@pytest.mark.slow
def test_eight_subscribers_follow_two_hundred_versions_under_kills(tmp_path: Path) -> None:
    seen = soak(tmp_path, readers=8, versions=200, rate=0.05, size=16)
    print(seen)
    assert seen["versions"] == 200
    assert seen["reader deaths"] > 40
    assert seen["publisher deaths"] > 10
    assert seen["collections"] > 10
    assert seen["refits"] > 400
    assert seen["objects left"] < 300
