"""RMSNorm before, SwiGLU and a residual after a product, in the same call: bit-equal to the separate calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import get_spec
from halfbyte.kernels import Kernels, available, get

NAMES = [name for name in available() if name != "native"]
SPECS = {"weight_spec": get_spec("halfbyte"), "activation_spec": get_spec("halfbyte_token")}
FOREIGN = {"weight_spec": get_spec("halfbyte"), "activation_spec": get_spec("halfbyte_token").replace(ties="away")}


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["fp32", "bf16", "w4a16", "w4a4"]),
    st.booleans(),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.integers(0, 19),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_one_call_equals_the_separate_calls_of_the_reference(
    name: str,
    kind: str,
    foreign: bool,
    parts: tuple[bool, bool, bool, bool],
    m: int,
    half: int,
    blocks: int,
) -> None:
    g = torch.Generator().manual_seed(m * 41 + half)
    normed, gated, added, biased = parts
    k, n = 16 * blocks, 2 * half
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    norm = torch.rand(k, generator=g) + 0.5 if normed else None
    residual = torch.randn(m, half if gated else n, generator=g) if added else None
    bias = torch.randn(n, generator=g) if biased else None
    reference, ours = get("reference"), get(name)
    packed = [i.pack_linear(w, kind, **(FOREIGN if foreign else SPECS), bias=bias) for i in (reference, ours)]  # type: ignore[arg-type]
    y = reference.linear(x if norm is None else reference.rms_norm(x, norm, 1e-5), packed[0])
    y = reference.swiglu(y) if gated else y
    y = y if residual is None else residual + y
    assert torch.equal(ours.linear(x, packed[1], norm=norm, eps=1e-5, gated=gated, residual=residual), y)


def test_operands_that_do_not_fit_are_refused_with_their_shapes(kernels: Kernels) -> None:
    x, w = torch.zeros(3, 32), kernels.pack_linear(torch.ones(6, 32), "bf16", name="proj")
    odd = kernels.pack_linear(torch.ones(5, 32), "bf16", name="proj")
    with pytest.raises(ShapeError, match=r"proj.*\[32\]|\(31,\)"):
        kernels.linear(x, w, norm=torch.ones(31))
    with pytest.raises(ShapeError, match=r"\(3, 6\)"):
        kernels.linear(x, w, gated=True, residual=torch.zeros(3, 6))
    with pytest.raises(ShapeError, match="float64"):
        kernels.linear(x, w, residual=torch.zeros(3, 6, dtype=torch.float64))
    with pytest.raises(ShapeError, match="5 outputs"):
        kernels.linear(x, odd, gated=True)


def test_a_norm_of_nothing_finite_is_named(kernels: Kernels) -> None:
    w = kernels.pack_linear(torch.ones(4, 32), "w4a4", **SPECS, name="proj")  # type: ignore[arg-type]
    x = torch.ones(2, 32)
    x[1, 3] = float("inf")
    with pytest.raises(NumericsError, match="proj"):
        kernels.linear(x, w, norm=torch.ones(32), eps=1e-6)
