"""The five E8M0 rules against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats import SPECS, get_spec, quantise
from halfbyte.formats.block_scale import e8m0_bytes
from halfbyte.formats.spec import MxScale

RULES: tuple[MxScale, ...] = ("floor", "even", "rceil", "modelopt", "naive")


def floor_log2(value: Fraction) -> int:
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if Fraction(2) ** k <= value else k - 1


def ceil_log2(value: Fraction) -> int:
    k = floor_log2(value)
    return k if Fraction(2) ** k == value else k + 1


def sixth(amax: float) -> Fraction:
    return Fraction(float(torch.tensor(amax) / torch.tensor(6.0)))


def even(amax: float) -> int:
    k = floor_log2(Fraction(amax))
    return (k + 1 if Fraction(amax) >= Fraction(7, 4) * Fraction(2) ** k else k) - 2


ORACLES: dict[str, Callable[[float], int]] = {
    "floor": lambda amax: floor_log2(Fraction(amax)) - 2,
    "even": even,
    "rceil": lambda amax: ceil_log2(sixth(amax)),
    "naive": lambda amax: floor_log2(sixth(amax)),
}


@given(st.floats(2.0**-120, 2.0**126, width=32))
@settings(deadline=None)
def test_exact_rules(amax: float) -> None:
    for rule, oracle in ORACLES.items():
        byte = int(e8m0_bytes(torch.tensor([amax]), rule))  # type: ignore[arg-type]
        assert byte - 127 == min(127, max(-127, oracle(amax))), rule


@given(st.floats(2.0**-120, 2.0**126, width=32))
@settings(deadline=None)
def test_modelopt_rule_is_rceil_but_for_the_logarithm(amax: float) -> None:
    exact = int(e8m0_bytes(torch.tensor([amax]), "rceil"))
    rule = int(e8m0_bytes(torch.tensor([amax]), "modelopt"))
    if rule != exact:
        assert rule == exact - 1
        assert sixth(amax) < Fraction(2) ** (rule - 127) * (1 + Fraction(64, 2**23))


def test_modelopt_rule_differs_just_above_a_power_of_two() -> None:
    """fp32 log2(2^40 * (1 + 2^-23)) is 40, so its ceil is one less than the exact round-up."""
    amax = torch.tensor([6.0 * 2.0**40 * (1 + 2.0**-22)])
    assert int(e8m0_bytes(amax, "rceil")) == 41 + 127
    assert int(e8m0_bytes(amax, "modelopt")) == 40 + 127
    assert int(e8m0_bytes(amax, "modelopt")) == 127 + math.ceil(float(torch.log2(amax / 6.0)))


def test_subnormal_blocks() -> None:
    amax = torch.tensor([0.0, 1e-45, 6.0 * 2.0**-127, 6.0 * 2.0**-127 * (1 + 2.0**-20), 2.0**-124])
    assert e8m0_bytes(amax, "rceil").tolist() == [0, 0, 0, 1, 1]
    for rule in RULES:
        x = torch.zeros(5, 32)
        x[:, 0] = amax
        spec = get_spec("mx_floor").replace(mx_scale=rule)
        values = quantise(x, spec).dequantise()
        assert bool(values.isfinite().all())
        assert bool(((values - x).abs() <= 2.0**-126).all())


def test_vllm_43557_mx_rules_are_distinct() -> None:
    """floor(log2(amax / 6)) was used for floor(log2(amax)) - 2: half of the blocks saturate, 5 dB worse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1024, generator=generator)
    quality: dict[str, float] = {}
    scales: dict[str, torch.Tensor] = {}
    for name in ("mx_floor", "mx_even", "mx_rceil", "mx_modelopt", "mx_naive"):
        q = quantise(x, SPECS[name])
        scales[name] = q.scales
        quality[name] = float(10 * torch.log10(x.square().mean() / (q.dequantise() - x).square().mean()))
    assert {SPECS[name].mx_scale for name in quality} == set(RULES)
    assert quality["mx_naive"] < min(quality[name] for name in quality if name != "mx_naive") - 4.5
    for a in ("mx_floor", "mx_even", "mx_rceil", "mx_naive"):
        for b in ("mx_floor", "mx_even", "mx_rceil", "mx_naive"):
            assert a == b or not torch.equal(scales[a], scales[b])


@pytest.mark.parametrize("rule", RULES)
def test_largest_values_stay_finite(rule: MxScale) -> None:
    x = torch.linspace(-1.0, 1.0, 64).reshape(2, 32) * 2.0**126
    assert bool(quantise(x, get_spec("mx_floor").replace(mx_scale=rule)).dequantise().isfinite().all())
