"""Reference routed experts: SwiGLU experts over the tokens routed to each, in torch.

Definition, for token m and slots j = 0, 1, ... in order, from y = 0: ``y += gates[m, j] * down_e(swiglu(gate_up_e(x_m)))`` with
e = ``expert_ids[m, j]``; multiply, then add. ``x`` is quantised once a token, the intermediate once a (token, slot); both take
a per-token global scale, so a token's result does not depend on what shares its batch or its expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.formats import QuantSpec, QuantTensor, quantise
from halfbyte.formats.global_scale import fixed_global
from halfbyte.kernels.reference.linear import REFERENCE, Products, RowStore, matrix_product, row_store
from halfbyte.kernels.weights import (
    ExpertsRecord,
    LinearKind,
    PackedExperts,
    check_kind,
    check_recordable,
    check_routing,
    experts_shape,
    row_global_scale,
)

__all__ = ["ExpertRows", "experts", "experts_recorded", "merge_codes", "pack_experts"]


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """One :class:`RowStore` an expert."""

    rows: tuple[RowStore, ...]

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return sum(r.nbytes for r in self.rows)

    def dequantised(self) -> Tensor:
        """float32 ``[E, N, K]``."""
        return torch.stack([r.dequantised() for r in self.rows])

    def parts(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :class:`~halfbyte.kernels.weights.WeightStore`; joined, so copied."""
        found = [p for r in self.rows if (p := r.parts()) is not None]
        if not found:
            return None
        codes, scales, rows = (torch.cat(column) for column in zip(*found))
        return codes, scales, rows

    def unpacked(self) -> QuantTensor | None:
        """See :class:`~halfbyte.kernels.weights.WeightStore`."""
        parts = [q for r in self.rows if (q := r.unpacked()) is not None]
        if not parts:
            return None
        codes, scales, g = (torch.stack([getattr(q, p) for q in parts]) for p in ("codes", "scales", "global_scale"))
        return QuantTensor(codes, scales, g, parts[0].spec, (len(parts), *parts[0].shape))


def _expert(weight: Tensor | QuantTensor, index: int) -> Tensor | QuantTensor:
    if not isinstance(weight, QuantTensor):
        return weight[index]
    scale = row_global_scale(weight.global_scale, weight.shape[:2])[index]
    return QuantTensor(weight.codes[index], weight.scales[index], scale, weight.spec, tuple(weight.shape[1:]))


def _stack(weight: Tensor | QuantTensor, kind: LinearKind, spec: QuantSpec | None, name: str) -> ExpertRows:
    return ExpertRows(tuple(row_store(_expert(weight, e), kind, spec, f"{name}.{e}") for e in range(weight.shape[0])))


def pack_experts(
    gate_up: Tensor | QuantTensor,
    down: Tensor | QuantTensor,
    kind: LinearKind,
    *,
    weight_spec: QuantSpec | None = None,
    activation_spec: QuantSpec | None = None,
    name: str = "experts",
) -> PackedExperts:
    """Packs ``gate_up [E, 2I, H]`` (gate rows first) and ``down [E, H, I]``; each expert's matrix has its own global scale.

    Raises:
        ShapeError: shapes that do not fit together or do not hold whole blocks.
        ConfigError: see :func:`halfbyte.kernels.weights.check_kind`.
        NumericsError: a weight holds NaN or infinity (FP4 kinds).
    """
    n_experts, intermediate, hidden = experts_shape(gate_up.shape, down.shape, name)
    checked = check_kind(kind, gate_up, hidden, weight_spec, activation_spec, name)
    check_kind(kind, down, intermediate, weight_spec, activation_spec, name)
    quantised = checked in ("w4a4", "w4a16")
    return PackedExperts(
        kind=checked,
        n_experts=n_experts,
        intermediate=intermediate,
        hidden=hidden,
        weight_spec=(gate_up.spec if isinstance(gate_up, QuantTensor) else weight_spec) if quantised else None,
        activation_spec=activation_spec if checked == "w4a4" else None,
        gate_up=_stack(gate_up, checked, weight_spec, f"{name}.gate_up"),
        down=_stack(down, checked, weight_spec, f"{name}.down"),
        name=name,
    )


def experts(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    w: PackedExperts,
    *,
    swiglu: Callable[[Tensor], Tensor],
    products: Products | None = None,
) -> Tensor:
    """``x [M, H] f32, expert_ids [M, k] int32, gates [M, k] f32 -> [M, H] f32``; ``swiglu`` maps ``[R, 2I]`` to ``[R, I]``.

    Raises:
        ShapeError: tensors that do not fit ``w`` or each other, or an expert id outside ``[0, E)``.
        NumericsError: ``x`` or an intermediate holds NaN or infinity (w4a4).
    """
    return _run(x, expert_ids, gates, w, swiglu, products or REFERENCE)[0]


def experts_recorded(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    w: PackedExperts,
    *,
    swiglu: Callable[[Tensor], Tensor],
    products: Products | None = None,
) -> ExpertsRecord:
    """:func:`experts` with the codes of its input and its intermediate.

    Raises:
        ConfigError: ``w`` is not w4a4. Otherwise as :func:`experts`.
    """
    check_recordable(w.kind, w.name)
    y, inputs, parts = _run(x, expert_ids, gates, w, swiglu, products or REFERENCE)
    assert inputs is not None
    assert w.activation_spec is not None
    return ExpertsRecord(y, inputs, merge_codes(parts, w.activation_spec, (*expert_ids.shape, w.intermediate)))


def merge_codes(
    parts: Sequence[tuple[Tensor, QuantTensor]], spec: QuantSpec, shape: tuple[int, int, int]
) -> QuantTensor:
    """Codes of ``shape`` = ``[M, k, I]`` from ``(pairs, codes [pairs, I])`` of each expert; ``pairs`` are indices into M * k."""
    pairs, width = shape[0] * shape[1], shape[2]
    device = parts[0][1].codes.device if parts else None
    codes = torch.zeros(pairs, width // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(pairs, width // spec.block, dtype=torch.uint8, device=device)
    per_row = spec.global_scale == "token"
    g = torch.ones(pairs, device=device) if per_row else fixed_global(spec)
    for where, q in parts:
        codes[where], scales[where] = q.codes, q.scales
        if per_row:
            g[where] = q.global_scale
    lead = shape[:2]
    codes, scales = codes.view(*lead, width // 2), scales.view(*lead, width // spec.block)
    return QuantTensor(codes, scales, g.view(lead) if per_row else g, spec, shape)


def _run(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    w: PackedExperts,
    swiglu: Callable[[Tensor], Tensor],
    products: Products,
) -> tuple[Tensor, QuantTensor | None, list[tuple[Tensor, QuantTensor]]]:
    """The output, the codes of ``x`` and, expert by expert, routed pairs with the codes of their intermediates (w4a4)."""
    check_routing(x, expert_ids, gates, w)
    if not isinstance(w.gate_up, ExpertRows) or not isinstance(w.down, ExpertRows):
        raise ShapeError(
            "these experts were packed by other kernels", where=w.name, expected="experts packed by these kernels"
        )
    tokens, slots = expert_ids.shape
    x = x.detach()
    a = quantise(x, w.activation_spec, name=f"{w.name} input") if w.activation_spec is not None else None
    parts = torch.zeros(tokens * slots, w.hidden, device=x.device)
    recorded: list[tuple[Tensor, QuantTensor]] = []
    flat = expert_ids.reshape(-1)
    for e in torch.unique(flat).tolist():
        where = (flat == e).nonzero().squeeze(1)
        rows = where // slots
        if a is not None:
            scale = row_global_scale(a.global_scale, (tokens,))[rows]
            picked = QuantTensor(a.codes[rows], a.scales[rows], scale, a.spec, (len(rows), w.hidden))
            inner = quantise(
                swiglu(products.w4a4(picked, w.gate_up.rows[e])), a.spec, name=f"{w.name}.{e} intermediate input"
            )
            recorded.append((where, inner))
            parts[where] = products.w4a4(inner, w.down.rows[e])
        else:
            both = matrix_product(x[rows], w.gate_up.rows[e], w.kind, None, w.name, products)
            parts[where] = matrix_product(swiglu(both), w.down.rows[e], w.kind, None, w.name, products)
    y = torch.zeros(tokens, w.hidden, device=x.device)
    for j in range(slots):
        y += gates[:, j : j + 1] * parts.view(tokens, slots, w.hidden)[:, j]
    return y, a, recorded
