"""Deltas encoded where parts of a tensor lie: the joined delta, and a version published from deltas, are those of the whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import RefitError
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.arrays import flat_bytes
from halfbyte.refit.codec import encode, joined, whole_blocks
from halfbyte.refit.errors import WrongBaseError
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store.memory import MemoryStore
from halfbyte.refit.subscriber import Subscriber

BLOCK = 64
OPTIONS = PublishOptions(block=BLOCK, skip_levels=0)


@given(
    data=st.data(),
    blocks=st.integers(1, 6),
    tail=st.integers(0, BLOCK - 1),
    share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_delta_of_parts_is_the_delta_of_the_whole(
    data: st.DataObject, blocks: int, tail: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    elements = blocks * BLOCK + tail
    old = rng.integers(0, 2**16, elements).astype(np.uint16)
    new = np.where(rng.random(elements) < share, old ^ 1, old).astype(np.uint16)
    cuts = sorted(data.draw(st.sets(st.integers(1, blocks), max_size=3)))
    edges = [0, *(cut * BLOCK for cut in cuts if cut * BLOCK < elements), elements]
    assert whole_blocks(edges, elements, BLOCK)
    parts = [encode("BF16", flat_bytes(old[a:b]), flat_bytes(new[a:b]), block=BLOCK) for a, b in pairwise(edges)]
    whole = encode("BF16", flat_bytes(old), flat_bytes(new), block=BLOCK)
    assert joined(parts).to_bytes() == whole.to_bytes()


def test_parts_that_end_within_a_block_are_refused() -> None:
    x = np.zeros(BLOCK + 1, np.uint16)
    part = encode("BF16", flat_bytes(x), flat_bytes(x), block=BLOCK)
    assert not whole_blocks([BLOCK + 1], 2 * BLOCK + 2, BLOCK)
    with pytest.raises(RefitError, match="within a block"):
        joined([part, part])
    other = encode("F32", flat_bytes(x.astype(np.float32)), flat_bytes(x.astype(np.float32)), block=BLOCK)
    with pytest.raises(RefitError, match="different dtypes"):
        joined([other, part])


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": rng.integers(0, 2**16, 300).astype(np.uint16) for i in range(3)}


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0], ids=["nothing", "a delta", "so much that all is written whole"])
def test_a_version_of_deltas_is_the_version_of_the_weights(share: float) -> None:
    """The same objects, digests and bytes as ``publish`` makes of the same weights."""
    stores = [MemoryStore(), MemoryStore()]
    one, two = (Publisher(store, "run", options=OPTIONS, clock=lambda: 0.0) for store in stores)
    before = weights(0)
    rng = np.random.default_rng(1)
    after = {
        n: np.where(rng.random(w.size) < share, rng.integers(0, 2**16, w.size), w).astype(np.uint16)
        for n, w in before.items()
    }
    for publisher in (one, two):
        publisher.publish(before)
    left = one.publish(after)
    right = two.publish_deltas({name: two.delta(name, array) for name, array in after.items()})
    assert (left.kind, left.bytes, left.payload_bytes, left.changed) == (
        right.kind,
        right.bytes,
        right.payload_bytes,
        right.changed,
    )
    assert left.stamp == right.stamp
    assert left.kind == {0.0: "noop", 0.02: "delta", 1.0: "full"}[share]
    keys = [{entry.key: store.get(entry.key) for entry in store.list("objects")} for store in stores]
    assert keys[0] == keys[1]
    held = {name: np.zeros_like(array) for name, array in after.items()}
    target = ArraysTarget(held)
    Subscriber(stores[1], target).refit()
    for name, array in after.items():
        assert target.read(name).tobytes() == array.tobytes()


def test_deltas_from_other_values_or_of_other_tensors_are_refused() -> None:
    publisher = Publisher(MemoryStore(), "run", options=OPTIONS)
    with pytest.raises(WrongBaseError, match="no version yet"):
        publisher.publish_deltas({})
    publisher.publish(weights(0))
    head = publisher.head
    other = {n: encode("U16", flat_bytes(weights(2)[n]), flat_bytes(w), block=BLOCK) for n, w in weights(3).items()}
    with pytest.raises(WrongBaseError, match="other values"):
        publisher.publish_deltas(other)
    few = weights(2)["w0"].copy()
    few[3] ^= 1
    wrong = encode("U16", flat_bytes(weights(2)["w0"]), flat_bytes(few), block=BLOCK)
    with pytest.raises(WrongBaseError):
        publisher.publish_deltas({"w0": wrong})
    with pytest.raises(WrongBaseError, match="nobody"):
        publisher.publish_deltas({"nobody": wrong})
    assert publisher.head == head
    assert publisher.publish(weights(3)).stamp.version == 1
