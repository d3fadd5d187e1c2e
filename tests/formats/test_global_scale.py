"""The global scale: powers of two, conventions, extremes."""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError
from halfbyte.formats import get_spec, multiplier_pair, power_of_two_at_least, quantise, shared_global
from halfbyte.formats.spec import GlobalConvention


@given(st.floats(0.0, 2.0**126, width=32))
@settings(deadline=None)
def test_power_of_two_at_least(value: float) -> None:
    result = Fraction(float(power_of_two_at_least(torch.tensor(value))))
    assert result.numerator == 1 or result.denominator == 1
    assert result >= Fraction(value)
    assert result == Fraction(1, 2**126) or result / 2 < Fraction(value)


def test_power_of_two_at_least_beside_powers() -> None:
    for exponent in (-126, -10, 0, 1, 100):
        power = torch.tensor(2.0**exponent)
        above, below = torch.nextafter(power, power * 2), torch.nextafter(power, torch.tensor(0.0))
        assert power_of_two_at_least(torch.stack((below, power, above))).tolist() == [
            2.0**exponent,
            2.0**exponent,
            2.0 ** (exponent + 1),
        ]


@pytest.mark.parametrize("convention", get_args(GlobalConvention))
def test_both_multipliers_are_positive_and_finite(convention: GlobalConvention) -> None:
    spec = get_spec("torchao").replace(global_convention=convention)
    for pair in multiplier_pair(torch.tensor([0.0, 1e-45, 1e-38, 1.0, 1e30, 2.0**127]), spec):
        assert bool(pair.isfinite().all())
        assert bool((pair > 0).all())


@pytest.mark.parametrize("convention", get_args(GlobalConvention))
def test_the_convention_changes_the_stored_number_only(convention: GlobalConvention) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    spec = get_spec("halfbyte")
    for mode in ("tensor", "token", "constant", "none"):
        plain = quantise(x, spec.replace(global_scale=mode, constant=0.125))
        other = quantise(x, spec.replace(global_scale=mode, constant=0.125, global_convention=convention))
        expected = {
            "multiplier": plain.global_scale,
            "reciprocal": 1 / plain.global_scale,
            "amax": plain.global_scale * 2688,
        }[convention]
        assert torch.equal(other.global_scale, expected)
        assert torch.equal(other.codes, plain.codes)
        assert torch.equal(other.scales, plain.scales)
        assert torch.equal(other.dequantise(), plain.dequantise())


def test_a_global_scale_given_by_the_caller_is_in_the_convention_of_the_spec() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for name in ("halfbyte", "torchao", "modelopt", "compressed_tensors", "fouroversix_static6", "fouroversix_mse"):
        own = quantise(x, get_spec(name))
        given_back = quantise(x, get_spec(name), global_scale=own.global_scale.reshape(1))
        assert torch.equal(given_back.global_scale, own.global_scale)
        assert torch.equal(given_back.codes, own.codes)
        assert torch.equal(given_back.scales, own.scales)


def test_only_per_tensor_global_scales_can_be_shared() -> None:
    with pytest.raises(ConfigError, match="per-tensor"):
        shared_global([torch.ones(1, 16)], get_spec("halfbyte_token"))
