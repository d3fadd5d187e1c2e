"""Packed weights: what ``pack_linear`` and ``pack_experts`` return.

A packed weight belongs to the implementation that packed it: the reference keeps rows, the native kernels keep panels of 16
rows in their own layout. Both sit behind :class:`WeightStore`, so that the rest of the house sees one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.formats import QuantSpec, QuantTensor

__all__ = [
    "ExpertsRecord",
    "LinearKind",
    "PackedExperts",
    "PackedLinear",
    "WeightStore",
    "check_around",
    "check_bias",
    "check_input",
    "check_kind",
    "check_recordable",
    "check_routing",
    "experts_shape",
    "matrix_shape",
    "row_global_scale",
]

LinearKind = Literal["fp32", "bf16", "w4a16", "w4a4"]


class WeightStore(Protocol):
    """The bytes of one packed matrix (or of one matrix an expert), in the layout of the implementation that made it."""

    @property
    def nbytes(self) -> int:
        """Resident bytes: codes, scales and padding."""
        ...

    def dequantised(self) -> Tensor:
        """The weight as float32, ``[N, K]`` or ``[E, N, K]``, including the global scale."""
        ...

    def parts(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Codes (two a byte), block scales and the global scale of each row as they lie in memory, not copied: their order is the
        implementation's, the same for all weights of one shape. None for dense kinds."""
        ...

    def unpacked(self) -> QuantTensor | None:
        """The codes ``[N, K]`` or ``[E, N, K]`` in a copy of their own, with one global scale a row (a multiplier); None for
        dense kinds."""
        ...


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """One weight ``[n, k]`` ready for ``Kernels.linear``.

    Arguments:
        kind: what the product runs in: ``fp32``, ``bf16``, ``w4a16`` (FP4 weight, BF16 input) or ``w4a4``.
        n, k: outputs and inputs.
        bias: float32 ``[n]`` or None, added after the product.
        weight_spec: the rule of the weight's codes (None for ``fp32`` and ``bf16``).
        activation_spec: the rule the input is quantised with (``w4a4`` only).
        store: the bytes.
        name: the tensor's name, for messages.
    """

    kind: LinearKind
    n: int
    k: int
    bias: Tensor | None
    weight_spec: QuantSpec | None
    activation_spec: QuantSpec | None
    store: WeightStore
    name: str

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weight and its bias."""
        return self.store.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dequantised(self) -> Tensor:
        """The weight the product uses, float32 ``[n, k]``."""
        return self.store.dequantised()


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The SwiGLU experts of one layer, ready for ``Kernels.experts``.

    Gate and up of one expert are one matrix ``[2 * intermediate, hidden]`` (gate rows first) and share one global scale
    (ModelOpt #1411, vLLM #54973).

    Arguments:
        kind: as in :class:`PackedLinear`, for both products.
        n_experts, intermediate, hidden: E, I and H of ``gate_up [E, 2I, H]`` and ``down [E, H, I]``.
        weight_spec, activation_spec: as in :class:`PackedLinear`.
        gate_up, down: the bytes.
        name: the layer's name, for messages.
    """

    kind: LinearKind
    n_experts: int
    intermediate: int
    hidden: int
    weight_spec: QuantSpec | None
    activation_spec: QuantSpec | None
    gate_up: WeightStore
    down: WeightStore
    name: str

    @property
    def nbytes(self) -> int:
        """Resident bytes of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """``(gate_up [E, 2I, H], down [E, H, I])`` as float32."""
        return self.gate_up.dequantised(), self.down.dequantised()


@dataclass(frozen=True, eq=False)
class ExpertsRecord:
    """What ``Kernels.experts_recorded`` returns.

    Arguments:
        output: ``[M, H]`` float32, as ``Kernels.experts`` returns it.
        inputs: the codes of ``x``, logical shape ``[M, H]``.
        middle: the codes of the SwiGLU intermediate of each routed pair, logical shape ``[M, k, I]``, slots as in ``expert_ids``.
    """

    output: Tensor
    inputs: QuantTensor
    middle: QuantTensor


def check_recordable(kind: LinearKind, name: str) -> None:
    """Raises:
    ConfigError: a product without quantised inputs has no codes to record.
    """
    if kind != "w4a4":
        raise ConfigError(f"a {kind} product has no input codes", where=name, expected="w4a4")


def check_kind(
    kind: str,
    weight: Tensor | QuantTensor,
    k: int,
    weight_spec: QuantSpec | None,
    activation_spec: QuantSpec | None,
    name: str,
) -> LinearKind:
    """Checks that a kind, a weight and the two specs fit together.

    Raises:
        ConfigError: an unknown kind, a missing or superfluous spec, or an activation spec whose global scale comes from the
            batch (a sample would depend on its neighbours).
        ShapeError: the inner dimension does not hold whole blocks (torchao #3233).
    """
    if kind not in get_args(LinearKind):
        raise ConfigError(
            f"unknown linear kind {kind!r}", where=name, expected=f"one of {', '.join(get_args(LinearKind))}"
        )
    if kind in ("fp32", "bf16"):
        if isinstance(weight, QuantTensor):
            fix = "dequantise it first, or pack it as w4a4 or w4a16"
            raise ConfigError(f"a {kind} linear got FP4 codes", where=name, fix=fix)
        return "fp32" if kind == "fp32" else "bf16"
    spec = weight.spec if isinstance(weight, QuantTensor) else weight_spec
    if spec is None:
        raise ConfigError(
            f"a {kind} linear needs weight_spec", where=name, expected="a QuantSpec, or a QuantTensor as weight"
        )
    blocks = [spec.block]
    if kind == "w4a4":
        if activation_spec is None:
            raise ConfigError("a w4a4 linear needs activation_spec", where=name, expected="a QuantSpec")
        if activation_spec.block != spec.block or activation_spec.format != spec.format:
            raise ConfigError(
                f"weight codes are {spec.format} and activation codes {activation_spec.format}",
                where=name,
                expected="one format for both",
            )
        if activation_spec.global_scale == "tensor":
            raise ConfigError(
                "activation_spec takes its global scale from the whole batch",
                where=name,
                expected="global_scale token, constant or none: else a sample depends on its neighbours",
            )
        blocks.append(activation_spec.block)
    for block in blocks:
        if k % block:
            raise ShapeError(
                f"the inner dimension {k} does not hold whole blocks of {block}",
                where=name,
                expected=f"a multiple of {block}",
                fix="keep this weight in bf16 (torchao #3233)",
            )
    return "w4a4" if kind == "w4a4" else "w4a16"


def row_global_scale(global_scale: Tensor, rows: Sequence[int]) -> Tensor:
    """The global scale of each row: float32 of shape ``rows``, from a scalar or from leading dimensions of ``rows``.

    Raises:
        ShapeError: the global scale has neither shape ``()`` nor a leading part of ``rows``.
    """
    shape = tuple(rows)
    if global_scale.numel() == 1:
        return global_scale.reshape(()).to(torch.float32).expand(shape).contiguous()
    if tuple(global_scale.shape) != shape[: global_scale.dim()]:
        raise ShapeError(
            f"global scale has shape {tuple(global_scale.shape)}", expected=f"() or a leading part of {shape}"
        )
    view = global_scale.to(torch.float32).reshape(*global_scale.shape, *([1] * (len(shape) - global_scale.dim())))
    return view.expand(shape).contiguous()


def check_bias(bias: Tensor | None, n: int, name: str) -> Tensor | None:
    """The bias as contiguous float32 ``[n]``, or None.

    Raises:
        ShapeError: another shape.
    """
    if bias is None:
        return None
    if tuple(bias.shape) != (n,):
        raise ShapeError(f"the bias has shape {tuple(bias.shape)}", where=name, expected=f"[{n}]")
    return bias.detach().to(torch.float32).contiguous()


def check_input(x: Tensor, k: int, name: str) -> None:
    """Checks that ``x`` is float32 ``[M, k]``.

    Raises:
        ShapeError: another shape or dtype.
    """
    if x.dim() != 2 or x.shape[1] != k or x.dtype != torch.float32:
        raise ShapeError(f"the input is {x.dtype} {tuple(x.shape)}", where=name, expected=f"float32 [M, {k}]")


def check_around(x: Tensor, w: PackedLinear, norm: Tensor | None, gated: bool, residual: Tensor | None) -> int:
    """Checks the operands of ``Kernels.linear``; returns the width of its result.

    Raises:
        ShapeError: ``x`` is not float32 ``[M, w.k]``, the norm not ``[w.k]``, ``w.n`` odd although gated, or the residual
            not float32 of the result's shape.
    """
    check_input(x, w.k, w.name)
    width = w.n // 2 if gated else w.n
    if gated and w.n % 2:
        raise ShapeError(f"a gated product of {w.n} outputs", where=w.name, expected="gate and up of one width")
    if norm is not None and norm.shape != (w.k,):
        raise ShapeError(f"the norm has shape {tuple(norm.shape)}", where=w.name, expected=f"[{w.k}]")
    if residual is not None and (residual.shape != (len(x), width) or residual.dtype != torch.float32):
        found = f"the residual is {residual.dtype} {tuple(residual.shape)}"
        raise ShapeError(found, where=w.name, expected=f"float32 [{len(x)}, {width}]")
    return width


def matrix_shape(shape: Sequence[int], name: str) -> tuple[int, int]:
    """``(N, K)`` of a matrix.

    Raises:
        ShapeError: another number of dimensions.
    """
    if len(shape) != 2:
        raise ShapeError(f"the weight has shape {tuple(shape)}", where=name, expected="[N, K]")
    return shape[0], shape[1]


def experts_shape(gate_up: Sequence[int], down: Sequence[int], name: str) -> tuple[int, int, int]:
    """``(E, I, H)`` of ``gate_up [E, 2I, H]`` and ``down [E, H, I]``.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    if len(gate_up) != 3 or len(down) != 3 or tuple(gate_up) != (down[0], 2 * down[2], down[1]):
        raise ShapeError(
            f"expert weights have shapes {tuple(gate_up)} and {tuple(down)}",
            where=name,
            expected="gate_up [E, 2I, H] and down [E, H, I]",
        )
    return down[0], down[2], down[1]


def check_routing(x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> None:
    """Checks the arguments of ``Kernels.experts``.

    Raises:
        ShapeError: wrong shapes or dtypes, or an expert id outside ``[0, E)``.
    """
    check_input(x, w.hidden, w.name)
    if (
        expert_ids.dim() != 2
        or gates.shape != expert_ids.shape
        or expert_ids.shape[0] != x.shape[0]
        or expert_ids.dtype != torch.int32
        or gates.dtype != torch.float32
    ):
        raise ShapeError(
            f"routing is expert_ids {expert_ids.dtype} {tuple(expert_ids.shape)}, gates {gates.dtype} {tuple(gates.shape)}",
            where=w.name,
            expected=f"int32 [{x.shape[0]}, k] and float32 [{x.shape[0]}, k]",
        )
    if expert_ids.numel():
        low, high = (int(v) for v in torch.aminmax(expert_ids))
        if low < 0 or high >= w.n_experts:
            raise ShapeError(f"expert ids reach from {low} to {high}", where=w.name, expected=f"0 to {w.n_experts - 1}")
