"""The native implementation: wrappers round the extension module ``halfbyte.kernels._native``.

Importing this package raises ImportError where the extension was not built; the registry then offers the reference alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor
from halfbyte.kernels import _native
from halfbyte.kernels import kv as _kv
from halfbyte.kernels.attention_step import AttentionStep
from halfbyte.kernels.kv import KvKind, KvLayer
from halfbyte.kernels.native import attend as _attend
from halfbyte.kernels.native import attention as _attention
from halfbyte.kernels.native import experts as _experts
from halfbyte.kernels.native import guidance_rows as _guidance_rows
from halfbyte.kernels.native import guide as _guide
from halfbyte.kernels.native import kv_store as _kv_store
from halfbyte.kernels.native import linear as _linear
from halfbyte.kernels.native import norm as _norm
from halfbyte.kernels.native import quantise as _quantise
from halfbyte.kernels.native import rope as _rope
from halfbyte.kernels.native import routing as _routing
from halfbyte.kernels.native import sampling as _sampling
from halfbyte.kernels.native import swiglu as _swiglu
from halfbyte.kernels.native.buffers import new_zeros
from halfbyte.kernels.reference.guidance_rows import RowPart
from halfbyte.kernels.reference.sampling import Sampled
from halfbyte.kernels.weights import ExpertsRecord, LinearKind, PackedExperts, PackedLinear

__all__ = ["NativeKernels", "instruction_sets", "set_thread_count", "thread_count"]

_ISAS = ("generic", "avx2", "avx512")


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets this processor can run, slowest first."""
    return _ISAS[: _native.best_isa() + 1]


def thread_count() -> int:
    """Threads of the native pool."""
    return int(_native.thread_count())


def set_thread_count(n: int) -> None:
    """Sizes the native pool; results do not depend on it."""
    _native.set_thread_count(n)


set_thread_count(int(os.environ.get("HALFBYTE_THREADS") or torch.get_num_threads()))


class NativeKernels:
    """``Kernels`` in C++ for one instruction set; the docstrings are the protocol's."""

    def __init__(self, isa: str) -> None:
        self._name = isa
        self._isa = _ISAS.index(isa)

    @property
    def name(self) -> str:
        return self._name

    def quantise(
        self, x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> QuantTensor:
        return _quantise.quantise(self._isa, x, spec, global_scale=global_scale, name=name)

    def dequantise(self, q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return _quantise.dequantise(self._isa, q, dtype)

    def fake_quantise(self, x: Tensor, spec: QuantSpec, *, name: str = "tensor") -> Tensor:
        return _quantise.fake_quantise(self._isa, x, spec, name=name)

    def quantise_with_payload(
        self, x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> tuple[QuantTensor, Payload]:
        return _quantise.quantise_with_payload(self._isa, x, spec, bits, global_scale=global_scale, name=name)

    def payload(self, q: QuantTensor, bits: PayloadBits) -> Payload:
        return _guide.payload(self._isa, q, bits)

    def guided_round(
        self, x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
    ) -> Tensor:
        return _guide.guided_round(self._isa, x, payload, shift=shift, guided=guided, name=name)

    def store_parts(self, rows: Tensor, slots: Tensor, parts: Sequence[RowPart]) -> None:
        _guidance_rows.store_parts(rows, slots, parts)

    def read_kv(
        self, layer: KvLayer, part: Literal["k", "v"], slots: Tensor, bits: PayloadBits, rows: Tensor, start: int
    ) -> None:
        _guidance_rows.read_kv(self._isa, layer, part, slots, bits, rows, start)

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
            self._isa, weight, kind, weight_spec=weight_spec, activation_spec=activation_spec, bias=bias, name=name
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
        return _linear.linear(self._isa, x, w, norm, eps, gated, residual)

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
        return _linear.linear_recorded(self._isa, x, w, bits, norm, eps, gated, residual)

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
            self._isa, gate_up, down, kind, weight_spec=weight_spec, activation_spec=activation_spec, name=name
        )

    def experts(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> Tensor:
        return _experts.experts(self._isa, x, expert_ids, gates, w)

    def experts_recorded(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> ExpertsRecord:
        return _experts.experts_recorded(self._isa, x, expert_ids, gates, w)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm.rms_norm(x, weight, eps, isa=self._isa)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rope.rope(x, positions, cos, sin, isa=self._isa)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _swiglu.swiglu(gate_up, isa=self._isa)

    def route(self, logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        return _routing.route(logits, k, normalise=normalise, isa=self._isa)

    def new_kv_layer(
        self, n_pages: int, page_size: int, n_kv: int, head_dim: int, kind: KvKind, spec: QuantSpec | None = None
    ) -> KvLayer:
        return _kv.new_kv_layer(n_pages, page_size, n_kv, head_dim, kind, spec, zeros=new_zeros)

    def store_kv(self, layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        _kv_store.store_kv(layer, k, v, slots, isa=self._isa)

    def copy_pages(self, layer: KvLayer, src: Sequence[int], dst: Sequence[int]) -> None:
        _kv.copy_pages(layer, src, dst)

    def attention(
        self, q: Tensor, layer: KvLayer, page_table: Tensor, query_start: Tensor, context_len: Tensor, scale: float
    ) -> Tensor:
        return _attention.attention(q, layer, page_table, query_start, context_len, scale, isa=self._isa)

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
        return _attend.attend(self, qkv, layer, step, q_norm, k_norm, eps, isa=self._isa)

    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        return _sampling.log_softmax(logits, temperature, isa=self._isa)

    def token_logprobs(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, supports: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        return _sampling.token_logprobs(logits, ids, temperature, supports, isa=self._isa)

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
        return _sampling.sample(
            logits, temperature, top_k, top_p, min_p, uniform, want_support=want_support, isa=self._isa
        )
