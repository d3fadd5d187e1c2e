"""Products that record: the output keeps its bits, the codes are those of the quantised input and intermediate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.formats import PayloadBits, QuantTensor, get_spec, payload_of, quantise
from halfbyte.kernels import Kernels, available, get
from halfbyte.kernels.weights import PackedExperts

NAMES = [name for name in available() if name != "native"]
SPECS = {
    "token": (get_spec("halfbyte"), get_spec("halfbyte_token")),
    "constant": (get_spec("halfbyte"), get_spec("halfbyte_kv")),
    "given by the library": (get_spec("halfbyte"), get_spec("modelopt").replace(global_scale="token")),
    "mxfp4": (get_spec("mx_rceil"), get_spec("mx_even")),
}


def same(a: QuantTensor, b: QuantTensor) -> bool:
    scales = torch.equal(a.scales, b.scales) and torch.equal(a.global_scale, b.global_scale)
    return torch.equal(a.codes, b.codes) and scales and a.shape == b.shape and a.spec == b.spec


def routed(kernels: Kernels, specs: str, kind: str = "w4a4") -> tuple[PackedExperts, tuple[Tensor, Tensor, Tensor]]:
    """Six experts, one of them never chosen; 9 tokens, three slots."""
    weight_spec, activation_spec = SPECS[specs]
    g = torch.Generator().manual_seed(5)
    gate_up, down = torch.randn(6, 64, 96, generator=g), torch.randn(6, 96, 32, generator=g)
    packed = kernels.pack_experts(
        gate_up, down, kind, weight_spec=weight_spec, activation_spec=activation_spec, name="layers.1"
    )  # type: ignore[arg-type]
    ids = torch.stack([torch.randperm(5, generator=g)[:3] for _ in range(9)]).to(torch.int32)
    return packed, (torch.randn(9, 96, generator=g), ids, torch.rand(9, 3, generator=g))


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [4, 2, 1])
def test_linear_records_its_input(name: str, specs: str, bits: PayloadBits) -> None:
    """Bias, norm before, SwiGLU and residual after: the output as without recording, the payload that of the normed rows."""
    kernels, (weight_spec, activation_spec) = get(name), SPECS[specs]
    x, bias, norm = torch.randn(7, 96), torch.randn(40), torch.rand(96) + 0.5
    weight = torch.randn(40, 96)
    for b in (None, bias):
        w = kernels.pack_linear(weight, "w4a4", weight_spec=weight_spec, activation_spec=activation_spec, bias=b)
        for rows in (x, x[:1], x[:0], x.t().contiguous().t()):
            around: list[dict[str, Any]] = [
                {},
                {"norm": norm, "eps": 1e-5},
                {"gated": True},
                {"norm": norm, "eps": 1e-5, "residual": torch.randn(len(rows), 40)},
            ]
            for options in around:
                y, payload = kernels.linear_recorded(rows, w, bits, **options)
                assert torch.equal(y, kernels.linear(rows, w, **options))
                read = get("reference").rms_norm(rows, norm, 1e-5) if "norm" in options else rows
                expected = payload_of(quantise(read, activation_spec), bits)
                for part in ("codes", "scales", "global_scale"):
                    assert torch.equal(getattr(payload, part), getattr(expected, part))
                assert (payload.shape, payload.bits, payload.spec) == (expected.shape, bits, activation_spec)


@pytest.mark.parametrize("name", NAMES)
def test_linear_refuses_to_record_what_it_cannot(name: str) -> None:
    kernels, (weight_spec, spec) = get(name), SPECS["token"]
    weight = torch.randn(40, 96)
    w = kernels.pack_linear(weight, "w4a4", weight_spec=weight_spec, activation_spec=spec, name="up")
    with pytest.raises(ShapeError, match="96"):
        kernels.linear_recorded(torch.randn(2, 64), w, 4)
    with pytest.raises(ConfigError, match="3 bits"):
        kernels.linear_recorded(torch.randn(2, 96), w, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bf16"):
        kernels.linear_recorded(torch.randn(2, 96), kernels.pack_linear(weight, "bf16"), 4)
    bad = torch.randn(5, 96)
    bad[3, 95] = float("nan")
    with pytest.raises(NumericsError, match="up input"):
        kernels.linear_recorded(bad, w, 2)
    if name != "reference":
        other = get("reference").pack_linear(weight, "w4a4", weight_spec=weight_spec, activation_spec=spec)
        with pytest.raises(ShapeError, match="other kernels"):
            kernels.linear_recorded(torch.randn(2, 96), other, 4)


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("name", NAMES)
def test_experts_record_input_and_intermediate(name: str, specs: str) -> None:
    """Against the same computed token by token with products of their own."""
    kernels, (_, activation_spec) = get(name), SPECS[specs]
    w, (x, ids, gates) = routed(kernels, specs)
    record = kernels.experts_recorded(x, ids, gates, w)
    assert torch.equal(record.output, kernels.experts(x, ids, gates, w))
    assert same(record.inputs, quantise(x, activation_spec))
    assert record.middle.shape == (9, 3, 32)
    gate_up, _ = w.dequantised()
    for token in range(9):
        for slot in range(3):
            expert = kernels.pack_linear(
                quantise_rows(gate_up[int(ids[token, slot])], w), "w4a4", activation_spec=activation_spec
            )
            inner = kernels.swiglu(kernels.linear(x[token : token + 1], expert))
            expected = quantise(inner, activation_spec)
            assert torch.equal(record.middle.codes[token, slot], expected.codes[0])
            assert torch.equal(record.middle.scales[token, slot], expected.scales[0])
            if record.middle.global_scale.dim():
                assert float(record.middle.global_scale[token, slot]) == float(expected.global_scale[0])


def quantise_rows(values: Tensor, w: PackedExperts) -> QuantTensor:
    """Codes of a matrix that is exact in the weight's format."""
    assert w.weight_spec is not None
    q = quantise(values, w.weight_spec)
    assert torch.equal(q.dequantise(), values)
    return q


@pytest.mark.parametrize("specs", SPECS)
def test_implementations_record_the_same(specs: str) -> None:
    w, inputs = routed(get("reference"), specs)
    expected = get("reference").experts_recorded(*inputs, w)
    for name in NAMES:
        record = get(name).experts_recorded(*inputs, routed(get(name), specs)[0])
        assert torch.equal(record.output, expected.output)
        assert same(record.inputs, expected.inputs)
        assert same(record.middle, expected.middle)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    w, (x, ids, gates) = routed(get(name), "token")
    record = get(name).experts_recorded(x[:0], ids[:0], gates[:0], w)
    assert record.output.shape == (0, 96)
    assert record.inputs.shape == (0, 96)
    assert record.middle.shape == (0, 3, 32)


@pytest.mark.parametrize("name", NAMES)
def test_recording_refuses_what_plain_experts_refuse(name: str) -> None:
    w, (x, ids, gates) = routed(get(name), "token")
    bad = x.clone()
    bad[4, 17] = float("nan")
    with pytest.raises(NumericsError, match=r"layers\.1 input"):
        get(name).experts_recorded(bad, ids, gates, w)
    huge = x.clone()
    huge[4] = 1e30  # squared by silu(gate) * up
    with pytest.raises(NumericsError, match="intermediate"):
        get(name).experts_recorded(huge, ids, gates, w)
    with pytest.raises(ShapeError):
        get(name).experts_recorded(x, ids + 5, gates, w)
    plain, inputs = routed(get(name), "token", "bf16")
    with pytest.raises(ConfigError, match="bf16"):
        get(name).experts_recorded(*inputs, plain)
    if name != "reference":
        with pytest.raises(ShapeError, match="other kernels"):
            get(name).experts_recorded(x, ids, gates, routed(get("reference"), "token")[0])
