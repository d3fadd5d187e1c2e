"""From a publisher through a store into a target: byte-equal, in few steps, prepared before the pause."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_case import OPTIONS, EngineHooks, Trainer, arrays_target, publish_versions, same, zeros_like

from halfbyte.refit.errors import (
    LayoutError,
)
from halfbyte.refit.head import Catalogue, Edge, Head, read_catalogue
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.route import bases_at, find_route, skip_parents
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.subscriber import Subscriber


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
