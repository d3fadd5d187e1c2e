"""Native routed experts: packing, and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import QuantSpec, QuantTensor
from halfbyte.kernels import _native
from halfbyte.kernels.native.linear import PanelStore, pack_stack
from halfbyte.kernels.native.quantise import code_rows, empty_record, quantise, rule_of
from halfbyte.kernels.reference.experts import merge_codes
from halfbyte.kernels.reference.swiglu import swiglu
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

__all__ = ["experts", "experts_recorded", "pack_experts"]


def _quantised(isa: int, weight: Tensor | QuantTensor, spec: QuantSpec, name: str) -> QuantTensor:
    """Codes of ``[E, N, K]`` with a global scale an expert (shape ``[E]``), or a row where the spec says so."""
    if isinstance(weight, QuantTensor):
        return weight
    parts = [quantise(isa, weight[e], spec, name=f"{name}.{e}") for e in range(weight.shape[0])]
    return QuantTensor(
        torch.stack([p.codes for p in parts]),
        torch.stack([p.scales for p in parts]),
        torch.stack([p.global_scale for p in parts]),
        spec,
        tuple(weight.shape),
    )


def pack_experts(
    isa: int,
    gate_up: Tensor | QuantTensor,
    down: Tensor | QuantTensor,
    kind: LinearKind,
    *,
    weight_spec: QuantSpec | None = None,
    activation_spec: QuantSpec | None = None,
    name: str = "experts",
) -> PackedExperts:
    """Packs ``gate_up [E, 2I, H]`` and ``down [E, H, I]``; errors as in ``reference.experts.pack_experts``."""
    n_experts, intermediate, hidden = experts_shape(gate_up.shape, down.shape, name)
    checked = check_kind(kind, gate_up, hidden, weight_spec, activation_spec, name)
    check_kind(kind, down, intermediate, weight_spec, activation_spec, name)
    spec = gate_up.spec if isinstance(gate_up, QuantTensor) else weight_spec
    if checked not in ("w4a4", "w4a16"):
        spec = None
    if spec is not None:
        gate_up = _quantised(isa, gate_up, spec, f"{name}.gate_up")
        down = _quantised(isa, down, spec, f"{name}.down")
    return PackedExperts(
        kind=checked,
        n_experts=n_experts,
        intermediate=intermediate,
        hidden=hidden,
        weight_spec=spec,
        activation_spec=activation_spec if checked == "w4a4" else None,
        gate_up=pack_stack(gate_up, checked, True, None, spec),
        down=pack_stack(down, checked, True, None, spec),
        name=name,
    )


def experts(isa: int, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> Tensor:
    """``x [M, H] f32, expert_ids [M, k] int32, gates [M, k] f32 -> [M, H] f32``; definition in ``reference/experts.py``."""
    check_routing(x, expert_ids, gates, w)
    if not isinstance(w.gate_up, PanelStore) or not isinstance(w.down, PanelStore):
        raise ShapeError(
            "these experts were packed by other kernels", where=w.name, expected="experts packed by these kernels"
        )
    tokens, slots = expert_ids.shape
    out = torch.empty(tokens, w.hidden)
    if tokens == 0:
        return out
    x, expert_ids, gates = x.contiguous(), expert_ids.contiguous(), gates.contiguous()
    rule = None if w.activation_spec is None else rule_of(w.activation_spec)
    if w.activation_spec is not None and rule is None:
        return _experts_by_codes(isa, x, expert_ids, gates, w).output
    bad = _native.experts(
        isa, w.gate_up.view, w.down.view, rule, w.n_experts, x.data_ptr(), expert_ids.data_ptr(), gates.data_ptr(),
        tokens, slots, out.data_ptr(), None, None,
    )  # fmt: skip
    _refuse_bad_row(bad, tokens, slots, w.name)
    return out


def experts_recorded(isa: int, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> ExpertsRecord:
    """:func:`experts` with the codes of its two activations; errors as in ``reference.experts.experts_recorded``."""
    check_recordable(w.kind, w.name)
    check_routing(x, expert_ids, gates, w)
    if not isinstance(w.gate_up, PanelStore) or not isinstance(w.down, PanelStore):
        raise ShapeError(
            "these experts were packed by other kernels", where=w.name, expected="experts packed by these kernels"
        )
    x, expert_ids, gates, spec = x.contiguous(), expert_ids.contiguous(), gates.contiguous(), w.activation_spec
    assert spec is not None
    rule = rule_of(spec)
    tokens, slots = expert_ids.shape
    if rule is None or tokens * slots == 0:
        return _experts_by_codes(isa, x, expert_ids, gates, w)
    out = torch.empty(tokens, w.hidden)
    inputs, _ = empty_record((tokens, w.hidden), spec)
    middle, _ = empty_record((tokens, slots, w.intermediate), spec)
    bad = _native.experts(
        isa, w.gate_up.view, w.down.view, rule, w.n_experts, x.data_ptr(), expert_ids.data_ptr(), gates.data_ptr(),
        tokens, slots, out.data_ptr(), code_rows(inputs), code_rows(middle),
    )  # fmt: skip
    _refuse_bad_row(bad, tokens, slots, w.name)
    return ExpertsRecord(out, inputs, middle)


def _refuse_bad_row(bad: int, tokens: int, slots: int, name: str) -> None:
    """``bad`` is the first row with NaN or infinity, tokens first, then (token, slot) pairs; -1 for none."""
    if bad >= 0:
        where = (
            f"{name} input, token {bad}" if bad < tokens else f"{name} intermediate, token {(bad - tokens) // slots}"
        )
        raise NumericsError("NaN or infinity before a quantiser", where=where, expected="finite numbers")


def _product(isa: int, q: QuantTensor, view: _native.Panels, n: int) -> Tensor:
    rows = q.shape[0]
    out = torch.empty(rows, n)
    g = row_global_scale(q.multiplier(), (rows,))
    codes, scales = q.codes.contiguous(), q.scales.contiguous()
    _native.linear_codes(isa, view, codes.data_ptr(), scales.data_ptr(), g.data_ptr(), rows, out.data_ptr())
    return out


def _experts_by_codes(isa: int, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> ExpertsRecord:
    """The same for an activation spec whose quantiser only the reference has: expert by expert, from codes."""
    assert isinstance(w.gate_up, PanelStore)
    assert isinstance(w.down, PanelStore)
    assert w.activation_spec is not None
    tokens, slots = expert_ids.shape
    a = quantise(isa, x, w.activation_spec, name=f"{w.name} input")
    g = row_global_scale(a.global_scale, (tokens,))
    parts = torch.zeros(tokens * slots, w.hidden)
    recorded = []
    flat = expert_ids.reshape(-1)
    for e in torch.unique(flat).tolist():
        where = (flat == e).nonzero().squeeze(1)
        rows = where // slots
        picked = QuantTensor(a.codes[rows], a.scales[rows], g[rows], a.spec, (len(rows), w.hidden))
        both = _product(isa, picked, w.gate_up.view.expert(e), 2 * w.intermediate)
        inner = quantise(isa, swiglu(both), w.activation_spec, name=f"{w.name}.{e} intermediate")
        recorded.append((where, inner))
        parts[where] = _product(isa, inner, w.down.view.expert(e), w.hidden)
    y = torch.zeros(tokens, w.hidden)
    for j in range(slots):
        y += gates[:, j : j + 1] * parts.view(tokens, slots, w.hidden)[:, j]
    return ExpertsRecord(y, a, merge_codes(recorded, w.activation_spec, (tokens, slots, w.intermediate)))
