"""The model as the rollout holds it: every weight packed once, for each kind its site runs in, under one version.

What is packed is what was published (the BF16 cast of the learner's masters, or FP32 for the exact control). Weights that
share an input (q/k/v; gate/up) are quantised separately, each with its own global scale, and packed as one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats import QuantTensor
from halfbyte.kernels import Kernels, PackedExperts, PackedLinear
from halfbyte.models.architecture import Architecture, site_of
from halfbyte.models.checkpoint import check_finite
from halfbyte.models.layout import from_checkpoint
from halfbyte.models.precision import Kind, Precision

__all__ = ["RolloutWeights", "fused_groups"]


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
class RolloutWeights:
    """All weights of one version.

    Arguments:
        linears: (names, kind) -> packed projections.
        experts: (layer, kind) -> packed experts.
        vectors: norm weights, float32.
        embedding: [vocab, hidden] as published.
        cos, sin: rotary tables [max positions, head_dim / 2] float32.
        fallbacks: projections that a quantised site left in BF16 because their input is no multiple of the block (torchao #3233).
    """

    arch: Architecture
    precision: Precision
    version: int
    linears: dict[tuple[tuple[str, ...], Kind], PackedLinear]
    experts: dict[tuple[int, Kind], PackedExperts]
    vectors: dict[str, Tensor]
    embedding: Tensor
    cos: Tensor
    sin: Tensor
    fallbacks: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Resident bytes of everything packed, norms and embedding included; a tied head in the embedding's own dtype counts
        as the second copy it is."""
        packed = sum(w.nbytes for w in self.linears.values()) + sum(w.nbytes for w in self.experts.values())
        return packed + self.embedding.nbytes + sum(v.nbytes for v in self.vectors.values())

    @classmethod
    def pack(
        cls,
        arch: Architecture,
        precision: Precision,
        tensors: Mapping[str, Tensor],
        kernels: Kernels,
        *,
        version: int,
        n_positions: int,
    ) -> RolloutWeights:
        """Pack checkpoint tensors (checkpoint names; experts per expert or stacked), for sequences up to ``n_positions``.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
            NumericsError: a weight is NaN or infinite, by name.
        """
        params = from_checkpoint(tensors, arch)
        for name, tensor in params.items():
            check_finite(tensor, name)
        dtype = torch.float32 if precision.exact else torch.bfloat16
        packer = _Packer(arch, precision, {k: v.detach().to(dtype) for k, v in params.items()}, kernels)
        packer.pack_all()
        cos, sin = arch.rope_tables(n_positions)
        vectors = {k: v.float() for k, v in packer.params.items() if v.dim() == 1 and not k.endswith(".bias")}
        embedding = packer.params["model.embed_tokens.weight"]
        return cls(
            arch,
            precision,
            version,
            packer.linears,
            packer.experts,
            vectors,
            embedding,
            cos,
            sin,
            tuple(packer.fallbacks),
        )


class _Packer:
    def __init__(self, arch: Architecture, precision: Precision, params: dict[str, Tensor], kernels: Kernels) -> None:
        self.arch, self.precision, self.params, self.kernels = arch, precision, params, kernels
        self.linears: dict[tuple[tuple[str, ...], Kind], PackedLinear] = {}
        self.experts: dict[tuple[int, Kind], PackedExperts] = {}
        self.fallbacks: list[str] = []

    def pack_all(self) -> None:
        for names in fused_groups(self.arch):
            self._linear(names, names)
        head = "model.embed_tokens" if self.arch.tie_embeddings else "lm_head"
        self._linear(("lm_head",), (head,))
        for i in range(self.arch.n_layers):
            if self.arch.is_moe_layer(i):
                self._experts(i)

    def _weight(self, name: str) -> Tensor:
        if f"{name}.weight" not in self.params:
            raise CheckpointError(
                "a tensor is missing", where=f"{name}.weight", expected="every tensor of the architecture"
            )
        return self.params[f"{name}.weight"]

    def _linear(self, key: tuple[str, ...], names: tuple[str, ...]) -> None:
        weights = [self._weight(n) for n in names]
        biases = [self.params.get(f"{n}.bias") for n in names]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([torch.zeros(len(w)) if b is None else b.float() for b, w in zip(biases, weights)])
        for kind in self.precision.kinds(site_of(f"{key[0]}.weight")):
            spec = self.precision.weight_spec
            packable = kind if kind in ("fp32", "bf16") or weights[0].shape[1] % spec.block == 0 else "bf16"
            if packable != kind:
                self.fallbacks += names
            packed: Tensor | QuantTensor
            if packable in ("fp32", "bf16"):
                packed = torch.cat(weights)
                if packable == "fp32":
                    packed = packed.float()
            else:
                packed = _concatenate([self.kernels.quantise(w, spec, name=n) for w, n in zip(weights, names)])
            activation = self.precision.activation_spec if packable == "w4a4" else None
            self.linears[key, kind] = self.kernels.pack_linear(
                packed, packable, activation_spec=activation, bias=bias, name="+".join(names)
            )

    def _experts(self, layer: int) -> None:
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = self.params[f"{prefix}.gate_up_proj"], self.params[f"{prefix}.down_proj"]
        block = self.precision.weight_spec.block
        for kind in self.precision.kinds("experts"):
            fits = gate_up.shape[2] % block == 0 and down.shape[2] % block == 0
            packable: Kind = kind if kind in ("fp32", "bf16") or fits else "bf16"
            if packable != kind:
                self.fallbacks.append(prefix)
            quantised = packable in ("w4a16", "w4a4")
            self.experts[layer, kind] = self.kernels.pack_experts(
                gate_up.float() if packable == "fp32" else gate_up,
                down.float() if packable == "fp32" else down,
                packable,
                weight_spec=self.precision.weight_spec if quantised else None,
                activation_spec=self.precision.activation_spec if packable == "w4a4" else None,
                name=prefix,
            )


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
