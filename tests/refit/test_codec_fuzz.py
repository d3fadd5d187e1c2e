"""Hostile deltas: every byte changed, cut anywhere, headers that lie, bombs. The result is the target or a clear error.

A delta is believed only where its hashes hold, so whatever is done to its bytes, either it is refused, or blocks are
reported as damaged, or the weights become exactly what they were to become. Nothing else, and never a write outside.
"""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec import BlockKind, Coding, TensorDelta, apply, available, decode, encode, kernels, revert
from halfbyte.refit.codec.delta import ROW, STREAMS
from halfbyte.refit.codec.element import ELEMENTS
from halfbyte.refit.codec.kernels import Classed
from halfbyte.refit.codec.streams import Packer, Unpacker
from halfbyte.refit.errors import RefitError

NAMES = available()
HEADER = 32
BLOCK = 512


def example(profile: str) -> tuple[Bytes, Bytes, TensorDelta]:
    """Base, target and delta with every kind of block, as plain and as class-coded streams, zstd and stored."""
    rng = np.random.default_rng(1)
    base = (rng.standard_normal(7 * BLOCK) * 0.02).astype(np.float32).view(np.uint32) >> 16
    base = base.astype(np.uint16)
    target = base.copy()
    for block, share in ((1, 0.004), (2, 0.3), (4, 0.9)):
        places = block * BLOCK + np.flatnonzero(rng.random(BLOCK) < share)
        steps = np.where(rng.random(places.size) < 0.1, 3000, 1)
        target[places] += steps.astype(np.uint16)
    small = 3 * BLOCK + np.flatnonzero(
        (base[3 * BLOCK : 4 * BLOCK] >> 7 & 255) < 119
    )  # what exponent classes are good at
    target[small] = base[small] + 1
    target[5 * BLOCK : 6 * BLOCK] = 0
    target[6 * BLOCK :] = np.arange(BLOCK) // 2
    base8, target8 = base.view(np.uint8), target.view(np.uint8)
    return base8, target8, encode("BF16", base8, target8, profile, block=BLOCK)  # type: ignore[arg-type]


EXAMPLES = {profile: example(profile) for profile in ("fast", "max")}


def survives(data: bytes, base: Bytes, target: Bytes, name: str) -> str:
    """Read and apply hostile bytes; what happened. The weights lie inside a larger array whose rim must stay."""
    rim = np.full(base.size + 256, 0xA5, np.uint8)
    weights = rim[128:-128]
    weights[:] = base
    use = kernels(name)
    try:
        delta = TensorDelta.from_bytes(data)
        done = apply("BF16", weights, delta, with_kernels=use)
    except RefitError as error:
        assert weights.tobytes() == base.tobytes(), "refused after a write"
        outcome = f"refused: {error.what[:20]}"
    else:
        n = base.size // (2 * delta.block)
        for index in range(n):
            span = slice(*delta.span(index))
            row = delta.table[index]
            if index in done.written or index in done.already or row["kind"] == BlockKind.NOOP:
                continue
            assert index in done.damaged
            assert weights[span].tobytes() == base[span].tobytes()
        honest = {
            i
            for i in range(n)
            if weights[slice(*delta.span(i))].tobytes()
            in (base[slice(*delta.span(i))].tobytes(), target[slice(*delta.span(i))].tobytes())
        }
        outcome = "applied" if len(honest) == n else "other weights"
        revert(weights, done.undo, with_kernels=use)
        assert weights.tobytes() == base.tobytes()
    assert set(rim[:128].tolist()) | set(rim[-128:].tolist()) == {0xA5}
    return outcome


@pytest.mark.parametrize("profile", ["fast", "max"])
def test_the_example_has_every_kind(profile: str) -> None:
    base, target, delta = EXAMPLES[profile]
    kinds = set(delta.table["kind"].tolist())
    assert {BlockKind.NOOP, BlockKind.SPARSE, BlockKind.FILL, BlockKind.RAW} <= kinds
    if profile == "fast":
        assert BlockKind.BITMASK in kinds
    else:
        assert Coding.CLASSES in delta.table["coding"].tolist()
    assert any(delta.table["zstd"].tolist())
    for name in NAMES:
        assert survives(delta.to_bytes(), base, target, name) == "applied"


@pytest.mark.parametrize("profile", ["fast", "max"])
@pytest.mark.parametrize("name", ["reference", NAMES[-1]])
def test_every_byte_changed_gives_an_error_or_the_right_weights(profile: str, name: str) -> None:
    """All bytes of header, table and streams, enumerated; three changes each."""
    base, target, delta = EXAMPLES[profile]
    good = delta.to_bytes()
    step = 1 if name != "reference" else 11
    for at in range(0, len(good), step):
        for change in (0x01, 0x80, 0xFF):
            bad = bytearray(good)
            bad[at] ^= change
            assert survives(bytes(bad), base, target, name) != "other weights", (at, change)


@pytest.mark.parametrize("profile", ["fast", "max"])
def test_cut_anywhere_or_longer_it_is_refused(profile: str) -> None:
    _, _, delta = EXAMPLES[profile]
    good = delta.to_bytes()
    for length in range(len(good)):
        with pytest.raises(RefitError):
            TensorDelta.from_bytes(good[:length])
    with pytest.raises(RefitError):
        TensorDelta.from_bytes(good + b"\0")


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["fast", "max"]), st.sampled_from(NAMES), st.integers(0, 2**32))
def test_streams_of_noise_with_hashes_that_hold_stay_inside_and_are_taken_back(
    profile: str, name: str, seed: int
) -> None:
    """Garbage in the streams and the base hashes right: what a hostile publisher would send. Only the target hash is left."""
    rng = np.random.default_rng(seed)
    base, target, delta = EXAMPLES[profile]
    payload = delta.payload.copy()
    plain = rng.random() < 0.5
    at = rng.integers(0, payload.size, 1 + int(rng.integers(0, 20)))
    payload[at] = rng.integers(0, 256, at.size)
    table = delta.table.copy()
    if plain:
        table["changed"][rng.integers(0, len(table))] = rng.integers(0, BLOCK + 1)
    raw = TensorDelta("BF16", delta.elements, BLOCK, table, payload).to_bytes()
    assert survives(raw, base, target, name) != "other weights"


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["BF16", "U8", "F4", "F64", "F8_E4M3"]), st.integers(0, 2**32))
def test_class_streams_of_noise_are_judged_alike_by_all_kernels(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    element, n = ELEMENTS[dtype], 256
    base = rng.integers(0, 256, n * element.bits // 8, dtype=np.uint8)
    target = base.copy()
    at = rng.integers(0, base.size, 12)
    target[at] = rng.integers(0, 256, at.size)
    marked = kernels("reference").sparse(element, base, target, n)
    assert marked is not None
    if marked.changed == 0:
        return
    good = kernels("reference").to_classes(element, base, marked)
    parts = [part.copy() for part in (good.quotients, good.values, good.wide, good.low)]
    for _ in range(int(rng.integers(0, 3))):
        part = parts[int(rng.integers(0, 4))]
        if part.size:
            part[rng.integers(0, part.size)] = rng.choice([0, 1, 15, 16, 254, 255, int(rng.integers(0, 256))])
    which = int(rng.integers(0, 12))
    if which < 4 and parts[which].size:
        parts[which] = parts[which][:-1]
    elif which < 8:
        parts[which - 4] = np.append(parts[which - 4], np.uint8(rng.integers(0, 256)))
    changed = good.changed + int(rng.choice([0, 0, 0, 1, -1]))
    classed = Classed(changed, *parts)
    truth = kernels("reference").from_classes(element, base, classed)
    for name in NAMES[1:]:
        found = kernels(name).from_classes(element, base, classed)
        assert (found is None) == (truth is None)
        if found is not None and truth is not None:
            assert [a.tobytes() for a in (found.where, found.values, found.wide)] == [
                a.tobytes() for a in (truth.where, truth.values, truth.wide)
            ]


def row(**values: object) -> np.ndarray:
    """A table of one sparse row of 100 BF16 elements with one change, with some fields replaced."""
    table = np.zeros(1, ROW)
    start = {"kind": 1, "changed": 1, "raw": (1, 1, 0, 0), "stored": (1, 1, 0, 0), "base": 1, "target": 2}
    for name, value in (start | values).items():
        table[name] = value
    return table


def delta_of(table: np.ndarray, payload: bytes = b"\0\0", elements: int = 100) -> bytes:
    return TensorDelta("BF16", elements, 1 << 10, table, np.frombuffer(payload, np.uint8)).to_bytes()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"kind": 6}, "kind or coding"),
        ({"kind": 255}, "kind or coding"),
        ({"coding": 2}, "kind or coding"),
        ({"kind": 3, "coding": 1}, "kind or coding"),
        ({"zero": 1}, "reserved bits"),
        ({"zstd": 16}, "reserved bits"),
        ({"changed": 101}, "changed elements"),
        ({"changed": 0}, "changed elements"),
        ({"changed": 2**32 - 1}, "changed elements"),
        ({"kind": 0}, "changed elements"),
        ({"raw": (2, 1, 0, 0)}, "stream lengths"),
        ({"raw": (0, 1, 0, 0)}, "stream lengths"),
        ({"raw": (1, 2, 0, 0)}, "stream lengths"),
        ({"raw": (1, 1, 1, 0)}, "stream lengths"),
        ({"raw": (1, 1, 4, 0)}, "stream lengths"),
        ({"raw": (1, 1, 0, 1)}, "stream lengths"),
        ({"raw": (2**32 - 1, 1, 0, 0)}, "stream lengths"),
        ({"stored": (0, 1, 0, 0)}, "stored lengths"),
        ({"stored": (2, 0, 0, 0)}, "stored lengths"),
        ({"zstd": 1}, "stored lengths"),
        ({"stored": (2**32 - 1, 1, 0, 0), "zstd": 1}, "stored lengths"),
        ({"base": 2}, "hashes"),
    ],
)
def test_tables_that_lie_are_refused(values: dict[str, object], match: str) -> None:
    assert TensorDelta.from_bytes(delta_of(row())).changed == 1
    with pytest.raises(RefitError, match=match):
        TensorDelta.from_bytes(delta_of(row(**values)))


def test_headers_that_lie_are_refused_without_the_memory_they_ask_for() -> None:
    good = delta_of(row())
    for at, size, value in (
        (8, 8, 2**60 - 1),
        (8, 8, 2**63),
        (8, 8, 101 << 10),
        (16, 8, 2**40),
        (16, 8, 0),
        (24, 8, 2**62),
        (4, 1, 2),
        (5, 1, 99),
        (6, 1, 40),
        (6, 1, 0),
        (7, 1, 1),
        (0, 4, 0),
    ):
        bad = good[:at] + value.to_bytes(size, "little") + good[at + size :]
        with pytest.raises(RefitError):
            TensorDelta.from_bytes(bad)


def test_a_zstd_bomb_is_refused_before_its_size_is_allocated() -> None:
    """A frame of a few bytes that says or holds a gigabyte, in a stream that may have a hundred bytes."""
    import tracemalloc

    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 24))
    packed = Packer().pack(np.zeros(100, np.uint8))
    assert packed[0]
    lying = bytearray(packed[1])
    tracemalloc.start()
    for frame in (
        bomb,
        silent,
        bytes(lying) + b"\0",
        bomb[: len(bomb) // 2],
        b"\x28\xb5\x2f\xfd" + b"\xff" * 14,
        b"",
        b"\0" * 30,
    ):
        with pytest.raises(RefitError):
            Unpacker().unpack(np.frombuffer(frame, np.uint8), True, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    # A frame whose header was rewritten to the right size: its content is still too long.
    two = zstandard.ZstdCompressor(level=1).compress(bytes(200))
    assert two[4] & 0x20  # single segment: a one-byte content size follows
    cut = bytearray(two)
    cut[5] = 100
    with pytest.raises(RefitError):
        Unpacker().unpack(np.frombuffer(bytes(cut), np.uint8), True, 100)


def test_decode_needs_no_weights_and_names_the_block() -> None:
    _, _, delta = EXAMPLES["fast"]
    payload = delta.payload.copy()
    payload[:] = 0xEE
    bad = TensorDelta.from_bytes(TensorDelta("BF16", delta.elements, BLOCK, delta.table, payload).to_bytes())
    with pytest.raises(RefitError, match=r"layer\.weight, block 1"):
        decode(bad, where="layer.weight")
    assert len(decode(delta)) == 7
    assert ROW.itemsize == 2 * STREAMS * 4 + 24
