"""The reference implementation: every kernel in torch, by its definition. Slow, and the oracle of the native one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.formats import QuantSpec, QuantTensor
from halfbyte.kernels.protocol import KvKind
from halfbyte.kernels.reference import experts as _experts
from halfbyte.kernels.reference import linear as _linear
from halfbyte.kernels.reference import quantise as _quantise
from halfbyte.kernels.weights import LinearKind, PackedExperts, PackedLinear

if TYPE_CHECKING:
    from halfbyte.kernels.kv import KvLayer
    from halfbyte.kernels.reference.sampling import Sampled

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

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        return _linear.linear(x, w)

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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from halfbyte.kernels.reference.norm import rms_norm

        return rms_norm(x, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from halfbyte.kernels.reference.rope import rope

        return rope(x, positions, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        from halfbyte.kernels.reference.swiglu import swiglu

        return swiglu(gate_up)

    def new_kv_layer(
        self, n_pages: int, page_size: int, n_kv: int, head_dim: int, kind: KvKind, spec: QuantSpec | None = None
    ) -> KvLayer:
        from halfbyte.kernels.kv import new_kv_layer

        return new_kv_layer(n_pages, page_size, n_kv, head_dim, kind, spec)

    def store_kv(self, layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        from halfbyte.kernels.reference.kv_store import store_kv

        store_kv(layer, k, v, slots)

    def copy_page(self, layer: KvLayer, src: int, dst: int) -> None:
        from halfbyte.kernels.kv import copy_page

        copy_page(layer, src, dst)

    def attention(
        self, q: Tensor, layer: KvLayer, page_table: Tensor, query_start: Tensor, context_len: Tensor, scale: float
    ) -> Tensor:
        from halfbyte.kernels.reference.attention import attention

        return attention(q, layer, page_table, query_start, context_len, scale)

    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        from halfbyte.kernels.reference.sampling import log_softmax

        return log_softmax(logits, temperature)

    def token_logprobs(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, supports: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        from halfbyte.kernels.reference.sampling import token_logprobs

        return token_logprobs(logits, ids, temperature, supports)

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
        from halfbyte.kernels.reference.sampling import sample

        return sample(logits, temperature, top_k, top_p, min_p, uniform, want_support=want_support)
