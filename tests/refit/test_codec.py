"""The codec: any bits go over and come back, on every instruction set alike; blocks are checked one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.bench.refit_traces import TRACES, AdamTrace
from halfbyte.refit.arrays import DTYPE_BITS, Bytes
from halfbyte.refit.codec import (
    BlockKind,
    BlockState,
    Coding,
    TensorDelta,
    apply,
    available,
    block_hash,
    block_hashes,
    block_span,
    commit,
    encode,
    kernels,
    prepare,
    revert,
)
from halfbyte.refit.codec.element import ELEMENTS
from halfbyte.refit.codec.integers import elements_of, rank, unrank
from halfbyte.refit.codec.kernels import Marked
from halfbyte.refit.errors import RefitError

NAMES = available()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bits_of(dtype: str, n: int, rng: np.random.Generator) -> Bytes:
    return rng.integers(0, 256, n * DTYPE_BITS[dtype] // 8, dtype=np.uint8)


def changed_at(dtype: str, base: Bytes, places: np.ndarray, rng: np.random.Generator, spread: int) -> Bytes:
    """Bytes in which the elements at ``places`` get other bits: near in value, or any."""
    element = ELEMENTS[dtype]
    elements = elements_of(element, base).copy()
    ones = (1 << element.bits) - 1
    for place in places.tolist():
        step = int(rng.integers(1, spread + 1)) * (1 if rng.random() < 0.5 else -1)
        moved = (int(rank(element, elements[place : place + 1])[0]) + step) & ones
        elements[place] = unrank(element, np.array([moved], elements.dtype))[0]
    if element.bits == 4:
        return np.asarray(elements[0::2] | elements[1::2] << 4, np.uint8)
    return elements.view(np.uint8).copy()


@pytest.mark.parametrize("dtype", ["F4", "U8", "BF16", "F32", "F64"])
def test_the_targets_hash_is_taken_on_the_way(name: str, dtype: str) -> None:
    rng, use, element = np.random.default_rng(5), kernels(name), ELEMENTS[dtype]
    around = [at + step for at in (241, 1024, 2048, 4096, 16384, 1 << 17) for step in (-64, -8, 0, 8, 64, 1016)]
    for size in [8, 16, 128, 240, 248, 256, *(size // 8 * 8 for size in around)]:
        base, target = bits_of(dtype, size * 8 // element.bits, rng), rng.integers(0, 256, size, dtype=np.uint8)
        target = np.where(rng.random(size) < 0.01, target, base)
        marked = use.sparse(element, base, target, size)
        assert marked is not None
        assert marked.target in (None, xxhash.xxh3_64_intdigest(target.tobytes()))
        assert size < 241 or name == "reference" or marked.target is not None


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(DTYPE_BITS)),
    st.integers(0, 700),
    st.sampled_from([0.0, 0.003, 0.05, 0.3, 0.6, 1.0]),
    st.sampled_from([1, 7, 100]),
    st.sampled_from(["fast", "max"]),
    st.integers(0, 2**32),
)
def test_any_change_goes_over_and_back_and_all_kernels_write_the_same_bytes(
    dtype: str, n: int, density: float, spread: int, profile: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n += n % 2
    base = bits_of(dtype, n, rng)
    places = np.flatnonzero(rng.random(n) < density)
    target = changed_at(dtype, base, places, rng, spread)
    first: bytes | None = None
    for kind in NAMES:
        use = kernels(kind)
        delta = encode(dtype, base, target, profile, block=256, with_kernels=use)  # type: ignore[arg-type]
        first = first or delta.to_bytes()
        assert delta.to_bytes() == first
        delta = TensorDelta.from_bytes(first)
        # The oracle: elements compared one by one.
        element = ELEMENTS[dtype]
        assert delta.changed == int((elements_of(element, base) != elements_of(element, target)).sum())
        data = base.copy()
        done = apply(dtype, data, delta, with_kernels=use)
        assert data.tobytes() == target.tobytes()
        assert not done.damaged
        again = apply(dtype, data, delta, with_kernels=use)
        assert not again.written
        assert again.already == done.written
        revert(data, done.undo, with_kernels=use)
        assert data.tobytes() == base.tobytes()
        commit(prepare(dtype, data, delta, with_kernels=use), data, with_kernels=use)
        assert data.tobytes() == target.tobytes()


def test_trl_low_byte_detector_and_float_comparison_every_pattern_of_16_bits_to_every_kind_of_other(name: str) -> None:
    """Sign flips, 0.0 to -0.0, NaN payloads, Inf, subnormals: all 65,536 patterns move to a neighbour, their negative, a NaN."""
    use, all_bits = kernels(name), np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("BF16", "F16", "U16", "I16"):
        for other in (
            all_bits ^ 0x8000,
            all_bits ^ 1,
            np.roll(all_bits, 1),
            np.full_like(all_bits, 0x7FC1),
            all_bits ^ 0xFFFF,
        ):
            base, target = all_bits.view(np.uint8), other.view(np.uint8)
            delta = encode(dtype, base, target, block=1 << 12, with_kernels=use)
            assert delta.changed == int((all_bits != other).sum())
            data = base.copy()
            undo = apply(dtype, data, delta, with_kernels=use).undo
            assert data.tobytes() == target.tobytes()
            revert(data, undo, with_kernels=use)
            assert data.tobytes() == base.tobytes()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL", "F4"])
def test_every_pair_of_8_bit_patterns(dtype: str, name: str) -> None:
    use = kernels(name)
    base, target = np.repeat(np.arange(256, dtype=np.uint8), 256), np.tile(np.arange(256, dtype=np.uint8), 256)
    for places in (slice(None), slice(0, None, 37)):  # dense, and as single changes
        mixed = base.copy()
        mixed[places] = target[places]
        delta = encode(dtype, base, mixed, block=1 << 12, with_kernels=use)
        data = base.copy()
        apply(dtype, data, delta, with_kernels=use)
        assert data.tobytes() == mixed.tobytes()


@pytest.mark.parametrize(("dtype", "bits"), [("BF16", 16), ("F16", 16), ("F8_E4M3", 8), ("F8_E5M2", 8), ("F4", 4)])
def test_ranks_follow_the_values_and_miss_no_pattern(dtype: str, bits: int) -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    ranks = rank(ELEMENTS[dtype], patterns).astype(np.int64)
    assert sorted(ranks.tolist()) == list(range(1 << bits))
    assert np.array_equal(unrank(ELEMENTS[dtype], rank(ELEMENTS[dtype], patterns)), patterns)
    if bits == 4:
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = np.concatenate([grid, -grid])
    else:
        kind = {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}[dtype]
        signed = torch.from_numpy(patterns.view(np.int16 if bits == 16 else np.uint8))
        values = signed.view(getattr(torch, kind)).double().numpy()
    finite = np.isfinite(values)
    order = np.argsort(ranks[finite])
    assert (np.diff(values[finite][order]) >= 0).all()


def kinds(delta: TensorDelta) -> list[BlockKind]:
    return [BlockKind(int(kind)) for kind in delta.table["kind"]]


def test_each_kind_is_chosen_where_it_is_the_shortest(name: str) -> None:
    use, rng, n = kernels(name), np.random.default_rng(3), 4096
    base = bits_of("BF16", 7 * n, rng).view(np.uint16)
    target = base.copy()

    def move(block: int, share: float) -> None:
        places = block * n + np.flatnonzero(rng.random(n) < share)
        target[places] ^= 1

    move(1, 0.01)
    places = 2 * n + np.flatnonzero(rng.random(n) < 0.3)
    target[places] += rng.integers(1, 8, places.size, dtype=np.uint16) * 2 - 8
    move(3, 0.95)
    target[4 * n : 5 * n] = rng.integers(0, 1 << 16, n)
    base[4 * n : 5 * n] = rng.integers(0, 1 << 16, n)
    target[5 * n : 6 * n] = 0x7FC0  # NaN everywhere
    target[6 * n] ^= 0x8000
    delta = encode("BF16", base.view(np.uint8), target.view(np.uint8), block=n, with_kernels=use)
    want = [BlockKind.NOOP, BlockKind.SPARSE, BlockKind.BITMASK, BlockKind.XOR, None, BlockKind.FILL, BlockKind.SPARSE]
    found = kinds(delta)
    assert [a for a, b in zip(found, want, strict=True) if b is not None] == [b for b in want if b is not None]
    assert found[4] in (BlockKind.RAW, BlockKind.XOR)
    assert delta.table["stored"][5].sum() == 2


def test_raw_is_chosen_where_the_new_content_is_simple_and_the_difference_is_not(name: str) -> None:
    rng, n = np.random.default_rng(4), 4096
    base, target = bits_of("BF16", n, rng), np.tile(np.arange(64, dtype=np.uint8), 2 * n // 64)
    delta = encode("BF16", base, target, block=n, with_kernels=kernels(name))
    assert kinds(delta) == [BlockKind.RAW]
    data = base.copy()
    undo = apply("BF16", data, delta, with_kernels=kernels(name)).undo
    assert data.tobytes() == target.tobytes()
    revert(data, undo, with_kernels=kernels(name))
    assert data.tobytes() == base.tobytes()


def test_verl_6974_a_block_never_takes_more_than_its_bytes() -> None:
    rng = np.random.default_rng(5)
    for dtype in ("BF16", "F32", "F64", "U8", "F4"):
        for density in (0.05, 0.12, 0.26, 0.5, 1.0):
            n = 1 << 14
            base = bits_of(dtype, n, rng)
            places = np.flatnonzero(rng.random(n) < density)
            elements = elements_of(ELEMENTS[dtype], base).copy()
            elements[places] = elements_of(ELEMENTS[dtype], bits_of(dtype, n, rng))[places]
            packed = elements[0::2] | elements[1::2] << 4 if dtype == "F4" else elements.view(np.uint8)
            delta = encode(dtype, base, np.ascontiguousarray(packed, np.uint8), block=1 << 12)
            per_block = delta.table["stored"].sum(1)
            assert (per_block <= (1 << 12) * DTYPE_BITS[dtype] // 8).all(), (dtype, density)


@pytest.mark.parametrize(("trace", "fast", "most"), [("1.2%", 1.40, 1.10), ("3.1%", 1.20, 0.95)])
def test_bytes_per_changed_weight_on_the_synthetic_trace(trace: str, fast: float, most: float) -> None:
    base, target = AdamTrace(1 << 20, *TRACES[trace]).step()
    rate = float(trace.rstrip("%")) / 100
    for profile, bound in (("fast", fast), ("max", most)):
        delta = encode("BF16", base.view(np.uint8), target.view(np.uint8), profile)  # type: ignore[arg-type]
        assert delta.changed / base.size == pytest.approx(rate, rel=0.05)
        assert delta.n_bytes / delta.changed <= bound
        data = base.copy().view(np.uint8)
        apply("BF16", data, delta)
        assert data.tobytes() == target.tobytes()
    assert int(delta.table["coding"][0]) == Coding.CLASSES


def test_a_half_applied_tensor_is_completed_and_a_damaged_block_is_named(name: str) -> None:
    """ModelExpress #686: killed between two blocks, and killed inside one."""
    use, rng, n = kernels(name), np.random.default_rng(6), 6 * 256
    base = bits_of("BF16", n, rng)
    target = changed_at("BF16", base, np.arange(0, n, 9), rng, 3)
    delta = encode("BF16", base, target, block=256, with_kernels=use)
    for reached in range(7):
        data = base.copy()
        data[: reached * 512] = target[: reached * 512]
        done = apply("BF16", data, delta, with_kernels=use)
        assert (done.already, done.written) == (tuple(range(reached)), tuple(range(reached, 6)))
        assert data.tobytes() == target.tobytes()
    torn = base.copy()
    torn[512 + 100] ^= 0x40
    before = torn[512:1024].copy()
    seen = prepare("BF16", torn, delta, with_kernels=use)
    assert seen.damaged == (1,)
    assert seen.blocks(BlockState.READY) == (0, 2, 3, 4, 5)
    done = apply("BF16", torn, delta, with_kernels=use)
    assert done.damaged == (1,)
    assert torn[512:1024].tobytes() == before.tobytes(), "a damaged block is left for the repair"
    begin, end = block_span("BF16", n, 1, 256)
    torn[begin:end] = target[begin:end]
    assert apply("BF16", torn, delta, with_kernels=use).already == tuple(range(6))
    assert torn.tobytes() == target.tobytes()


def test_miles_1235_applied_twice_is_applied_once(name: str) -> None:
    rng = np.random.default_rng(7)
    base = bits_of("BF16", 2048, rng)
    target = bits_of("BF16", 2048, rng)  # dense: XOR or raw blocks
    delta = encode("BF16", base, target, block=512, with_kernels=kernels(name))
    data = base.copy()
    for _ in range(3):
        apply("BF16", data, delta, with_kernels=kernels(name))
        assert data.tobytes() == target.tobytes()


def test_skyrl_1902_nothing_is_written_to_another_base(name: str) -> None:
    rng = np.random.default_rng(8)
    base = bits_of("BF16", 1024, rng)
    delta = encode("BF16", base, changed_at("BF16", base, np.arange(0, 1024, 5), rng, 2), block=256)
    other = bits_of("BF16", 1024, rng)
    before = other.copy()
    assert apply("BF16", other, delta, with_kernels=kernels(name)).damaged == (0, 1, 2, 3)
    assert other.tobytes() == before.tobytes()


def test_a_delta_that_lies_about_its_target_is_undone(name: str) -> None:
    use, rng = kernels(name), np.random.default_rng(9)
    base = bits_of("BF16", 1024, rng)
    for step in (5, 2, 1):  # sparse, bitmask, XOR blocks
        delta = encode("BF16", base, changed_at("BF16", base, np.arange(0, 1024, step), rng, 2), block=256)
        table = delta.table.copy()
        table["target"][2] ^= 1
        data = base.copy()
        with pytest.raises(RefitError, match="back to what they were"):
            apply("BF16", data, TensorDelta("BF16", 1024, 256, table, delta.payload), with_kernels=use)
        assert data.tobytes() == base.tobytes()


def test_blocks_that_stay_are_looked_at_in_an_audit_only() -> None:
    base = np.zeros(1024, np.uint8)
    target = base.copy()
    target[0] = 1
    delta = encode("U8", base, target, block=256)
    data = base.copy()
    data[700] = 9
    assert prepare("U8", data, delta).damaged == ()
    assert prepare("U8", data, delta, audit=True).damaged == (2,)


def test_empty_and_one_element_tensors(name: str) -> None:
    use, empty = kernels(name), np.zeros(0, np.uint8)
    delta = TensorDelta.from_bytes(encode("BF16", empty, empty, with_kernels=use).to_bytes())
    assert (delta.is_noop, delta.changed, len(delta.table)) == (True, 0, 0)
    assert apply("BF16", empty.copy(), delta, with_kernels=use).written == ()
    base, target = np.array([0x3F80], np.uint16).view(np.uint8), np.array([0xBF80], np.uint16).view(np.uint8)
    delta = TensorDelta.from_bytes(encode("BF16", base, target, with_kernels=use).to_bytes())
    data = base.copy()
    apply("BF16", data, delta, with_kernels=use)
    assert data.tobytes() == target.tobytes()


def test_gaps_longer_than_a_byte_and_the_last_element(name: str) -> None:
    use, n = kernels(name), 1 << 14
    for places in ([0], [n - 1], [254], [255], [256], [0, 255], [0, 256], [0, 511, 512], [253, 254, 509, 765, n - 1]):
        base, target = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
        target[places] = 7
        delta = encode("U8", base, target, block=n, with_kernels=use)
        data = base.copy()
        undo = apply("U8", data, delta, with_kernels=use).undo
        assert np.flatnonzero(data).tolist() == places
        revert(data, undo, with_kernels=use)
        assert not data.any()


def test_positions_beyond_2_to_the_32_are_exact() -> None:
    """int32 and uint32 positions wrap; ours are (block, place in the block)."""
    n = 3 * 2**32 + 5
    for dtype in ("BF16", "F64", "F4", "U8"):
        bits = DTYPE_BITS[dtype]
        elements = n + n % 2
        last = -(-elements // (1 << 20)) - 1
        begin, end = block_span(dtype, elements, last)
        assert begin == last * (1 << 20) * bits // 8
        assert end == elements * bits // 8
        assert begin < end


@pytest.mark.slow
def test_five_billion_elements_in_a_sparse_file(tmp_path: object) -> None:
    """More than 2**32 elements, changed at both ends and across the 2**31 and 2**32 borders; the files are holes."""
    from pathlib import Path

    folder, n = Path(str(tmp_path)), 2**32 + (1 << 20) + 3
    places = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, n - 1]
    for name in ("base", "target"):
        np.memmap(folder / name, np.uint8, "w+", shape=(n,)).flush()
    target = np.memmap(folder / "target", np.uint8, "r+", shape=(n,))
    target[places] = 1
    base = np.memmap(folder / "base", np.uint8, "r+", shape=(n,))
    delta = TensorDelta.from_bytes(encode("U8", np.asarray(base), np.asarray(target)).to_bytes())
    assert (delta.elements, delta.changed) == (n, len(places))
    data = np.asarray(base)
    undo = apply("U8", data, delta).undo
    assert [int(data[p]) for p in places] == [1] * len(places)
    assert block_hashes("U8", data).tolist() == block_hashes("U8", np.asarray(target)).tolist()
    revert(data, undo)
    assert not any(int(data[p]) for p in places)


def test_known_base_hashes_are_used_and_checked_for_their_number() -> None:
    rng = np.random.default_rng(11)
    base = bits_of("BF16", 1024, rng)
    target = changed_at("BF16", base, np.arange(0, 1024, 100), rng, 1)
    hashes = block_hashes("BF16", base, 256)
    assert (
        encode("BF16", base, target, block=256, base_hashes=hashes).to_bytes()
        == encode("BF16", base, target, block=256).to_bytes()
    )
    with pytest.raises(RefitError, match="3 block hashes for 4 blocks"):
        encode("BF16", base, target, block=256, base_hashes=hashes[:3])


def test_misuse_is_refused() -> None:
    four, six = np.zeros(4, np.uint8), np.zeros(6, np.uint8)
    with pytest.raises(RefitError, match="4 bytes, target 6"):
        encode("BF16", four, six)
    with pytest.raises(RefitError, match="no whole number"):
        encode("F64", six, six)
    with pytest.raises(RefitError, match="unknown dtype"):
        encode("F3", four, four)
    delta = encode("BF16", four, np.ones(4, np.uint8))
    for dtype, data in (("F16", four.copy()), ("BF16", six.copy())):
        with pytest.raises(RefitError, match="the delta is for 2 elements of BF16"):
            apply(dtype, data, delta)
    locked = four.copy()
    locked.flags.writeable = False
    with pytest.raises(RefitError, match="read-only"):
        apply("BF16", locked, delta)
    done = apply("BF16", four.copy(), delta)
    with pytest.raises(RefitError, match="the delta is for"):
        revert(six.copy(), done.undo)


def hostile_marks() -> Iterator[tuple[str, Marked]]:
    """Streams for a block of 100 BF16 elements that must not pass ``check_sparse``."""
    none = np.zeros(0, np.uint8)

    def u8(*values: int) -> Bytes:
        return np.array(values, np.uint8)

    yield "past the end", Marked(1, u8(100), u8(0), none)
    yield "past the end by steps", Marked(3, u8(60, 30, 8), u8(0, 0), none)
    yield "past the end by a skip", Marked(1, u8(255, 0), u8(0), none)
    yield "fewer marks than changes", Marked(2, u8(1), u8(0), none)
    yield "more marks than changes", Marked(1, u8(1, 2), u8(0), none)
    yield "a skip at the end", Marked(1, u8(1, 255), u8(0), none)
    yield "too few values", Marked(3, u8(0, 0, 0), u8(0), none)
    yield "too many values", Marked(1, u8(0), u8(0, 0), none)
    yield "a code after the last", Marked(1, u8(0), u8(0x10), none)
    yield "a wide value without an escape", Marked(1, u8(0), u8(0), u8(20, 0))
    yield "an escape without a wide value", Marked(1, u8(0), u8(0x0F), none)
    yield "half a wide value", Marked(1, u8(0), u8(0x0F), u8(20))
    yield "a wide value that fits a code", Marked(1, u8(0), u8(0x0F), u8(15, 0))


@pytest.mark.parametrize(("what", "marked"), list(hostile_marks()), ids=[what for what, _ in hostile_marks()])
def test_streams_that_do_not_fit_are_refused_before_a_write(what: str, marked: Marked, name: str) -> None:
    assert not kernels(name).check_sparse(ELEMENTS["BF16"], marked, 100)
    if what == "a wide value that fits a code":
        good = Marked(1, marked.where, marked.values, np.array([16, 0], np.uint8))
        assert kernels(name).check_sparse(ELEMENTS["BF16"], good, 100)


def test_an_escape_has_no_meaning_for_four_bits(name: str) -> None:
    wide = np.array([16], np.uint8)
    marked = Marked(1, np.zeros(1, np.uint8), np.array([15], np.uint8), wide)
    assert not kernels(name).check_sparse(ELEMENTS["F4"], marked, 100)


def test_block_hash_is_xxh3_64() -> None:
    # Published by the xxHash project for the empty input; the rest of the algorithm is the package's.
    assert block_hash(np.zeros(0, np.uint8)) == 0x2D06800538D394C2


@pytest.mark.parametrize("block", [-4, 0, 1, 3, 1000, 1 << 21])
def test_a_block_that_the_format_does_not_have_is_refused(block: int) -> None:
    base = np.zeros(4096, np.uint8)
    with pytest.raises(RefitError, match="blocks of"):
        encode("F32", base, base + np.uint8(1), block=block)


def test_what_is_no_tensors_bytes_is_refused() -> None:
    base = np.zeros(64, np.uint8)
    delta = encode("BF16", base, base + np.uint8(1))
    odd: list[Any] = [np.zeros(128, np.uint8)[::2], base.view(np.float32), base.reshape(8, 8), base.tobytes(), None]
    for wrong in odd:
        with pytest.raises(RefitError, match="in place of a tensor's bytes"):
            encode("BF16", wrong, base)
        with pytest.raises(RefitError, match="in place of a tensor's bytes"):
            apply("BF16", wrong, delta)
    with pytest.raises(RefitError, match="profile 'slow'"):
        encode("BF16", base, base, "slow")  # type: ignore[arg-type]
    doubled = np.repeat(np.frombuffer(delta.to_bytes(), np.uint8), 2)
    assert TensorDelta.from_bytes(doubled[::2]).to_bytes() == delta.to_bytes()
