"""The two ends disagree: another base, a lying catalogue, versions that go back, two publishers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refit_case import OPTIONS, EngineHooks, Trainer, arrays_target, publish_versions, same, zeros_like

from halfbyte.refit.errors import (
    CorruptError,
    FencedError,
    LayoutError,
    RewoundError,
    TargetError,
    WrongBaseError,
)
from halfbyte.refit.head import Catalogue, read_catalogue, read_head
from halfbyte.refit.keys import HEAD, catalogue_key, manifest_key
from halfbyte.refit.manifest import Manifest
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.store.faults import Fault, FaultyStore, Operation
from halfbyte.refit.subscriber import Subscriber

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
