"""Kernels of absolute patches against numpy, and tensors folded block by block against applying every delta in turn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import RefitError
from halfbyte.refit.blockwise import PART, TensorFold
from halfbyte.refit.codec import Profile, TensorDelta, apply, available, encode, kernels
from halfbyte.refit.codec.delta import ROW, _check_columns, _check_rows
from halfbyte.refit.patch import write_block

UNITS = (1, 2, 4, 8)


def some_bytes(rng: np.random.Generator, units: int, unit: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, 256, units * unit, np.uint8)


def changed(rng: np.random.Generator, data: np.ndarray[Any, Any], share: float, unit: int) -> np.ndarray[Any, Any]:
    after = data.copy()
    marks = rng.random(data.size // unit) < share
    after.reshape(-1, unit)[marks] ^= rng.integers(0, 4, (int(marks.sum()), unit), np.uint8)
    return after


@pytest.mark.parametrize("name", available())
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9000), st.sampled_from(UNITS), st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]), st.integers(0, 99))
def test_differences_are_those_of_numpy(name: str, count: int, unit: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = some_bytes(rng, count, unit)
    after = changed(rng, before, share, unit)
    old, new = (side.view(f"<u{unit}") for side in (before, after))
    where = [i for i in range(count) if old[i] != new[i]]
    found = kernels(name).differences(unit, before, after, len(where))
    assert found is not None
    assert found.positions.tolist() == where
    assert np.array_equal(found.old, old[where])
    assert np.array_equal(found.new, new[where])
    if where:
        assert kernels(name).differences(unit, before, after, len(where) - 1) is None


@pytest.mark.parametrize("name", available())
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.sampled_from(UNITS), st.integers(0, 99), st.data())
def test_values_are_put_all_or_not_at_all(name: str, count: int, unit: int, seed: int, data: st.DataObject) -> None:
    rng, use = np.random.default_rng(seed), kernels(name)
    before = some_bytes(rng, count, unit)
    after = changed(rng, before, 0.4, unit)
    found = use.differences(unit, before, after, count)
    assert found is not None
    work = before.copy()
    assert use.put(work, found.positions, found.new, found.old) == 0
    assert np.array_equal(work, after)
    assert use.put(work, found.positions, found.old) == 0
    assert np.array_equal(work, before)
    if not len(found.positions):
        return
    wrong = data.draw(st.lists(st.sampled_from(range(len(found.positions))), min_size=1, unique=True))
    work.view(found.old.dtype)[found.positions[wrong]] ^= np.array(0x80, found.old.dtype)
    torn = work.copy()
    assert use.put(work, found.positions, found.new, found.old) == len(wrong)
    assert np.array_equal(work, torn)
    short = before[: int(found.positions[-1]) * unit].copy()
    kept = short.copy()
    assert use.put(short, found.positions, found.new) == -1
    assert np.array_equal(short, kept)


def versions(dtype: str, unit: int, shares: list[float], seed: int, elements: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    found = [some_bytes(rng, elements, unit)]
    for share in shares:
        after = changed(rng, found[-1], share, unit)
        after[: after.size // 3] = found[-1][: after.size // 3]  # some blocks stay
        found.append(after)
    return found


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("profile", ["fast", "max"])
@pytest.mark.parametrize(("dtype", "unit"), [("BF16", 2), ("F4", 1), ("U8", 1), ("F32", 4), ("I64", 8)])
@pytest.mark.parametrize("shares", [[0.03], [0.02, 0.03], [0.9, 0.01], [1.0], [0.3, 0.0, 0.2]])
def test_a_fold_gives_what_applying_gives(
    monkeypatch: pytest.MonkeyPatch, name: str, profile: Profile, dtype: str, unit: int, shares: list[float]
) -> None:
    monkeypatch.setenv("HALFBYTE_KERNELS", name)
    block = 64
    steps = versions(dtype, unit, shares, 5, block * (PART + 3) + 10)
    deltas = [encode(dtype, a, b, profile, block=block) for a, b in pairwise(steps)]
    for start in steps:  # from every version of the chain: deltas that were applied before are passed over
        reads = []

        def read(start: Any = start, reads: list[int] = reads) -> Any:
            reads.append(1)
            return start

        fold = TensorFold(dtype, read, deltas, "here")
        done = [fold.part(number) for number in reversed(range(fold.parts))]
        assert done == [False] * (fold.parts - 1) + [True]
        assert len(reads) == 1
        by_hand = start.copy()
        damaged = [index for delta in deltas for index in apply(dtype, by_hand, delta).damaged]
        assert fold.damaged == bool(damaged)
        if not fold.damaged:
            work = start.copy()
            for patch in fold.patches():
                write_block(work, patch, "new", expect=("old",))
            assert np.array_equal(work, by_hand)
            for patch in fold.patches():
                write_block(work, patch, "old", expect=("new",))
            assert np.array_equal(work, start)


def test_a_fold_finds_damage_and_lies() -> None:
    before, after = versions("BF16", 2, [0.1], 1, 1000)
    delta = encode("BF16", before, after, block=64)
    torn = before.copy()
    torn[-1] ^= 1
    fold = TensorFold("BF16", lambda: torn, [delta], "here")
    assert [fold.part(n) for n in range(fold.parts)][-1]
    assert fold.damaged
    with pytest.raises(RefitError, match="elements"):
        TensorFold("BF16", lambda: before[:-2], [delta], "here").part(0)
    table = delta.table.copy()
    table["target"][-1] ^= 1
    lie = TensorDelta(delta.dtype, delta.elements, delta.block, table, delta.payload)
    with pytest.raises(RefitError, match="other weights than it promised"):
        TensorFold("BF16", lambda: before, [lie], "here").part(0)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["BF16", "F4"]), st.sampled_from([0.0, 0.05, 0.6]), st.sampled_from(["fast", "max"]), st.data())
def test_rows_and_columns_of_a_table_are_held_to_the_same_rules(
    dtype: str, share: float, profile: Profile, data: st.DataObject
) -> None:
    before, after = versions(dtype, 2, [share], 2, 300)
    delta = encode(dtype, before, after, profile, block=64)
    table = bytearray(delta.table.tobytes())
    for _ in range(data.draw(st.integers(0, 2))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.sampled_from([0, 1, 2, 5, 6, 255]))
    rows = np.frombuffer(bytes(table), ROW)
    lie = TensorDelta(delta.dtype, delta.elements, delta.block, rows, delta.payload)
    verdicts = []
    for check in (_check_rows, _check_columns):
        try:
            verdicts.append(check(lie, "here"))
        except RefitError as error:
            verdicts.append("stream" if "of streams" in str(error) else "refused")
    assert verdicts[0] == verdicts[1]
