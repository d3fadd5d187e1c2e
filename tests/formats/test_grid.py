"""E2M1, E4M3 and E8M0 against exact arithmetic."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ShapeError
from halfbyte.formats import (
    E2M1_GRID,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_packed,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_bits,
    pack_codes,
    unpack_bits,
    unpack_codes,
)
from halfbyte.formats.spec import Ties

GRID = [Fraction(v) for v in E2M1_GRID]


def e4m3(byte: int) -> Fraction:
    """The definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3(byte) for byte in range(0x7F)]


def nearest(value: Fraction, points: list[Fraction], ties: Ties = "even") -> int:
    """Index of the point nearest to a value >= 0, saturating at the last."""
    high = bisect.bisect_left(points, value)
    if high == len(points):
        return high - 1
    if points[high] == value or high == 0:
        return high
    below, above = value - points[high - 1], points[high] - value
    if below != above:
        return high - 1 if below < above else high
    if ties == "even":
        return high - 1 if (high - 1) % 2 == 0 else high
    return high if ties == "away" else high - 1


def probes(points: list[Fraction]) -> list[float]:
    """Every point and every midpoint, and the float32 values beside them."""
    exact = [*points, *((a + b) / 2 for a, b in pairwise(points)), points[-1] * 2]
    centre = torch.tensor([float(v) for v in exact])
    return torch.cat((centre, torch.nextafter(centre, centre + 1e30), torch.nextafter(centre, centre * 0))).tolist()


def test_grid_is_the_definition_of_e2m1() -> None:
    exact = [Fraction(m, 2) if e == 0 else Fraction(2 + m, 2) * 2 ** (e - 1) for e in range(4) for m in range(2)]
    assert exact == GRID
    assert decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [*E2M1_GRID, *(-v for v in E2M1_GRID)]


@pytest.mark.parametrize("ties", ["even", "toward_zero", "away"])
def test_e2m1_at_every_point_and_tie(ties: Ties) -> None:
    values = probes(GRID)
    codes = encode_e2m1(torch.tensor(values), ties).tolist()
    assert codes == [nearest(Fraction(v), GRID, ties) for v in values]
    mirrored = encode_e2m1(-torch.tensor(values), ties).tolist()
    assert mirrored == [code + 8 if code else 0 for code in codes]


@given(st.floats(-(2.0**100), 2.0**100, width=32))
@settings(deadline=None)
def test_e2m1_is_nearest(value: float) -> None:
    index = nearest(abs(Fraction(value)), GRID)
    expected = index + 8 if value < 0 and index else index
    assert int(encode_e2m1(torch.tensor([value]))) == expected


def test_the_four_rules_for_zeros() -> None:
    values = torch.tensor([0.0, -0.0, 0.1, -0.1, -1.0])
    assert encode_e2m1(values, zero_sign="positive").tolist() == [0, 0, 0, 0, 10]
    assert encode_e2m1(values, zero_sign="keep").tolist() == [0, 8, 0, 8, 10]
    assert encode_e2m1(values, zero_sign="negative").tolist() == [0, 0, 0, 8, 10]
    assert encode_e2m1(values, zero_sign="nonpositive").tolist() == [8, 8, 0, 8, 10]


def test_every_e4m3_byte() -> None:
    decoded = decode_e4m3(torch.arange(256, dtype=torch.uint8))
    assert [Fraction(v) for v in decoded[:0x7F].tolist()] == E4M3
    assert [-Fraction(v) for v in decoded[0x80:0xFF].tolist()] == E4M3
    assert math.isnan(float(decoded[0x7F]))
    assert math.isnan(float(decoded[0xFF]))
    assert encode_e4m3(decoded[:0x7F]).tolist() == list(range(0x7F))


def test_e4m3_at_every_midpoint() -> None:
    values = probes(E4M3)
    assert encode_e4m3(torch.tensor(values)).tolist() == [nearest(Fraction(v), E4M3) for v in values]


def test_modelopt_1633_e4m3_saturates() -> None:
    """An unclamped cast to E4M3 wrote NaN above 448."""
    values = torch.tensor([448.0, 464.0, 480.0, 1e30, float("inf")])
    assert encode_e4m3(values).tolist() == [0x7E] * 5
    assert encode_e4m3(-values).tolist() == [0xFE] * 5


def test_every_e8m0_byte() -> None:
    decoded = decode_e8m0(torch.arange(256, dtype=torch.uint8)).tolist()
    assert decoded[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(decoded[255])
    exponents = torch.tensor([-200, -128, -127, 0, 127, 128, 200])
    assert encode_e8m0(exponents).tolist() == [0, 0, 0, 127, 254, 254, 254]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
@settings(deadline=None)
def test_packing(codes: list[int]) -> None:
    tensor = torch.tensor([codes], dtype=torch.uint8)
    packed = pack_codes(tensor)
    assert packed[0].tolist() == [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]
    assert torch.equal(unpack_codes(packed), tensor)
    assert torch.equal(decode_packed(packed), decode_e2m1(tensor))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8).map(lambda bits: bits * 8))
@settings(deadline=None)
def test_packing_bits(bits: list[int]) -> None:
    packed = pack_bits(torch.tensor(bits, dtype=torch.uint8))
    assert packed.tolist() == [sum(b << i for i, b in enumerate(bits[j : j + 8])) for j in range(0, len(bits), 8)]
    assert unpack_bits(packed).tolist() == bits


def test_packing_refuses_odd_sizes() -> None:
    with pytest.raises(ShapeError, match="odd"):
        pack_codes(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="eight a byte"):
        pack_bits(torch.zeros(12, dtype=torch.uint8))
