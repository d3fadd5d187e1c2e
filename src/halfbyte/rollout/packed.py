"""The rollout's execution: packed weights, paged KV cache, no gradient; routes and guidance recorded.

One object is built for every forward pass and holds that pass's batch; nothing survives it but what was written to the pages.
Every operation is batch-invariant, so a token's numbers do not depend on what shares the pass with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import NumericsError
from halfbyte.formats import PayloadBits, QuantTensor
from halfbyte.guidance.cache import PassRecord
from halfbyte.guidance.sites import site_of_linear
from halfbyte.kernels import AttentionStep, Kernels, PackedExperts, PackedLinear
from halfbyte.models.architecture import site_of
from halfbyte.rollout.pages import PagePool
from halfbyte.rollout.weights import RolloutWeights

__all__ = ["PackedExecution", "StepBatch"]


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The tokens of one forward pass, flat; ``S`` sequences with their queries one behind the other.

    Arguments:
        ids: [T] int64.
        positions: [T] int64.
        slots: [T] int64, page * page_size + offset.
        page_table: [S, P] int32.
        query_start: [S + 1] int32.
        context_length: [S] int32, keys each sequence's last query sees.
        generated: [T] bool, or None when prefill and decode run in the same precision.
        rows: [R] int64, rows whose logits are wanted.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    query_start: Tensor
    context_length: Tensor
    generated: Tensor | None
    rows: Tensor


class PackedExecution:
    """See :class:`halfbyte.models.execution.Execution`.

    Arguments:
        find_fault: check every layer's output and raise :class:`NumericsError` naming the first layer and token that are not
            finite; used to explain a failure, since it reads every activation once more.
        record: where the codes of this pass are noted; None for nowhere. Whoever made it commits it after the pass.
    """

    def __init__(
        self,
        weights: RolloutWeights,
        pool: PagePool,
        kernels: Kernels,
        batch: StepBatch,
        *,
        find_fault: bool = False,
        record: PassRecord | None = None,
    ) -> None:
        self.weights, self.pool, self.kernels, self.batch, self.find_fault = weights, pool, kernels, batch, find_fault
        self.record = record
        self.arch, self.precision = weights.arch, weights.precision
        self._step = AttentionStep(
            batch.positions, batch.slots, batch.page_table, batch.query_start, batch.context_length,
            weights.cos, weights.sin, float(self.arch.head_dim) ** -0.5,
        )  # fmt: skip
        self._moe_index = {layer: i for i, layer in enumerate(pool.moe_layers)}

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        return self.weights.embedding.index_select(0, ids).float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""
        flat = self.kernels.rms_norm(
            x.reshape(-1, x.shape[-1]), self.weights.vectors[f"{name}.weight"], self.arch.norm_eps
        )
        return flat.view(x.shape)

    def linear(
        self,
        x: Tensor,
        names: tuple[str, ...],
        *,
        norm: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Projections that share an input, each row in its phase's precision."""
        kinds = self.precision.kinds(site_of(f"{names[0]}.weight"))
        packed, place = [self.weights.linears[names, kind] for kind in kinds], self._recorded_place(names[0])
        if len(packed) == 1:
            weight = None if norm is None else self.weights.vectors[f"{norm}.weight"]
            return self._project(x, packed[0], place, None, norm=weight, gated=gated, residual=residual)
        rows = x if norm is None else self.norm(x, norm)
        out = self._phased(rows, packed, lambda part, w, which: self._project(part, w, place, which))
        out = self.kernels.swiglu(out) if gated else out
        return out if residual is None else residual + out

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Write K and V to their pages, then attend to what the pages hold (so that prefill equals decode)."""
        name = f"model.layers.{layer}.self_attn"
        vectors = self.weights.vectors
        norms = (
            (vectors[f"{name}.q_norm.weight"], vectors[f"{name}.k_norm.weight"]) if self.arch.qk_norm else (None, None)
        )
        return self.kernels.attend(
            qkv, self.pool.layers[layer], self._step, q_norm=norms[0], k_norm=norms[1], eps=self.arch.norm_eps
        )

    def experts(self, layer: int, x: Tensor) -> Tensor:
        """Routed experts; the routes are written to the tokens' slots."""
        logits = self.linear(x, (f"model.layers.{layer}.mlp.gate",))
        ids, gates = self.kernels.route(logits, self.arch.experts_per_token, normalise=self.arch.norm_topk_prob)
        self.pool.routes[self.batch.slots.numpy(), self._moe_index[layer]] = ids.numpy()
        packed = [self.weights.experts[layer, kind] for kind in self.precision.kinds("experts")]
        if len(packed) == 1:
            return self._routed(layer, x, ids, gates, packed[0], None)
        assert self.batch.generated is not None
        out = torch.empty_like(x)
        for rows, weight in zip(self._phase_rows(), packed):
            out[rows] = self._routed(layer, x[rows], ids[rows], gates[rows], weight, rows)
        return out

    def head(self, x: Tensor) -> Tensor:
        """[R, hidden] -> logits [R, vocab], in the decode precision: logits are only drawn from."""
        kind = self.precision.decode.head
        self._require_finite(x, "model.norm", self.batch.rows)
        out = self.kernels.linear(x, self.weights.linears[("lm_head",), kind])
        self._require_finite(out, "lm_head", self.batch.rows)
        return out

    def layer(self, index: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a layer; with ``find_fault``, stop at the first that is not finite."""
        out = function(x)
        self._require_finite(out, f"model.layers.{index}", None)
        return out

    def _require_finite(self, out: Tensor, name: str, rows: Tensor | None) -> None:
        if not self.find_fault:
            return
        bad = (~torch.isfinite(out)).any(dim=1).nonzero()
        if len(bad):
            row = int(bad[0]) if rows is None else int(rows[int(bad[0])])
            raise NumericsError(
                "an activation is not finite",
                where=f"{name}, token {int(self.batch.ids[row])} at position {int(self.batch.positions[row])}",
                expected="finite activations",
                fix="check the weights of this layer (halfbyte doctor MODEL), or run this site in bf16",
            )

    def _routed(
        self, layer: int, x: Tensor, ids: Tensor, gates: Tensor, weight: PackedExperts, which: Tensor | None
    ) -> Tensor:
        """The experts of the rows ``which`` (None: all), noting the codes of what they read and of their intermediate."""
        record = self.record
        if record is None or weight.kind != "w4a4" or len(x) == 0:
            return self.kernels.experts(x, ids, gates, weight)
        wanted = [site for site in ("expert_in", "expert_mid") if record.bits(layer, site) is not None]
        if not wanted:
            return self.kernels.experts(x, ids, gates, weight)
        done = self.kernels.experts_recorded(x, ids, gates, weight)
        for site in wanted:
            self._note(done.inputs if site == "expert_in" else done.middle, layer, site, which)
        return done.output

    def _recorded_place(self, name: str) -> tuple[int, str, PayloadBits] | None:
        """Layer, site and bits where the input of this projection is recorded."""
        site = None if self.record is None else site_of_linear(name)
        if self.record is None or site is None:
            return None
        layer = int(name.split(".")[2])
        bits = self.record.bits(layer, site)
        return None if bits is None else (layer, site, bits)

    def _project(
        self,
        x: Tensor,
        w: PackedLinear,
        place: tuple[int, str, PayloadBits] | None,
        which: Tensor | None,
        *,
        norm: Tensor | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """One product of the rows ``which`` (None: all), noting the codes of its input where ``place`` says so (W4A4)."""
        eps = self.arch.norm_eps
        if place is None or self.record is None or w.kind != "w4a4":
            return self.kernels.linear(x, w, norm=norm, eps=eps, gated=gated, residual=residual)
        layer, site, bits = place
        out, payload = self.kernels.linear_recorded(x, w, bits, norm=norm, eps=eps, gated=gated, residual=residual)
        self.record.write(layer, site, payload, which)
        return out

    def _note(self, q: QuantTensor, layer: int, site: str, which: Tensor | None) -> None:
        assert self.record is not None
        bits = self.record.bits(layer, site)
        assert bits is not None
        self.record.write(layer, site, self.kernels.payload(q, bits), which)

    def _phased(
        self,
        x: Tensor,
        weights: list[PackedLinear],
        call: Callable[[Tensor, PackedLinear, Tensor | None], Tensor],
    ) -> Tensor:
        if len(weights) == 1:
            return call(x, weights[0], None)
        assert self.batch.generated is not None
        out = torch.empty(len(x), weights[0].n)
        for rows, weight in zip(self._phase_rows(), weights):
            out[rows] = call(x[rows], weight, rows)
        return out

    def _phase_rows(self) -> tuple[Tensor, Tensor]:
        assert self.batch.generated is not None
        return (~self.batch.generated).nonzero().view(-1), self.batch.generated.nonzero().view(-1)
