"""Reference matrix products: the definition of every kind, in torch.

Per output element, accumulation is sequential in float32 starting at +0; an implementation may run outputs and rows in any
order or side by side, never the sum. Every product is exact, so a fused multiply-add and a multiply followed by an add are
the same number (products that underflow 2^-149 or overflow are the exception; they cannot occur with NVFP4's scales).

- ``w4a4``: the doubled E2M1 values are integers; for block b = 0, 1, ...: ``acc += float(dot of the doubled codes) *
  (sa_b * sw_b)``; then ``y = acc * ((ga * gw) * 0.25)`` with the token's and the row's global scale as multipliers.
- ``bf16``: ``x`` rounded to BF16 (to nearest even); for k = 0, 1, ...: ``acc += x_k * w_k``.
- ``w4a16``: as ``bf16`` with the weight ``grid * scale`` (exact in BF16); then ``y = acc * gw``.
- ``fp32``: float64 accumulation of exact products, sequential over k, rounded to float32 once.

The bias, if any, is added last in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor, decode_e2m1, quantise, unpack_codes
from halfbyte.kernels.reference.guide import quantise_with_payload
from halfbyte.kernels.reference.norm import rms_norm
from halfbyte.kernels.reference.swiglu import swiglu
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

__all__ = [
    "REFERENCE",
    "Products",
    "RowStore",
    "linear",
    "linear_recorded",
    "matrix_product",
    "pack_linear",
    "row_store",
    "w4a4_product",
    "w4a16_product",
]

_CHUNK = 1 << 24  # elements of the block dots held at once


@dataclass(frozen=True, eq=False)
class RowStore:
    """One matrix by rows: ``dense [N, K]`` (fp32, bf16) or ``quantised`` with one global scale a row ``[N]``."""

    dense: Tensor | None = None
    quantised: QuantTensor | None = None

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.dense.nbytes if self.dense is not None else self.quantised.nbytes if self.quantised else 0

    def dequantised(self) -> Tensor:
        """float32 ``[N, K]`` including the global scale."""
        if self.quantised is not None:
            return self.columns.t() * self.row_multiplier.unsqueeze(-1)
        assert self.dense is not None
        return self.dense.to(torch.float32)

    def parts(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :class:`~halfbyte.kernels.weights.WeightStore`."""
        q = self.quantised
        return None if q is None else (q.codes, q.scales, self.row_multiplier)

    def unpacked(self) -> QuantTensor | None:
        """See :class:`~halfbyte.kernels.weights.WeightStore`."""
        q = self.quantised
        if q is None:
            return None
        spec = q.spec.replace(global_convention="multiplier")
        return QuantTensor(q.codes.clone(), q.scales.clone(), self.row_multiplier.clone(), spec, q.shape)

    @cached_property
    def row_multiplier(self) -> Tensor:
        """The global scale of each row as a multiplier, float32 ``[N]``."""
        assert self.quantised is not None
        return row_global_scale(self.quantised.multiplier(), self.quantised.shape[:1])

    @cached_property
    def doubled(self) -> Tensor:
        """Doubled E2M1 values as float32 ``[K / block, block, N]``."""
        assert self.quantised is not None
        return _doubled(self.quantised).permute(0, 2, 1).contiguous()

    @cached_property
    def scales(self) -> Tensor:
        """Block scales as float32 ``[K / block, 1, N]``."""
        assert self.quantised is not None
        return self.quantised.scale_values().t().unsqueeze(1).contiguous()

    @cached_property
    def columns(self) -> Tensor:
        """The weight without its global scale as float32 ``[K, N]`` (bf16, w4a16), or float64 (fp32)."""
        if self.quantised is not None:
            n, k = self.quantised.shape
            values = decode_e2m1(unpack_codes(self.quantised.codes)).view(
                n, k // self.quantised.spec.block, self.quantised.spec.block
            )
            return (values * self.quantised.scale_values().unsqueeze(-1)).view(n, k).t().contiguous()
        assert self.dense is not None
        return self.dense.t().to(torch.float64 if self.dense.dtype == torch.float32 else torch.float32).contiguous()


def _doubled(q: QuantTensor) -> Tensor:
    """Doubled E2M1 values of ``q [R, K]`` as float32 ``[K / block, R, block]``."""
    values = decode_e2m1(unpack_codes(q.codes)) * 2.0
    return values.view(q.shape[0], q.shape[1] // q.spec.block, q.spec.block).permute(1, 0, 2)


def row_store(weight: Tensor | QuantTensor, kind: LinearKind, weight_spec: QuantSpec | None, name: str) -> RowStore:
    """The weight ``[N, K]`` by rows, quantised or cast as ``kind`` says."""
    if isinstance(weight, QuantTensor):
        return RowStore(quantised=weight)
    if kind in ("w4a4", "w4a16"):
        assert weight_spec is not None
        return RowStore(quantised=quantise(weight.detach().contiguous(), weight_spec, name=name))
    dense = weight.detach().to(torch.float32 if kind == "fp32" else torch.bfloat16, copy=True)
    return RowStore(dense=dense.contiguous())


def pack_linear(
    weight: Tensor | QuantTensor,
    kind: LinearKind,
    *,
    weight_spec: QuantSpec | None = None,
    activation_spec: QuantSpec | None = None,
    bias: Tensor | None = None,
    name: str = "linear",
) -> PackedLinear:
    """Packs ``weight [N, K]``.

    Raises:
        ShapeError: the weight is not a matrix of whole blocks, or the bias is not ``[N]``.
        ConfigError: see :func:`halfbyte.kernels.weights.check_kind`.
        NumericsError: the weight holds NaN or infinity (FP4 kinds).
    """
    n, k = matrix_shape(weight.shape, name)
    checked = check_kind(kind, weight, k, weight_spec, activation_spec, name)
    store = row_store(weight, checked, weight_spec, name)
    spec = store.quantised.spec if store.quantised is not None else None
    return PackedLinear(
        kind=checked,
        n=n,
        k=k,
        bias=check_bias(bias, n, name),
        weight_spec=spec,
        activation_spec=activation_spec if checked == "w4a4" else None,
        store=store,
        name=name,
    )


def matrix_product(
    x: Tensor,
    store: RowStore,
    kind: LinearKind,
    activation_spec: QuantSpec | None,
    name: str,
    products: Products | None = None,
) -> Tensor:
    """``x [M, K] float32`` times the rows of ``store``: ``[M, N] float32``, without bias; by the reference if no products."""
    if kind == "w4a4":
        assert activation_spec is not None
        return (products or REFERENCE).w4a4(quantise(x, activation_spec, name=f"{name} input"), store)
    if kind == "w4a16":
        return (products or REFERENCE).w4a16(x, store)
    return _accumulated(x if kind == "fp32" else x.to(torch.bfloat16), store.columns).to(torch.float32)


def _accumulated(x: Tensor, columns: Tensor) -> Tensor:
    acc = torch.zeros(x.shape[0], columns.shape[1], dtype=columns.dtype, device=x.device)
    values = x.to(columns.dtype)
    for k in range(columns.shape[0]):
        acc.addcmul_(values[:, k : k + 1], columns[k])
    return acc


def w4a16_product(x: Tensor, store: RowStore) -> Tensor:
    """``x [M, K] float32``, rounded to BF16, times the quantised rows of ``store``: ``[M, N] float32``."""
    return _accumulated(x.to(torch.bfloat16), store.columns) * store.row_multiplier


def w4a4_product(a: QuantTensor, store: RowStore) -> Tensor:
    """Product of quantised rows ``a [M, K]`` with the rows of ``store``: ``[M, N] float32``."""
    codes, scales = _doubled(a), a.scale_values().t().unsqueeze(-1)
    blocks, rows, _ = codes.shape
    columns = store.doubled.shape[-1]
    acc = torch.zeros(rows, columns, device=codes.device)
    step = max(1, _CHUNK // max(1, rows * columns))
    for start in range(0, blocks, step):
        part = slice(start, min(start + step, blocks))
        # Integers of at most 2^13 in absolute value: exact in float32 in whatever order the framework adds them.
        terms = torch.bmm(codes[part], store.doubled[part])
        terms *= scales[part] * store.scales[part]
        for term in terms:
            acc += term
    token = row_global_scale(a.multiplier(), (rows,)).unsqueeze(-1)
    return acc * ((token * store.row_multiplier) * 0.25)


class Products(NamedTuple):
    """How FP4 weights are multiplied: arguments as of :func:`w4a4_product` and :func:`w4a16_product`."""

    w4a4: Callable[[QuantTensor, RowStore], Tensor]
    w4a16: Callable[[Tensor, RowStore], Tensor]


REFERENCE = Products(w4a4_product, w4a16_product)


def linear(
    x: Tensor,
    w: PackedLinear,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    products: Products | None = None,
) -> Tensor:
    """``x [M, K] float32 -> [M, N] float32``, or ``[M, N / 2]`` when gated.

    Arguments:
        norm, eps: the rows go through RMSNorm with this weight ``[K]`` first.
        gated: the result goes through SwiGLU, the first half of the outputs being the gate.
        residual: added to the result, last.
        products: in place of the reference's.
    Raises:
        ShapeError: see :func:`halfbyte.kernels.weights.check_around`; or ``w`` was packed by another implementation.
        NumericsError: ``x`` holds NaN or infinity (w4a4).
    """
    check_around(x, w, norm, gated, residual)
    if not isinstance(w.store, RowStore):
        raise ShapeError(
            "this weight was packed by other kernels", where=w.name, expected="a weight packed by these kernels"
        )
    rows = x.detach() if norm is None else rms_norm(x.detach(), norm, eps)
    return _after(matrix_product(rows, w.store, w.kind, w.activation_spec, w.name, products), w, gated, residual)


def linear_recorded(
    x: Tensor,
    w: PackedLinear,
    bits: PayloadBits,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    products: Products | None = None,
) -> tuple[Tensor, Payload]:
    """:func:`linear` with the payload of its input (after the norm).

    Raises:
        ConfigError: ``w`` is not w4a4, or bits other than 4, 2 and 1. Otherwise as :func:`linear`.
    """
    check_recordable(w.kind, w.name)
    check_around(x, w, norm, gated, residual)
    if not isinstance(w.store, RowStore):
        raise ShapeError(
            "this weight was packed by other kernels", where=w.name, expected="a weight packed by these kernels"
        )
    assert w.activation_spec is not None
    rows = x.detach() if norm is None else rms_norm(x.detach(), norm, eps)
    q, payload = quantise_with_payload(rows, w.activation_spec, bits, name=f"{w.name} input")
    return _after((products or REFERENCE).w4a4(q, w.store), w, gated, residual), payload


def _after(y: Tensor, w: PackedLinear, gated: bool, residual: Tensor | None) -> Tensor:
    y = y if w.bias is None else y + w.bias
    y = swiglu(y) if gated else y
    return y if residual is None else residual + y
