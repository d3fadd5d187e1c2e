"""Refusing stored parts that no quantiser of ours can have written."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats.global_scale import LARGEST_MULTIPLIER, multiplier_pair
from halfbyte.formats.spec import QuantSpec

__all__ = ["validate_parts"]


def _refuse_scales(bad: Tensor, what: str, name: str, expected: str) -> None:
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise NumericsError(
            f"{name}: {what}",
            where=f"{int(bad.sum())} of {bad.numel()} scales, first at {first}",
            expected=expected,
            fix="requantise the tensor from its BF16 weights",
        )


def validate_parts(
    codes: Tensor, scales: Tensor, global_scale: Tensor, spec: QuantSpec, shape: tuple[int, ...], name: str
) -> None:
    """See :func:`halfbyte.formats.validate`."""
    if not shape or shape[-1] % spec.block:
        raise ShapeError(f"{name} cuts a block", where=f"shape {shape}", expected=f"a multiple of {spec.block}")
    leading = shape[:-1]
    parts = (
        ("codes", codes, torch.uint8, ((*leading, shape[-1] // 2),)),
        ("scales", scales, torch.uint8, ((*leading, shape[-1] // spec.block),)),
        ("global_scale", global_scale, torch.float32, ((), leading)),
    )
    for part, tensor, dtype, shapes in parts:
        if tensor.dtype != dtype:
            raise NumericsError(f"{name}.{part} has dtype {tensor.dtype}", where=name, expected=str(dtype))
        if tuple(tensor.shape) not in shapes:
            raise ShapeError(
                f"{name}.{part} does not fit the tensor",
                where=f"{part} {tuple(tensor.shape)}, logical shape {shape}",
                expected=" or ".join(map(str, dict.fromkeys(shapes))),
            )
    if spec.format == "nvfp4":
        _refuse_scales(scales >= 0x80, "block scales with the sign bit set", name, "unsigned E4M3 bytes 0x00..0x7E")
        _refuse_scales(scales == 0x7F, "NaN block scales", name, "E4M3 bytes 0x00..0x7E")
    else:
        _refuse_scales(scales == 0xFF, "NaN block scales", name, "E8M0 bytes 0x00..0xFE")
        if bool((global_scale != 1).any()):
            raise NumericsError(f"{name}: MXFP4 with a global scale", where=name, expected="1")
    if spec.scale_rows != 1:
        rows = scales.shape[-2] if scales.ndim > 1 else 0
        if rows % spec.scale_rows or scales.ndim < 2:
            raise ShapeError(
                f"{name} cuts a 2-D tile", where=f"shape {shape}", expected=f"rows divisible by {spec.scale_rows}"
            )
        tiles = scales.reshape(*scales.shape[:-2], rows // spec.scale_rows, spec.scale_rows, scales.shape[-1])
        _refuse_scales(
            (tiles != tiles[..., :1, :]).flatten(-3, -2),
            "rows of one tile with different scales",
            name,
            f"one scale for each tile of {spec.scale_rows} rows",
        )
    sound = torch.isfinite(global_scale) & (global_scale >= 0)
    if not bool((sound & (multiplier_pair(global_scale, spec)[0] <= LARGEST_MULTIPLIER)).all()):
        raise NumericsError(
            f"{name}: the global scale is negative, NaN or out of range",
            where=name,
            expected="a positive finite number",
        )
    silent = ~((codes & 0x77) != 0).any(-1)
    if bool(((global_scale == 0) & ~(silent if global_scale.ndim else silent.all())).any()):
        raise NumericsError(
            f"{name}: the global scale is zero although some codes are not",
            where=name,
            expected="a positive finite number",
        )
