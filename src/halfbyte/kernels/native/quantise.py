"""Native quantisation: shapes and dtypes are checked here, the C++ sees addresses.

Every spec with the default arithmetic runs in one native pass whatever its global scale; the others in two, with the arithmetic
of their scales in between (:mod:`halfbyte.kernels.native.other_rules`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor, get_spec, payload_of
from halfbyte.formats.global_scale import check_global
from halfbyte.formats.residues import check_bits
from halfbyte.kernels import _native
from halfbyte.kernels.native.buffers import new_buffer
from halfbyte.kernels.native.other_rules import quantise_by_parts

__all__ = ["dequantise", "fake_quantise", "quantise", "quantise_with_payload", "rule_of"]

_MODES = {"tensor": 0, "token": 1, "constant": 2, "none": 3}
_FLOATS = (torch.float32, torch.bfloat16)


@lru_cache(maxsize=64)
def rule_of(spec: QuantSpec) -> _native.Rule | None:
    """The native rule of a spec, or None when only the reference has its arithmetic."""
    free = {"global_scale": spec.global_scale, "constant": spec.constant, "global_update": spec.global_update}
    if spec != get_spec("halfbyte").replace(**free):
        return None
    return _native.Rule(0, _MODES[spec.global_scale], spec.constant)


def _native_input(x: Tensor, spec: QuantSpec) -> _native.Rule | None:
    rule = rule_of(spec)
    ready = x.dtype in _FLOATS and x.dim() > 0 and x.numel() > 0 and x.shape[-1] % spec.block == 0
    return rule if ready else None


def quantise(
    isa: int, x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor"
) -> QuantTensor:
    """See :func:`halfbyte.formats.quantise`."""
    return quantise_with_payload(isa, x, spec, 4, global_scale=global_scale, name=name)[0]


def quantise_with_payload(
    isa: int, x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
) -> tuple[QuantTensor, Payload]:
    """The quantised tensor and what it tells a learner in ``bits`` a value, in one pass."""
    check_bits(bits)
    rule = _native_input(x, spec)
    if rule is None:
        q = quantise_by_parts(isa, x, spec, global_scale, name)
        return q, payload_of(q, bits)
    v = x.detach().contiguous()
    leading, k = v.shape[:-1], v.shape[-1]
    given, count = 0, 0
    if global_scale is not None:
        global_scale = check_global(global_scale, tuple(leading), spec, name).contiguous()
        given, count = global_scale.data_ptr(), global_scale.numel()
    q, payload = empty_record(tuple(v.shape), spec, bits, global_scale)
    bad = _native.quantise(
        isa, rule, v.data_ptr(), v.dtype == torch.bfloat16, v.numel() // k, k, given, count, code_rows(q, payload),
    )  # fmt: skip
    if bad >= 0:
        formats.quantise(x, spec, global_scale=global_scale, name=name)  # raises, with the message of the definition
    return q, payload


def empty_record(
    shape: tuple[int, ...], spec: QuantSpec, bits: PayloadBits = 4, global_scale: Tensor | None = None
) -> tuple[QuantTensor, Payload]:
    """Uninitialised codes of ``shape`` and their payload, for a kernel to write (4 bits share the memory of the codes); the
    global scale too unless it is given."""
    lead, k = shape[:-1], shape[-1]
    codes = new_buffer((*lead, k // 2), torch.uint8)
    told = codes if bits == 4 else torch.empty((*lead, k * bits // 8), dtype=torch.uint8)
    scales = torch.empty((*lead, k // spec.block), dtype=torch.uint8)
    g = torch.empty(lead if spec.global_scale == "token" else ()) if global_scale is None else global_scale
    return QuantTensor(codes, scales, g, spec, shape), Payload(told, scales, g, spec, bits, shape)


def code_rows(q: QuantTensor, payload: Payload | None = None) -> _native.CodeRows:
    """Where a kernel writes such a record; the tensors have to outlive the call."""
    bits = 4 if payload is None else payload.bits
    told = 0 if payload is None else payload.codes.data_ptr()
    return _native.CodeRows(
        q.codes.data_ptr(), q.scales.data_ptr(), q.global_scale.data_ptr(), 0 if bits == 4 else bits, told
    )


def dequantise(isa: int, q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """See :func:`halfbyte.formats.dequantise`."""
    per_row = q.global_scale.dim() > 0 and tuple(q.global_scale.shape) == q.shape[:-1]
    native = (
        dtype in _FLOATS
        and q.codes.numel() > 0
        and (per_row or q.global_scale.dim() == 0)
        and q.spec.global_convention == "multiplier"
    )
    if not native:
        return formats.dequantise(q, dtype)
    k = q.shape[-1]
    out = new_buffer(q.shape, dtype)
    codes, scales, g = q.codes.contiguous(), q.scales.contiguous(), q.multiplier().contiguous()
    _native.dequantise(
        isa, 0 if q.spec.format == "nvfp4" else 1, codes.data_ptr(), scales.data_ptr(), g.data_ptr(), g.numel(),
        out.numel() // k, k, out.data_ptr(), dtype == torch.bfloat16,
    )  # fmt: skip
    return out


def fake_quantise(isa: int, x: Tensor, spec: QuantSpec, *, name: str = "tensor") -> Tensor:
    """``dequantise(quantise(x))`` in ``x``'s dtype and shape, in one pass."""
    rule = _native_input(x, spec)
    if rule is None:
        q = quantise_by_parts(isa, x, spec, None, name)
        return dequantise(isa, q, x.dtype)
    v = x.detach().contiguous()
    out = new_buffer(v.shape, v.dtype)
    k = v.shape[-1]
    bad = _native.fake_quantise(isa, rule, v.data_ptr(), v.dtype == torch.bfloat16, v.numel() // k, k, out.data_ptr())
    if bad >= 0:
        formats.quantise(x, spec, name=name)  # raises, with the message of the definition
    return out
