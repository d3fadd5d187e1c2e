"""The learner's execution: framework matmul on dequantised operands, straight-through rounding at exactly the rollout's sites,
towards the rollout's codes where the batch brings guidance (TRACE).

``emulated`` is what a learner on hardware without FP4 does: every operand is rounded as the rollout rounds it (weights,
activations, KV), products are the framework's. Against the rollout's kernels only summation order differs, and that is
enough to flip codes (TransformerEngine #3300).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from halfbyte.formats import QuantSpec
from halfbyte.guidance.batch import BatchGuidance, Guide
from halfbyte.guidance.measure import Observer
from halfbyte.guidance.rounding import TRACE, RoundingMethod, guided_round
from halfbyte.guidance.sites import site_of_linear
from halfbyte.kernels import Kernels
from halfbyte.learner.batch import LearnerBatch
from halfbyte.learner.buckets import length_buckets
from halfbyte.learner.parameters import Parameters
from halfbyte.learner.straight_through import fake_quantise, round_bf16
from halfbyte.models.architecture import site_of
from halfbyte.models.precision import Kind
from halfbyte.models.routing import gates_for

__all__ = ["AutogradExecution"]


class AutogradExecution:
    """See :class:`halfbyte.models.execution.Execution`.

    Arguments:
        batch: the flat tokens of this pass.
        tables: rotary cos and sin, [P, head_dim / 2] float32 with P > the largest position.
        activation_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
        guidance: what to round towards; None for the learner's own rounding everywhere.
        method: how guidance is used; None: it is only shown to the observer.
        observer: is shown every guided activation before it is rounded.
        bf16_products: multiply in BF16 (FP32 sums, BF16 results), as hardware does; the router and the logits stay FP32.

    Attributes:
        routes: layer -> expert ids [T, k] used in this pass (replayed or live).
        router_logits: layer -> [T, E], for load-balance losses and metrics.
    """

    def __init__(
        self,
        parameters: Parameters,
        batch: LearnerBatch,
        kernels: Kernels,
        tables: tuple[Tensor, Tensor],
        *,
        activation_checkpointing: bool = False,
        guidance: BatchGuidance | None = None,
        method: RoundingMethod | None = TRACE,
        observer: Observer | None = None,
        bf16_products: bool = False,
    ) -> None:
        self.parameters, self.batch, self.kernels = parameters, batch, kernels
        self.guidance, self.method, self.observer, self.bf16_products = guidance, method, observer, bf16_products
        self.arch, self.precision = parameters.arch, parameters.precision
        self.activation_checkpointing = activation_checkpointing
        device = batch.positions.device
        cos, sin = (table.to(device) for table in tables)
        self._cos = torch.cat([cos, cos], dim=1)[batch.positions][:, None]
        self._sin = torch.cat([sin, sin], dim=1)[batch.positions][:, None]
        self._buckets = length_buckets(batch.starts, device)
        rows = torch.cat([bucket.real_rows for bucket in self._buckets])
        self._back = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=device))
        self._moe_index = {layer: i for i, layer in enumerate(self.arch.moe_layers)}
        self.routes: dict[int, Tensor] = {}
        self.router_logits: dict[int, Tensor] = {}

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        return F.embedding(ids, self.parameters.effective("model.embed_tokens.weight"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.arch.norm_eps)
        return x * scale * self.parameters.effective(f"{name}.weight")

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
        kinds = self.precision.kinds(site_of(f"{names[0]}.weight"))
        guide = None
        if self.guidance is not None and (site := site_of_linear(names[0])) is not None:
            guide = self.guidance.at(int(names[0].split(".")[2]), site)
        rows = x if norm is None else self.norm(x, norm)
        out = self._phased(rows, kinds, lambda part, kind, which: self._project(part, names, kind, _of(guide, which)))
        out = self._swiglu(out) if gated else out
        return out if residual is None else residual + out

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Heads, their norms, rotation, attention."""
        prefix, arch = f"model.layers.{layer}.self_attn", self.arch
        heads, kv, dim = arch.n_heads, arch.n_kv_heads, arch.head_dim
        parts = qkv.split((heads * dim, kv * dim, kv * dim), dim=1)
        q, k, v = (part.reshape(len(qkv), -1, dim) for part in parts)
        if arch.qk_norm:
            q, k = self.norm(q, f"{prefix}.q_norm"), self.norm(k, f"{prefix}.k_norm")
        return self._attention(layer, self._rotate(q), self._rotate(k), v)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding, half-split convention."""
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat([-second, first], dim=-1) * self._sin

    def _attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention inside each sequence; K and V rounded as the rollout's pages hold them."""
        prefix = f"model.layers.{layer}.self_attn"
        guides = (None, None) if self.guidance is None else (self.guidance.at(layer, "k"), self.guidance.at(layer, "v"))
        k, v = self._cached(k, f"{prefix}.k", guides[0]), self._cached(v, f"{prefix}.v", guides[1])
        if self.bf16_products:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        grouped = self.arch.n_heads != self.arch.n_kv_heads
        parts = []
        for bucket in self._buckets:
            # padding comes last, so that a causal mask alone keeps it from every real query
            out = F.scaled_dot_product_attention(
                bucket.grid(q), bucket.grid(k), bucket.grid(v), is_causal=True, enable_gqa=grouped
            )
            parts.append(out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[2]).index_select(0, bucket.real_cells))
        return torch.cat(parts).index_select(0, self._back).float()

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def experts(self, layer: int, x: Tensor) -> Tensor:
        """Routed experts; replayed routes where the batch has them, with gates from live router logits."""
        logits = self.linear(x, (f"model.layers.{layer}.mlp.gate",))
        ids, _ = self.kernels.route(logits.detach(), self.arch.experts_per_token, normalise=self.arch.norm_topk_prob)
        chosen = ids.long()
        if self.batch.routes is not None:
            replayed = self.batch.routes[:, self._moe_index[layer]]
            chosen = torch.where(replayed >= 0, replayed, chosen)
        self.routes[layer], self.router_logits[layer] = chosen, logits
        gates = self._gates(logits, chosen)
        kinds = self.precision.kinds("experts")
        inputs = middle = None
        if self.guidance is not None:
            inputs = self.guidance.at(layer, "expert_in")
            middle = self.guidance.at(layer, "expert_mid", None if self.batch.routes is not None else chosen)
        if len(kinds) == 1:
            return self._routed(layer, x, chosen, gates, kinds[0], inputs, middle)
        out = torch.zeros_like(x)
        for kind, rows in zip(kinds, self._phase_rows()):
            if len(rows) == 0:
                continue
            part = self._routed(layer, x[rows], chosen[rows], gates[rows], kind, _of(inputs, rows), _of(middle, rows))
            out = out.index_copy(0, rows, part)
        return out

    def head(self, x: Tensor) -> Tensor:
        """[R, hidden] -> logits [R, vocab]."""
        kind = self.precision.decode.head
        tied = self.arch.tie_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        plain = tied and kind in ("fp32", "bf16")  # then the head multiplies by the embedding as published
        weight = self.parameters.effective(name, None if plain else kind)
        return F.linear(self._activation(x, kind, "lm_head", x.shape[-1]), weight)  # logits stay FP32

    def layer(self, index: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a layer, recomputing it in the backward pass if asked to."""
        if self.activation_checkpointing and torch.is_grad_enabled():

            def recomputed(x: Tensor) -> Tensor:
                out: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
                return out

            return self.parameters.layer(index, recomputed, x)
        return self.parameters.layer(index, function, x)

    def _gates(self, logits: Tensor, chosen: Tensor) -> Tensor:
        return gates_for(logits, chosen, normalise=self.arch.norm_topk_prob)

    def _project(self, x: Tensor, names: tuple[str, ...], kind: Kind, guide: Guide | None) -> Tensor:
        rounded = self._activation(x, kind, names[0], x.shape[-1], guide)
        parts = []
        for name in names:
            weight = self.parameters.effective(f"{name}.weight", kind)
            bias = self.parameters.effective(f"{name}.bias") if f"{name}.bias" in self.parameters.masters else None
            parts.append(self._product(rounded, weight, kind, bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _product(self, x: Tensor, weight: Tensor, kind: Kind, bias: Tensor | None = None) -> Tensor:
        if not self.bf16_products or kind == "fp32":
            return F.linear(x, weight, bias)
        out = F.linear(x.bfloat16(), weight.bfloat16()).float()
        return out if bias is None else out + bias

    def _routed(
        self, layer: int, x: Tensor, ids: Tensor, gates: Tensor, kind: Kind, inputs: Guide | None, middle: Guide | None
    ) -> Tensor:
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up = self.parameters.effective(f"{prefix}.gate_up_proj", kind)
        down = self.parameters.effective(f"{prefix}.down_proj", kind)
        rounded = self._activation(x, kind, f"{prefix}.in", down.shape[-1], inputs)
        slots, k = ids.reshape(-1), ids.shape[1]
        order = torch.sort(slots, stable=True).indices
        counts = torch.bincount(slots, minlength=self.arch.n_experts).tolist()
        pairs = rounded.index_select(0, order // k).split(counts)
        both = [self._product(rows, gate_up[e], kind) for e, rows in enumerate(pairs) if len(rows)]
        guide = None if middle is None else middle.flat().select(order)
        inner = self._activation(self._swiglu(torch.cat(both)), kind, f"{prefix}.mid", gate_up.shape[-1], guide)
        outputs = [self._product(rows, down[e], kind) for e, rows in enumerate(inner.split(counts)) if len(rows)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        by_slot = torch.cat(outputs).index_select(0, back).view(len(x), k, -1)
        return (by_slot * gates[:, :, None]).sum(dim=1)

    def _activation(self, x: Tensor, kind: Kind, name: str, other_inputs: int, guide: Guide | None = None) -> Tensor:
        """``x`` as the kernel of ``kind`` sees it. Where the block does not divide the inputs the rollout falls back to BF16."""
        block = self.precision.weight_spec.block
        if kind == "fp32":
            return x
        if kind == "w4a4" and x.shape[-1] % block == 0 and other_inputs % block == 0:
            return self._rounded(x, self.precision.activation_spec, name, guide)
        return round_bf16(x)

    def _rounded(self, x: Tensor, spec: QuantSpec, name: str, guide: Guide | None) -> Tensor:
        if guide is None:
            return fake_quantise(self.kernels, x, spec, name)
        if self.observer is not None:
            self.observer.see(x, guide)
        if self.method is None:
            return fake_quantise(self.kernels, x, spec, name)
        return guided_round(x, guide.payload, spec, self.method, kernels=self.kernels, guided=guide.guided, name=name)

    def _cached(self, x: Tensor, name: str, guide: Guide | None) -> Tensor:
        if self.precision.kv == "fp4":
            return self._rounded(x, self.precision.kv_spec, name, guide)
        return round_bf16(x) if self.precision.kv == "bf16" else x

    def _phased(
        self, x: Tensor, kinds: tuple[Kind, ...], call: Callable[[Tensor, Kind, Tensor | None], Tensor]
    ) -> Tensor:
        if len(kinds) == 1:
            return call(x, kinds[0], None)
        parts = [call(x[rows], kind, rows) for kind, rows in zip(kinds, self._phase_rows())]
        out = x.new_zeros(len(x), parts[0].shape[1])
        for rows, part in zip(self._phase_rows(), parts):
            out = out.index_copy(0, rows, part)
        return out

    def _phase_rows(self) -> tuple[Tensor, Tensor]:
        return (~self.batch.generated).nonzero().view(-1), self.batch.generated.nonzero().view(-1)


def _of(guide: Guide | None, rows: Tensor | None) -> Guide | None:
    return guide if guide is None or rows is None else guide.select(rows)
