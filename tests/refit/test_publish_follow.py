"""From a publisher through a store into a target: byte-equal, in few steps, prepared before the pause."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_case import OPTIONS, EngineHooks, Trainer, arrays_target, same, zeros_like

from halfbyte.errors import RefitError
from halfbyte.refit.errors import (
    CorruptError,
    FencedError,
    LayoutError,
    RewoundError,
    StoreConflictError,
    StoreUnavailableError,
    TargetError,
    WrongBaseError,
)
from halfbyte.refit.head import Catalogue, Edge, Head, read_catalogue, read_head
from halfbyte.refit.keys import HEAD, catalogue_key, manifest_key, object_key
from halfbyte.refit.manifest import Manifest, Signer
from halfbyte.refit.patch import Update
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.route import bases_at, find_route, skip_parents
from halfbyte.refit.store import MemoryStore, Retrying
from halfbyte.refit.store.faults import Fault, FaultyStore, Operation
from halfbyte.refit.subscriber import Subscriber


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def publish_versions(store: Any, trainer: Trainer, count: int, options: Any = OPTIONS) -> Publisher:
    publisher = Publisher(store, "run", options=options)
    for n in range(count):
        if n:
            trainer.step()
        publisher.publish(trainer.weights)
    return publisher


def test_every_version_arrives_byte_for_byte(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    hooks = EngineHooks()
    target = arrays_target(zeros_like(trainer.weights), hooks=hooks)
    subscriber = Subscriber(store, target)
    for version in range(20):
        done = publisher.publish(trainer.weights)
        refit = subscriber.refit()
        assert refit is not None
        assert (done.stamp.version, refit.target) == (version, done.stamp)
        assert same(target.arrays, trainer.weights)
        assert target.stamp() == done.stamp
        trainer.step()
    assert subscriber.refit() is None
    assert hooks.events == ["pause", "invalidate", "resume"] * 20
    assert hooks.stamp == done.stamp


def test_only_what_changed_is_shipped_and_written(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    target = arrays_target(trainer.weights)
    subscriber = Subscriber(store, target)
    assert subscriber.refit().changed == 0  # the bytes were there already
    before = trainer.copy()
    trainer.step(0.01)
    done = publisher.publish(trainer.weights)
    differ = sum(
        int((before[n].view(f"u{a.itemsize}") != a.view(f"u{a.itemsize}")).sum())
        for n, a in trainer.weights.items()
        if a.ndim
    )
    differ += 1  # the counter
    refit = subscriber.refit()
    assert done.kind == "delta"
    assert done.changed == refit.changed == differ
    assert refit.kinds == ("delta",)
    assert refit.fetched_bytes == done.bytes < trainer.bytes


def test_a_version_without_a_change_is_free(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 2, replace(OPTIONS, skip_levels=0))
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    objects = [*store.list("objects")]
    done = publisher.publish(trainer.weights)
    refit = subscriber.refit()
    assert (done.kind, done.changed) == ("noop", 0)
    assert [*store.list("objects")] == objects
    assert (refit.changed, refit.fetched_bytes, refit.target.version) == (0, done.bytes, 2)
    assert done.bytes < 2000


def test_verl_6974_a_dense_change_is_written_as_a_full_version(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 2)
    target = arrays_target(trainer.weights)
    subscriber = Subscriber(store, target)
    for array in trainer.weights.values():
        array[...] = np.frombuffer(trainer.random.bytes(array.nbytes), array.dtype).reshape(array.shape)
    done = publisher.publish(trainer.weights)
    assert done.kind == "full"
    assert done.bytes < 1.2 * trainer.bytes + 4000
    assert subscriber.refit().kinds == ("full",)
    assert same(target.arrays, trainer.weights)


def test_verl_7060_many_small_tensors_share_objects() -> None:
    store = MemoryStore()
    weights = {f"experts.{n}.weight": np.full((8,), n, np.float32) for n in range(500)}
    publisher = Publisher(store, "run")
    publisher.publish(weights)
    for array in weights.values():
        array[0] += 1
    publisher.publish(weights)
    assert len([*store.list("objects")]) == 2
    target = arrays_target({name: np.zeros_like(a) for name, a in weights.items()})
    Subscriber(store, target).refit()
    assert same(target.arrays, weights)


def test_structure_changes_are_versions_too(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 3)
    target = arrays_target(trainer.weights, make=lambda info, data: np.array(data))
    fixed = arrays_target(trainer.weights)
    subscriber, other = Subscriber(store, target), Subscriber(store, fixed, name="other")
    subscriber.refit(), other.refit()
    trainer.weights["lora.weight"] = np.ones((5, 3), np.float32)
    trainer.weights["norm.weight"] = np.ones((7, 2), np.float16)
    del trainer.weights["layers.1.codes"]
    trainer.step()
    old = {name: array.tobytes() for name, array in fixed.arrays.items()}
    assert publisher.publish(trainer.weights).kind == "delta"
    subscriber.refit()
    assert same(target.arrays, trainer.weights)
    assert target.infos()["norm.weight"].shape == (7, 2)
    with pytest.raises(LayoutError, match="fixed set"):
        other.refit()
    assert {name: array.tobytes() for name, array in fixed.arrays.items()} == old
    trainer.step()
    publisher.publish(trainer.weights)  # no skip spans the change
    subscriber.refit()
    assert same(target.arrays, trainer.weights)


# ---- many versions behind


@pytest.mark.parametrize("behind", [1, 2, 3, 5, 7, 8, 13, 21, 31])
def test_modelexpress_709_a_late_reader_takes_few_steps(behind: int) -> None:
    trainer, store = Trainer(size=20), MemoryStore()
    options = replace(OPTIONS, anchor_every=0, anchor_chain=1e9, skip_levels=5)
    publisher = publish_versions(store, trainer, 33 - behind, options)
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    for _ in range(behind):
        trainer.step()
        publisher.publish(trainer.weights)
    catalogue, head = read_catalogue(store, publisher.head), publisher.head
    without_full = catalogue.keeping(lambda e: e.kind != "full")
    route = find_route(without_full, head, bases_at(catalogue, subscriber.held.state))
    assert len(route) <= 2 * np.log2(behind) + 2
    refit = subscriber.refit()
    assert same(target.arrays, trainer.weights)
    assert len(refit.kinds) <= len(route)


def test_several_versions_are_folded_and_written_once(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1, replace(OPTIONS, skip_levels=0, anchor_every=0, anchor_chain=1e9))
    hooks = EngineHooks()
    target = arrays_target(trainer.weights, hooks=hooks)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    before = trainer.copy()
    for _ in range(6):
        trainer.step(0.02)
        publisher.publish(trainer.weights)
    refit = subscriber.refit()
    assert refit.kinds == ("delta",) * 6
    assert hooks.events.count("pause") == 2
    differ = sum(
        int((before[n].view(np.uint8) != a.view(np.uint8)).any()) for n, a in trainer.weights.items() if a.ndim
    )
    assert differ
    units = sum(
        int((before[n].reshape(-1).view(f"u{a.itemsize}") != a.reshape(-1).view(f"u{a.itemsize}")).sum())
        for n, a in trainer.weights.items()
    )
    assert refit.changed == units
    assert same(target.arrays, trainer.weights)


def test_a_new_reader_starts_from_the_newest_full_version() -> None:
    trainer, store = Trainer(size=20), MemoryStore()
    publish_versions(store, trainer, 20)
    target = arrays_target(zeros_like(trainer.weights))
    refit = Subscriber(store, target).refit()
    assert refit.kinds[0] == "full"
    assert len(refit.kinds) <= 4
    assert refit.fetched_bytes < 2.2 * trainer.bytes
    assert same(target.arrays, trainer.weights)


@given(st.integers(1, 5000), st.integers(0, 200), st.integers(1, 8))
def test_skips_start_where_powers_of_two_say(version: int, first: int, levels: int) -> None:
    parents = skip_parents(version, first, levels)
    brute = [version - 2**k for k in range(1, levels + 1) if version % 2**k == 0 and version - 2**k >= first]
    assert sorted(parents) == sorted(brute)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_routes_are_the_cheapest(seed: int) -> None:
    """Against all simple paths of a small random catalogue."""
    random = np.random.default_rng(seed)
    digest = [f"{n:064x}" for n in range(7)]
    edges = []
    for version in range(7):
        for parent in [None, *range(version)]:
            if random.random() < 0.5 or parent == version - 1 or (parent is None and version == 0):
                kind = "full" if parent is None else "delta"
                size = int(random.integers(1, 10**6))
                base = "" if parent is None else digest[parent]
                edges.append(Edge(version, digest[version], parent, base, kind, size, f"{len(edges) + 100:064x}"))
    head = Head("run", 1, 1, 6, digest[6], "a" * 64, "b" * 64, "x")
    start = int(random.integers(-1, 6))

    def best(node: int | None) -> float:
        if node == 6:
            return 0
        out = [e for e in edges if e.parent == node and (node is None or e.version > node)]
        return min((e.bytes + 65536 + best(e.version) for e in out), default=float("inf"))

    route = find_route(Catalogue("run", tuple(edges)), head, None if start < 0 else (start, digest[start]))
    cost = sum(e.bytes + 65536 for e in route)
    assert cost == min(best(None), best(start) if start >= 0 else float("inf"))
    assert route[-1].version == 6
    for one, two in pairwise(route):
        assert two.parent == one.version


# ---- the two ends disagree


def test_skyrl_1902_a_delta_never_meets_a_base_that_is_not_its_own(trainer: Trainer) -> None:
    """The catalogue is pruned of everything but the last delta; a reader elsewhere must not apply it."""
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 3)
    other = Trainer(seed=5)
    target = arrays_target(other.weights)
    subscriber = Subscriber(store, target)
    catalogue = read_catalogue(store, publisher.head)
    only = Catalogue("run", tuple(e for e in catalogue.edges if e.kind == "delta" and e.version == 2))
    store.put(catalogue_key(only.digest), only.to_bytes())
    head, tag = read_head(store)
    store.swap(HEAD, replace(head, serial=head.serial + 1, catalogue=only.digest).to_bytes(), tag)
    with pytest.raises(CorruptError, match="no way to version 2"):
        subscriber.refit()
    assert same(target.arrays, other.weights)


def test_a_catalogue_that_lies_about_the_base_is_found_out(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 3)
    other = Trainer(seed=5)
    target = arrays_target(other.weights)
    subscriber = Subscriber(store, target)
    state = subscriber.state(256).digest()
    catalogue = read_catalogue(store, publisher.head)
    last = next(e for e in catalogue.edges if e.kind == "delta" and e.version == 2)
    lie = Catalogue("run", (replace(last, base=state),))
    store.put(catalogue_key(lie.digest), lie.to_bytes())
    head, tag = read_head(store)
    store.swap(HEAD, replace(head, serial=head.serial + 1, catalogue=lie.digest).to_bytes(), tag)
    with pytest.raises(WrongBaseError, match="starts from another version"):
        subscriber.refit()
    assert same(target.arrays, other.weights)


def test_another_base_is_replaced_by_a_full_version(trainer: Trainer) -> None:
    store = MemoryStore()
    publish_versions(store, trainer, 3)
    target = arrays_target(Trainer(seed=5).weights)
    assert Subscriber(store, target).refit().kinds[0] == "full"
    assert same(target.arrays, trainer.weights)


def test_a_damaged_block_is_repaired_alone() -> None:
    trainer, store = Trainer(size=400), MemoryStore()
    publisher = publish_versions(store, trainer, 3)
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    target.arrays["layers.1.weight"].reshape(-1)[300] = 77.0  # block 1
    target.arrays["embed.weight"].reshape(-1)[0] = np.nan  # block 0
    assert subscriber.audit() == {"embed.weight": (0,), "layers.1.weight": (1,)}
    refit = subscriber.refit()  # HEAD has not moved
    assert refit.repaired_blocks == 2
    assert refit.fetched_bytes < 0.5 * trainer.bytes
    assert same(target.arrays, trainer.weights)
    target.arrays["layers.1.weight"].reshape(-1)[300] = 77.0
    trainer.step()
    publisher.publish(trainer.weights)
    refit = subscriber.refit()
    assert refit.repaired_blocks == 1
    assert refit.kinds == ("delta",)
    assert same(target.arrays, trainer.weights)


def test_a_write_between_check_and_commit_is_found_and_undone(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    target = arrays_target(trainer.weights, hooks=hooks)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step(0.2)
    publisher.publish(trainer.weights)

    def scribble() -> None:
        target.arrays["layers.1.codes"] += 1

    hooks.pause = scribble
    with pytest.raises(TargetError, match="values changed under the refit"):
        subscriber.refit()
    hooks.pause = lambda: None
    subscriber.refit()
    assert same(target.arrays, trainer.weights)


def test_stitch_53_a_manifest_that_lacks_names_is_refused(trainer: Trainer) -> None:
    """A delta whose manifest leaves a changed tensor out does not lead to the state it promises."""
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    target = arrays_target(trainer.weights)
    old = trainer.copy()
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step()
    publisher.publish(trainer.weights)
    head, tag = read_head(store)
    manifest = Manifest.from_bytes(store.get(manifest_key(head.manifest)))
    kept = [c for c in manifest.tensors if c.info.name != "embed.weight"]
    used = sorted({c.object for c in kept})
    forged = replace(
        manifest,
        tensors=tuple(replace(c, object=used.index(c.object)) for c in kept),
        objects=tuple(manifest.objects[n] for n in used),
    )
    store.put(manifest_key(forged.digest()), forged.to_bytes())
    catalogue = read_catalogue(store, head)
    edges = tuple(replace(e, manifest=forged.digest()) if e.version == 1 else e for e in catalogue.edges)
    lie = Catalogue("run", edges)
    store.put(catalogue_key(lie.digest), lie.to_bytes())
    store.swap(HEAD, replace(head, manifest=forged.digest(), catalogue=lie.digest).to_bytes(), tag)
    with pytest.raises(CorruptError, match="do not lead to the state"):
        subscriber.refit()
    assert same(target.arrays, old)


# ---- versions that go back


def test_a_replayed_head_is_refused(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 2)
    replayed = store.get(HEAD)
    trainer.step()
    publisher.publish(trainer.weights)
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    store.put(HEAD, replayed)
    with pytest.raises(RewoundError, match="it was at epoch 1, version 2"):
        subscriber.refit()
    assert same(target.arrays, trainer.weights)


def test_a_replayed_head_is_refused_after_a_restart(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 2)
    replayed = store.get(HEAD)
    trainer.step()
    publisher.publish(trainer.weights)
    Subscriber(store, arrays_target(zeros_like(trainer.weights)), folder=tmp_path).refit()
    store.put(HEAD, replayed)
    fresh = Subscriber(store, arrays_target(zeros_like(trainer.weights)), folder=tmp_path)
    with pytest.raises(RewoundError):
        fresh.refit()


def test_another_content_under_the_same_version_is_refused(trainer: Trainer) -> None:
    store, other = MemoryStore(), MemoryStore()
    publish_versions(store, trainer, 2)
    publish_versions(other, Trainer(seed=8), 2)
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    subscriber.store = subscriber.fetcher.store = other
    with pytest.raises(RewoundError, match="other content"):
        subscriber.refit()


def test_a_publisher_rewinds_in_a_new_epoch_and_readers_follow() -> None:
    trainer, store = Trainer(size=20), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    kept: list[dict[str, Any]] = []
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(store, target)
    for _ in range(7):
        publisher.publish(trainer.weights)
        kept.append(trainer.copy())
        trainer.step()
    subscriber.refit()
    with pytest.raises(RewoundError, match="version 4 after version 6"):
        publisher.publish(trainer.weights, version=4)
    publisher.rewind(3)
    assert (publisher.head.version, publisher.head.epoch) == (3, 2)
    subscriber.refit()
    assert same(target.arrays, kept[3])
    trainer.weights = {n: a.copy() for n, a in kept[3].items()}
    trainer.step(0.2)
    assert publisher.publish(trainer.weights).stamp.version == 4
    assert subscriber.refit().kinds == ("delta",)
    assert same(target.arrays, trainer.weights)
    with pytest.raises(RewoundError, match="version 6 is not in the store"):
        publisher.rewind(6)


def test_two_runs_do_not_mix(trainer: Trainer) -> None:
    store = MemoryStore()
    publish_versions(store, trainer, 1)
    with pytest.raises(LayoutError, match="holds run 'run'"):
        Publisher(store, "another")
    with pytest.raises(RewoundError, match="holds run 'run'"):
        Subscriber(store, arrays_target(trainer.weights), run="another").refit()
    with pytest.raises(LayoutError, match="not a run's name"):
        Publisher(store, "../up")


def test_an_empty_store_has_nothing_to_do(trainer: Trainer) -> None:
    store = MemoryStore()
    subscriber = Subscriber(store, arrays_target(trainer.weights))
    assert subscriber.refit() is None
    Publisher(store, "run")
    assert subscriber.refit() is None


# ---- two publishers


def test_the_older_of_two_publishers_is_fenced(trainer: Trainer) -> None:
    store = MemoryStore()
    first = publish_versions(store, trainer, 2)
    second = Publisher(store, "run", options=OPTIONS)
    trainer.step()
    with pytest.raises(FencedError, match="another publisher has taken over"):
        first.publish(trainer.weights)
    second.publish(trainer.weights)
    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(store, target).refit()
    assert same(target.arrays, trainer.weights)
    with pytest.raises(FencedError):
        first.publish(trainer.weights)


def test_of_two_publishers_that_open_at_once_one_wins(trainer: Trainer) -> None:
    memory = MemoryStore()
    publish_versions(memory, trainer, 1)
    inner: list[Publisher] = []

    def plan(op: Operation) -> Fault | None:
        if op.kind == "swap" and not inner:
            inner.append(Publisher(memory, "run", options=OPTIONS))
        return None

    with pytest.raises(FencedError, match="at the same moment"):
        Publisher(FaultyStore(memory, plan), "run", options=OPTIONS)
    trainer.step()
    inner[0].publish(trainer.weights)


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_on_head_is_settled_by_reading_it(trainer: Trainer, status: int) -> None:
    """Garbage collection swaps HEAD too; that is no other publisher."""
    seen: list[int] = []

    def plan(op: Operation) -> Fault | None:
        if op.kind == "swap" and op.number > 10 and not seen:
            seen.append(op.number)
            return Fault(status)
        return None

    store = FaultyStore(MemoryStore(), plan)
    publish_versions(store, trainer, 3)
    assert seen
    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(store, target).refit()
    assert same(target.arrays, trainer.weights)


# ---- a store that fails


def test_slime_2104_prime_rl_3386_the_baseline_waits_for_the_store(trainer: Trainer) -> None:
    """A publication fails; the next one still carries its changes."""
    broken = [False]
    store = FaultyStore(MemoryStore(), lambda op: Fault(503) if broken[0] and op.kind in ("put", "swap") else None)
    publisher = publish_versions(store, trainer, 2)
    target = arrays_target(trainer.weights)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step()
    broken[0] = True
    with pytest.raises(StoreUnavailableError):
        publisher.publish(trainer.weights)
    broken[0] = False
    trainer.step()
    done = publisher.publish(trainer.weights)
    assert done.stamp.version == 2
    subscriber.refit()
    assert same(target.arrays, trainer.weights)


def count_operations(trainer: Trainer) -> int:
    store = FaultyStore(MemoryStore())
    publish_versions(store, trainer, 3)
    return len(store.operations)


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (409, False),
        (503, True),
        *(
            pytest.param(error, after, marks=pytest.mark.slow)
            for error in (403, 409, 412, 503)
            for after in (False, True)
            if (error, after) not in ((409, False), (503, True))
        ),
    ],
)
def test_a_store_error_at_any_operation_loses_nothing(error: int, after: bool) -> None:
    """Every operation of three publications, each with every kind of error, before and after it happened."""
    for number in range(count_operations(Trainer(size=12))):
        trainer, memory = Trainer(size=12), MemoryStore()
        fault = Fault(error, after=after)
        store = FaultyStore(memory, lambda op, number=number, fault=fault: fault if op.number == number else None)
        publisher = None
        target = arrays_target(zeros_like(trainer.weights))
        subscriber = Subscriber(memory, target)
        for _ in range(4):
            try:
                publisher = publisher or Publisher(store, "run", options=OPTIONS)
                publisher.publish(trainer.weights)
            except FencedError:
                publisher = None  # an open whose answer was lost: open again
                continue
            except RefitError:
                pass
            else:
                subscriber.refit()
                assert same(target.arrays, trainer.weights), number
            trainer.step()
        publisher = publisher or Publisher(store, "run", options=OPTIONS)
        publisher.publish(trainer.weights)
        subscriber.refit()
        assert same(target.arrays, trainer.weights), number


def test_a_swap_whose_answer_was_lost_is_found_again(trainer: Trainer) -> None:
    lost = [False]
    memory = MemoryStore()
    store = FaultyStore(memory, lambda op: Fault(503, after=True) if lost[0] and op.kind == "swap" else None)
    publisher = publish_versions(store, trainer, 1)
    trainer.step()
    lost[0] = True
    with pytest.raises(StoreUnavailableError):
        publisher.publish(trainer.weights)
    lost[0] = False
    trainer.step()
    assert publisher.publish(trainer.weights).stamp.version == 2  # version 1 was published after all
    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(memory, target).refit()
    assert same(target.arrays, trainer.weights)


def test_a_store_that_damages_what_is_put_is_noticed(trainer: Trainer) -> None:
    flip = Fault(damage=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    times = [0]

    def plan(op: Operation) -> Fault | None:
        if op.kind == "put" and op.key.startswith("objects/") and times[0] < 1:
            times[0] += 1
            return flip
        return None

    store = FaultyStore(MemoryStore(), plan)
    publish_versions(store, trainer, 1)  # put again
    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(store, target).refit()
    assert same(target.arrays, trainer.weights)
    always = FaultyStore(MemoryStore(), lambda op: flip if op.kind == "put" and op.key.startswith("objects/") else None)
    with pytest.raises(CorruptError, match="other bytes than were put"):
        publish_versions(always, trainer, 1)


@pytest.mark.parametrize("prefix", ["objects/", "manifests/", "catalogues/", "HEAD"])
@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "grow", "zeros"])
def test_damaged_bytes_never_reach_the_target(trainer: Trainer, prefix: str, how: str) -> None:
    damage = {
        "flip": lambda d: d[: len(d) // 2] + bytes([d[len(d) // 2] ^ 4]) + d[len(d) // 2 + 1 :],
        "truncate": lambda d: d[: len(d) // 2],
        "empty": lambda d: b"",
        "grow": lambda d: d + b"x",
        "zeros": lambda d: bytes(len(d)),
    }[how]
    memory = MemoryStore()
    publisher = publish_versions(memory, trainer, 1)
    target = arrays_target(trainer.weights)
    broken = [False]
    store = FaultyStore(memory, lambda op: Fault(damage=damage) if broken[0] and op.key.startswith(prefix) else None)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    broken[0] = True
    with pytest.raises(RefitError):
        subscriber.refit()
    assert same(target.arrays, old)
    broken[0] = False
    subscriber.refit()
    assert same(target.arrays, trainer.weights)


def test_damage_on_the_way_is_fetched_again(trainer: Trainer) -> None:
    memory = MemoryStore()
    publish_versions(memory, trainer, 2)
    seen: set[str] = set()

    def plan(op: Operation) -> Fault | None:
        if op.kind == "get" and op.key.startswith(("objects/", "manifests/")) and op.key not in seen:
            seen.add(op.key)
            return Fault(damage=lambda d: d[:-1] + bytes([d[-1] ^ 1]))
        return None

    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(FaultyStore(memory, plan), target).refit()
    assert seen
    assert same(target.arrays, trainer.weights)


def test_a_key_is_demanded(trainer: Trainer) -> None:
    store, signer = MemoryStore(), Signer(b"k" * 32)
    publisher = Publisher(store, "run", options=OPTIONS, signer=signer)
    publisher.publish(trainer.weights)
    old = zeros_like(trainer.weights)
    target = arrays_target(old)
    with pytest.raises(RefitError, match="signature is wrong"):
        Subscriber(store, target, signer=Signer(b"x" * 32)).refit()
    assert same(target.arrays, old)
    Subscriber(store, target, signer=signer).refit()
    assert same(target.arrays, trainer.weights)
    unsigned = MemoryStore()
    publish_versions(unsigned, trainer, 1)
    with pytest.raises(RefitError, match="no signature"):
        Subscriber(unsigned, arrays_target(old), signer=signer).refit()


# ---- a target that fails


class Moody:
    """A target that fails once, at a named call, perhaps after half of its work."""

    survives = False

    def __init__(self, inner: Any, call: str, *, half: bool = False, error: BaseException | None = None) -> None:
        self.inner, self.call, self.half, self.left = inner, call, half, 1
        self.error = error or RuntimeError("out of memory")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name != self.call or not self.left:
            return found

        def fail(update: Update | None = None) -> None:
            self.left -= 1
            if self.half:
                found(replace(update, changes=update.changes[: len(update.changes) // 2]))
            raise self.error

        return fail


@pytest.mark.parametrize(("call", "half"), [("stage", False), ("pause", False), ("commit", False), ("commit", True)])
def test_a_target_that_fails_serves_its_old_version_and_takes_the_next(trainer: Trainer, call: str, half: bool) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    inner = arrays_target(trainer.weights, hooks=hooks)
    target = Moody(inner, call, half=half)
    target.left = 0
    subscriber = Subscriber(store, target)
    subscriber.refit()
    old, held = trainer.copy(), subscriber.held
    trainer.step()
    publisher.publish(trainer.weights)
    target.left = 1
    hooks.events.clear()
    with pytest.raises(TargetError, match="out of memory"):
        subscriber.refit()
    assert same(inner.arrays, old)
    assert inner.stamp() == subscriber.held == held
    assert hooks.events[-1:] in ([], ["resume"])
    refit = subscriber.refit()
    assert refit.kinds == ("delta",)
    assert same(inner.arrays, trainer.weights)


def test_modelexpress_713_a_failure_before_any_change_leaves_no_state_behind(trainer: Trainer) -> None:
    """Staging fails five times; nothing is stuck in "updating", and the engine never pauses."""
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    inner = arrays_target(trainer.weights, hooks=hooks)
    target = Moody(inner, "stage")
    target.left = 0
    subscriber = Subscriber(store, target)
    subscriber.refit()
    hooks.events.clear()
    trainer.step()
    publisher.publish(trainer.weights)
    target.left = 5
    for _ in range(5):
        with pytest.raises(TargetError):
            subscriber.refit()
    assert hooks.events == []
    assert subscriber.refit().kinds == ("delta",)


def test_nemo_rl_3274_a_failed_refit_leaves_nothing_to_be_applied_twice(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    inner = arrays_target(trainer.weights)
    target = Moody(inner, "commit", half=True)
    target.left = 0
    subscriber = Subscriber(store, target)
    subscriber.refit()
    for _ in range(3):
        trainer.step()
        publisher.publish(trainer.weights)
        target.left = 2
        for _ in range(2):
            with pytest.raises(TargetError):
                subscriber.refit()
        subscriber.refit()
        assert same(inner.arrays, trainer.weights)


def test_a_target_that_cannot_even_go_back_stays_paused_until_it_is_repaired(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    inner = arrays_target(trainer.weights, hooks=hooks)
    subscriber = Subscriber(store, inner)
    subscriber.refit()
    hooks.events.clear()
    trainer.step()
    publisher.publish(trainer.weights)
    broken = Moody(Moody(inner, "commit", half=True), "rollback")
    subscriber.target = broken
    with pytest.raises(TargetError, match="stays paused"):
        subscriber.refit()
    assert hooks.events == ["pause"]
    refit = subscriber.refit()
    assert refit.kinds == ("delta",)
    assert same(inner.arrays, trainer.weights)
    assert hooks.events[-1] == "resume"


def test_an_interrupt_in_the_pause_takes_the_update_back(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    inner = arrays_target(trainer.weights)
    subscriber = Subscriber(store, inner)
    subscriber.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    subscriber.target = Moody(inner, "commit", half=True, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        subscriber.refit()
    assert same(inner.arrays, old)
    subscriber.refit()
    assert same(inner.arrays, trainer.weights)


def test_everything_slow_happens_before_the_pause(trainer: Trainer) -> None:
    """Between pause and resume the store is not touched."""
    memory = MemoryStore()
    publisher = publish_versions(memory, trainer, 1)
    store = FaultyStore(memory)
    hooks = EngineHooks()
    target = arrays_target(trainer.weights, hooks=hooks)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step()
    publisher.publish(trainer.weights)
    marks: list[int] = []
    hooks.pause = lambda: marks.append(len(store.operations))
    hooks.resume = lambda: marks.append(len(store.operations))
    refit = subscriber.refit()
    assert marks[0] == marks[1] > 5
    assert 0 < refit.pause_seconds < refit.prepare_seconds


def test_following_goes_on_after_errors(trainer: Trainer) -> None:
    memory = MemoryStore()
    publisher = publish_versions(memory, trainer, 1)
    broken = [True]
    store = FaultyStore(memory, lambda op: Fault(503) if broken[0] else None)
    target = arrays_target(zeros_like(trainer.weights))
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            broken[0] = False
        if len(naps) == 3:
            trainer.step()
            publisher.publish(trainer.weights)

    subscriber = Subscriber(store, target, sleep=sleep)
    events = subscriber.follow(interval=0.5)
    assert [type(next(events)).__name__ for _ in range(4)] == ["StoreUnavailableError"] * 2 + ["Refit"] * 2
    assert same(target.arrays, trainer.weights)
    broken[0] = True
    with pytest.raises(StoreUnavailableError):
        list(subscriber.follow(patience=2))


# ---- ties


def test_miles_1235_a_tied_tensor_is_published_once() -> None:
    store = MemoryStore()
    embed = np.arange(600, dtype=np.float32).reshape(30, 20)
    weights = {"embed": embed, "lm_head": embed, "other": np.ones(5, np.float32)}
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(weights)
    tied = arrays_target({"embed": embed, "other": weights["other"]})
    copies = arrays_target(weights)  # holds both names apart
    head_only = arrays_target({"lm_head": embed, "other": weights["other"]})
    readers = [Subscriber(store, t, name=f"r{n}") for n, t in enumerate((tied, copies, head_only))]
    for _ in range(3):
        for reader in readers:
            reader.refit()
        embed[::3] += 1
        publisher.publish(weights)
    for reader in readers:
        reader.refit()
    manifest = Manifest.from_bytes(store.get(manifest_key(publisher.head.manifest)))
    assert [c.info.name for c in manifest.tensors] == ["embed"]
    assert manifest.aliases == {"lm_head": "embed"}
    for target, name in ((tied, "embed"), (copies, "embed"), (copies, "lm_head"), (head_only, "lm_head")):
        assert target.arrays[name].tobytes() == embed.tobytes()


def test_skyrl_a_tied_head_missing_in_the_base_is_an_error_without_a_policy() -> None:
    store = MemoryStore()
    embed = np.arange(60, dtype=np.float32)
    with pytest.raises(LayoutError, match="lm_head = embed"):
        Publisher(store, "run", options=replace(OPTIONS, ties="refuse")).publish({"embed": embed, "lm_head": embed})
    publisher = Publisher(store, "run", options=replace(OPTIONS, ties="separate"))
    publisher.publish({"embed": embed, "lm_head": embed})
    target = arrays_target({"embed": np.zeros(60, np.float32)})
    with pytest.raises(LayoutError, match="'lm_head'"):
        Subscriber(store, target).refit()
    assert not target.arrays["embed"].any()


def test_tensors_that_overlap_in_part_are_refused() -> None:
    fused = np.zeros((30, 4), np.float32)
    with pytest.raises(LayoutError, match="share a part of their memory"):
        Publisher(MemoryStore(), "run").publish({"qkv": fused, "q": fused[:10]})


def test_torch_ties_are_found_by_their_memory() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.zeros(8, 4)
    from halfbyte.refit.ties import find_ties

    assert find_ties({"a": weight, "b": torch.zeros(8, 4), "c": weight, "d": torch.nn.Parameter(weight)}) == {
        "c": "a",
        "d": "a",
    }


# ---- strictness of HEAD and the catalogue


def test_head_and_catalogue_survive_a_round_trip_and_nothing_else(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 9)
    head, catalogue = publisher.head, read_catalogue(store, publisher.head)
    assert Head.from_bytes(head.to_bytes()) == head
    assert Catalogue.from_bytes(catalogue.to_bytes()) == catalogue
    table = json.loads(head.to_bytes())
    for key, value in [
        ("version", -1), ("version", 1.5), ("version", True), ("state", "xyz"), ("manifest", ""), ("run", "../x"), ("epoch", "1"),
        ("format", "other"), ("catalogue", None), ("publisher", 3), ("extra", 1), ("serial", 2**63),
    ]:  # fmt: skip
        with pytest.raises(CorruptError):
            Head.from_bytes(json.dumps(table | {key: value}).encode())
    rows = json.loads(catalogue.to_bytes())
    for key, value in [
        ("version", -1), ("parent", 99), ("kind", "other"), ("bytes", "1"), ("manifest", "x"), ("state", 1), ("extra", 1),
    ]:  # fmt: skip
        bad = json.loads(json.dumps(rows))
        bad["edges"][-1][key] = value
        with pytest.raises(CorruptError):
            Catalogue.from_bytes(json.dumps(bad).encode())
    for data in (b"", b"[]", b"{", b"null", b"[" * 100_000, b"\xff\xfe"):
        with pytest.raises(CorruptError):
            Head.from_bytes(data)
        with pytest.raises(CorruptError):
            Catalogue.from_bytes(data)


@settings(max_examples=150)
@given(st.data())
def test_a_head_with_any_byte_changed_is_refused_or_reads_as_a_head(data: st.DataObject) -> None:
    head = Head("run", 3, 17, 9, "a" * 64, "b" * 64, "c" * 64, "host:1").to_bytes()
    place = data.draw(st.integers(0, len(head) - 1))
    changed = head[:place] + bytes([data.draw(st.integers(0, 255))]) + head[place + 1 :]
    try:
        again = Head.from_bytes(changed)
    except CorruptError:
        return
    assert Head.from_bytes(again.to_bytes()) == again


def test_modelexpress_716_no_name_becomes_a_path(trainer: Trainer) -> None:
    """Tensor names may hold anything printable, and every key in the store is a digest."""
    store = MemoryStore()
    weights = {
        "../../etc/passwd": np.ones(3, np.float32),
        "/absolute": np.ones(2, np.float32),
        "a/../b": np.ones(4, np.float32),
    }
    Publisher(store, "run").publish(weights)
    keys = [e.key for prefix in ("objects", "manifests", "catalogues") for e in store.list(prefix)]
    assert all(len(key.split("/")) == 2 and len(key.split("/")[1].split(".")[0]) == 64 for key in keys)
    target = arrays_target(zeros_like(weights))
    Subscriber(store, target).refit()
    assert same(target.arrays, weights)


def test_an_object_longer_than_its_manifest_says_is_not_read(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    manifest = Manifest.from_bytes(store.get(manifest_key(publisher.head.manifest)))
    store.put(object_key(manifest.objects[0].digest), bytes(10_000_000))
    with pytest.raises(RefitError, match="at most"):
        Subscriber(store, arrays_target(zeros_like(trainer.weights)), name="r").refit()


def test_losing_a_race_forever_ends_with_an_error() -> None:
    memory = MemoryStore()
    busy = [False]
    store = FaultyStore(memory, lambda op: Fault(412) if busy[0] and op.kind == "swap" else None)
    publisher = Publisher(store, "run")
    busy[0] = True
    with pytest.raises(StoreUnavailableError, match="faster than"):
        publisher.publish({"a": np.ones(3, np.float32)})
    busy[0] = False
    publisher.publish({"a": np.ones(3, np.float32)})
    with pytest.raises(StoreConflictError):
        memory.swap(HEAD, b"x", None)
    assert isinstance(Retrying(memory).get(HEAD), bytes)
