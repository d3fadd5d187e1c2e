"""Native payloads and guided rounding against the reference, bit for bit (the sign of zeros included)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.formats import SPECS, Payload, QuantSpec, get_spec, payload_of
from halfbyte.formats.residues import PayloadBits
from halfbyte.kernels import available, get
from halfbyte.kernels.reference.guide import guided_round

NAMES = [name for name in available() if name not in ("native", "reference")]
BITS: tuple[PayloadBits, ...] = (4, 2, 1)
KINDS = ("normal", "grid", "zeros", "wide", "subnormal", "tiny")

pytestmark = pytest.mark.skipif(not NAMES, reason="the native kernels are not built here")


def tensor(rows: int, k: int, g: torch.Generator, kind: str) -> Tensor:
    x = torch.randn(rows, k, generator=g) * torch.exp(torch.randn(rows, 1, generator=g) * 4)
    if kind == "grid":  # most quotients are grid points or midpoints
        return (
            torch.randint(-24, 25, (rows, k), generator=g) * 0.25 * 2.0 ** float(torch.randint(-9, 9, (), generator=g))
        )
    if kind == "zeros":
        x = torch.where(torch.rand(rows, k, generator=g) < 0.8, torch.zeros(()), x)
        x[::2] = 0
    elif kind == "wide":
        x = x * torch.exp(torch.randn(rows, k, generator=g) * 12)
    elif kind == "subnormal":
        x = x * 2.0**-140
    elif kind == "tiny":  # quotients that round to zero or come near it, beside ordinary ones
        x = torch.where(torch.rand(rows, k, generator=g) < 0.3, x * 2.0**-135, x * 2.0**20)
    return x


def same(a: Tensor, b: Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@settings(max_examples=250, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    spec_name=st.sampled_from(("halfbyte", "halfbyte_token", "halfbyte_kv", "mx_rceil", "modelopt", "torchao")),
    bits=st.sampled_from(BITS),
    shift=st.sampled_from((1.0, 1.0, 0.0, 0.5, 0.3)),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    noise=st.sampled_from((0.0, 0.01, 0.3, None)),
    masked=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_native_equals_reference(
    name: str,
    spec_name: str,
    bits: PayloadBits,
    shift: float,
    rows: int,
    blocks: int,
    dtype: torch.dtype,
    kinds: tuple[str, str],
    noise: float | None,
    masked: bool,
    seed: int,
) -> None:
    """``noise`` None: the learner's tensor has nothing to do with the rollout's."""
    g, spec, kernels = torch.Generator().manual_seed(seed), get_spec(spec_name), get(name)
    rolled = tensor(rows, blocks * spec.block, g, kinds[0]).to(dtype)
    if noise is None:
        mine = tensor(rows, blocks * spec.block, g, kinds[1]).to(dtype)
    else:
        mine = (rolled.float() * (1 + noise * torch.randn(rolled.shape, generator=g))).to(dtype)
    q, payload = kernels.quantise_with_payload(rolled, spec, bits)
    assert torch.equal(payload.codes, payload_of(q, bits).codes)
    assert torch.equal(kernels.payload(q, bits).codes, payload.codes)
    mask = torch.rand(rows, generator=g) < 0.5 if masked else None
    y = kernels.guided_round(mine, payload, shift=shift, guided=mask)
    assert same(y, guided_round(mine, payload, shift=shift, guided=mask))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_every_quotient_near_the_grid(name: str, bits: PayloadBits) -> None:
    """All eight mantissas of a block scale times grid points and midpoints, and two ulps on either side of each."""
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    for mantissa in range(8):
        byte = (4 << 3) | mantissa  # (1 + mantissa / 8) / 8
        s = (1 + mantissa / 8) / 8
        x = points * s
        near = [x]
        for towards in (torch.tensor(9.0), torch.tensor(-9.0)):
            near.append(torch.nextafter(x, towards))
            near.append(torch.nextafter(near[-1], towards))
        values = torch.cat([torch.stack(near).flatten(), -torch.stack(near).flatten()])
        x = torch.nn.functional.pad(values, (0, -len(values) % 16)).repeat(16, 1)
        residue = torch.arange(16, dtype=torch.uint8).fmod(2**bits)[:, None].expand(x.shape)
        weights = torch.tensor([1 << (bits * i) for i in range(8 // bits)], dtype=torch.int64)
        codes = (residue.reshape(16, -1, 8 // bits) * weights).sum(-1).to(torch.uint8)
        scales = torch.full((16, x.shape[1] // 16), byte, dtype=torch.uint8)
        for g in (1.0, 2.0**-9, 2.0**40):
            spec = get_spec("halfbyte").replace(global_scale="constant", constant=g)
            payload = Payload(codes, scales, torch.tensor(g), spec, bits, tuple(x.shape))
            assert same(get(name).guided_round(x * g, payload), guided_round(x * g, payload))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_a_rollout_of_another_magnitude(name: str, bits: PayloadBits) -> None:
    """Quotients that overflow to infinity or vanish saturate and round as any other; nothing becomes NaN."""
    spec = get_spec("halfbyte_token")
    for rolled, mine in ((1e-25, 1e37), (1e30, 1e-37), (1e-30, 1e30), (1.0, 0.0)):
        p = get(name).quantise_with_payload(torch.randn(4, 208) * rolled, spec, bits)[1]
        x = torch.randn(4, 208) * mine
        y = get(name).guided_round(x, p)
        assert bool(torch.isfinite(y).all())
        assert same(y, guided_round(x, p))


@pytest.mark.parametrize("name", NAMES)
def test_views_and_unaligned_buffers(name: str) -> None:
    spec, base = get_spec("halfbyte_token"), torch.randn(48, 129)
    flat = torch.randn(3 * 80 + 1)[1:]
    for x in (base[:, 1:].t()[:, :48], base[::2, :64], base[:, ::4][:, :32], flat.view(3, 80)):
        rolled = x * (1 + 0.1 * torch.randn(x.shape))
        for bits in BITS:
            p = get("reference").quantise_with_payload(rolled, spec, bits)[1]
            odd = torch.empty(p.codes.numel() + 3, dtype=torch.uint8)[3:].view(p.codes.shape)
            odd.copy_(p.codes)
            strided = Payload(odd, p.scales.t().contiguous().t(), p.global_scale, spec, bits, p.shape)
            assert same(get(name).guided_round(x, strided), guided_round(x.contiguous(), p))


@pytest.mark.parametrize("name", NAMES)
def test_a_calibrated_global_scale(name: str) -> None:
    """No power of two: the native code has to divide."""
    spec, x = get_spec("halfbyte_token"), torch.randn(5, 400)
    for g in (torch.tensor(0.0371), torch.tensor([0.5, 0.01, 3.0, 1e-30, 7e25])):
        for bits in BITS:
            q, p = get(name).quantise_with_payload(x, spec, bits, global_scale=g)
            assert torch.equal(p.codes, payload_of(q, bits).codes)
            mine = x * (1 + 0.1 * torch.randn(x.shape))
            assert same(get(name).guided_round(mine, p), guided_round(mine, p))


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.scale_rows == 1], ids=lambda s: s.name)
def test_every_spec(spec: QuantSpec) -> None:
    x = torch.randn(6, 192, generator=torch.Generator().manual_seed(3))
    for name in NAMES:
        for bits in BITS:
            p = get(name).quantise_with_payload(x, spec, bits)[1]
            for shift in (1.0, 0.0):
                assert same(get(name).guided_round(x * 1.05, p, shift=shift), guided_round(x * 1.05, p, shift=shift))


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    spec, x = get_spec("halfbyte_token"), torch.randn(300, 512)
    p = get(name).quantise_with_payload(x * 1.02, spec, 2)[1]
    whole = get(name).guided_round(x, p)
    some = torch.tensor([299, 7, 150])
    assert same(get(name).guided_round(x[some], p.select(some)), whole[some])
