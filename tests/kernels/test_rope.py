"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ShapeError
from halfbyte.kernels import Kernels, available, get

NAMES = [name for name in available() if name != "native"]


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


def tables(positions: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    return angle.cos().float(), angle.sin().float()


@pytest.mark.parametrize("width", [2, 16, 64, 96])
def test_rope_is_a_rotation_of_the_two_halves(kernels: Kernels, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    x, positions = torch.randn(9, 3, width, generator=g), torch.randint(0, 50, (9,), generator=g)
    cos, sin = tables(50, width)
    turn = torch.complex(cos.double(), sin.double())[positions].unsqueeze(1)
    truth = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double()) * turn
    result = kernels.rope(x, positions, cos, sin).double()
    size = truth.abs()  # two rounded products and one rounded sum: at most 2.5 eps of the magnitude
    assert bool(((result[..., : width // 2] - truth.real).abs() <= 2.5 * 2.0**-24 * 1.5 * size).all())
    assert bool(((result[..., width // 2 :] - truth.imag).abs() <= 2.5 * 2.0**-24 * 1.5 * size).all())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31))
def test_implementations_agree_bit_for_bit(rows: int, heads: int, half: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, positions = torch.randn(rows, heads, 2 * half, generator=g), torch.randint(0, 30, (rows,), generator=g)
    cos, sin = tables(30, 2 * half)
    truth = get("reference").rope(x, positions, cos, sin)
    for name in NAMES:
        assert torch.equal(get(name).rope(x, positions, cos, sin), truth)
        assert torch.equal(get(name).rope(x[rows // 2 :], positions[rows // 2 :], cos, sin), truth[rows // 2 :])


def test_bad_positions_and_shapes_are_refused(kernels: Kernels) -> None:
    cos, sin = tables(8, 16)
    x = torch.zeros(2, 1, 16)
    for bad in (8, -1):
        with pytest.raises(ShapeError, match=f"{bad}"):
            kernels.rope(x, torch.tensor([0, bad]), cos, sin)
    with pytest.raises(ShapeError, match=r"\(2, 1, 16\)"):
        kernels.rope(x, torch.tensor([0, 1]), cos[:, :4], sin[:, :4])
    with pytest.raises(ShapeError, match=r"positions \(3,\)"):
        kernels.rope(x, torch.tensor([0, 1, 2]), cos, sin)
