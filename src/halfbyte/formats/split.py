"""Slices of quantised tensors, for tensor parallelism and fused projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.errors import ShapeError, SpecMismatchError
from halfbyte.formats.spec import first_difference
from halfbyte.formats.tensor import QuantTensor

__all__ = ["concat_rows", "slice_columns", "slice_rows", "split_columns"]


def slice_columns(q: QuantTensor, start: int, stop: int, *, name: str = "tensor") -> QuantTensor:
    """Columns start..stop of the last dimension. A cut inside a block is a ShapeError (vLLM #49949): the two halves of
    a block would need the same scale byte and the same amax."""
    columns, block = q.shape[-1], q.spec.block
    if not 0 <= start <= stop <= columns or start % block or stop % block:
        raise ShapeError(
            f"columns {start}..{stop} of {name} cut a block",
            where=f"{name} of shape {q.shape}: {columns} columns, blocks of {block}",
            expected=f"multiples of {block} from 0 to {columns}",
            fix="split by fewer ranks, or split rows instead",
        )
    codes, scales = q.codes[..., start // 2 : stop // 2], q.scales[..., start // block : stop // block]
    return QuantTensor(codes, scales, q.global_scale, q.spec, (*q.shape[:-1], stop - start))


def split_columns(q: QuantTensor, parts: int, *, name: str = "tensor") -> list[QuantTensor]:
    """Equal column parts. A ShapeError names the sizes when a part would not be whole blocks (vLLM #49949)."""
    columns, block = q.shape[-1], q.spec.block
    if parts < 1 or columns % (parts * block):
        raise ShapeError(
            f"{name} does not split into {parts} column parts",
            where=f"{name}: {columns} columns / {parts} = {columns / max(parts, 1):g}, blocks of {block}",
            expected=f"a part size divisible by {block}",
            fix="split by fewer ranks, or split rows instead",
        )
    size = columns // parts
    return [slice_columns(q, i * size, (i + 1) * size, name=name) for i in range(parts)]


def slice_rows(q: QuantTensor, start: int, stop: int, *, name: str = "tensor") -> QuantTensor:
    """Rows start..stop of the first dimension (whole tiles when scales are 2-D)."""
    rows = q.shape[0] if len(q.shape) > 1 else 0
    step = q.spec.scale_rows if len(q.shape) == 2 else 1
    if not 0 <= start <= stop <= rows or start % step or stop % step:
        raise ShapeError(
            f"rows {start}..{stop} of {name} cannot be taken",
            where=f"{name} of shape {q.shape}",
            expected=f"multiples of {step} from 0 to {rows}",
        )
    g = q.global_scale[start:stop] if q.global_scale.ndim else q.global_scale
    return QuantTensor(q.codes[start:stop], q.scales[start:stop], g, q.spec, (stop - start, *q.shape[1:]))


def concat_rows(tensors: Sequence[QuantTensor], *, name: str = "tensor") -> QuantTensor:
    """Stack [N_i, K] tensors of one spec into [sum N_i, K], bit for bit: different global scales become one per row.

    Raises: ShapeError for other shapes, SpecMismatchError naming the first differing field.
    """
    if not tensors or any(len(q.shape) != 2 or q.shape[1] != tensors[0].shape[1] for q in tensors):
        raise ShapeError(
            f"the parts of {name} cannot be stacked",
            where=", ".join(str(q.shape) for q in tensors),
            expected="2-D tensors with the same number of columns",
        )
    spec = tensors[0].spec
    for q in tensors[1:]:
        if difference := first_difference(spec, q.spec):
            raise SpecMismatchError(
                f"the parts of {name} are quantised differently", where=difference, expected="one QuantSpec"
            )
    globals_ = [q.global_scale for q in tensors]
    if all(g.ndim == 0 and bool(g == globals_[0]) for g in globals_):
        g = globals_[0]
    else:
        g = torch.cat([g.expand(q.shape[0]) for g, q in zip(globals_, tensors)])
    codes, scales = torch.cat([q.codes for q in tensors]), torch.cat([q.scales for q in tensors])
    return QuantTensor(codes, scales, g, spec, (codes.shape[0], tensors[0].shape[1]))
