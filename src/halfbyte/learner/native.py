"""The learner's forward pass on the rollout's own kernels: bitwise parity, so that the gap of same-version tokens is exactly 0.

Every operation computes its value with the kernels that sampled (integer block products in a fixed order, batch-invariant
attention over pages), on the weights as they were published and packed. The gradient is that of the emulated operation, on
operands that are rounded to the very same bits: straight-through, as in :mod:`halfbyte.learner.autograd`. Without a gradient
the emulated operation is not run. Parity is the control for TRACE and TRIAGE: what it leaves is staleness alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from halfbyte.guidance.batch import Guide
from halfbyte.kernels import AttentionStep, Kernels, PackedExperts, PackedLinear
from halfbyte.kernels.kv import KvLayer
from halfbyte.learner.autograd import AutogradExecution
from halfbyte.learner.batch import LearnerBatch
from halfbyte.learner.parameters import Parameters
from halfbyte.models.architecture import site_of
from halfbyte.models.precision import Kind
from halfbyte.models.routing import gate_values

__all__ = ["NativeExecution", "PackedModel"]

_PAGE = 16


class PackedModel(Protocol):
    """The weights of one version as the rollout holds them (``halfbyte.rollout.weights.RolloutWeights``)."""

    @property
    def linears(self) -> Mapping[tuple[tuple[str, ...], Kind], PackedLinear]:
        """(names, kind) -> packed projections."""
        ...

    @property
    def experts(self) -> Mapping[tuple[int, Kind], PackedExperts]:
        """(layer, kind) -> packed experts."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden] as published."""
        ...

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """Norm weights, float32."""
        ...


class NativeExecution(AutogradExecution):
    """See :class:`AutogradExecution`.

    Arguments:
        weights: the present weights, packed.
        tables: the rotary tables that the rollout uses.
    """

    def __init__(
        self,
        parameters: Parameters,
        weights: PackedModel,
        batch: LearnerBatch,
        kernels: Kernels,
        tables: tuple[Tensor, Tensor],
        *,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(parameters, batch, kernels, tables, activation_checkpointing=activation_checkpointing)
        self.weights = weights
        self._tables = tables
        self._step, self._pages = _pages(self, batch, tables)

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        value = lambda: self.weights.embedding.index_select(0, ids).float()  # noqa: E731
        return _valued(lambda: AutogradExecution.embed(self, ids), value)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""

        def value() -> Tensor:
            flat = x.detach().reshape(-1, x.shape[-1])
            return self.kernels.rms_norm(flat, self.weights.vectors[f"{name}.weight"], self.arch.norm_eps).view(x.shape)

        return _valued(lambda: AutogradExecution.norm(self, x, name), value)

    def linear(
        self,
        x: Tensor,
        names: tuple[str, ...],
        *,
        norm: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Projections that share an input, concatenated."""
        through = AutogradExecution.linear

        def value() -> Tensor:
            kinds = self.precision.kinds(site_of(f"{names[0]}.weight"))
            rows = x.detach()
            if norm is not None:
                rows = self.kernels.rms_norm(rows, self.weights.vectors[f"{norm}.weight"], self.arch.norm_eps)
            y = self._phased(rows, kinds, lambda r, kind, _: self.kernels.linear(r, self.weights.linears[names, kind]))
            y = self.kernels.swiglu(y) if gated else y
            return y if residual is None else residual.detach() + y

        return _valued(lambda: through(self, x, names, norm=norm, gated=gated, residual=residual), value)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Heads, their norms, rotation, attention over pages that hold the K and V of this batch alone."""

        def value() -> Tensor:
            prefix, vectors = f"model.layers.{layer}.self_attn", self.weights.vectors
            norms = [vectors[f"{prefix}.{n}_norm.weight"] if self.arch.qk_norm else None for n in "qk"]
            return self.kernels.attend(
                qkv.detach(), self._pages, self._step, q_norm=norms[0], k_norm=norms[1], eps=self.arch.norm_eps
            )

        return _valued(lambda: AutogradExecution.attend(self, layer, qkv), value)

    def head(self, x: Tensor) -> Tensor:
        """[R, hidden] -> logits [R, vocab]."""
        packed = self.weights.linears[("lm_head",), self.precision.decode.head]
        return _valued(lambda: AutogradExecution.head(self, x), lambda: self.kernels.linear(x.detach(), packed))

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self._tables
        value = lambda: self.kernels.rope(x.detach().contiguous(), self.batch.positions, cos, sin)  # noqa: E731
        return _valued(lambda: AutogradExecution._rotate(self, x), value)

    def _gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        value = lambda: gate_values(logits.detach(), chosen, normalise=self.arch.norm_topk_prob)  # noqa: E731
        return _valued(lambda: AutogradExecution._gates(self, logits, chosen), value)

    def _routed(
        self, layer: int, x: Tensor, ids: Tensor, gates: Tensor, kind: Kind, inputs: Guide | None, middle: Guide | None
    ) -> Tensor:
        packed = self.weights.experts[layer, kind]
        return _valued(
            lambda: AutogradExecution._routed(self, layer, x, ids, gates, kind, inputs, middle),
            lambda: self.kernels.experts(x.detach(), ids.to(torch.int32), gates.detach(), packed),
        )


def _pages(run: NativeExecution, batch: LearnerBatch, tables: tuple[Tensor, Tensor]) -> tuple[AttentionStep, KvLayer]:
    """Pages for the sequences of a batch, one layer after another uses them; and where its tokens stand in them."""
    arch, precision = run.arch, run.precision
    lengths = batch.starts.diff()
    pages = (lengths + _PAGE - 1) // _PAGE
    first = pages.cumsum(0) - pages
    table = first[:, None] + torch.arange(int(pages.max()))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.arange(len(sequence)) - batch.starts[sequence]
    step = AttentionStep(
        positions=batch.positions,
        slots=first[sequence] * _PAGE + place,
        page_table=torch.where(table < (first + pages)[:, None], table, -1).to(torch.int32),
        query_start=batch.starts.to(torch.int32),
        context_length=lengths.to(torch.int32),
        cos=tables[0],
        sin=tables[1],
        scale=float(arch.head_dim) ** -0.5,
    )
    count = int(pages.sum())
    layer = run.kernels.new_kv_layer(count, _PAGE, arch.n_kv_heads, arch.head_dim, precision.kv, precision.kv_spec)
    return step, layer


def _valued(through: Callable[[], Tensor], value: Callable[[], Tensor]) -> Tensor:
    """The number of ``value`` with the gradient of ``through``."""
    if not torch.is_grad_enabled():
        return value()
    return cast(Tensor, _Valued.apply(through(), value))  # type: ignore[no-untyped-call]


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, through: Tensor, value: Callable[[], Tensor]) -> Tensor:
        out = value()
        assert out.shape == through.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
