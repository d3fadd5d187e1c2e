"""Matrix products: native against reference bit for bit, float64 against both, and their invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.formats import QuantTensor, get_spec, quantise
from halfbyte.kernels import Kernels, PackedLinear, available, get

NAMES = [name for name in available() if name != "native"]
NATIVE = [name for name in NAMES if name != "reference"]
KINDS = ("fp32", "bf16", "w4a16", "w4a4")
SPECS = {"weight_spec": get_spec("halfbyte"), "activation_spec": get_spec("halfbyte_token")}
MX = {"weight_spec": get_spec("mx_rceil"), "activation_spec": get_spec("mx_floor")}


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


def pack(kernels: Kernels, w: Tensor | QuantTensor, kind: str, specs: dict = SPECS, **kw: object) -> PackedLinear:
    return kernels.pack_linear(w, kind, **specs, **kw)  # type: ignore[arg-type]


def operands(m: int, n: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g) * torch.exp(torch.randn(m, 1, generator=g) * 2)
    return x, torch.randn(n, k, generator=g) * 0.1, torch.randn(n, generator=g)


def exact(kernels: Kernels, x: Tensor, w: PackedLinear) -> tuple[Tensor, Tensor]:
    """The product of the same operands in float64, and the sum of absolute products."""
    a = x
    if w.activation_spec is not None:
        a = kernels.fake_quantise(x, w.activation_spec)
    elif w.kind != "fp32":
        a = x.to(torch.bfloat16)
    a64, w64 = a.to(torch.float64), w.dequantised().to(torch.float64)
    bias = 0.0 if w.bias is None else w.bias.to(torch.float64)
    return a64 @ w64.t() + bias, a64.abs() @ w64.abs().t() + abs(bias)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(NATIVE or ["reference"]),
    st.sampled_from(KINDS),
    st.booleans(),
    st.booleans(),
    st.integers(0, 70),
    st.integers(1, 70),
    st.integers(1, 12),
    st.integers(0, 10_000),
)
def test_native_equals_reference(
    name: str, kind: str, mx: bool, bias: bool, m: int, n: int, blocks: int, seed: int
) -> None:
    x, w, b = operands(m, n, blocks * (32 if mx else 16), seed)
    kw = {"bias": b} if bias else {}
    specs = MX if mx else SPECS
    y = [k.linear(x, pack(k, w, kind, specs, **kw)) for k in (get("reference"), get(name))]
    assert y[0].shape == (m, n)
    assert torch.equal(y[0], y[1])


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 2, 7, 33])
@pytest.mark.parametrize("name", NATIVE)
def test_any_inner_dimension_without_blocks(name: str, kind: str, k: int) -> None:
    x, w, b = operands(5, 19, k, k)
    assert torch.equal(
        get(name).linear(x, pack(get(name), w, kind, bias=b)),
        get("reference").linear(x, pack(get("reference"), w, kind, bias=b)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kernels: Kernels, kind: str) -> None:
    """1e-6 of the size of what is summed, and of the result's norm (issue 3)."""
    x, w, b = operands(5, 48, 1024, 1)
    packed = pack(kernels, w, kind, bias=b)
    y, (want, size) = kernels.linear(x, packed), exact(kernels, x, packed)
    assert ((y - want).abs() <= 1e-6 * size).all()
    assert (y - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_definition_by_hand(kernels: Kernels, kind: str) -> None:
    """One output, computed in scalar float32 steps as the docstring says."""
    x, w, b = operands(1, 1, 48, 5)
    packed = pack(kernels, w, kind, bias=b)
    w_values = packed.dequantised()[0]
    if kind == "w4a4":
        qa, qw = quantise(x, SPECS["activation_spec"]), quantise(w, SPECS["weight_spec"])
        acc = torch.zeros(())
        for block in range(3):
            part = slice(16 * block, 16 * block + 16)
            sa, sw = qa.scale_values()[0, block], qw.scale_values()[0, block]
            grid_a = qa.dequantise()[0, part] / (sa * qa.global_scale[0])
            grid_w = w_values[part] / (sw * qw.global_scale)
            acc = acc + ((grid_a * 2) * (grid_w * 2)).sum() * (sa * sw)
        want = acc * ((qa.global_scale[0] * qw.global_scale) * 0.25)
    elif kind == "fp32":
        total = torch.zeros((), dtype=torch.float64)
        for a, c in zip(x[0].double(), w_values.double(), strict=True):
            total = total + a * c
        want = total.float()
    else:
        g = quantise(w, SPECS["weight_spec"]).global_scale if kind == "w4a16" else torch.ones(())
        acc = torch.zeros(())
        for a, c in zip(x[0].to(torch.bfloat16).float(), w_values / g, strict=True):
            acc = acc + a * c
        want = acc * g
    assert kernels.linear(x, packed)[0, 0] == want + b[0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_batch(kernels: Kernels, kind: str) -> None:
    x, w, b = operands(67, 40, 96, 2)
    packed = pack(kernels, w, kind, bias=b)
    y = kernels.linear(x, packed)
    order = torch.randperm(67)
    assert torch.equal(kernels.linear(x[order], packed), y[order])
    for m in (1, 2, 3, 5, 8, 9, 16, 31, 64):
        assert torch.equal(kernels.linear(x[:m], packed), y[:m])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
def test_thread_counts_agree(kind: str) -> None:
    from halfbyte.kernels import native

    x, w, b = operands(9, 1100, 512, 4)
    kernels = get("native")
    packed, before, results = pack(kernels, w, kind, bias=b), native.thread_count(), []
    try:
        for threads in (1, 2, 3, 8, 1):
            native.set_thread_count(threads)
            results.append(kernels.linear(x, packed))
    finally:
        native.set_thread_count(before)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("kind", ["w4a4", "w4a16"])
def test_concatenated_rows_keep_their_global_scales(kernels: Kernels, kind: str) -> None:
    """Weights that share an input are packed as one, with one global scale a row."""
    x, w, _ = operands(4, 37, 64, 3)
    parts = [quantise(p, SPECS["weight_spec"]) for p in (w[:20] * 100, w[20:])]
    joined = QuantTensor(
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scales for p in parts]),
        torch.cat([p.global_scale.expand(p.shape[0]) for p in parts]),
        SPECS["weight_spec"],
        (37, 64),
    )
    apart = torch.cat([kernels.linear(x, pack(kernels, p, kind)) for p in parts], dim=1)
    packed = pack(kernels, joined, kind)
    assert torch.equal(kernels.linear(x, packed), apart)
    assert torch.equal(packed.dequantised(), torch.cat([p.dequantise() for p in parts]))


@pytest.mark.parametrize("kind", KINDS)
def test_views_and_unaligned_inputs(kernels: Kernels, kind: str) -> None:
    x, w, _ = operands(6, 20, 48, 6)
    packed = pack(kernels, w.t().contiguous().t(), kind)
    want = kernels.linear(x, packed)
    wide = torch.zeros(6, 49)
    wide[:, 1:] = x
    flat = torch.zeros(6 * 48 + 1)
    flat[1:] = x.reshape(-1)
    for view in (wide[:, 1:], x.t().contiguous().t(), flat[1:].view(6, 48)):
        assert torch.equal(kernels.linear(view, packed), want)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weight_is_the_quantised_weight(kernels: Kernels, kind: str) -> None:
    _, w, _ = operands(1, 21, 64, 7)
    packed = pack(kernels, w, kind)
    want = {"fp32": w, "bf16": w.to(torch.bfloat16).float()}.get(kind, quantise(w, SPECS["weight_spec"]).dequantise())
    assert torch.equal(packed.dequantised(), want)


def test_fp4_weights_are_small(kernels: Kernels) -> None:
    """At most .30 of BF16, global scales and padding included (issue 3)."""
    w = torch.randn(512, 1024)
    assert pack(kernels, w, "w4a4").nbytes <= 0.30 * pack(kernels, w, "bf16").nbytes
    assert pack(kernels, w, "bf16").nbytes == w.numel() * 2


def test_activation_spec_of_another_library(kernels: Kernels) -> None:
    """A constant global scale and foreign arithmetic: the reference quantises, the product is still native."""
    foreign = get_spec("modelopt").replace(global_scale="constant", constant=0.01)
    x, w, _ = operands(5, 33, 64, 8)
    packed = kernels.pack_linear(w, "w4a4", weight_spec=SPECS["weight_spec"], activation_spec=foreign)
    reference = get("reference")
    other = reference.pack_linear(w, "w4a4", weight_spec=SPECS["weight_spec"], activation_spec=foreign)
    assert torch.equal(kernels.linear(x, packed), reference.linear(x, other))


def test_zero_rows_and_zero_weights(kernels: Kernels) -> None:
    x, w = torch.zeros(3, 32), torch.zeros(5, 32)
    for kind in KINDS:
        assert torch.equal(kernels.linear(x, pack(kernels, w, kind)), torch.zeros(3, 5))
        assert kernels.linear(torch.empty(0, 32), pack(kernels, w, kind)).shape == (0, 5)


def test_bad_arguments_name_their_shapes(kernels: Kernels) -> None:
    w = torch.randn(8, 32)
    with pytest.raises(ShapeError, match=r"\(3, 31\)"):
        kernels.linear(torch.randn(3, 31), pack(kernels, w, "w4a4"))
    with pytest.raises(ShapeError, match="float64"):
        kernels.linear(torch.randn(3, 32).double(), pack(kernels, w, "bf16"))
    with pytest.raises(ShapeError, match=r"\(7,\)"):
        pack(kernels, w, "bf16", bias=torch.randn(7))
    with pytest.raises(ShapeError, match=r"\(2, 8, 32\)"):
        pack(kernels, torch.randn(2, 8, 32), "w4a4")
    with pytest.raises(ConfigError, match="w4a8"):
        pack(kernels, w, "w4a8")
    with pytest.raises(ConfigError, match="activation_spec"):
        kernels.pack_linear(w, "w4a4", weight_spec=SPECS["weight_spec"])
    with pytest.raises(ConfigError, match="whole batch"):
        kernels.pack_linear(w, "w4a4", weight_spec=SPECS["weight_spec"], activation_spec=get_spec("halfbyte"))
    with pytest.raises(ConfigError, match="mxfp4"):
        kernels.pack_linear(w, "w4a4", weight_spec=SPECS["weight_spec"], activation_spec=get_spec("mx_floor"))


def test_torchao_3233_last_dimension_not_divisible(kernels: Kernels) -> None:
    for kind in ("w4a4", "w4a16"):
        with pytest.raises(ShapeError, match="24"):
            pack(kernels, torch.randn(8, 24), kind)
    assert kernels.linear(torch.randn(2, 24), pack(kernels, torch.randn(8, 24), "bf16")).shape == (2, 8)


def test_nan_input_is_named(kernels: Kernels) -> None:
    x = torch.randn(4, 32)
    x[2, 5] = float("nan")
    with pytest.raises(NumericsError, match="o_proj"):
        kernels.linear(x, pack(kernels, torch.randn(8, 32), "w4a4", name="o_proj"))


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
def test_weights_of_another_implementation_are_refused() -> None:
    packed = pack(get("reference"), torch.randn(8, 32), "w4a4")
    with pytest.raises(ShapeError, match="other kernels"):
        get("native").linear(torch.randn(1, 32), packed)
    with pytest.raises(ShapeError, match="other kernels"):
        get("reference").linear(torch.randn(1, 32), pack(get("native"), torch.randn(8, 32), "w4a4"))
