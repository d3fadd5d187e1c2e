"""HEAD and the catalogue are read strictly, and no name becomes a path."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_case import Trainer, arrays_target, publish_versions, same, zeros_like

from halfbyte.errors import RefitError
from halfbyte.refit.errors import (
    CorruptError,
    StoreConflictError,
    StoreUnavailableError,
)
from halfbyte.refit.head import Catalogue, Head, read_catalogue
from halfbyte.refit.keys import HEAD, catalogue_key, manifest_key, object_key
from halfbyte.refit.manifest import Manifest
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.store import MemoryStore, Retrying
from halfbyte.refit.store.faults import Fault, FaultyStore
from halfbyte.refit.subscriber import Subscriber

# ---- strictness of HEAD and the catalogue


def test_another_catalogue_in_the_place_of_the_one_that_head_names_is_refused(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 5)
    older = read_catalogue(store, publisher.head).keeping(lambda edge: edge.version < 3)
    store.put(catalogue_key(publisher.head.catalogue), older.to_bytes())
    with pytest.raises(CorruptError, match="digest that HEAD gives"):
        read_catalogue(store, publisher.head)


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
