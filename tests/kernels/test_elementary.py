"""exp, log and the ordered sums, against extended precision and literal loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from halfbyte.kernels.reference.elementary import exp, exp_negative, log
from halfbyte.kernels.reference.sums import block_sums, lane_sum, running_sum


def every_exponent(count: int, seed: int) -> torch.Tensor:
    """Random positive float32 with all exponents, subnormal ones included."""
    bits = np.random.default_rng(seed).integers(1, 0x7F800000, count, dtype=np.int32)
    return torch.from_numpy(bits).view(torch.float32)


def ulps(value: torch.Tensor, truth: np.ndarray, dtype: type) -> float:
    spacing = np.spacing(np.abs(truth).astype(dtype)).astype(np.longdouble)
    return float(np.max(np.abs(value.numpy().astype(np.longdouble) - truth) / spacing))


def test_exp_is_within_one_ulp() -> None:
    x = torch.cat([torch.linspace(-87.33, 88.72, 400_001), every_exponent(200_000, 0), -every_exponent(200_000, 1)])
    x = x[(x > -87.33) & (x < 88.72)]
    assert ulps(exp(x), np.exp(x.numpy().astype(np.longdouble)), np.float32) <= 1.0


def test_exp_at_the_ends_of_its_range() -> None:
    x = torch.tensor([-math.inf, -1e30, -104.0, -87.34, 0.0, -0.0, 88.7229, 1e30, math.inf])
    assert exp(x).tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, math.inf, math.inf, math.inf]
    assert math.isnan(exp(torch.tensor([math.nan])).item())
    assert exp(torch.tensor([88.7228])).item() < math.inf
    normal = exp(torch.linspace(-87.4, -87.2, 10_001))
    assert bool(((normal == 0) | (normal >= 2.0**-126)).all()), (
        "a subnormal result depends on the flush mode of the thread"
    )


def test_log_is_nearly_correctly_rounded() -> None:
    x = every_exponent(400_000, 2)
    assert ulps(log(x), np.log(x.numpy().astype(np.longdouble)), np.float32) <= 0.51
    d = torch.cat([x.double() * 1.0000001, 1.0 + torch.linspace(-0.3, 0.4, 200_001, dtype=torch.float64)])
    d = d[d != 1.0]
    assert ulps(log(d), np.log(d.numpy().astype(np.longdouble)), np.float64) <= 3.0


def test_log_of_special_numbers() -> None:
    assert log(torch.tensor([0.0, -0.0, 1.0, math.inf])).tolist() == [-math.inf, -math.inf, 0.0, math.inf]
    assert bool(torch.isnan(log(torch.tensor([-1.0, -math.inf, math.nan]))).all())
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert log(tiny).item() == pytest.approx(math.log(5e-324), rel=1e-15)


@pytest.mark.parametrize("function", [exp, log])
def test_value_does_not_depend_on_shape_or_neighbours(function) -> None:  # type: ignore[no-untyped-def]
    x = torch.linspace(-5, 5, 1003).abs() + 0.01
    whole = function(x)
    for size in (1, 3, 8, 17, 64):
        assert torch.equal(torch.cat([function(part) for part in x.split(size)]), whole)
    strided = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(function(strided), whole)


def test_exp_negative_has_the_bits_of_exp_down_to_minus_87() -> None:
    x = torch.cat([torch.linspace(-87.0, 0.0, 100_001), -every_exponent(100_000, 3)])
    assert torch.equal(exp_negative(x), torch.where(x >= -87.0, exp(x), 0.0))
    assert exp_negative(torch.tensor([-87.00001, -math.inf, math.nan])).tolist() == [0.0, 0.0, 0.0]


def literal_block_sums(values: list[float]) -> list[float]:
    out = []
    for first in range(0, max(1, len(values)), 1024):
        lanes = [0.0] * 16
        for i, v in enumerate(values[first : first + 1024]):
            lanes[i % 16] += v
        for half in (8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        out.append(lanes[0])
    return out


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 1023, 1024, 1025, 2500])
def test_sums_follow_their_definition(n: int) -> None:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * 1000
    for row in range(3):
        expected = literal_block_sums(x[row].tolist())
        assert block_sums(x)[row].tolist() == expected
        total = expected[0]
        for block in expected[1:]:
            total += block
        assert lane_sum(x)[row].item() == total
    literal, sums = 0.0, []
    for v in x[0].tolist():
        literal += v
        sums.append(literal)
    assert running_sum(x)[0].tolist() == sums


def test_the_sum_of_nothing_is_zero() -> None:
    assert lane_sum(torch.zeros(2, 0)).tolist() == [0.0, 0.0]
