"""Compiled quantise, guided_round and gap have the bits of the reference on the CPU, on whatever device they run."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from devices import CUDA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding_inputs import KINDS, tensor

from halfbyte import formats, objective
from halfbyte.errors import NumericsError
from halfbyte.formats import SPECS, Payload, PayloadBits, QuantSpec, get_spec
from halfbyte.kernels import get
from halfbyte.kernels.compiled import CompiledKernels
from halfbyte.kernels.compiled.exact import same_bits
from halfbyte.kernels.reference.guide import guided_round

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), CUDA]
KERNELS = CompiledKernels(insist=True)  # a function that has other bits, or does not compile, is an error
few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
@few
@given(
    rows=st.integers(1, 3),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    kind=st.sampled_from(KINDS),
    given_scale=st.booleans(),
)
def test_quantise(
    spec: QuantSpec, device: str, rows: int, blocks: int, seed: int, dtype: torch.dtype, kind: str, given_scale: bool
) -> None:
    x = tensor(rows * spec.scale_rows, blocks * 32, seed, kind).to(dtype)
    there, g = x.to(device), torch.tensor(0.0371) if given_scale and spec.format == "nvfp4" else None
    q, found = formats.quantise(x, spec, global_scale=g), KERNELS.quantise(there, spec, global_scale=g)
    assert same_bits(found.codes.cpu(), q.codes)
    assert same_bits(found.scales.cpu(), q.scales)
    assert same_bits(found.global_scale.cpu(), q.global_scale)
    own = formats.dequantise(formats.quantise(x, spec), dtype)
    assert same_bits(KERNELS.fake_quantise(there, spec).cpu(), own)
    assert same_bits(KERNELS.fake_quantise(there.unsqueeze(0), spec).cpu(), own.unsqueeze(0))


def moved(payload: Payload, device: str) -> Payload:
    parts = {part: getattr(payload, part).to(device) for part in ("codes", "scales", "global_scale")}
    return replace(payload, **parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", get_args(PayloadBits))
@pytest.mark.parametrize("shift", [1.0, 0.4, 0.0])
@few
@given(
    spec=st.sampled_from([SPECS[name] for name in ("halfbyte", "halfbyte_token", "halfbyte_kv", "mx_floor")]),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(KINDS),
    noise=st.sampled_from((0.0, 0.01, 0.3)),
    masked=st.booleans(),
)
def test_guided_round(
    device: str,
    bits: PayloadBits,
    shift: float,
    spec: QuantSpec,
    rows: int,
    blocks: int,
    seed: int,
    kind: str,
    noise: float,
    masked: bool,
) -> None:
    g, rolled = torch.Generator().manual_seed(seed), tensor(rows, blocks * 32, seed, kind)
    x = rolled * (1 + noise * torch.randn(rolled.shape, generator=g))
    payload = get("reference").quantise_with_payload(rolled, spec, bits)[1]
    mask = torch.rand(rows, generator=g) < 0.5 if masked else None
    there = None if mask is None else mask.to(device)
    y = KERNELS.guided_round(x.to(device), moved(payload, device), shift=shift, guided=there)
    assert same_bits(y.cpu(), guided_round(x, payload, shift=shift, guided=mask))


@pytest.mark.parametrize("device", DEVICES)
@few
@given(n=st.integers(1, 200), seed=st.integers(0, 10_000), spread=st.sampled_from((0.0, 1e-7, 1e-3, 1.0, 40.0)))
def test_gap_terms(device: str, n: int, seed: int, spread: float) -> None:
    g = torch.Generator().manual_seed(seed)
    rollout = -10 * torch.rand(n, generator=g)
    learner, mask = rollout + spread * torch.randn(n, generator=g), torch.rand(n, generator=g) < 0.8
    learner[~mask] = torch.nan
    arguments = [t.to(device) for t in (learner, rollout, mask)]
    gap, k3 = objective.gap_terms(*arguments, compile="on")
    plain = objective.gap_terms(*arguments, compile="off")
    assert same_bits(gap, plain[0])
    assert same_bits(k3, plain[1])
    assert same_bits(gap.cpu(), objective.token_gap(learner, rollout, mask))


def test_gap_terms_by_definition() -> None:
    rollout, mask = torch.tensor([-1.0, -2.0, -3.0, -0.5]), torch.tensor([True, True, False, True])
    learner = torch.tensor([-1.25, -1.0, torch.nan, 39.5])
    gap, k3 = objective.gap_terms(learner, rollout, mask)
    assert gap.tolist() == [-0.25, 1.0, 0.0, 40.0]
    wanted = [torch.tensor(d, dtype=torch.float64).expm1() - d for d in (-0.25, 1.0, 0.0, 20.0)]
    torch.testing.assert_close(k3, torch.stack(wanted).float())
    metrics = objective.gap_metrics(gap, mask)
    assert metrics.k3_kl == pytest.approx(float(k3[mask].double().mean()), rel=1e-6)
    with pytest.raises(NumericsError):
        objective.gap_terms(learner, rollout, torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 2.0**127])
def test_numbers_that_cannot_be_quantised_are_named(bad: float) -> None:
    """Before anything is compiled."""
    x = torch.ones(3, 64)
    x[1, 40] = bad
    payload = get("reference").quantise_with_payload(torch.ones(3, 64), get_spec("halfbyte"), 1)[1]
    for call in (
        lambda: KERNELS.quantise(x, get_spec("halfbyte"), name="layers.3"),
        lambda: KERNELS.fake_quantise(x, get_spec("mx_rceil"), name="layers.3"),
        lambda: KERNELS.guided_round(x, payload, name="layers.3"),
    ):
        with pytest.raises(NumericsError, match=r"layers\.3"):
            call()


@pytest.mark.parametrize("shape", [(0, 32), (1, 16), (2, 0, 32)])
def test_small_and_empty_tensors(shape: tuple[int, ...]) -> None:
    """At most one block: nothing is compiled."""
    x, spec = torch.ones(shape), get_spec("halfbyte_token")
    q = KERNELS.quantise(x, spec)
    assert same_bits(q.codes, formats.quantise(x, spec).codes)
    assert KERNELS.fake_quantise(x, spec).shape == shape
