"""``QuantTensor``: packed codes, scales, global scale, spec and logical shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.global_scale import multiplier_pair
from halfbyte.formats.grid import decode_e4m3, decode_e8m0, decode_packed
from halfbyte.formats.spec import QuantSpec

__all__ = ["QuantTensor", "dequantise"]


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A quantised tensor of logical shape ``shape`` = [..., K].

    Arguments:
        codes: uint8 [..., K/2], two E2M1 codes a byte, low nibble = even element.
        scales: uint8 [..., K/block], E4M3 (NVFP4) or E8M0 (MXFP4) bytes.
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
        return decode_e4m3(self.scales) if self.spec.format == "nvfp4" else decode_e8m0(self.scales)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :func:`dequantise`."""
        return dequantise(self, dtype)


def dequantise(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [shape]: fp32 (grid[code] * scale) * global, then one cast to ``dtype``.

    grid * scale has at most 6 significant bits, so it is exact; with a power-of-two global scale the value is exact in
    BF16 as well.
    """
    values = decode_packed(q.codes).unflatten(-1, (q.scales.shape[-1], q.spec.block))
    values = (values * q.scale_values().unsqueeze(-1)).flatten(-2)
    g = q.multiplier()
    return (values * (g.unsqueeze(-1) if g.ndim else g)).to(dtype)
