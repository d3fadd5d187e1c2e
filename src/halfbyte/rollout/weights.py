"""The model as the rollout holds it: every weight packed once, for each kind its site runs in, under one version.

What is packed is what was published (the BF16 cast of the learner's masters, or FP32 for the exact control). Weights that
share an input (q/k/v; gate/up) are quantised separately, each with its own global scale, and packed as one matrix.

A refit does not pack everything again: :meth:`RolloutWeights.repacked` quantises the rows that changed and shares every matrix
that did not with the version before, bit for bit as if all had been packed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.formats import QuantTensor
from halfbyte.kernels import Kernels, PackedExperts, PackedLinear
from halfbyte.models.architecture import Architecture, expert_names, site_of
from halfbyte.models.checkpoint import check_finite
from halfbyte.models.layout import from_checkpoint
from halfbyte.models.precision import Kind, Precision
from halfbyte.rollout.packer import Packer, Source

__all__ = ["RolloutWeights"]


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
        codes: Mapping[str, QuantTensor] | None = None,
    ) -> RolloutWeights:
        """Pack checkpoint tensors (checkpoint names; experts per expert or stacked), for sequences up to ``n_positions``.

        Tensors named ``<weight>.global_scale`` are global scales that the learner keeps over versions
        (``QuantSpec.global_update``); the others are derived from the weights.

        Arguments:
            codes: checkpoint name -> weights that are quantised already and packed as they are, where every phase runs their
                site in FP4. ``tensors`` has their values too, for where it does not.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
            NumericsError: a weight is NaN or infinite, by name.
        """
        source = published(arch, precision, tensors, codes)
        return cls.from_source(arch, precision, source, kernels, version, n_positions)

    @classmethod
    def from_source(
        cls, arch: Architecture, precision: Precision, source: Source, kernels: Kernels, version: int, n_positions: int
    ) -> RolloutWeights:
        """Pack everything that ``source`` holds. Errors as in :meth:`pack`."""
        packer = Packer(arch, precision, source, kernels)
        packer.pack_all()
        cos, sin = arch.rope_tables(n_positions)
        return cls(
            arch,
            precision,
            version,
            packer.linears,
            packer.experts,
            _vectors(source.params),
            _embedding(source.params),
            cos,
            sin,
            tuple(packer.fallbacks),
        )

    def repacked(
        self, source: Source, rows: Mapping[str, Tensor], kernels: Kernels, *, version: int
    ) -> tuple[RolloutWeights, int]:
        """The next version, and how many rows were quantised for it.

        Arguments:
            source: the weights of the next version.
            rows: parameter name -> bool [rows], which of its rows (all dimensions but the last flattened) may differ from
                this version; parameters that are not listed are equal.
        Raises:
            NumericsError: a changed weight is NaN or infinite, by name.
        """
        for name in rows:
            if name in source.params:
                check_finite(source.params[name], name)
        packer = Packer(self.arch, self.precision, source, kernels, old=(self.linears, self.experts), rows=rows)
        packer.pack_all()
        return (
            replace(
                self,
                version=version,
                linears=packer.linears,
                experts=packer.experts,
                vectors=_vectors(source.params),
                embedding=_embedding(source.params),
                fallbacks=tuple(packer.fallbacks),
            ),
            packer.quantised_rows,
        )


def published(
    arch: Architecture,
    precision: Precision,
    tensors: Mapping[str, Tensor],
    codes: Mapping[str, QuantTensor] | None = None,
) -> Source:
    """Checkpoint tensors as the packer's source, in the dtype that this precision publishes.

    Raises:
        CheckpointError, NumericsError: see :meth:`RolloutWeights.pack`.
    """
    held = _packed_as_they_are(arch, precision, codes or {})
    params = from_checkpoint(tensors, arch, skip=held)
    for name, tensor in params.items():
        check_finite(tensor, name)
    dtype = torch.float32 if precision.exact else torch.bfloat16
    suffix = ".global_scale"
    scales = {n.removesuffix(suffix): t.reshape(()).float() for n, t in tensors.items() if n.endswith(suffix)}
    return Source({k: v.detach().to(dtype) for k, v in params.items()}, scales, held)


def _packed_as_they_are(
    arch: Architecture, precision: Precision, codes: Mapping[str, QuantTensor]
) -> dict[str, QuantTensor]:
    """The codes that no phase needs the values of; experts only where a layer has them all."""
    held = {n: codes[n] for n in codes if not {"fp32", "bf16"} & set(precision.kinds(site_of(n)))}
    for layer in arch.moe_layers:
        names = [n for e in range(arch.n_experts) for n in expert_names(arch, layer, e)]
        if any(n in held for n in names) and not all(n in held for n in names):
            held = {n: q for n, q in held.items() if n not in names}
    for name, q in held.items():
        if q.spec.format != precision.weight_spec.format:
            raise ConfigError(
                f"{name} is {q.spec.format}, the precision's weight_spec {precision.weight_spec.format}",
                where=f"precision {precision.name}",
                expected="one format",
                fix="use with_weight_spec, or leave the codes out to quantise anew",
            )
    return held


def _vectors(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.float() for k, v in params.items() if v.dim() == 1 and not k.endswith(".bias")}


def _embedding(params: Mapping[str, Tensor]) -> Tensor:
    name = "model.embed_tokens.weight"
    if name not in params:
        raise CheckpointError("a tensor is missing", where=name, expected="every tensor of the architecture")
    return params[name]
