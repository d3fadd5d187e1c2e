"""Retention: old versions go, readers at work keep what they need, and nothing that HEAD reaches is ever deleted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_case import OPTIONS, Trainer, arrays_target, same, zeros_like

from halfbyte.errors import RefitError
from halfbyte.refit.errors import CorruptError, LayoutError, ObjectMissingError
from halfbyte.refit.head import read_catalogue, read_head
from halfbyte.refit.keys import DOOMED, manifest_key, object_key
from halfbyte.refit.leases import Lease, drop_lease, read_leases, write_lease
from halfbyte.refit.manifest import Manifest
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.retention import Retention, collect, prune
from halfbyte.refit.route import find_route
from halfbyte.refit.store import FilesystemStore, MemoryStore
from halfbyte.refit.store.faults import Crash, Fault, FaultyStore, Operation
from halfbyte.refit.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("one_thread")

KEEP = Retention(versions=4, grace=100)


class Clock:
    """The store's clock."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def filled(versions: int = 20, size: int = 8) -> tuple[MemoryStore, Clock, Trainer, Publisher, dict[int, Any]]:
    clock, trainer = Clock(), Trainer(size=size)
    store = MemoryStore(clock)
    publisher = Publisher(store, "run", options=OPTIONS)
    kept: dict[int, Any] = {}
    for version in range(versions):
        publisher.publish(trainer.weights)
        kept[version] = trainer.copy()
        trainer.step()
        clock.now += 1
    return store, clock, trainer, publisher, kept


def keys(store: Any) -> set[str]:
    return {entry.key for prefix in ("objects", "manifests", "catalogues") for entry in store.list(prefix)}


def new_reader(store: Any, weights: Any) -> bool:
    target = arrays_target(zeros_like(weights))
    Subscriber(store, target, name="new").refit()
    return same(target.arrays, weights)


def test_old_versions_go_after_the_grace_period_and_readers_still_arrive() -> None:
    store, clock, _, _, kept = filled()
    before = keys(store)
    first = collect(store, KEEP)
    assert (first.deleted, keys(store) >= before) == (0, True)
    assert first.dropped_steps > 10
    assert first.doomed > 20
    clock.now += 99
    assert collect(store, KEEP).deleted == 0
    clock.now += 2
    done = collect(store, KEEP)
    assert done.deleted == first.doomed
    assert done.freed_bytes > 10_000
    assert len(keys(store)) < len(before) / 2
    assert new_reader(store, kept[19])
    for behind in range(1, 5):
        target = arrays_target(kept[19 - behind])
        refit = Subscriber(store, target).refit()
        assert "full" not in refit.kinds
        assert same(target.arrays, kept[19])
    assert collect(store, KEEP).deleted == 0


def test_publishing_goes_on_between_and_during_collections() -> None:
    store, clock, trainer, publisher, _ = filled(5)
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    for _ in range(25):
        trainer.step()
        publisher.publish(trainer.weights)
        collect(store, KEEP)
        clock.now += 60
        subscriber.refit()
        assert same(target.arrays, trainer.weights)
    assert len(read_catalogue(store, publisher.head).edges) < 30
    assert new_reader(store, trainer.weights)


def test_a_rewind_within_the_kept_versions_still_works_after_a_collection() -> None:
    store, clock, _, publisher, kept = filled()
    collect(store, KEEP)
    clock.now += 200
    collect(store, KEEP)
    for version in (19, 17, 16):
        publisher.rewind(version)
        assert new_reader(store, kept[version])


def test_skyrl_1902_a_reader_of_a_pruned_chain_takes_another_way() -> None:
    store, clock, _, _, kept = filled()
    target = arrays_target(kept[2])
    subscriber = Subscriber(store, target)
    collect(store, KEEP)
    clock.now += 200
    collect(store, KEEP)
    assert subscriber.refit().kinds[0] == "full"
    assert same(target.arrays, kept[19])


def test_a_slow_reader_keeps_what_it_fetches_during_collections() -> None:
    """While the reader fetches, versions are published and collected at every one of its reads."""
    store, clock, trainer, publisher, kept = filled()
    at_work = [False]

    def plan(op: Operation) -> Fault | None:
        if op.kind == "get" and op.key.startswith("objects/") and not at_work[0]:
            at_work[0] = True
            for _ in range(12):
                trainer.step()
                publisher.publish(trainer.weights)
                clock.now += 60
                collect(store, KEEP)
            at_work[0] = False
        return None

    target = arrays_target(kept[15])
    slow = FaultyStore(store, plan)
    subscriber = Subscriber(slow, target, name="slow")
    refit = subscriber.refit()
    assert refit.target.version == 19
    assert same(target.arrays, kept[19])
    at_work[0] = True
    subscriber.refit()
    assert same(target.arrays, trainer.weights)
    clock.now += 200
    collect(store, KEEP)
    clock.now += 200
    collect(store, KEEP)
    assert new_reader(store, trainer.weights)


def test_a_reader_without_a_lease_that_lost_its_object_plans_again() -> None:
    """Over HTTP nothing can be written: the next look at HEAD finds another way."""
    store, clock, trainer, publisher, kept = filled()
    fired = [False]

    def plan(op: Operation) -> Fault | None:
        if op.key.startswith("leases/"):
            return Fault(403)
        if op.kind == "get" and op.key.startswith("objects/") and not fired[0]:
            fired[0] = True
            for _ in range(12):
                trainer.step()
                publisher.publish(trainer.weights)
                clock.now += 60
                collect(store, KEEP)
        return None

    target = arrays_target(kept[15])
    refit = Subscriber(FaultyStore(store, plan), target).refit()
    assert refit.target.version == publisher.head.version
    assert same(target.arrays, trainer.weights)


def test_leases_lapse_by_the_clock_of_the_store() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    write_lease(store, Lease("a", ("a" * 64,), seconds=10))
    write_lease(store, Lease("b", (), ("b" * 64,), seconds=1000))
    clock.now += 11
    assert [lease.reader for lease in read_leases(store, clock.now)] == ["b"]
    drop_lease(store, "b")
    assert read_leases(store, clock.now) == []
    with pytest.raises(LayoutError, match="not a reader's name"):
        write_lease(store, Lease("../x"))


@pytest.mark.parametrize(
    "lease",
    [
        b"{",
        b"[" * 100_000,
        b'{"keys":[],"manifests":[],"seconds":Infinity}',
        b'{"keys":[],"manifests":[],"seconds":-1}',
    ],
)
def test_a_lease_that_cannot_be_read_stops_the_collection(lease: bytes) -> None:
    store, clock, _, _, _ = filled()
    collect(store, KEEP)
    clock.now += 200
    store.put("leases/broken.json", lease)
    before = keys(store)
    with pytest.raises(CorruptError, match="not a lease"):
        collect(store, KEEP)
    assert keys(store) == before


def test_a_damaged_manifest_stops_the_collection() -> None:
    store, _, _, publisher, _ = filled()
    key = manifest_key(publisher.head.manifest)
    store.put(key, store.get(key)[:-1])
    before = keys(store)
    with pytest.raises(CorruptError, match="nothing is deleted"):
        collect(store, KEEP)
    assert keys(store) >= before


def test_objects_of_a_publication_in_progress_are_not_collected() -> None:
    """A publisher that takes longer than the grace period between its objects and HEAD."""
    store, clock, trainer, _, _ = filled()

    def plan(op: Operation) -> Fault | None:
        if op.kind == "swap" and op.number > 5:
            for _ in range(3):
                clock.now += 150
                collect(store, KEEP)
        return None

    trainer.step()
    publisher = Publisher(FaultyStore(store, plan), "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    assert new_reader(store, trainer.weights)


def test_a_collection_killed_at_every_operation_leaves_a_whole_store() -> None:
    first, first_clock, _, publisher, kept = filled(8, size=5)
    collect(first, KEEP)
    first_clock.now += 200
    publisher.publish(kept[7])

    def prepared() -> tuple[MemoryStore, Clock, dict[int, Any]]:
        clock = Clock()
        clock.now = first_clock.now
        store = MemoryStore(clock)
        store._objects, store._writes = dict(first._objects), first._writes
        return store, clock, kept

    counting = FaultyStore(prepared()[0])
    collect(counting, KEEP)
    for k in range(len(counting.operations)):
        store, clock, kept = prepared()
        with pytest.raises(Crash):
            collect(FaultyStore(store, lambda op, k=k: Fault("crash") if op.number == k else None), KEEP)
        assert new_reader(store, kept[7]), k
        clock.now += 200
        collect(store, KEEP)
        clock.now += 200
        collect(store, KEEP)
        assert new_reader(store, kept[7]), k
        for edge in read_catalogue(store, read_head(store)[0]).edges:
            manifest = Manifest.from_bytes(store.get(manifest_key(edge.manifest)))
            for ref in manifest.objects:
                assert len(store.get(object_key(ref.digest))) == ref.size
    assert len(counting.operations) > 40


def test_two_collections_at_once(tmp_path: Path) -> None:
    store, clock, _, _, kept = filled(10)
    collect(store, KEEP)
    clock.now += 200
    nested = [False]

    def plan(op: Operation) -> Fault | None:
        if not nested[0] and op.kind == "delete":
            nested[0] = True
            collect(store, KEEP)
        return None

    collect(FaultyStore(store, plan), KEEP)
    assert nested[0]
    assert new_reader(store, kept[9])


def test_a_lease_that_comes_while_doomed_keys_are_chosen_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock, _, _, _ = filled()
    collect(store, KEEP)
    clock.now += 200
    doomed = tuple(sorted(json.loads(store.get(DOOMED))))
    looks, listing = [], store.list

    def list_(prefix: str) -> Any:
        if prefix == "leases":
            looks.append(prefix)
            if len(looks) == 2:
                write_lease(store, Lease("late", keys=doomed))
        return listing(prefix)

    monkeypatch.setattr(store, "list", list_)
    assert collect(store, KEEP).deleted == 0
    assert set(doomed) <= keys(store)


@pytest.mark.parametrize("lost", ["not json", "[" * 100_000, "NaN", "Infinity"])
def test_a_list_of_doomed_keys_that_was_lost_only_costs_time(lost: str) -> None:
    store, clock, _, _, kept = filled()
    collect(store, KEEP)
    clock.now += 200
    table = dict.fromkeys(json.loads(store.get(DOOMED)), lost)
    store.put(DOOMED, (json.dumps(table).replace('"' + lost + '"', lost) if lost[0] in "NI" else lost).encode())
    assert collect(store, KEEP).deleted == 0
    clock.now += 200
    assert collect(store, KEEP).deleted > 0
    assert new_reader(store, kept[19])


def test_an_empty_store_and_an_empty_run() -> None:
    assert collect(MemoryStore()).deleted == 0
    store = MemoryStore()
    Publisher(store, "run")
    assert collect(store).deleted == 0


def test_a_folder_is_collected_too(tmp_path: Path) -> None:
    store, trainer = FilesystemStore(tmp_path), Trainer(size=6)
    publisher = Publisher(store, "run", options=OPTIONS)
    for _ in range(10):
        publisher.publish(trainer.weights)
        trainer.step()
    now = Retention(versions=2, grace=0)
    collect(store, now)
    assert collect(store, now).deleted > 0
    publisher.publish(trainer.weights)
    assert new_reader(store, trainer.weights)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(0, 12), st.sampled_from([0, 1, 3, 8]))
def test_pruning_keeps_a_way_from_every_kept_version(versions: int, keep: int, anchor_every: int) -> None:
    """Over real catalogues of many lengths: HEAD can be reached from nothing and from each of the last ``keep`` versions."""
    catalogue, head = _catalogue(anchor_every)
    last = versions - 1
    edges = tuple(e for e in catalogue.edges if e.version <= last)
    main = next(e for e in edges if e.version == last and e.kind != "skip" and (last == 0 or e.kind != "full"))
    head = replace(head, version=last, state=main.state, manifest=main.manifest)
    pruned = prune(replace(catalogue, edges=edges), head, keep)
    states = {e.version: e.state for e in edges}
    assert find_route(pruned, head, None) or last < 0
    for version in range(max(0, last - keep), last):
        route = find_route(pruned.keeping(lambda e: e.kind != "full"), head, (version, states[version]))
        assert route[0].parent == version
    assert head.manifest in {e.manifest for e in pruned.edges}


_catalogues: dict[int, Any] = {}


def _catalogue(anchor_every: int) -> Any:
    if anchor_every not in _catalogues:
        store, weights = MemoryStore(), {"a": np.arange(3000, dtype=np.float32)}
        publisher = Publisher(store, "run", options=replace(OPTIONS, anchor_every=anchor_every, anchor_chain=1e9))
        for _ in range(20):
            publisher.publish(weights)
            weights["a"][::99] += 1
        _catalogues[anchor_every] = (read_catalogue(store, publisher.head), publisher.head)
    return _catalogues[anchor_every]


def test_missing_for_good_is_an_error_that_leaves_the_target_alone() -> None:
    store, _, trainer, _, _ = filled(3)
    for entry in list(store.list("objects")):
        store.delete(entry.key)
    old = zeros_like(trainer.weights)
    target = arrays_target(old)
    with pytest.raises(ObjectMissingError):
        Subscriber(store, target).refit()
    assert same(target.arrays, old)
    with pytest.raises(RefitError):
        Publisher(store, "run", options=OPTIONS)
