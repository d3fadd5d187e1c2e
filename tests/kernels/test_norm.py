"""RMSNorm and SwiGLU against float64, and implementations against each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ShapeError
from halfbyte.kernels import Kernels, available, get

NAMES = [name for name in available() if name != "native"]
EPS = 2.0**-24


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


@pytest.mark.parametrize("width", [1, 8, 100, 576, 1030, 4096])
def test_rms_norm_is_three_roundings_from_float64(kernels: Kernels, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(5, width, generator=g) * 7, torch.randn(width, generator=g)
    d = x.double()
    truth = d / (d.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert bool(((kernels.rms_norm(x, weight, 1e-6).double() - truth).abs() <= 3.01 * EPS * truth.abs()).all())


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.integers(1, 300), st.integers(0, 2**31))
def test_implementations_agree_bit_for_bit_and_rows_are_independent(rows: int, width: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, width, generator=g) * 10, torch.randn(width, generator=g)
    gate_up = torch.randn(rows, 2 * width, generator=g) * 40
    norms, gated = get("reference").rms_norm(x, weight, 1e-5), get("reference").swiglu(gate_up)
    assert norms.shape == (rows, width)
    assert gated.shape == (rows, width)
    for name in NAMES:
        kernels = get(name)
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5), norms)
        assert torch.equal(kernels.swiglu(gate_up), gated)
        if rows:
            assert torch.equal(kernels.rms_norm(x[rows // 2 :], weight, 1e-5), norms[rows // 2 :])
            assert torch.equal(kernels.swiglu(gate_up[-1:]), gated[-1:])


def test_a_row_of_zeros_stays_zero(kernels: Kernels) -> None:
    assert torch.equal(kernels.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-6), torch.zeros(2, 32))


def test_swiglu_against_float64(kernels: Kernels) -> None:
    gate = torch.linspace(-85, 85, 4001)
    up = torch.linspace(-3, 5, 4001)
    truth = torch.nn.functional.silu(gate.double()) * up.double()
    result = kernels.swiglu(torch.cat([gate, up]).unsqueeze(0)).squeeze(0).double()
    # exp one ulp (2 eps), then three roundings, and the argument of exp is exact.
    assert bool(((result - truth).abs() <= 6 * EPS * truth.abs()).all())


def test_swiglu_far_out_is_finite_or_zero(kernels: Kernels) -> None:
    gate = torch.tensor([[-1e30, -200.0, -89.0, 200.0, 1e30]])
    result = kernels.swiglu(torch.cat([gate, torch.ones_like(gate)], 1))[0]
    assert result[:3].abs().tolist() == [0.0, 0.0, 0.0]
    assert result[3:].tolist() == gate[0, 3:].tolist()


def test_inputs_that_are_views(kernels: Kernels) -> None:
    wide = torch.randn(6, 80, generator=torch.Generator().manual_seed(0))
    view, weight = wide[::2, 5:55], torch.ones(50)
    assert torch.equal(kernels.rms_norm(view, weight, 1e-6), kernels.rms_norm(view.clone(), weight, 1e-6))
    assert torch.equal(kernels.swiglu(view), kernels.swiglu(view.clone()))


def test_wrong_shapes_are_refused_with_the_shapes(kernels: Kernels) -> None:
    with pytest.raises(ShapeError, match=r"\(2, 8\).*\(9,\)"):
        kernels.rms_norm(torch.zeros(2, 8), torch.zeros(9), 1e-6)
    with pytest.raises(ShapeError, match=r"\(2, 7\)"):
        kernels.swiglu(torch.zeros(2, 7))
