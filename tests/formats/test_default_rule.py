"""The default rule against an exact scalar oracle, and its properties."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import E2M1_GRID, SPECS, decode_e4m3, fits, get_spec, quantise, unpack_codes

GRID = [Fraction(v) for v in E2M1_GRID]
F32 = np.float32
NVFP4 = sorted(name for name, spec in SPECS.items() if spec.format == "nvfp4" and spec.scale_rows == 1)


def exact_e4m3(byte: int) -> Fraction:
    exponent, mantissa = byte >> 3, byte & 7
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


E4M3 = [exact_e4m3(byte) for byte in range(0x7F)]


def nearest(value: Fraction, points: list[Fraction]) -> int:
    distance = min(abs(p - value) for p in points)
    best = [i for i, p in enumerate(points) if abs(p - value) == distance]
    return best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)


def oracle(row: list[float], g: Fraction) -> tuple[list[int], list[int]]:
    """Scale bytes and codes of one row, in exact arithmetic but for the three fp32 roundings that the rule states."""
    scales, codes = [], []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        sixth = Fraction(float(F32(max(map(abs, block))) / F32(6)))
        target = Fraction(float(F32(float(sixth / g))))
        byte = nearest(min(target, Fraction(448)), E4M3)
        scales.append(byte)
        for value in block:
            if byte == 0:
                codes.append(0)
                continue
            z = float(F32(value) / F32(float(E4M3[byte] * g)))
            index = nearest(min(abs(Fraction(z)), Fraction(6)), GRID)
            codes.append(index + 8 if value < 0 and index else index)
    return scales, codes


def oracle_global(amax: float) -> Fraction:
    target, g = Fraction(float(F32(amax) / F32(2688))), Fraction(1, 2**126)
    while g < target:
        g *= 2
    return g if amax else Fraction(1)


def blocks(rows: int = 2, columns: int = 32, *, normal: bool = False) -> st.SearchStrategy[Tensor]:
    """Rows whose blocks differ widely in magnitude; with ``normal`` no value is below 2^-80 but zero."""
    values = hnp.arrays(F32, (rows, columns), elements=st.floats(-1e4, 1e4, width=32))
    exponents = hnp.arrays(np.int64, (rows, columns // 16), elements=st.integers(-30, 10))

    def build(pair: tuple[np.ndarray, np.ndarray]) -> Tensor:
        x = torch.from_numpy((pair[0] * np.repeat(np.exp2(pair[1]), 16, axis=1)).astype(F32))
        return torch.where(x.abs() < 2.0**-80, 0.0, x) if normal else x

    return st.tuples(values, exponents).map(build)


def assert_oracle(x: Tensor, name: str) -> None:
    q = quantise(x, get_spec(name))
    whole = oracle_global(float(x.abs().max()))
    for i, row in enumerate(x.tolist()):
        g = {
            "halfbyte": whole,
            "halfbyte_token": oracle_global(max(map(abs, row))),
            "halfbyte_kv": Fraction(1, 8),
        }[name]
        assert Fraction(float(q.global_scale if q.global_scale.ndim == 0 else q.global_scale[i])) == g
        scales, codes = oracle(row, g)
        assert q.scales[i].tolist() == scales
        assert unpack_codes(q.codes)[i].tolist() == codes


@given(blocks())
@settings(max_examples=40, deadline=None)
def test_codes_and_scales_are_the_oracle(x: Tensor) -> None:
    for name in ("halfbyte", "halfbyte_token", "halfbyte_kv"):
        assert_oracle(x, name)


@pytest.mark.parametrize("power", [-149, -140, -130, -122, -116, -110, 60, 126])
def test_the_oracle_holds_at_the_ends_of_fp32(power: int) -> None:
    """Below 2^-114 the global scale stops at 2^-126, the smallest normal number."""
    x = (torch.rand(4, 32, generator=torch.Generator().manual_seed(power)) * 2 - 1) * 2.0**power
    for name in ("halfbyte", "halfbyte_token"):
        assert_oracle(x, name)
    if power < -114:
        assert float(quantise(x, get_spec("halfbyte")).global_scale) == 2.0**-126


@given(blocks())
@settings(max_examples=40, deadline=None)
def test_bf16_values_get_the_nearest_grid_value(x: Tensor) -> None:
    """With a BF16 input the fp32 quotient cannot cross a midpoint, so the code is the nearest of all 15 values exactly,
    and inside the grid the error is at most half a step."""
    x = x.bfloat16()
    q = quantise(x, get_spec("halfbyte_token"))
    steps = decode_e4m3(q.scales) * q.global_scale.unsqueeze(-1)
    values = q.dequantise()
    for i in range(x.shape[0]):
        for j, value in enumerate(x[i].tolist()):
            scale = Fraction(float(steps[i, j // 16]))
            points = [sign * p * scale for p in GRID for sign in (1, -1)]
            error = abs(Fraction(float(values[i, j])) - Fraction(value))
            assert error == min(abs(p - Fraction(value)) for p in points)
            z = abs(Fraction(value)) / scale if scale else Fraction(0)
            if scale > 0 and z <= 6:
                above = next(p for p in GRID if p >= z)
                below = max(p for p in GRID if p <= z)
                assert error <= (above - below) / 2 * scale


@given(blocks(normal=True))
@settings(max_examples=100, deadline=None)
def test_dequantised_values_are_exact_in_bf16(x: Tensor) -> None:
    for name in ("halfbyte", "halfbyte_token", "halfbyte_kv", "halfbyte_2d"):
        values = quantise(x.repeat(8, 1) if name == "halfbyte_2d" else x, get_spec(name)).dequantise()
        assert torch.equal(values.bfloat16().float(), values)


@given(blocks())
@settings(max_examples=100, deadline=None)
def test_quantising_again_changes_nothing(x: Tensor) -> None:
    """Values and codes are a fixed point, except in blocks whose scale byte is 1 or 2 (the two smallest subnormals: the
    largest code there need not be 6). The global scale is one too, except that it halves when the largest scale byte
    was rounded down to 224: the same values, written with the next exponent."""
    for name in ("halfbyte", "halfbyte_token", "halfbyte_kv"):
        q = quantise(x, get_spec(name))
        if bool(((q.scales == 1) | (q.scales == 2)).any()):
            continue
        again = quantise(q.dequantise(), get_spec(name))
        assert torch.equal(again.dequantise(), q.dequantise())
        assert torch.equal(again.codes, q.codes)
        rounded_down = (q.scales.amax(-1) if q.global_scale.ndim else q.scales.amax()) <= 0x76
        same = (again.global_scale == q.global_scale) | rounded_down
        assert bool(same.all())
        if name == "halfbyte_kv" or not bool(rounded_down.any()):
            assert torch.equal(again.scales, q.scales)
        frozen = quantise(q.dequantise(), get_spec(name), global_scale=q.global_scale)
        assert torch.equal(frozen.scales, q.scales)
        assert torch.equal(frozen.codes, q.codes)


def test_both_exceptions_of_the_fixed_point_exist() -> None:
    spec = get_spec("halfbyte")
    halved = torch.zeros(1, 16)
    halved[0, 0] = 6 * 228.0  # block scale 228 rounds to 224
    q = quantise(halved, spec)
    again = quantise(q.dequantise(), spec)
    assert (q.scales.tolist(), again.scales.tolist()) == ([[0x76]], [[0x7E]])
    assert float(again.global_scale) == float(q.global_scale) / 2
    assert torch.equal(q.dequantise(), again.dequantise())
    small = torch.zeros(1, 32)
    small[0, 0], small[0, 16] = 2688.0, 6 * 1.6 * 2.0**-9  # byte 2, largest code 4
    q = quantise(small, spec)
    assert q.scales[0, 1] == 2
    assert not torch.equal(quantise(q.dequantise(), spec).dequantise(), q.dequantise())


@given(blocks())
@settings(max_examples=40, deadline=None)
def test_sign_symmetry(x: Tensor) -> None:
    for name in (*NVFP4, "mx_floor", "mx_even", "mx_rceil", "mx_naive"):
        spec = get_spec(name)
        a, b = quantise(x, spec), quantise(-x, spec)
        assert torch.equal(a.scales, b.scales)
        assert torch.equal(a.dequantise(), -b.dequantise())


@given(blocks(rows=4), st.permutations(range(4)))
@settings(max_examples=100, deadline=None)
def test_rows_are_independent_with_token_and_constant_globals(x: Tensor, order: list[int]) -> None:
    for name in ("halfbyte_token", "halfbyte_kv"):
        together = quantise(x[order], get_spec(name))
        for position, row in enumerate(order):
            alone = quantise(x[row], get_spec(name))
            assert torch.equal(together.codes[position], alone.codes)
            assert torch.equal(together.scales[position], alone.scales)
            assert torch.equal(together.dequantise()[position], alone.dequantise())


@given(blocks(normal=True), st.integers(-20, 20))
@settings(max_examples=100, deadline=None)
def test_a_power_of_two_moves_into_the_global_scale(x: Tensor, exponent: int) -> None:
    a, b = quantise(x, get_spec("halfbyte")), quantise(x * 2.0**exponent, get_spec("halfbyte"))
    if float(x.abs().max()) > 0:
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)
        assert float(b.global_scale) == float(a.global_scale) * 2.0**exponent


@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("power", [-149, -140, -126, -100, -30, 100, 126])
def test_extreme_magnitudes_stay_finite_and_close(name: str, power: int) -> None:
    generator = torch.Generator().manual_seed(power)
    x = (torch.rand(16, 64, generator=generator) * 2 - 1) * 2.0**power
    q = quantise(x, get_spec(name)).check(name)
    values = q.dequantise()
    assert bool(values.isfinite().all())
    adapts = q.spec.format == "mxfp4" or q.spec.global_scale != "constant"
    if adapts and -100 <= power <= 100:
        assert float((values - x).abs().max()) <= 0.26 * 2.0**power  # naive MX saturates a quarter; the rest err by 1/6


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 32), (2, 3, 4, 48), (0, 16), (4, 0)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for name in ("halfbyte", "halfbyte_token", "halfbyte_kv", "compressed_tensors", "fouroversix_mse"):
        q = quantise(x, get_spec(name)).check()
        assert q.shape == shape
        assert q.codes.shape == (*shape[:-1], shape[-1] // 2)
        assert q.scales.shape == (*shape[:-1], shape[-1] // 16)
        assert q.global_scale.shape == (shape[:-1] if name == "halfbyte_token" else ())
        assert q.dequantise().shape == shape
        assert q.dequantise(torch.bfloat16).dtype == torch.bfloat16


def test_non_contiguous_input_is_the_same_tensor() -> None:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    for name in sorted(SPECS):
        if fits((48, 32), get_spec(name)):
            a, b = quantise(x.T, get_spec(name)), quantise(x.T.contiguous(), get_spec(name))
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**127])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_non_finite_input_names_the_tensor(name: str, value: float) -> None:
    x = torch.zeros(16, 64)
    x[7, 9] = value
    with pytest.raises(NumericsError, match=r"layers\.3\.down_proj[\s\S]*1 of 1024"):
        quantise(x, get_spec(name), name="layers.3.down_proj")


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float64, torch.int8):
        with pytest.raises(NumericsError, match="dtype"):
            quantise(torch.zeros(16, dtype=dtype), get_spec("halfbyte"))


def test_bf16_input_equals_the_same_values_in_fp32() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("halfbyte", "halfbyte_token", "halfbyte_kv"):
        a, b = quantise(x, get_spec(name)), quantise(x.float(), get_spec(name))
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)


def test_scalar_is_refused() -> None:
    with pytest.raises(ShapeError):
        quantise(torch.tensor(1.0), get_spec("halfbyte"))
