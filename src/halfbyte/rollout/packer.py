"""Packing published weights for the rollout, all of them or those that a refit touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import QuantTensor, multiplier_pair, slice_rows
from halfbyte.formats.global_scale import stored_global
from halfbyte.formats.spec import QuantSpec
from halfbyte.kernels import Kernels, PackedExperts, PackedLinear
from halfbyte.models.architecture import Architecture, expert_names, site_of
from halfbyte.models.precision import Kind, Precision

__all__ = ["Packer", "Source", "fused_groups", "requantised"]

#: With this share of rows changed or more, everything is quantised: unpacking the old codes costs as much.
_FEW = 0.5

Linears = dict[tuple[tuple[str, ...], Kind], PackedLinear]
Experts = dict[tuple[int, Kind], PackedExperts]


def fused_groups(arch: Architecture) -> list[tuple[str, ...]]:
    """The groups of projections that share an input, in the order the forward pass asks for them."""
    groups: list[tuple[str, ...]] = []
    for i in range(arch.n_layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        groups += [(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"), (f"{attn}.o_proj",)]
        groups += (
            [(f"{mlp}.gate",)]
            if arch.is_moe_layer(i)
            else [(f"{mlp}.gate_proj", f"{mlp}.up_proj"), (f"{mlp}.down_proj",)]
        )
    return groups


@dataclass(frozen=True, eq=False)
class Source:
    """Where weights come from.

    Arguments:
        params: parameter name (experts stacked) -> tensor in the publish dtype.
        scales: checkpoint weight name -> stored global scale, float32 of shape (), for scales that outlive a version.
        codes: checkpoint weight name -> codes, in place of a parameter that is then never dequantised.
    """

    params: dict[str, Tensor]
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    codes: Mapping[str, QuantTensor] = field(default_factory=dict)


class Packer:
    """Packs into ``linears`` and ``experts``; ``quantised_rows`` counts what was quantised on the way.

    Arguments:
        old: packed matrices of the version before; those without a touched row are shared.
        rows: see :meth:`halfbyte.rollout.weights.RolloutWeights.repacked`; for weights given as codes, the weight's name.
    """

    def __init__(
        self,
        arch: Architecture,
        precision: Precision,
        source: Source,
        kernels: Kernels,
        *,
        old: tuple[Linears, Experts] | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.arch, self.precision, self.source, self.kernels = arch, precision, source, kernels
        self.old, self.rows = old, rows or {}
        self.linears: Linears = {}
        self.experts: Experts = {}
        self.fallbacks: list[str] = []
        self.quantised_rows = 0

    def pack_all(self) -> None:
        """Every projection, the head, all experts."""
        for names in fused_groups(self.arch):
            self._linear(names, names)
        head = "model.embed_tokens" if self.arch.tie_embeddings else "lm_head"
        self._linear(("lm_head",), (head,))
        for i in range(self.arch.n_layers):
            if self.arch.is_moe_layer(i):
                self._experts(i)

    def _weight(self, name: str) -> Tensor:
        if f"{name}.weight" not in self.source.params:
            raise CheckpointError(
                "a tensor is missing", where=f"{name}.weight", expected="every tensor of the architecture"
            )
        return self.source.params[f"{name}.weight"]

    def _linear(self, key: tuple[str, ...], names: tuple[str, ...]) -> None:
        kinds = self.precision.kinds(site_of(f"{key[0]}.weight"))
        spec = self.precision.weight_spec
        width = self._columns(names[0])
        touched = self.old is None or any(f"{n}.{part}" in self.rows for n in names for part in ("weight", "bias"))
        for kind in kinds:
            packable = kind if kind in ("fp32", "bf16") or width % spec.block == 0 else "bf16"
            if packable != kind:
                self.fallbacks += names
            if not touched and self.old is not None:
                self.linears[key, kind] = self.old[0][key, kind]
                continue
            packed: Tensor | QuantTensor
            if packable in ("fp32", "bf16"):
                packed = torch.cat([self._weight(n) for n in names])
                if packable == "fp32":
                    packed = packed.float()
            else:
                partial = any(self._few(f"{n}.weight") or f"{n}.weight" in self.source.codes for n in names)
                before = self.old[0][key, kind].store.unpacked() if partial and self.old is not None else None
                packed = _concatenate(self._members(names, before))
            activation = self.precision.activation_spec if packable == "w4a4" else None
            self.linears[key, kind] = self.kernels.pack_linear(
                packed, packable, activation_spec=activation, bias=self._bias(names), name="+".join(names)
            )

    def _few(self, parameter: str) -> bool:
        """Whether so few rows of a parameter changed that keeping the codes of the others is worth it."""
        rows = self.rows.get(parameter)
        return self.old is not None and (rows is None or float(rows.float().mean()) < _FEW)

    def _columns(self, name: str) -> int:
        held = self.source.codes.get(f"{name}.weight")
        return int(self._weight(name).shape[1]) if held is None else held.shape[1]

    def _bias(self, names: tuple[str, ...]) -> Tensor | None:
        biases = [self.source.params.get(f"{n}.bias") for n in names]
        if all(b is None for b in biases):
            return None
        return torch.cat([torch.zeros(len(self._weight(n))) if b is None else b.float() for b, n in zip(biases, names)])

    def _members(self, names: tuple[str, ...], before: QuantTensor | None) -> list[QuantTensor]:
        """The codes of projections that are packed as one matrix; ``before``: the matrix of the last version."""
        parts, begin = [], 0
        for name in names:
            weight = f"{name}.weight"
            held = self.source.codes.get(weight)
            count = held.shape[0] if held is not None else len(self._weight(name))
            old = None if before is None else slice_rows(before, begin, begin + count)
            begin += count
            if held is not None:
                parts.append(held)
                continue
            rows = (
                torch.zeros(count, dtype=torch.bool)
                if old is not None and weight not in self.rows
                else self.rows.get(weight)
            )
            parts.append(self._quantised(self._weight(name), weight, weight, old, rows))
        return parts

    def _quantised(
        self, w: Tensor, name: str, scale_name: str, old: QuantTensor | None, rows: Tensor | None
    ) -> QuantTensor:
        given = self.source.scales.get(scale_name)
        q, count = requantised(self.kernels, w, self.precision.weight_spec, given=given, old=old, rows=rows, name=name)
        self.quantised_rows += count
        return q

    def _experts(self, layer: int) -> None:
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up_name, down_name = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
        spec = self.precision.weight_spec
        first = expert_names(self.arch, layer, 0)
        inner, width = self.arch.moe_intermediate_size, self.arch.hidden_size
        coded = first[0] in self.source.codes
        names = [n for e in range(self.arch.n_experts) for n in expert_names(self.arch, layer, e)]
        touched = self.old is None or any(n in self.rows for n in (gate_up_name, down_name, *names))
        for kind in self.precision.kinds("experts"):
            fits = width % spec.block == 0 and inner % spec.block == 0
            packable: Kind = kind if kind in ("fp32", "bf16") or fits else "bf16"
            if packable != kind:
                self.fallbacks.append(prefix)
            if not touched and self.old is not None:
                self.experts[layer, kind] = self.old[1][layer, kind]
                continue
            quantised = packable in ("w4a16", "w4a4")
            gate_up: Tensor | QuantTensor
            down: Tensor | QuantTensor
            few = self._few(gate_up_name) or self._few(down_name)
            if quantised and (coded or few or first[0] in self.source.scales):
                before = None if self.old is None else self.old[1][layer, kind]
                gate_up, down = self._expert_codes(layer, before, coded=coded)
            else:
                gate_up, down = self.source.params[gate_up_name], self.source.params[down_name]
                self.quantised_rows += quantised * (gate_up.shape[:2].numel() + down.shape[:2].numel())
                if packable == "fp32":
                    gate_up, down = gate_up.float(), down.float()
            self.experts[layer, kind] = self.kernels.pack_experts(
                gate_up,
                down,
                packable,
                weight_spec=spec if quantised else None,
                activation_spec=self.precision.activation_spec if packable == "w4a4" else None,
                name=prefix,
            )

    def _expert_codes(
        self, layer: int, before: PackedExperts | None, *, coded: bool
    ) -> tuple[QuantTensor, QuantTensor]:
        """Codes of ``gate_up [E, 2I, H]`` and ``down [E, H, I]``, an expert at a time."""
        prefix = f"model.layers.{layer}.mlp.experts"
        stacks: list[QuantTensor] = []
        for part in ("gate_up_proj", "down_proj"):
            store = None if before is None else before.gate_up if part == "gate_up_proj" else before.down
            old = None if store is None else store.unpacked()
            name = f"{prefix}.{part}"
            found = []
            for e in range(self.arch.n_experts):
                gate, up, down = expert_names(self.arch, layer, e)
                members = (gate, up) if part == "gate_up_proj" else (down,)
                if coded:
                    found.append(_concatenate([self.source.codes[m] for m in members]))
                    continue
                w = self.source.params[name][e]
                mask = self.rows.get(name)
                rows = None if mask is None else mask.view(self.arch.n_experts, -1)[e]
                if old is not None and mask is None:
                    rows = torch.zeros(len(w), dtype=torch.bool)
                held = None if old is None else _of_expert(old, e)
                found.append(self._quantised(w, f"{name}.{e}", members[0], held, rows))
            stacks.append(_stacked(found))
        return stacks[0], stacks[1]


def requantised(
    kernels: Kernels,
    w: Tensor,
    spec: QuantSpec,
    *,
    given: Tensor | None = None,
    old: QuantTensor | None = None,
    rows: Tensor | None = None,
    name: str = "tensor",
) -> tuple[QuantTensor, int]:
    """``w`` [N, K] quantised, and how many rows were; bit for bit what quantising all of it gives.

    Arguments:
        given: the stored global scale, where it outlives versions.
        old: codes of the version before, with one global scale a row as a multiplier; changed in place.
        rows: bool [N], which rows of ``w`` may differ from what ``old`` was made of; None: all.
    """
    g = given
    if g is None and spec.global_scale == "tensor":
        g = stored_global(w.abs().amax() if w.numel() else w.new_zeros(()), spec).to(torch.float32)
    if g is not None and not bool(g > 0):  # an all-zero tensor stores 0 in some conventions; quantise knows what to do
        g = None
    partial = old is not None and rows is not None and spec.global_convention == "multiplier"
    if partial and old is not None and g is not None:
        partial = bool((old.global_scale == multiplier_pair(g, spec)[0]).all())
    elif spec.global_scale == "tensor":
        partial = False
    if not partial or old is None or rows is None:
        return kernels.quantise(w, spec, global_scale=g, name=name), len(w)
    if spec.scale_rows > 1:
        rows = rows.view(-1, spec.scale_rows).any(1).repeat_interleave(spec.scale_rows)
    chosen = rows.nonzero().view(-1)
    if len(chosen):
        part = kernels.quantise(w.index_select(0, chosen), spec, global_scale=g, name=name)
        old.codes[chosen], old.scales[chosen] = part.codes, part.scales
        if part.global_scale.ndim:
            old.global_scale[chosen] = part.multiplier()
    return QuantTensor(old.codes, old.scales, old.global_scale, spec, old.shape), len(chosen)


def _concatenate(parts: list[QuantTensor]) -> QuantTensor:
    """Rows of several quantised weights as one, each row keeping its tensor's global scale."""
    rows = [p.shape[0] for p in parts]
    scale = torch.cat(
        [
            p.global_scale.reshape(-1).expand(n) if p.global_scale.numel() == 1 else p.global_scale
            for p, n in zip(parts, rows)
        ]
    )
    return QuantTensor(
        codes=torch.cat([p.codes for p in parts]),
        scales=torch.cat([p.scales for p in parts]),
        global_scale=scale.contiguous(),
        spec=parts[0].spec,
        shape=(sum(rows), parts[0].shape[1]),
    )


def _of_expert(q: QuantTensor, e: int) -> QuantTensor:
    return QuantTensor(q.codes[e], q.scales[e], q.global_scale[e], q.spec, q.shape[1:])


def _stacked(parts: list[QuantTensor]) -> QuantTensor:
    """One stack [E, N, K] with a global scale a row."""
    g = torch.stack([p.global_scale.reshape(-1).expand(p.shape[0]) for p in parts])
    codes, scales = torch.stack([p.codes for p in parts]), torch.stack([p.scales for p in parts])
    return QuantTensor(codes, scales, g.contiguous(), parts[0].spec, (len(parts), *parts[0].shape))
