"""What is compiled is compared before it is used: differences and failures of a compiler lead back to the eager function."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.formats import SPECS, QuantSpec, get_spec
from halfbyte.formats.block_scale import apply_scales
from halfbyte.formats.quantise import round_elements
from halfbyte.kernels import compiled
from halfbyte.kernels.compiled import exact as module
from halfbyte.kernels.compiled.exact import compile_exactly, same_bits


def double(x: Tensor) -> Tensor:
    return x + x


def arguments() -> tuple[Tensor, ...]:
    return (torch.tensor([1.0, -0.0]),)


def fails(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    raise RuntimeError("no compiler\nand a long story")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda f: lambda x: (x + x).abs(), "differs"),  # only the sign of a zero
        (lambda f: lambda x: (x + x).double(), "differs"),
        (fails, "RuntimeError: no compiler"),
    ],
    ids=["zero", "dtype", "failure"],
)
def test_another_result_is_not_used(
    broken: Callable[..., Callable[..., Tensor]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_chosen", {})
    monkeypatch.setattr(module, "_compiled", broken)
    with caplog.at_level(logging.WARNING):
        assert compile_exactly("key", "double", double, arguments) is double
    assert "double runs uncompiled" in caplog.text
    assert why in caplog.text
    with pytest.raises(ConfigError, match=why):
        compile_exactly("key", "double", double, arguments, insist=True)


def test_an_equal_result_is_used_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        calls.append(1)
        return lambda x: 2 * x

    monkeypatch.setattr(module, "_chosen", {})
    monkeypatch.setattr(module, "_compiled", twice)
    assert compile_exactly("key", "double", double, arguments) is not double
    compile_exactly("key", "double", double, arguments, insist=True)
    assert len(calls) == 1


def test_bits_tell_zeros_and_numbers_apart() -> None:
    x = torch.tensor([0.0, torch.nan])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([-0.0, torch.nan]))
    assert not same_bits(x, x.view(2, 1))
    assert not same_bits(x, x.bfloat16())


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_the_probe_sees_what_compilers_do(spec: QuantSpec) -> None:
    """A reciprocal in place of a division, subnormal numbers flushed, ties broken otherwise."""
    device = torch.device("cpu")
    values, scale = compiled._probe(spec, torch.float32, device)[:2]
    multiply = compiled._Blocks.of(compiled.split_tiles(torch.ones(16, 64), spec, None, "x"), spec).multiply

    def codes(values: Tensor, scale: Tensor, multiply: bool = multiply, spec: QuantSpec = spec) -> Tensor:
        return round_elements(apply_scales(values, scale, multiply), spec)

    wanted = codes(values, scale)
    if spec.format == "nvfp4" and not multiply:  # MXFP4 divides by powers of two, and their reciprocals are exact
        assert not torch.equal(codes(values, 1.0 / scale, True), wanted)
    other = spec.replace(ties="away" if spec.ties != "away" else "even")
    assert not torch.equal(codes(values, scale, spec=other), wanted)
    assert set(range(16)) - {8} <= set(wanted.flatten().tolist())


def test_the_probe_holds_subnormal_values() -> None:
    tiny = torch.finfo(torch.float32).tiny
    values, scale = compiled._probe(get_spec("mx_rceil"), torch.float32, torch.device("cpu"))[:2]
    assert bool(((values != 0) & (values.abs() < tiny)).any())
    assert bool(((scale != 0) & (scale < tiny)).any())


def test_a_compiler_that_fails_later_leads_back_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def tired(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor) -> Tensor:
            sizes.append(len(x))
            if len(x) > 2:
                raise RuntimeError("not once more")
            return x + x

        return call

    monkeypatch.setattr(module, "_chosen", {})
    monkeypatch.setattr(module, "_compiled", tired)
    found = compile_exactly("key", "double", double, arguments, insist=True)
    with caplog.at_level(logging.WARNING):
        for size in (2, 3, 2, 5):
            assert found(torch.ones(size)).tolist() == [2.0] * size
    assert sizes == [2, 2, 3], "compared, used, failed, and never asked again"
    assert caplog.text.count("double runs uncompiled from now on") == 1
