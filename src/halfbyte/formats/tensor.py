"""``QuantTensor``: packed codes, scales, global scale, spec and logical shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.block_scale import decode_scales
from halfbyte.formats.global_scale import multiplier_pair
from halfbyte.formats.grid import decode_packed
from halfbyte.formats.spec import QuantSpec
from halfbyte.formats.validate import validate_parts

__all__ = ["QuantTensor", "dequantise", "validate"]

_PARTS = ("codes", "scales", "global_scale")


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A quantised tensor of logical shape ``shape`` = [..., K].

    Arguments:
        codes: uint8 [..., K/2], two E2M1 codes a byte, low nibble = even element.
        scales: uint8 [..., K/block], E4M3 (NVFP4) or E8M0 (MXFP4) bytes; a 2-D scale is repeated for each of its rows.
        global_scale: float32, shape () or the leading shape [...] (one per row), stored in ``spec.global_convention``.
        spec: the choices that made it.
        shape: logical shape.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    spec: QuantSpec
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.global_scale))

    def multiplier(self) -> Tensor:
        """The global scale as the factor g of value = grid * scale * g, whatever convention it is stored in."""
        return multiplier_pair(self.global_scale, self.spec)[0]

    def scale_values(self) -> Tensor:
        """Block scales as float32 [..., K/block], without the global scale."""
        return decode_scales(self.scales, self.spec)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :func:`dequantise`."""
        return dequantise(self, dtype)

    def check(self, name: str = "tensor") -> QuantTensor:
        """See :func:`validate`."""
        return validate(self, name)

    def to_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a safetensors file stores: tensors ``name.codes``, ``name.scales``, ``name.global_scale`` and a metadata
        entry ``name`` with the spec and the logical shape as JSON."""
        metadata = json.dumps({"spec": self.spec.to_json(), "shape": list(self.shape)}, sort_keys=True)
        return {f"{name}.{part}": getattr(self, part).contiguous() for part in _PARTS}, {name: metadata}

    @staticmethod
    def from_tensors(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> QuantTensor:
        """Inverse of :meth:`to_tensors`; checks everything :func:`validate` checks.

        Raises: CheckpointError when a part or the metadata is missing or unreadable; the errors of :func:`validate`.
        """
        missing = [f"{name}.{part}" for part in _PARTS if f"{name}.{part}" not in tensors]
        if missing or name not in metadata:
            raise CheckpointError(
                f"{name} is incomplete",
                where=", ".join(missing) or f"metadata entry {name!r}",
                expected=f"tensors {name}.codes, {name}.scales, {name}.global_scale and a metadata entry {name!r}",
            )
        try:
            record = json.loads(metadata[name])
            spec, shape = record["spec"], tuple(int(n) for n in record["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the metadata of {name} cannot be read", where=str(error), expected="JSON with 'spec' and 'shape'"
            ) from error
        codes, scales, global_scale = (tensors[f"{name}.{part}"] for part in _PARTS)
        return QuantTensor(codes, scales, global_scale, QuantSpec.from_json(spec), shape).check(name)


def dequantise(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [shape]: fp32 (grid[code] * scale) * g, then one cast to ``dtype``.

    grid * scale has at most 6 significant bits, so it is exact; with a power-of-two global scale the value is exact in
    BF16 as well (unless it is smaller than 2^-126).
    """
    values = decode_packed(q.codes).reshape(*q.scales.shape, q.spec.block)
    values = (values * q.scale_values().unsqueeze(-1)).reshape(q.shape)
    g = q.multiplier()
    return (values * (g.unsqueeze(-1) if g.ndim else g)).to(dtype)


def validate(q: QuantTensor, name: str = "tensor") -> QuantTensor:
    """Return q, or refuse one that no quantiser of ours can have written.

    Raises:
        ShapeError: parts that do not fit the logical shape, or a shape that cuts a block.
        NumericsError: wrong dtypes; scales with the sign bit set; NaN scales; a global scale that is negative, not
            finite, above 2^116 as a multiplier, or zero although some value is not.
    """
    validate_parts(q.codes, q.scales, q.global_scale, q.spec, q.shape, name)
    return q
