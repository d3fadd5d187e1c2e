"""Native quantise, dequantise and fake_quantise against the definition in ``halfbyte.formats``, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding_inputs import tensor
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import SPECS, QuantSpec, get_spec
from halfbyte.kernels import available, get

NAMES = [name for name in available() if name not in ("native", "reference")]
DEFAULTS = ("halfbyte", "halfbyte_token", "halfbyte_kv")

pytestmark = pytest.mark.skipif(not NAMES, reason="the native kernels are not built here")


def same(a: formats.QuantTensor, b: formats.QuantTensor) -> bool:
    """Codes, scale bytes and the bits of the global scale."""
    bits = torch.equal(a.global_scale.view(torch.int32), b.global_scale.view(torch.int32))
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and bits and a.shape == b.shape


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(DEFAULTS),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 10_000),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.sampled_from(("normal", "grid", "zeros", "wide", "subnormal")),
)
def test_default_rule_equals_the_definition(
    name: str, spec_name: str, rows: int, blocks: int, seed: int, dtype: torch.dtype, kind: str
) -> None:
    x, spec, kernels = tensor(rows, blocks * 16, seed, kind).to(dtype), get_spec(spec_name), get(name)
    q = formats.quantise(x, spec)
    assert same(kernels.quantise(x, spec), q)
    for out in (torch.float32, torch.bfloat16):
        assert torch.equal(kernels.dequantise(q, out), formats.dequantise(q, out))
    assert torch.equal(kernels.fake_quantise(x, spec), formats.dequantise(q, x.dtype))


@pytest.mark.parametrize("name", NAMES)
def test_every_quotient_near_a_midpoint(name: str) -> None:
    """All eight mantissas of a block scale times all midpoints, and two ulps on either side of each."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    blocks = []
    for mantissa in range(8, 16):
        scale = mantissa / 8 * 2.0**-3
        row = [torch.tensor([6 * scale])]
        for t in midpoints:
            x = t * scale
            near = [x, -x]
            for towards in (torch.tensor(9.0), torch.tensor(0.0)):
                near.append(torch.nextafter(x, towards))
                near.append(torch.nextafter(near[-1], towards))
            row.append(torch.stack(near))
        values = torch.cat(row)
        for part in values[1:].split(15):
            blocks.append(torch.cat([values[:1], part, torch.zeros(15 - len(part))]))
    x = torch.stack(blocks).reshape(1, -1)
    spec = get_spec("halfbyte").replace(global_scale="constant", constant=1.0)
    assert same(get(name).quantise(x, spec), formats.quantise(x, spec))


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.name not in DEFAULTS], ids=lambda s: s.name)
def test_other_specs_equal_the_definition(spec: QuantSpec) -> None:
    for seed, kind in enumerate(("normal", "grid", "zeros")):
        x = tensor(16, 192, seed, kind).to(torch.bfloat16)
        q = formats.quantise(x, spec)
        for name in NAMES:
            assert same(get(name).quantise(x, spec), q)
            assert torch.equal(get(name).dequantise(q), formats.dequantise(q))
            assert torch.equal(get(name).fake_quantise(x, spec), formats.dequantise(q, x.dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("g", [torch.tensor(0.0371), torch.tensor([0.5, 0.01, 3.0, 1e-30, 7e25])], ids=["one", "rows"])
def test_given_global_scale(name: str, g: Tensor) -> None:
    """A scale from calibration is no power of two: the native code has to divide."""
    x, spec = tensor(5, 400, 3, "normal").to(torch.float32), get_spec("halfbyte")
    q = formats.quantise(x, spec, global_scale=g)
    assert same(get(name).quantise(x, spec, global_scale=g), q)
    assert torch.equal(get(name).dequantise(q), formats.dequantise(q))
    assert torch.equal(get(name).dequantise(q, torch.bfloat16), formats.dequantise(q, torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_views_are_read_as_what_they_are(name: str) -> None:
    """Transposed, strided and unaligned tensors."""
    base, spec = torch.randn(48, 65), get_spec("halfbyte_token")
    flat = torch.randn(3 * 32 + 1)[1:]
    for x in (base[:, 1:].t()[:, :48], base[::2, :64], base[:, ::4][:, :16], flat.view(3, 32)):
        assert same(get(name).quantise(x, spec), formats.quantise(x.contiguous(), spec))
        assert torch.equal(get(name).fake_quantise(x, spec), formats.dequantise(formats.quantise(x.contiguous(), spec)))


@pytest.mark.parametrize("name", NAMES)
def test_three_dimensions_and_rows_alone(name: str) -> None:
    """Leading dimensions are rows, and a row does not depend on its neighbours."""
    x, spec = torch.randn(2, 3, 64), get_spec("halfbyte_token")
    q = get(name).quantise(x, spec)
    assert q.global_scale.shape == (2, 3)
    assert same(q, formats.quantise(x, spec))
    alone = get(name).fake_quantise(x[1, 2:3], spec)
    assert torch.equal(alone[0], get(name).fake_quantise(x, spec)[1, 2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 70, 271])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec_name", DEFAULTS)
def test_nan_and_infinity_are_named(name: str, bad: float, at: int, dtype: torch.dtype, spec_name: str) -> None:
    x = torch.randn(3, 272).to(dtype)
    x[2, at] = bad
    for function in (get(name).quantise, get(name).fake_quantise):
        with pytest.raises(NumericsError, match=r"layers\.3\.mlp"):
            function(x, get_spec(spec_name), name="layers.3.mlp")


@pytest.mark.parametrize("name", NAMES)
def test_cut_blocks_and_empty_tensors(name: str) -> None:
    spec = get_spec("halfbyte_token")
    with pytest.raises(ShapeError, match=r"3, 24"):
        get(name).quantise(torch.randn(3, 24), spec)
    empty = get(name).quantise(torch.empty(0, 32), spec)
    assert empty.codes.shape == (0, 16)
    assert get(name).dequantise(empty).shape == (0, 32)
    assert get(name).fake_quantise(torch.empty(0, 32), spec).shape == (0, 32)


RULES = st.one_of(
    st.builds(
        QuantSpec,
        global_scale=st.sampled_from(("tensor", "token", "constant", "none")),
        constant=st.sampled_from((1.0, 0.0371, 2.0**-100)),
        global_rounding=st.sampled_from(("none", "power_of_two")),
        global_convention=st.sampled_from(("multiplier", "reciprocal", "amax")),
        global_division=st.sampled_from(("divide", "reciprocal")),
        zero_global=st.sampled_from((1.0, 0.0)),
        arithmetic=st.sampled_from(("fp32", "input")),
        amax_division=st.sampled_from(("divide", "reciprocal")),
        block_scale=st.sampled_from(("divide", "divide_product", "multiply_inverse")),
        scale_floor=st.sampled_from((0.0, 2.0**-9, 2.0**-6)),
        zero_scale=st.sampled_from((0.0, 0.125, 1.0)),
        scale_max=st.sampled_from((448.0, 256.0)),
        element_scale=st.sampled_from(("divide_product", "reciprocal_global", "reciprocal_product", "divide_ratio")),
        ties=st.sampled_from(("even", "toward_zero", "away")),
        zero_sign=st.sampled_from(("positive", "keep", "negative", "nonpositive")),
        overflow=st.sampled_from(("saturate", "wrap")),
    ),
    st.builds(
        QuantSpec,
        format=st.just("mxfp4"),
        global_scale=st.just("none"),
        global_rounding=st.just("none"),
        ties=st.sampled_from(("even", "toward_zero", "away")),
        zero_sign=st.sampled_from(("positive", "keep", "negative", "nonpositive")),
        mx_scale=st.sampled_from(("floor", "even", "rceil", "modelopt", "naive")),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(NAMES),
    RULES,
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 10_000),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.sampled_from(("normal", "grid", "zeros", "wide", "subnormal")),
)
def test_any_rule_equals_the_definition(
    name: str, spec: QuantSpec, tiled: bool, rows: int, blocks: int, seed: int, dtype: torch.dtype, kind: str
) -> None:
    if tiled and spec.format == "nvfp4" and spec.global_scale != "token":
        spec, rows = spec.replace(scale_rows=16), 16 * rows
    x = tensor(rows, blocks * 32, seed, kind).to(dtype)
    x[0, ::5] = -0.0
    q = formats.quantise(x, spec)
    assert same(get(name).quantise(x, spec), q)
    assert torch.equal(get(name).fake_quantise(x, spec), formats.dequantise(q, x.dtype))
