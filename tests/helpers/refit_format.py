"""A second reader of the delta format, written from docs/refit-format.md: plain loops over bytes, no code of the package.

``python tests/helpers/refit_format.py`` writes the golden files anew (only after a deliberate change of the format).
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash
import zstandard

GOLDEN = Path(__file__).parents[1] / "data" / "refit"

#: Number of a dtype in the format -> (bits, sign and magnitude, lowest bit and width of the class field).
DTYPES = {
    1: (8, False, 0, 0), 2: (8, False, 0, 0), 3: (8, False, 0, 0), 4: (8, True, 3, 4), 5: (8, True, 2, 5),
    6: (8, False, 0, 0), 7: (4, True, 1, 2), 8: (16, False, 0, 0), 9: (16, False, 0, 0), 10: (16, True, 10, 5),
    11: (16, True, 7, 8), 12: (32, False, 0, 0), 13: (32, False, 0, 0), 14: (32, True, 23, 8), 15: (64, False, 0, 0),
    16: (64, False, 0, 0), 17: (64, True, 52, 8), 18: (64, False, 0, 0),
}  # fmt: skip


def unpack(data: bytes, bits: int) -> list[int]:
    if bits == 4:
        return [half for byte in data for half in (byte & 15, byte >> 4)]
    size = bits // 8
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def pack(elements: list[int], bits: int) -> bytes:
    if bits == 4:
        return bytes(low | high << 4 for low, high in zip(elements[0::2], elements[1::2], strict=True))
    return b"".join(element.to_bytes(bits // 8, "little") for element in elements)


def positions(gaps: bytes) -> list[int]:
    at, found = 0, []
    for gap in gaps:
        at += gap
        if gap < 255:
            found.append(at)
            at += 1
    return found


def class_positions(quotients: bytes, low: bytes, elements: list[int], shift: int, width: int) -> list[int]:
    (count,) = struct.unpack_from("<H", low)
    bits = int.from_bytes(low[2 + 6 * count :], "little")
    stream, found = iter(quotients), []
    for j in range(count):
        number, k, changed = struct.unpack_from("<BBI", low, 2 + 6 * j)
        members = [i for i, element in enumerate(elements) if element >> shift & (1 << width) - 1 == number]
        at = 0
        for _ in range(changed):
            quotient = 0
            while (byte := next(stream)) == 255:
                quotient += 255
            gap = (quotient + byte << k) + (bits & (1 << k) - 1)
            bits >>= k
            found.append(members[at + gap])
            at += gap + 1
    assert next(stream, None) is None
    return found


def moved(element: int, zigzag: int, bits: int, signed: bool) -> int:
    top, ones = 1 << bits - 1, (1 << bits) - 1
    rank = element ^ (ones if element & top else top) if signed else element
    rank = rank + (zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1 >> 1)) & ones
    return rank ^ (top if rank & top else ones) if signed else rank


def read_block(kind: int, coding: int, changed: int, streams: list[bytes], base: bytes, dtype: int) -> bytes:
    bits, signed, shift, width = DTYPES[dtype]
    elements = unpack(base, bits)
    if kind == 3:
        size = max(1, bits // 8)
        planes = [streams[0][p * len(base) // size : (p + 1) * len(base) // size] for p in range(size)]
        return bytes(byte ^ planes[i % size][i // size] for i, byte in enumerate(base))
    if kind == 4:
        return streams[0]
    if kind == 5:
        return pack([int.from_bytes(streams[0], "little")] * len(elements), bits)
    if kind == 2:
        places = [i for i in range(len(elements)) if streams[0][i // 8] >> i % 8 & 1]
    elif coding == 1:
        places = class_positions(streams[0], streams[3], elements, shift, width)
    else:
        places = positions(streams[0])
    wide = iter(unpack(streams[2], max(8, bits)))
    assert len(places) == changed
    for place, code in zip(places, unpack(streams[1], 4), strict=False):
        elements[place] = moved(elements[place], next(wide) if code == 15 else code + 1, bits, signed)
    return pack(elements, bits)


def read_delta(data: bytes, base: bytes) -> bytes:
    """The target."""
    magic, version, dtype, log2, zero, elements, blocks, n_payload = struct.unpack_from("<4sBBBBQQQ", data)
    assert (magic, version, zero) == (b"HBTD", 1, 0)
    bits, at, out = DTYPES[dtype][0], 32 + 56 * blocks, []
    assert len(data) == at + n_payload
    assert len(base) * 8 == elements * bits
    step = bits << log2 >> 3
    for b in range(blocks):
        kind, coding, zstd, _, changed, *rest = struct.unpack_from("<BBBBI4I4IQQ", data, 32 + 56 * b)
        raw, stored, base_hash, target_hash = rest[:4], rest[4:8], rest[8], rest[9]
        block, streams = base[b * step : (b + 1) * step], []
        assert xxhash.xxh3_64_intdigest(block) == base_hash
        for s in range(4):
            stream = data[at : at + stored[s]]
            at += stored[s]
            streams.append(zstandard.ZstdDecompressor().decompress(stream) if zstd >> s & 1 else stream)
            assert len(streams[s]) == raw[s]
        out.append(block if kind == 0 else read_block(kind, coding, changed, streams, block, dtype))
        assert xxhash.xxh3_64_intdigest(out[-1]) == target_hash
    return b"".join(out)


def golden_weights(dtype: str, bits: int) -> tuple[bytes, bytes]:
    """Base and target of a golden file: seven blocks of 1024 elements by a linear congruence, for every kind of block."""
    state, base, target, n = 12345, [], [], 1024
    ones = (1 << bits) - 1

    def draw(most: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % most

    for i in range(7 * n):
        shift, width = next((s, w) for b, _, s, w in DTYPES.values() if (b, w > 0) == (bits, True))
        block, chance = i // n, draw(1000)
        bell = draw(4) if block == 2 else sum(draw(1 << min(width, 5)) for _ in range(2)) // 2
        element = (draw(2) << bits - 1 | (96 if width == 8 else 0) + bell << shift | draw(1 << shift)) & ones
        likely = (0, 40, 980 if bell == 0 else 3, 350, 950, 0, 0)[block]
        new = element
        if block == 5:
            new = 3
        elif block == 6:
            new = i % n // 64
        elif chance < likely:
            new = element + 1 + draw(2) * draw(9) ^ (draw(40) == 0) << bits - 1
        base.append(element)
        target.append(new & ones)
    return pack(base, bits), pack(target, bits)


def main() -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    import numpy as np

    from halfbyte.refit.codec import encode
    from halfbyte.refit.objects import write_object

    GOLDEN.mkdir(parents=True, exist_ok=True)
    for dtype, bits in (("BF16", 16), ("F32", 32), ("F8_E4M3", 8), ("F4", 4)):
        base, target = golden_weights(dtype, bits)
        entries: dict[str, bytes] = {"base": base, "target": target}
        for profile in ("fast", "max"):
            arrays = (np.frombuffer(data, np.uint8) for data in (base, target))
            delta = encode(dtype, *arrays, profile, block=1024)  # type: ignore[arg-type]
            entries[profile] = delta.to_bytes()
        (GOLDEN / f"{dtype.lower()}.safetensors").write_bytes(write_object(entries))


if __name__ == "__main__":
    main()
