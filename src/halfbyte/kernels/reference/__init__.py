"""The reference implementation: every kernel in torch, by its definition. Slow, and the oracle of the native one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor, payload_of
from halfbyte.kernels import kv as _kv
from halfbyte.kernels.attention_step import AttentionStep
from halfbyte.kernels.kv import KvKind, KvLayer
from halfbyte.kernels.reference import attend as _attend
from halfbyte.kernels.reference import attention as _attention
from halfbyte.kernels.reference import experts as _experts
from halfbyte.kernels.reference import guidance_rows as _guidance_rows
from halfbyte.kernels.reference import guide as _guide
from halfbyte.kernels.reference import kv_store as _kv_store
from halfbyte.kernels.reference import linear as _linear
from halfbyte.kernels.reference import norm as _norm
from halfbyte.kernels.reference import quantise as _quantise
from halfbyte.kernels.reference import rope as _rope
from halfbyte.kernels.reference import routing as _routing
from halfbyte.kernels.reference import sampling as _sampling
from halfbyte.kernels.reference import swiglu as _swiglu
from halfbyte.kernels.reference.guidance_rows import RowPart
from halfbyte.kernels.reference.sampling import Sampled
from halfbyte.kernels.weights import ExpertsRecord, LinearKind, PackedExperts, PackedLinear

__all__ = ["ReferenceKernels"]


class ReferenceKernels:
    """``Kernels`` in torch; the docstrings are the protocol's."""

    @property
    def name(self) -> str:
        return "reference"

    def quantise(
        self, x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> QuantTensor:
        return _quantise.quantise(x, spec, global_scale=global_scale, name=name)

    def dequantise(self, q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return _quantise.dequantise(q, dtype)

    def fake_quantise(self, x: Tensor, spec: QuantSpec, *, name: str = "tensor") -> Tensor:
        return _quantise.fake_quantise(x, spec, name=name)

    def quantise_with_payload(
        self, x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> tuple[QuantTensor, Payload]:
        return _guide.quantise_with_payload(x, spec, bits, global_scale=global_scale, name=name)

    def payload(self, q: QuantTensor, bits: PayloadBits) -> Payload:
        return payload_of(q, bits)

    def guided_round(
        self, x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
    ) -> Tensor:
        return _guide.guided_round(x, payload, shift=shift, guided=guided, name=name)

    def store_parts(self, rows: Tensor, slots: Tensor, parts: Sequence[RowPart]) -> None:
        _guidance_rows.store_parts(rows, slots, parts)

    def read_kv(
        self, layer: KvLayer, part: Literal["k", "v"], slots: Tensor, bits: PayloadBits, rows: Tensor, start: int
    ) -> None:
        _guidance_rows.read_kv(layer, part, slots, bits, rows, start)

    def pack_linear(
        self,
        weight: Tensor | QuantTensor,
        kind: LinearKind,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | None = None,
        bias: Tensor | None = None,
        name: str = "linear",
    ) -> PackedLinear:
        return _linear.pack_linear(
            weight, kind, weight_spec=weight_spec, activation_spec=activation_spec, bias=bias, name=name
        )

    def linear(
        self,
        x: Tensor,
        w: PackedLinear,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        return _linear.linear(x, w, norm, eps, gated, residual)

    def linear_recorded(
        self,
        x: Tensor,
        w: PackedLinear,
        bits: PayloadBits,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Payload]:
        return _linear.linear_recorded(x, w, bits, norm, eps, gated, residual)

    def pack_experts(
        self,
        gate_up: Tensor | QuantTensor,
        down: Tensor | QuantTensor,
        kind: LinearKind,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | None = None,
        name: str = "experts",
    ) -> PackedExperts:
        return _experts.pack_experts(
            gate_up, down, kind, weight_spec=weight_spec, activation_spec=activation_spec, name=name
        )

    def experts(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> Tensor:
        return _experts.experts(x, expert_ids, gates, w, swiglu=self.swiglu)

    def experts_recorded(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> ExpertsRecord:
        return _experts.experts_recorded(x, expert_ids, gates, w, swiglu=self.swiglu)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm.rms_norm(x, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rope.rope(x, positions, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _swiglu.swiglu(gate_up)

    def route(self, logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        return _routing.route(logits, k, normalise=normalise)

    def new_kv_layer(
        self, n_pages: int, page_size: int, n_kv: int, head_dim: int, kind: KvKind, spec: QuantSpec | None = None
    ) -> KvLayer:
        return _kv.new_kv_layer(n_pages, page_size, n_kv, head_dim, kind, spec)

    def store_kv(self, layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        _kv_store.store_kv(layer, k, v, slots)

    def copy_pages(self, layer: KvLayer, src: Sequence[int], dst: Sequence[int]) -> None:
        _kv.copy_pages(layer, src, dst)

    def attention(
        self, q: Tensor, layer: KvLayer, page_table: Tensor, query_start: Tensor, context_len: Tensor, scale: float
    ) -> Tensor:
        return _attention.attention(q, layer, page_table, query_start, context_len, scale)

    def attend(
        self,
        qkv: Tensor,
        layer: KvLayer,
        step: AttentionStep,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        return _attend.attend(self, qkv, layer, step, q_norm, k_norm, eps)

    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        return _sampling.log_softmax(logits, temperature)

    def token_logprobs(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, supports: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        return _sampling.token_logprobs(logits, ids, temperature, supports)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
        *,
        want_support: bool = False,
    ) -> Sampled:
        return _sampling.sample(logits, temperature, top_k, top_p, min_p, uniform, want_support=want_support)
