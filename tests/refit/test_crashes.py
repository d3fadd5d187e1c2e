"""Killed at every store operation, file operation and block write: the next attempt succeeds without a full reload.

Nothing here is sampled: a run without a crash counts the operations, then one run is made for each of them that dies there
(files written but not synced lose their second half, renames whose folder was not synced are undone), and a new process goes
on. The oracle is the trainer's own bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashing_disk import CrashingDisk
from refit_case import OPTIONS, Trainer, arrays_target, checkpoint, read_checkpoint, same, zeros_like

from halfbyte.refit.adapters import arrays as arrays_module
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.adapters.folder import FolderTarget
from halfbyte.refit.errors import RefitError
from halfbyte.refit.head import read_head
from halfbyte.refit.journal import Journal, update_from_bytes, update_to_bytes
from halfbyte.refit.patch import BlockPatch, write_block
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store import FilesystemStore, MemoryStore
from halfbyte.refit.store.faults import Crash, Fault, FaultyStore
from halfbyte.refit.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = PublishOptions(block=256, anchor_every=2, skip_levels=1, object_bytes=3000)
#: Without full versions after the first: whatever a recovery fetches, it has to get along with deltas.
DELTAS = replace(SMALL, anchor_every=0, anchor_chain=1e9)


def every_kill(count: Callable[[], int], attempt: Callable[[int], None]) -> int:
    """Run ``attempt`` for each operation that ``count`` counts; how many."""
    total = count()
    for k in range(total):
        attempt(k)
    return total


def publish(publisher: Publisher, trainer: Trainer, versions: int) -> None:
    for _ in range(versions):
        trainer.step()
        publisher.publish(trainer.weights)


# ---- the publisher


def test_a_publisher_killed_at_every_store_operation_loses_no_change() -> None:
    """slime #2104 and prime-rl #3386 for every moment of a publication, an anchor and a skip among them.

    (With one thread, dying after an operation is dying before the next.)
    """

    def count() -> int:
        store = FaultyStore(MemoryStore())
        publish(Publisher(store, "run", options=SMALL), Trainer(size=12), 3)
        return len(store.operations)

    def attempt(k: int) -> None:
        memory, trainer = MemoryStore(), Trainer(size=12)
        store = FaultyStore(memory, lambda op: Fault("crash") if op.number == k else None)
        reader = arrays_target(zeros_like(trainer.weights))
        with pytest.raises(Crash):
            publish(Publisher(store, "run", options=SMALL), trainer, 3)
        subscriber = Subscriber(memory, reader)
        subscriber.refit()
        whole = subscriber.held is not None
        publisher = Publisher(memory, "run", options=SMALL)
        assert publisher.publish(trainer.weights).kind in ("full", "delta", "noop")
        refit = subscriber.refit()
        assert same(reader.arrays, trainer.weights), k
        if whole and refit is not None:
            assert "full" not in refit.kinds or refit.fetched_bytes < 1.5 * trainer.bytes
        publish(publisher, trainer, 1)
        subscriber.refit()
        late = arrays_target(zeros_like(trainer.weights))
        Subscriber(memory, late, name="late").refit()
        assert same(reader.arrays, trainer.weights), k
        assert same(late.arrays, trainer.weights), k

    assert every_kill(count, attempt) > 40


def test_a_publisher_with_a_mapped_baseline_killed_at_every_file_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store and baseline lie on the disk that dies. The next publisher reads what is missing, never everything."""
    torn: list[int] = []  # block writes of the baseline, counted with the disk's operations

    def run(root: Path, disk: CrashingDisk, trainer: Trainer, versions: int) -> None:
        def tearing(data: Any, block: BlockPatch, side: Any, *, expect: Any = ()) -> None:
            half = block.count // 2
            disk._step("block", root, lambda: write_block(data, _first(block, half), side))
            write_block(data, block, side, expect=expect)
            torn.append(disk.count)

        monkeypatch.setattr(arrays_module, "write_block", tearing)
        store = FilesystemStore(root / "store", disk=disk)
        publish(Publisher(store, "run", options=DELTAS, baseline=root / "baseline", disk=disk), trainer, versions)

    def count() -> int:
        root = tmp_path / "count"
        first, trainer = CrashingDisk(), Trainer(size=10)
        run(root, first, trainer, 2)
        disk = CrashingDisk()
        run(root, disk, trainer, 1)
        assert torn
        return disk.count

    def attempt(k: int) -> None:
        root, trainer = tmp_path / f"at{k}", Trainer(size=10)
        run(root, CrashingDisk(), trainer, 2)
        with pytest.raises(Crash):
            run(root, CrashingDisk(k), trainer, 1)
        monkeypatch.setattr(arrays_module, "write_block", write_block)
        store, disk = FilesystemStore(root / "store", disk=CrashingDisk()), CrashingDisk()
        publisher = Publisher(store, "run", options=DELTAS, baseline=root / "baseline", disk=disk)
        assert publisher._follower.fetcher.fetched_bytes < trainer.bytes, k
        publisher.publish(trainer.weights)
        reader = arrays_target(zeros_like(trainer.weights))
        Subscriber(store, reader).refit()
        assert same(reader.arrays, trainer.weights), k
        assert same(
            {n: publisher._target.read(n) for n in trainer.weights}, {n: _bytes(a) for n, a in trainer.weights.items()}
        )

    assert every_kill(count, attempt) > 50


def _first(block: BlockPatch, count: int) -> BlockPatch:
    positions = None if block.positions is None else block.positions[:count]
    return BlockPatch(block.begin, positions, block.old[:count], block.new[:count])


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(array.tobytes(), np.uint8)


# ---- the subscriber, weights patched in place that outlive it


class TearingTarget(ArraysTarget):
    """Memory that outlives its process (shared, mapped): block ``at`` is written half, then the process dies."""

    def __init__(self, arrays: dict[str, Any], at: int | None = None) -> None:
        super().__init__(arrays, survives=True)
        self.at, self.count = at, 0

    def _write(self, change: Any, side: Any, *, checked: bool = False) -> None:
        for block in change.blocks:
            number, self.count = self.count, self.count + 1
            data = self.arrays[change.name].reshape(-1).view(np.uint8)
            if number == self.at:
                write_block(data, _first(block, block.count // 2), side)
                raise Crash(f"block {number}")
            write_block(data, block, side, expect=("old",) if checked else ())


def behind(versions: int = 3) -> tuple[MemoryStore, Trainer, dict[str, Any]]:
    """A store with some versions, and the weights of its first."""
    trainer, store = Trainer(size=40), MemoryStore()
    publisher = Publisher(store, "run", options=replace(DELTAS, read_back=False))
    publisher.publish(trainer.weights)
    first = trainer.copy()
    publish(publisher, trainer, versions)
    return store, trainer, first


def goes_on(store: Any, target: Any, folder: Path, trainer: Trainer, arrays: dict[str, Any]) -> None:
    """The next process: byte-equal, and no full version was fetched for it."""
    subscriber = Subscriber(store, target, folder=folder, disk=CrashingDisk())
    refit = subscriber.refit()
    assert same(arrays, trainer.weights)
    if refit is not None:
        assert "full" not in refit.kinds
        assert refit.fetched_bytes < trainer.bytes
    assert subscriber.held == read_head(store)[0].stamp
    assert subscriber.audit() == {}
    assert Journal(folder, CrashingDisk()).record.phase == "idle"


def test_modelexpress_686_killed_at_every_block_while_patching_in_place(tmp_path: Path) -> None:
    """State says old, bytes say new, old or half: the log completes them."""
    store, trainer, first = behind(1)

    def count() -> int:
        target = TearingTarget({n: a.copy() for n, a in first.items()})
        Subscriber(store, target, folder=tmp_path / "count").refit()
        return target.count

    def attempt(k: int) -> None:
        arrays, folder = {n: a.copy() for n, a in first.items()}, tmp_path / f"at{k}"
        with pytest.raises(Crash):
            Subscriber(store, TearingTarget(arrays, k), folder=folder, disk=CrashingDisk()).refit()
        assert Journal(folder, CrashingDisk()).record.phase == "committing"
        goes_on(store, TearingTarget(arrays), folder, trainer, arrays)

    assert every_kill(count, attempt) > 10


def test_killed_again_at_every_block_of_the_recovery(tmp_path: Path) -> None:
    store, trainer, first = behind(2)

    def begin(name: str) -> tuple[dict[str, Any], Path]:
        arrays, folder = {n: a.copy() for n, a in first.items()}, tmp_path / name
        with pytest.raises(Crash):
            Subscriber(store, TearingTarget(arrays, 4), folder=folder).refit()
        return arrays, folder

    def count() -> int:
        arrays, folder = begin("count")
        target = TearingTarget(arrays)
        Subscriber(store, target, folder=folder)
        return target.count

    def attempt(k: int) -> None:
        arrays, folder = begin(f"at{k}")
        with pytest.raises(Crash):
            Subscriber(store, TearingTarget(arrays, k), folder=folder)
        goes_on(store, TearingTarget(arrays), folder, trainer, arrays)

    assert every_kill(count, attempt) > 10


def test_a_subscriber_killed_at_every_file_operation_of_cache_and_journal(tmp_path: Path) -> None:
    store, trainer, first = behind()

    def count() -> int:
        disk = CrashingDisk()
        target = TearingTarget({n: a.copy() for n, a in first.items()})
        Subscriber(store, target, folder=tmp_path / "count", disk=disk).refit()
        return disk.count

    def attempt(k: int) -> None:
        arrays, folder = {n: a.copy() for n, a in first.items()}, tmp_path / f"at{k}"
        with pytest.raises(Crash):
            Subscriber(store, TearingTarget(arrays), folder=folder, disk=CrashingDisk(k)).refit()
        goes_on(store, TearingTarget(arrays), folder, trainer, arrays)

    assert every_kill(count, attempt) > 30


def test_a_subscriber_killed_at_every_store_operation(tmp_path: Path) -> None:
    store, trainer, first = behind()

    def count() -> int:
        faulty = FaultyStore(store)
        target = TearingTarget({n: a.copy() for n, a in first.items()})
        Subscriber(faulty, target, folder=tmp_path / "count").refit()
        return len(faulty.operations)

    def attempt(k: int) -> None:
        arrays, folder = {n: a.copy() for n, a in first.items()}, tmp_path / f"at{k}"
        faulty = FaultyStore(store, lambda op: Fault("crash") if op.number == k else None)
        with pytest.raises(Crash):
            Subscriber(faulty, TearingTarget(arrays), folder=folder, disk=CrashingDisk()).refit()
        goes_on(store, TearingTarget(arrays), folder, trainer, arrays)

    assert every_kill(count, attempt) >= 8


@pytest.mark.parametrize("error", [404, 409, 412, 503])
def test_a_subscriber_survives_any_error_at_every_store_operation(tmp_path: Path, error: int) -> None:
    store, trainer, first = behind()

    def count() -> int:
        faulty = FaultyStore(store)
        Subscriber(faulty, arrays_target(first)).refit()
        return len(faulty.operations)

    def attempt(k: int) -> None:
        target = arrays_target(first)
        faulty = FaultyStore(store, lambda op: Fault(error) if op.number == k else None)
        subscriber = Subscriber(faulty, target)
        try:
            subscriber.refit()
        except RefitError:
            assert same(target.arrays, first)
            subscriber.refit()
        assert same(target.arrays, trainer.weights)

    every_kill(count, attempt)


def test_objects_fetched_before_a_kill_are_not_fetched_again(tmp_path: Path) -> None:
    store, trainer, first = behind()
    arrays = {n: a.copy() for n, a in first.items()}
    with pytest.raises(Crash):
        Subscriber(store, TearingTarget(arrays, 0), folder=tmp_path).refit()
    counting = FaultyStore(store)
    publisher = Publisher(store, "run", options=SMALL)
    publish(publisher, trainer, 1)
    (tmp_path / "commit.log").rename(tmp_path / "kept")  # as if the kill had come just before the log
    Journal(tmp_path, CrashingDisk()).write(phase="idle", stamp=None, log="")
    arrays = {n: a.copy() for n, a in first.items()}
    Subscriber(counting, TearingTarget(arrays), folder=tmp_path).refit()
    again = [op.key for op in counting.operations if op.key.startswith("objects/")]
    assert 0 < len(again) < len({*again}) + 1
    assert same(arrays, trainer.weights)


def test_a_damaged_cache_is_fetched_again(tmp_path: Path) -> None:
    store, trainer, first = behind()
    arrays = {n: a.copy() for n, a in first.items()}
    with pytest.raises(Crash):
        Subscriber(store, TearingTarget(arrays, 0), folder=tmp_path).refit()
    for path in (tmp_path / "objects").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    goes_on(store, TearingTarget(arrays), tmp_path, trainer, arrays)


def test_weights_that_survive_need_a_journal() -> None:
    with pytest.raises(RefitError, match="need a journal"):
        Subscriber(MemoryStore(), TearingTarget({}))


def test_a_log_that_no_crash_can_have_damaged_is_an_error(tmp_path: Path) -> None:
    store, _, first = behind()
    arrays = {n: a.copy() for n, a in first.items()}
    with pytest.raises(Crash):
        Subscriber(store, TearingTarget(arrays, 3), folder=tmp_path).refit()
    log = tmp_path / "commit.log"
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(RefitError, match="log of an interrupted commit is damaged"):
        Subscriber(store, TearingTarget(arrays), folder=tmp_path)
    (tmp_path / "journal.json").write_text('{"format": "other"}')
    with pytest.raises(RefitError, match="not a subscriber's journal"):
        Subscriber(store, TearingTarget(arrays), folder=tmp_path)


def test_a_log_holds_an_update_exactly() -> None:
    """Also where tensors are added, removed and re-shaped."""
    trainer, store = Trainer(size=12), MemoryStore()
    publisher = Publisher(store, "run", options=SMALL)
    publisher.publish(trainer.weights)
    seen: list[Any] = []

    class Keeping(ArraysTarget):
        def stage(self, update: Any) -> None:
            seen.append(update)
            super().stage(update)

    target = Keeping(trainer.copy(), make=lambda info, data: np.array(data))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step(0.5)
    trainer.weights["new"] = np.arange(3, dtype=np.int16)
    del trainer.weights["norm.weight"]
    publisher.publish(trainer.weights)
    subscriber.refit()
    again = update_from_bytes(update_to_bytes(seen[-1]))
    assert (again.source, again.target) == (seen[-1].source, seen[-1].target)
    for one, two in zip(again.changes, seen[-1].changes, strict=True):
        assert (one.before, one.after) == (two.before, two.after)
        for name in ("old", "new"):
            a, b = getattr(one, name), getattr(two, name)
            assert (a is None) == (b is None)
            assert a is None or a.tobytes() == np.asarray(b).tobytes()
        for x, y in zip(one.blocks, two.blocks, strict=True):
            assert x.begin == y.begin
            assert np.array_equal(x.old, y.old)
            assert np.array_equal(x.new, y.new)
            assert (x.positions is None) == (y.positions is None)
            assert x.positions is None or np.array_equal(x.positions, y.positions)


# ---- the subscriber, a checkpoint folder


def test_a_folder_killed_at_every_file_operation_always_shows_a_whole_version(tmp_path: Path) -> None:
    store, trainer, first = behind(1)
    source = checkpoint(tmp_path / "source", first)

    def count() -> int:
        disk = CrashingDisk()
        target = FolderTarget(tmp_path / "count" / "out", source=source, disk=disk)
        Subscriber(store, target, folder=tmp_path / "count" / "state", disk=disk).refit()
        return disk.count

    def attempt(k: int) -> None:
        root, disk = tmp_path / f"at{k}" / "out", CrashingDisk(k)
        folder = tmp_path / f"at{k}" / "state"
        with pytest.raises(Crash):
            Subscriber(store, FolderTarget(root, source=source, disk=disk), folder=folder, disk=disk).refit()
        disk.clean()
        if (root / "current").is_symlink():
            found = read_checkpoint(root / "current")
            assert same(found, first) or same(found, trainer.weights), k
        target = FolderTarget(root, source=source, disk=CrashingDisk())
        refit = Subscriber(store, target, folder=folder, disk=CrashingDisk()).refit()
        assert refit is None or "full" not in refit.kinds
        assert same(read_checkpoint(root / "current"), trainer.weights), k
        assert same(read_checkpoint(source), first), k
        assert len(list((root / "versions").iterdir())) <= 2, k

    assert every_kill(count, attempt) > 40


def test_default_options_have_blocks_of_a_million() -> None:
    assert PublishOptions().block == 1 << 20
    assert OPTIONS.block == 256
