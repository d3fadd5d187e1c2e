"""Stochastic rounding: unbiased, reproducible, on the grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError
from halfbyte.formats import E2M1_GRID, get_spec, quantise, quantise_stochastic, unpack_codes

SPECS_WITHOUT_CHOICE = ("halfbyte", "halfbyte_token", "torchao", "modelopt", "mx_floor", "mx_even", "mx_naive")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient() -> Tensor:
    """Blocks from large to subnormal scales, with zeros."""
    x = torch.randn(4, 64, generator=generator(3)) * torch.tensor([1.0, 1e-3, 1e-5, 0.0]).unsqueeze(-1)
    x[0, :5] = 0
    return x


@pytest.mark.parametrize("name", SPECS_WITHOUT_CHOICE)
def test_unbiased(name: str) -> None:
    """The mean of n draws lies within 5 standard errors of x, where a value between two grid points a step apart has a
    standard deviation of at most step / 2 (the step comes from the draws' own largest and smallest values)."""
    x, draws = gradient(), 4000
    stacked = x.expand(draws, *x.shape).reshape(-1, x.shape[-1])
    fixed = quantise(x, get_spec(name)).global_scale  # one global scale, however often the rows are repeated
    fixed = fixed.repeat(draws) if fixed.ndim else fixed
    q = quantise_stochastic(stacked, get_spec(name), generator(0), global_scale=fixed)
    values = q.dequantise().reshape(draws, *x.shape).double()
    spread = values.amax(0) - values.amin(0)
    limit = 5 * spread / 2 / draws**0.5 + 1e-6 * x.abs()
    bias = (values.mean(0) - x).abs()
    assert bool((bias <= limit).all()), float((bias / limit.clamp(min=1e-30)).max())
    assert bool((spread[x != 0] > 0).float().mean() > 0.9)  # it does draw; round to nearest would have no spread


def test_nearest_rounding_is_biased_where_stochastic_is_not() -> None:
    x = torch.full((1, 16), 0.6)
    x[0, 0] = 6.0
    nearest = quantise(x, get_spec("halfbyte")).dequantise()[0, 1:].mean()
    drawn = quantise_stochastic(x.repeat(2000, 1), get_spec("halfbyte"), generator(0)).dequantise()[:, 1:].mean()
    assert abs(float(nearest) - 0.6) > 0.09
    assert abs(float(drawn) - 0.6) < 0.01


def test_values_stay_on_neighbouring_grid_points() -> None:
    x = torch.linspace(-6, 6, 4096).reshape(256, 16)
    x[:, 0] = 6.0
    codes = unpack_codes(
        quantise_stochastic(x, get_spec("halfbyte"), generator(1), global_scale=torch.tensor(1.0)).codes
    )
    grid = torch.tensor(E2M1_GRID)
    size = grid[(codes & 7).long()]
    assert not bool((codes == 8).any())
    above = torch.bucketize(x.abs(), grid).clamp(max=7)
    assert bool(((size == grid[above]) | (size == grid[(above - 1).clamp(min=0)])).all())
    on_grid = torch.isin(x.abs(), grid)
    assert bool((size == x.abs())[on_grid].all())


def test_the_generator_decides() -> None:
    x = gradient()
    a, b = (quantise_stochastic(x, get_spec("halfbyte"), generator(7)) for _ in range(2))
    assert torch.equal(a.codes, b.codes)
    assert not torch.equal(a.codes, quantise_stochastic(x, get_spec("halfbyte"), generator(8)).codes)
    before = torch.random.get_rng_state()
    quantise_stochastic(x, get_spec("halfbyte"), generator(7))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="four-over-six"):
        quantise_stochastic(gradient(), get_spec("fouroversix_mse"), generator(0))
    with pytest.raises(NumericsError, match=r"grad\.w"):
        quantise_stochastic(gradient() * float("nan"), get_spec("halfbyte"), generator(0), name="grad.w")
