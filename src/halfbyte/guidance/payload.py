"""Recording guidance on the rollout's side, and the check that both sides round by one rule."""

from __future__ import annotations

from torch import Tensor

from halfbyte.errors import SpecMismatchError
from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor, first_difference, payload_bytes, payload_of
from halfbyte.kernels import Kernels

__all__ = ["Payload", "PayloadBits", "check_spec", "payload_bytes", "payload_of", "record"]


def record(
    values: Tensor, spec: QuantSpec, bits: PayloadBits, kernels: Kernels, *, name: str = "tensor"
) -> tuple[QuantTensor, Payload]:
    """Quantises ``values [..., K]`` (float32 or bfloat16) as the rollout does, with the guidance for a learner.

    Raises:
        ConfigError: other bits than 4, 2 or 1.
        ShapeError, NumericsError: see :func:`halfbyte.formats.quantise`.
    """
    return kernels.quantise_with_payload(values, spec, bits, name=name)


def check_spec(payload: Payload, spec: QuantSpec, name: str = "guidance") -> None:
    """Refuses guidance that another rule made: its codes would mean other values.

    Raises:
        SpecMismatchError: names the first field that differs, with both values.
    """
    difference = first_difference(payload.spec, spec)
    if difference is not None:
        raise SpecMismatchError(
            f"the guidance of {name} was recorded by another quantiser than the learner's",
            where=difference,
            expected=f"one QuantSpec on both sides (rollout {payload.spec.name!r}, learner {spec.name!r})",
            fix="give rollout and learner the same precision, or switch the alignment off",
        )
