"""Native payloads and rollout-guided rounding; definition in ``reference/guide.py``.

Rounding towards a payload needs the block scales and one division a value, so it runs natively for MXFP4 and for every NVFP4 spec
that divides by scale * global; other orders of scaling run on the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantTensor, payload_of
from halfbyte.formats.global_scale import multiplier_pair
from halfbyte.formats.residues import check_bits
from halfbyte.kernels import _native
from halfbyte.kernels.native.buffers import new_buffer
from halfbyte.kernels.native.quantise import fake_quantise, rule_of
from halfbyte.kernels.reference import guide as reference
from halfbyte.kernels.weights import row_global_scale

__all__ = ["guided_round", "payload"]


def payload(isa: int, q: QuantTensor, bits: PayloadBits) -> Payload:
    """What the codes of ``q`` tell a learner; 4 bits share its memory."""
    k = q.shape[-1]
    if check_bits(bits) == 4 or k % 16:
        return payload_of(q, bits)
    codes = q.codes.contiguous()
    told = torch.empty((*codes.shape[:-1], k * bits // 8), dtype=torch.uint8)
    _native.narrow(isa, codes.data_ptr(), codes.numel() * 2, bits, told.data_ptr())
    return Payload(told, q.scales, q.global_scale, q.spec, bits, q.shape)


def guided_round(
    isa: int, x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
) -> Tensor:
    """See :func:`halfbyte.kernels.reference.guide.guided_round`."""
    spec = payload.spec
    rows = reference.check_guided(x, payload, shift, guided, name)
    rule = rule_of(spec)
    divides = spec.format == "mxfp4" or spec.element_scale == "divide_product"
    if not divides or (shift == 0 and rule is None) or x.numel() == 0 or x.shape[-1] % spec.block:
        return reference.guided_round(x, payload, shift=shift, guided=guided, name=name)
    native_rows = rows is None or (rule is not None and spec.global_scale != "tensor")
    v = x.detach().contiguous()
    leading, k = v.shape[:-1], v.shape[-1]
    codes, scales = payload.codes.contiguous(), payload.scales.contiguous()
    g = multiplier_pair(payload.global_scale, spec)[0]
    g = g.contiguous() if g.dim() in (0, len(leading)) else row_global_scale(g, leading)
    mask = rows.contiguous() if rows is not None and native_rows else None
    out = new_buffer(v.shape, v.dtype)
    bad = _native.guided_round(
        isa, rule, 0 if spec.format == "nvfp4" else 1, 0 if shift == 0 else payload.bits, (1.0 + shift) / 2.0,
        v.data_ptr(), v.dtype == torch.bfloat16, v.numel() // k, k, codes.data_ptr(), scales.data_ptr(), g.data_ptr(),
        g.numel(), 0 if mask is None else mask.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    if bad >= 0:
        reference.guided_round(
            x, payload, shift=shift, guided=guided, name=name
        )  # raises, with the definition's message
    if rows is None or native_rows:
        return out
    return torch.where(rows.unsqueeze(-1), out, fake_quantise(isa, v, spec, name=name))
