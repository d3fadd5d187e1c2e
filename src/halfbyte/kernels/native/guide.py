"""Native payloads and rollout-guided rounding; definition in ``reference/guide.py``."""

from __future__ import annotations

from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor, payload_of
from halfbyte.formats.residues import check_bits
from halfbyte.kernels.native.quantise import quantise
from halfbyte.kernels.reference import guide as reference

__all__ = ["guided_round", "payload", "quantise_with_payload"]


def quantise_with_payload(
    isa: int, x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
) -> tuple[QuantTensor, Payload]:
    """The quantised tensor and what it tells a learner in ``bits`` a value."""
    check_bits(bits)
    q = quantise(isa, x, spec, global_scale=global_scale, name=name)
    return q, payload(isa, q, bits)


def payload(isa: int, q: QuantTensor, bits: PayloadBits) -> Payload:
    """What the codes of ``q`` tell a learner; 4 bits share its memory."""
    return payload_of(q, bits)


def guided_round(
    isa: int, x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
) -> Tensor:
    """See :func:`halfbyte.kernels.reference.guide.guided_round`."""
    return reference.guided_round(x, payload, shift=shift, guided=guided, name=name)
