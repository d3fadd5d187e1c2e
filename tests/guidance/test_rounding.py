"""Rollout-guided rounding: exhaustively against an enumerating oracle, its guarantees, its edges, its gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding_oracle import GRID, bracket, guided, index_of, nearest, value_of
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError, ShapeError, SpecMismatchError
from halfbyte.formats import SPECS, QuantSpec, decode_e2m1, get_spec, unpack_codes
from halfbyte.formats.residues import PayloadBits, pack_residues, residues
from halfbyte.guidance import (
    HARD_REPLAY,
    SCALE_ONLY,
    TRACE,
    Payload,
    RoundingMethod,
    guided_round,
    parse_method,
    payload_of,
    record,
)
from halfbyte.kernels import available, get

BITS: tuple[PayloadBits, ...] = (4, 2, 1)
NAMES = [name for name in available() if name != "native"]
TOKEN = get_spec("halfbyte_token")
UNIT = get_spec("halfbyte").replace(global_scale="constant", constant=1.0)
ONE = 0x38  # 1.0 in E4M3


def unit_payload(codes: Tensor, bits: PayloadBits, scale: int = ONE) -> Payload:
    """Guidance of uint8 codes [R, K] at one given block scale, so that z is x over a number we know."""
    rows, k = codes.shape
    scales = torch.full((rows, k // 16), scale, dtype=torch.uint8)
    return Payload(pack_residues(residues(codes, bits), bits), scales, torch.tensor(1.0), UNIT, bits, (rows, k))


def interesting() -> list[float]:
    """Grid points, midpoints, two ulps around each, beyond the grid, and both zeros."""
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(GRID)]
    values = [0.0, -0.0, 1e-40, -1e-40, 6.5, -7.0, 1e30, -1e30, 0.1, -2.2, 4.9, 5.3]
    for v in GRID + midpoints:
        t = torch.tensor(v)
        for end in (9.0, -9.0):
            values += [v, float(torch.nextafter(t, torch.tensor(end)))]
    return values


def exhaustive() -> tuple[Tensor, Tensor]:
    """Every interesting z beside every code: x [R, 64] and codes [R, 64]."""
    pairs = list(itertools.product(interesting(), range(16)))
    pairs += pairs[: -len(pairs) % 64]
    z, codes = zip(*pairs)
    return torch.tensor(z).view(-1, 64), torch.tensor(codes, dtype=torch.uint8).view(-1, 64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [ONE, 0x2B], ids=["1", "0.171875"])
def test_every_z_and_code_against_the_oracle(name: str, bits: PayloadBits, scale: int) -> None:
    z, codes = exhaustive()
    s = float(torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    x = z * s
    z = (x.double() / s).float()  # what is left of z in float32; a float64 quotient rounds once more to the same
    y = get(name).guided_round(x, unit_payload(codes, bits, scale))
    expected = [guided(float(v), int(c), bits) for v, c in zip(z.flatten(), codes.flatten())]
    assert torch.equal(y, (torch.tensor(expected) * s).view_as(y))
    assert not bool((y == 0).logical_and(torch.signbit(y)).any())


@pytest.mark.parametrize("name", NAMES)
def test_scale_only_is_rounding_to_nearest(name: str) -> None:
    z, codes = exhaustive()
    y = get(name).guided_round(z, unit_payload(codes, 4), shift=0.0)
    assert torch.equal(y, torch.tensor([nearest(float(v)) for v in z.flatten()]).view_as(y))


def test_pointwise_guarantee_and_nesting_of_payloads() -> None:
    """On every z and code: 4 bits are never further from the code than rounding to nearest; 1 bit is 4 bits whenever the code is
    in the bracket; 2 bits are 4 bits one step further out, and there never worse than 1 bit."""
    z, codes = exhaustive()
    y = {bits: get("reference").guided_round(z, unit_payload(codes, bits)) for bits in BITS}
    rolled = decode_e2m1(codes)
    rounded = get("reference").guided_round(z, unit_payload(codes, 4), shift=0.0)
    assert bool(((y[4] - rolled).abs() <= (rounded - rolled).abs()).all())
    inside = near = 0
    for i in range(z.numel()):
        v, code = float(z.flatten()[i]), int(codes.flatten()[i])
        low, high = bracket(v)
        four, two, one = (float(y[bits].flatten()[i]) for bits in BITS)
        if value_of(code) in (low, high):
            inside += 1
            assert four == two == one == value_of(code)
        first = GRID.index(low) - 7
        if low < high and first - 1 <= index_of(code) <= first + 2:
            near += 1
            assert two == four
        if first - 1 <= index_of(code) <= GRID.index(high) - 6:
            assert abs(two - value_of(code)) <= abs(one - value_of(code))
    assert near > inside > 200


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(SPECS)),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.sampled_from((0.001, 0.02, 0.3, 2.0)),
    st.sampled_from(NAMES),
    st.integers(0, 10_000),
)
def test_guarantee_for_every_spec(spec_name: str, dtype: torch.dtype, noise: float, name: str, seed: int) -> None:
    """|q* - q_roll| <= |RTN(z) - q_roll| at the rollout's scale, with both recovered from the values by division."""
    spec, g = get_spec(spec_name), torch.Generator().manual_seed(seed)
    x = torch.randn(16, 64, generator=g) * torch.exp(torch.randn(16, 1, generator=g))
    mine = (x + noise * torch.randn(16, 64, generator=g)).to(dtype).float()
    q, p = record(x.to(dtype), spec, 4, get(name))
    rolled = decode_e2m1(unpack_codes(q.codes))
    unit = (
        q.scale_values() * (q.multiplier()[..., None] if q.multiplier().dim() else q.multiplier())
    ).repeat_interleave(spec.block, dim=-1)
    live = unit > 0
    guided_value = guided_round(mine, p, spec, TRACE, kernels=get(name))
    rounded_value = guided_round(mine, p, spec, SCALE_ONLY, kernels=get(name))
    star, rtn = (torch.where(live, v / torch.where(live, unit, 1.0), 0.0) for v in (guided_value, rounded_value))
    star, rtn = (torch.round(v * 2) / 2 for v in (star, rtn))  # the grid's spacing is one half
    assert bool((live | (guided_value == 0)).all())
    assert bool((((star - rolled).abs() <= (rtn - rolled).abs()) | ~live).all())


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("bits", BITS)
def test_the_same_input_gives_the_rollouts_values(spec: QuantSpec, bits: PayloadBits) -> None:
    """Without noise nothing is left of a mismatch, whatever the method, unless the spec writes 0 for what overflows (wrap)."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 3
    q, p = record(x, spec, bits, get("reference"))
    wrapped = torch.zeros(x.shape, dtype=torch.bool)
    if spec.overflow == "wrap":
        wrapped = (unpack_codes(q.codes) == 8) & (x.abs() > 0.5)
    for method in (TRACE, SCALE_ONLY, RoundingMethod("shift", 0.5)):
        y = guided_round(x, p, spec, method, kernels=get("reference"))
        assert torch.equal(y[~wrapped], q.dequantise()[~wrapped])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_shift_moves_from_nearest_to_full_guidance(name: str, bits: PayloadBits) -> None:
    """The distance from the value pointed at never grows with the shift; its ends are scale_only and trace."""
    z, codes = exhaustive()
    p, kernels = unit_payload(codes, bits), get(name)
    full = kernels.guided_round(z, p)
    before = (kernels.guided_round(z, p, shift=0.0) - full).abs()
    assert bool((before > 0).any())
    for shift in (0.1, 0.5, 0.9, 0.9999, 1.0):
        distance = (kernels.guided_round(z, p, shift=shift) - full).abs()
        assert bool((distance <= before).all())
        assert shift == 1.0 or bool((distance < before).any() or shift != 0.5)
        before = distance
    assert float(before.max()) == 0.0


def test_shift_of_a_known_threshold() -> None:
    """Between 2 and 3 with the code at 3: half a shift takes 3 from 2.25 upwards."""
    x = torch.tensor([[2.2, 2.25, 2.3, 2.5, 2.0] + [0.0] * 11])
    codes = torch.full((1, 16), 5, dtype=torch.uint8)
    y = get("reference").guided_round(x, unit_payload(codes, 4), shift=0.5)
    assert y[0, :5].tolist() == [2.0, 3.0, 3.0, 3.0, 2.0]


@pytest.mark.parametrize("method", [TRACE, SCALE_ONLY, HARD_REPLAY, RoundingMethod("shift", 0.3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_exactly_straight_through(method: RoundingMethod, name: str) -> None:
    """Also where values saturate, where the scale is zero and in rows without guidance."""
    x = torch.randn(6, 32) * 4
    x[0] = 0
    _, p = record(x, TOKEN, 4, get(name))
    mine = (x * 3).requires_grad_()
    guided_rows = torch.tensor([True, True, False, True, False, True])
    upstream = torch.randn(6, 32)
    y = guided_round(mine, p, TOKEN, method, kernels=get(name), guided=guided_rows)
    y.backward(upstream)
    assert mine.grad is not None
    assert torch.equal(mine.grad, upstream)
    assert bool((y.detach() != mine.detach()).any())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_zero_scales_give_zero(name: str, bits: PayloadBits) -> None:
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    x = torch.randn(3, 64) * 1e4
    x[:, ::7] = 0
    for shift in (0.0, 0.5, 1.0):
        y = get(name).guided_round(x, unit_payload(codes, bits, scale=0), shift=shift)
        assert torch.equal(y.view(torch.int32), torch.zeros(3, 64, dtype=torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_saturated_values_choose_between_four_and_six(name: str) -> None:
    x = torch.tensor([[6.0, 9.0, 6.0, -6.0, -1e9, 7.0, 6.0, -6.5]]).repeat(1, 2)
    codes = torch.tensor([[7, 6, 5, 15, 14, 15, 0, 8]], dtype=torch.uint8).repeat(1, 2)
    expected = torch.tensor([[6.0, 4.0, 4.0, -6.0, -4.0, 4.0, 4.0, -4.0]]).repeat(1, 2)
    assert torch.equal(get(name).guided_round(x, unit_payload(codes, 4)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_guidance_round_on_their_own(name: str) -> None:
    """Their part of the payload may hold anything, NaN scales included; the others do not notice them."""
    kernels = get(name)
    for spec in (
        TOKEN,
        get_spec("halfbyte_kv"),
        get_spec("halfbyte"),
        get_spec("mx_even"),
        get_spec("compressed_tensors"),
    ):
        x = torch.randn(9, 64)
        mine = x + 0.05 * torch.randn(9, 64)
        _, p = record(x, spec, 2, kernels)
        rows = torch.tensor([True, False, True, True, False, False, True, False, True])
        codes, scales = p.codes.clone(), p.scales.clone()
        codes[~rows], scales[~rows] = 0xFF, 0xFF
        damaged = Payload(codes, scales, p.global_scale, spec, 2, p.shape)
        y = guided_round(mine, damaged, spec, kernels=kernels, guided=rows)
        assert torch.equal(y[rows], guided_round(mine, p, spec, kernels=kernels)[rows])
        assert torch.equal(y[~rows], kernels.fake_quantise(mine, spec)[~rows])


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_leading_dimensions(name: str) -> None:
    """Keys are [tokens, heads, head_dim] and guidance is a matter of the token."""
    x = torch.randn(4, 2, 32)
    _, p = record(x + 0.1 * torch.randn(4, 2, 32), get_spec("halfbyte_kv"), 4, get(name))
    rows = torch.tensor([True, False, False, True])
    y = get(name).guided_round(x, p, guided=rows)
    assert torch.equal(y, get(name).guided_round(x, p, guided=rows[:, None].expand(4, 2)))
    assert torch.equal(y[rows], get(name).guided_round(x, p)[rows])
    for bad in (torch.tensor([True]), rows.float(), torch.ones(4, 2, 32, dtype=torch.bool)):
        with pytest.raises(ShapeError, match="mask"):
            get(name).guided_round(x, p, guided=bad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_named(name: str, bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 144).to(dtype)
    _, p = record(x, TOKEN, 4, get(name))
    for row, column in ((0, 0), (1, 70), (2, 143)):
        damaged = x.clone()
        damaged[row, column] = bad
        for method in (TRACE, SCALE_ONLY, HARD_REPLAY):
            for rows in (None, torch.tensor([True, False, True])):
                with pytest.raises(NumericsError, match=r"layers\.3\.k"):
                    guided_round(damaged, p, TOKEN, method, kernels=get(name), guided=rows, name="layers.3.k")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "mxfp4"), ("global_scale", "constant"), ("ties", "away"), ("zero_sign", "keep"), ("scale_floor", 2.0**-6),
        ("element_scale", "reciprocal_global"), ("four_over_six", "mse"), ("global_rounding", "none"), ("scale_max", 256.0),
    ],
)  # fmt: skip
def test_another_spec_is_refused_by_field(field: str, value: object) -> None:
    x = torch.randn(2, 32)
    _, p = record(x, TOKEN, 4, get("reference"))
    changes = {field: value} | ({"global_scale": "none"} if field == "format" else {})
    with pytest.raises(SpecMismatchError, match=field):
        guided_round(x, p, TOKEN.replace(**changes), kernels=get("reference"))
    guided_round(x, p, TOKEN.replace(name="another label"), kernels=get("reference"))


def test_hard_replay_is_the_rollouts_tensor() -> None:
    x = torch.randn(5, 64)
    q, p = record(x, TOKEN, 4, get("reference"))
    rows = torch.tensor([True, True, False, True, False])
    mine = torch.randn(5, 64)
    y = guided_round(mine, p, TOKEN, HARD_REPLAY, kernels=get("reference"), guided=rows)
    assert torch.equal(y[rows], q.dequantise()[rows])
    assert torch.equal(y[~rows], get("reference").fake_quantise(mine, TOKEN)[~rows])
    assert torch.equal(guided_round(mine, p, TOKEN, HARD_REPLAY, kernels=get("reference")), q.dequantise())
    with pytest.raises(ConfigError, match="2 bits"):
        guided_round(x, payload_of(q, 2), TOKEN, HARD_REPLAY, kernels=get("reference"))


def test_methods_by_name() -> None:
    for text in ("trace", "scale_only", "hard_replay", "shift(0.25)", "shift(1)", "shift(0)"):
        assert str(parse_method(text)) == text
    for text in ("tracer", "shift", "shift()", "shift(2)", "shift(-1)", "shift(e)", ""):
        with pytest.raises(ConfigError):
            parse_method(text)
    with pytest.raises(ConfigError):
        RoundingMethod("nearest")  # type: ignore[arg-type]


def test_tensors_that_do_not_fit_are_refused() -> None:
    _, p = record(torch.randn(4, 32), TOKEN, 4, get("reference"))
    for x, message in (
        (torch.randn(4, 64), "4, 64"),
        (torch.randn(5, 32), "5, 32"),
        (torch.randn(4, 32).double(), "float64"),
    ):
        for name in NAMES:
            with pytest.raises(ShapeError, match=message):
                get(name).guided_round(x, p)
    with pytest.raises(ConfigError, match="shift"):
        get("reference").guided_round(torch.randn(4, 32), p, shift=1.5)


@pytest.mark.parametrize("name", NAMES)
def test_empty_tensors(name: str) -> None:
    _, p = record(torch.empty(0, 32), TOKEN, 1, get(name))
    assert get(name).guided_round(torch.empty(0, 32), p).shape == (0, 32)


def errors(noise: float) -> dict[str, float]:
    """Mean distance from the rollout's values on LLM-like activations (heavy-tailed rows and channels), and of controls."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(512, 256, generator=g) * torch.exp(torch.randn(256, generator=g))
    x = x * torch.exp(torch.randn(512, 1, generator=g))
    mine = x * (1 + noise * torch.randn(x.shape, generator=g))
    kernels = get("reference")
    q, p = record(x, TOKEN, 4, kernels)
    scale = x.square().mean(1, keepdim=True).sqrt()

    def distance(y: Tensor) -> float:
        return float(((y - q.dequantise()).abs() / scale).mean())

    out = {f"trace{bits}": distance(guided_round(mine, payload_of(q, bits), TOKEN, kernels=kernels)) for bits in BITS}
    out["scale_only"] = distance(guided_round(mine, p, TOKEN, SCALE_ONLY, kernels=kernels))
    out["half"] = distance(guided_round(mine, p, TOKEN, RoundingMethod("shift", 0.5), kernels=kernels))
    out["rtn"] = distance(kernels.fake_quantise(mine, TOKEN))
    shuffled = torch.randperm(len(x), generator=g)
    codes_only = Payload(p.codes[shuffled], p.scales, p.global_scale, TOKEN, 4, p.shape)
    out["shuffled_rows"] = distance(guided_round(mine, p.select(shuffled), TOKEN, kernels=kernels))
    out["shuffled_codes"] = distance(guided_round(mine, codes_only, TOKEN, kernels=kernels))
    return out


@pytest.mark.parametrize("noise", [2.0**-8, 0.03])
def test_guidance_helps_and_shuffled_guidance_harms(noise: float) -> None:
    e = errors(noise)
    assert e["trace4"] <= e["trace2"] <= e["trace1"] <= e["half"] < e["scale_only"] < e["rtn"]
    assert e["trace1"] < 0.01 * e["rtn"]
    assert e["shuffled_rows"] > e["rtn"]
    assert e["shuffled_codes"] > e["rtn"]


@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_two_bits_follow_four_where_one_bit_stops(noise: float) -> None:
    e = errors(noise)
    assert e["trace4"] <= e["trace2"] < e["trace1"]
    assert e["trace2"] - e["trace4"] < 0.1 * (e["trace1"] - e["trace4"])
