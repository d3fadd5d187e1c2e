"""Native matrix products: packing into panels, and the call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import ShapeError
from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor
from halfbyte.formats.residues import check_bits
from halfbyte.kernels import _native
from halfbyte.kernels.native.buffers import as_buffer, new_buffer
from halfbyte.kernels.native.norm import rms_norm
from halfbyte.kernels.native.quantise import code_rows, empty_record, quantise, quantise_with_payload, rule_of
from halfbyte.kernels.native.swiglu import swiglu
from halfbyte.kernels.weights import (
    LinearKind,
    PackedLinear,
    check_around,
    check_bias,
    check_kind,
    check_recordable,
    matrix_shape,
    row_global_scale,
)

__all__ = ["PanelStore", "linear", "linear_recorded", "pack_linear", "pack_stack"]

_KINDS: dict[str, int] = {"fp32": 0, "bf16": 1, "w4a16": 2, "w4a4": 3}
_PANEL = 16


@dataclass(frozen=True, eq=False)
class PanelStore:
    """One matrix ``[n, k]``, or a stack of them, in panels of 16 rows (layout: ``cpp/panels.hpp``).

    Arguments:
        view: what the kernels read: addresses into the tensors below.
        kind: as in ``PackedLinear``.
        stack: how many matrices, or None for one matrix.
        n, k: outputs and inputs of each.
        codes, scales: FP4 codes and block scales in panels (FP4 kinds).
        row_scale: global scale of every row as a multiplier, float32, padded (FP4 kinds).
        dense: the weight in panels (fp32, bf16).
        bias: float32, padded to whole panels, or None.
        spec: the rule of the codes.
    """

    view: _native.Panels
    kind: LinearKind
    stack: int | None
    n: int
    k: int
    codes: Tensor | None
    scales: Tensor | None
    row_scale: Tensor | None
    dense: Tensor | None
    bias: Tensor | None
    spec: QuantSpec | None

    @property
    def nbytes(self) -> int:
        """Resident bytes, padding included."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.row_scale, self.dense) if t is not None)

    def dequantised(self) -> Tensor:
        """float32 ``[n, k]`` or ``[stack, n, k]``, including the global scale."""
        if self.dense is not None:
            count, panels = self.stack or 1, -(-self.n // _PANEL)
            wide = self.dense.to(torch.float32)
            step = 1 if self.kind == "fp32" else 2
            rows = wide.view(count, panels, -1, _PANEL, step).permute(0, 1, 3, 2, 4).reshape(count, panels * _PANEL, -1)
            values = rows[:, : self.n, : self.k]
        else:
            quantised = self.unpacked()
            assert quantised is not None
            return formats.dequantise(quantised).contiguous()
        return values.contiguous() if self.stack is not None else values[0].contiguous()

    def parts(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :class:`~halfbyte.kernels.weights.WeightStore`; padding is zero."""
        if self.codes is None or self.scales is None or self.row_scale is None:
            return None
        return self.codes, self.scales, self.row_scale

    def unpacked(self) -> QuantTensor | None:
        """See :class:`~halfbyte.kernels.weights.WeightStore`."""
        if self.codes is None:
            return None
        assert self.scales is not None
        assert self.row_scale is not None
        assert self.spec is not None
        count = self.stack or 1
        codes = torch.empty(count, self.n, self.k // 2, dtype=torch.uint8)
        scales = torch.empty(count, self.n, self.k // self.spec.block, dtype=torch.uint8)
        for e in range(count):
            _native.unpack_codes(
                self.codes[e].data_ptr(), self.scales[e].data_ptr(), self.n, self.k, self.spec.block,
                codes[e].data_ptr(), scales[e].data_ptr(),
            )  # fmt: skip
        g = self.row_scale.view(count, -1)[:, : self.n].clone()
        spec = self.spec.replace(global_convention="multiplier")
        if self.stack is None:
            return QuantTensor(codes[0], scales[0], g[0], spec, (self.n, self.k))
        return QuantTensor(codes, scales, g, spec, (count, self.n, self.k))


def pack_stack(
    weight: Tensor | QuantTensor, kind: LinearKind, stacked: bool, bias: Tensor | None, spec: QuantSpec | None
) -> PanelStore:
    """Packs ``[n, k]``, or ``[stack, n, k]`` when ``stacked``; FP4 kinds take codes, the others a tensor."""
    n, k = weight.shape[-2:]
    count = weight.shape[0] if stacked else 1
    panels = -(-n // _PANEL)
    padded_bias = None if bias is None else torch.nn.functional.pad(bias, (0, panels * _PANEL - n))
    codes = scales = row_scale = dense = None
    if isinstance(weight, QuantTensor):
        block = weight.spec.block
        codes = new_buffer((count, panels, k // 16, 128), torch.uint8)
        scales = new_buffer((count, panels, k // block, _PANEL), torch.uint8)
        rows = weight.codes.reshape(count, n, k // 2).contiguous()
        row_scales = weight.scales.reshape(count, n, k // block).contiguous()
        for e in range(count):
            _native.pack_codes(
                rows[e].data_ptr(), row_scales[e].data_ptr(), n, k, block, codes[e].data_ptr(), scales[e].data_ptr()
            )
        g = row_global_scale(weight.multiplier(), weight.shape[:-1]).view(count, n)
        row_scale = torch.nn.functional.pad(g, (0, panels * _PANEL - n)).reshape(-1).contiguous()
    else:
        step = 1 if kind == "fp32" else 2
        cast = weight.detach().to(torch.float32 if kind == "fp32" else torch.bfloat16).reshape(count, n, k)
        full = torch.nn.functional.pad(cast, (0, -k % step, 0, panels * _PANEL - n))
        dense = new_buffer((count, panels, full.shape[-1] // step, _PANEL, step), full.dtype)
        dense.copy_(full.view(count, panels, _PANEL, -1, step).permute(0, 1, 3, 2, 4))
    view = _native.Panels(
        _KINDS[kind],
        1 if spec is not None and spec.format == "mxfp4" else 0,
        n,
        k,
        *(0 if t is None else t.data_ptr() for t in (codes, scales, row_scale, dense, padded_bias)),
    )
    return PanelStore(
        view, kind, count if stacked else None, n, k, codes, scales, row_scale, dense, padded_bias,
        spec if codes is not None else None,
    )  # fmt: skip


def pack_linear(
    isa: int,
    weight: Tensor | QuantTensor,
    kind: LinearKind,
    *,
    weight_spec: QuantSpec | None = None,
    activation_spec: QuantSpec | None = None,
    bias: Tensor | None = None,
    name: str = "linear",
) -> PackedLinear:
    """Packs ``weight [N, K]``; errors as in ``reference.linear.pack_linear``."""
    n, k = matrix_shape(weight.shape, name)
    checked = check_kind(kind, weight, k, weight_spec, activation_spec, name)
    if checked in ("w4a4", "w4a16") and not isinstance(weight, QuantTensor):
        assert weight_spec is not None
        weight = quantise(isa, weight, weight_spec, name=name)
    spec = weight.spec if isinstance(weight, QuantTensor) else None
    bias = check_bias(bias, n, name)
    return PackedLinear(
        kind=checked,
        n=n,
        k=k,
        bias=bias,
        weight_spec=spec,
        activation_spec=activation_spec if checked == "w4a4" else None,
        store=pack_stack(weight, checked, False, bias, spec),
        name=name,
    )


def linear(
    isa: int,
    x: Tensor,
    w: PackedLinear,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``x [M, K] float32 -> [M, N] float32``; definition and errors as in ``reference.linear.linear``."""
    return _run(isa, x, w, None, norm, eps, gated, residual)[0]


def linear_recorded(
    isa: int,
    x: Tensor,
    w: PackedLinear,
    bits: PayloadBits,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Payload]:
    """:func:`linear` with the payload of its input; definition and errors as in ``reference.linear.linear_recorded``."""
    check_recordable(w.kind, w.name)
    y, payload = _run(isa, x, w, check_bits(bits), norm, eps, gated, residual)
    assert payload is not None
    return y, payload


def _run(
    isa: int,
    x: Tensor,
    w: PackedLinear,
    bits: PayloadBits | None,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Payload | None]:
    store = w.store
    if not isinstance(store, PanelStore):
        raise ShapeError(
            "this weight was packed by other kernels", where=w.name, expected="a weight packed by these kernels"
        )
    width = check_around(x, w, norm, gated, residual)
    rule = None if w.activation_spec is None else rule_of(w.activation_spec)
    if w.activation_spec is not None and (rule is None or (bits is not None and len(x) * width == 0)):
        rows = x if norm is None else rms_norm(x, norm, eps, isa=isa)
        q, payload = quantise_with_payload(isa, rows, w.activation_spec, bits or 4, name=f"{w.name} input")
        y = _by_codes(isa, q, w, store)
        if gated:
            y = swiglu(y, isa=isa)
        return y if residual is None else residual + y, None if bits is None else payload
    out = new_buffer((len(x), width))
    if out.numel() == 0:
        return out, None
    x, norm, residual = (
        as_buffer(x),
        None if norm is None else as_buffer(norm),
        None if residual is None else as_buffer(residual),
    )
    around = (0 if norm is None else norm.data_ptr(), eps, gated, 0 if residual is None else residual.data_ptr())
    record = None
    if bits is not None:
        assert w.activation_spec is not None
        record = empty_record((len(x), w.k), w.activation_spec, bits)
    to = None if record is None else code_rows(*record)
    if _native.linear(isa, store.view, rule, x.data_ptr(), len(x), out.data_ptr(), *around, to) >= 0:
        assert w.activation_spec is not None
        rows = x if norm is None else rms_norm(x, norm, eps, isa=isa)
        formats.quantise(rows, w.activation_spec, name=f"{w.name} input")  # raises, with the message of the definition
    return out, None if record is None else record[1]


def _by_codes(isa: int, q: QuantTensor, w: PackedLinear, store: PanelStore) -> Tensor:
    out = torch.empty(q.shape[0], w.n)
    if out.numel():
        g = row_global_scale(q.multiplier(), q.shape[:1])
        codes, scales = q.codes.contiguous(), q.scales.contiguous()
        _native.linear_codes(
            isa, store.view, codes.data_ptr(), scales.data_ptr(), g.data_ptr(), len(out), out.data_ptr()
        )
    return out
