"""The seam between the house and its kernels: one typed protocol, two implementations (reference and native)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor
from halfbyte.kernels.attention_step import AttentionStep
from halfbyte.kernels.kv import KvKind, KvLayer
from halfbyte.kernels.reference.guidance_rows import RowPart
from halfbyte.kernels.reference.sampling import Sampled
from halfbyte.kernels.weights import ExpertsRecord, LinearKind, PackedExperts, PackedLinear

__all__ = ["Kernels"]


@runtime_checkable
class Kernels(Protocol):
    """Every operation of a decode step, bit-reproducible and batch-invariant.

    All tensors are on the CPU; activations are float32. Each operation is defined by basic IEEE operations in a fixed order
    (see the reference modules), so the implementations agree bit for bit on any instruction set, for any batch and any number
    of threads. Wrong shapes raise :class:`halfbyte.errors.ShapeError` with the shapes in the message.
    """

    @property
    def name(self) -> str:
        """``reference``, or the instruction set of the native kernels (``generic``, ``avx2``, ``avx512``)."""
        ...

    # Quantisation

    def quantise(
        self, x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> QuantTensor:
        """Quantises ``x [..., K]`` (float32 or bfloat16) along its last dimension; see ``halfbyte.formats.quantise``."""
        ...

    def dequantise(self, q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of ``q`` including the global scale, ``[..., K]`` in ``dtype`` (float32 or bfloat16)."""
        ...

    def fake_quantise(self, x: Tensor, spec: QuantSpec, *, name: str = "tensor") -> Tensor:
        """``dequantise(quantise(x))`` in ``x``'s dtype and shape; leading dimensions are rows (tokens)."""
        ...

    def quantise_with_payload(
        self, x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> tuple[QuantTensor, Payload]:
        """:meth:`quantise`, and in the same pass what the codes tell a learner in ``bits`` a value."""
        ...

    def payload(self, q: QuantTensor, bits: PayloadBits) -> Payload:
        """What the codes of ``q`` tell a learner; 4 bits share its memory."""
        ...

    def guided_round(
        self, x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
    ) -> Tensor:
        """``x [..., K]`` (float32 or bfloat16) at the payload's scales, towards its codes; see ``reference/guide.py``."""
        ...

    def store_parts(self, rows: Tensor, slots: Tensor, parts: Sequence[RowPart]) -> None:
        """Writes ``parts``, each (source [T, ...], first byte), into ``rows [S, bytes]`` uint8 at ``slots [T]`` int64; a uint8
        source is copied, of a float32 source (powers of two) the exponents are stored."""
        ...

    def read_kv(
        self, layer: KvLayer, part: Literal["k", "v"], slots: Tensor, bits: PayloadBits, rows: Tensor, start: int
    ) -> None:
        """Codes (as ``bits`` say), then block scales of the keys or values at ``slots [T]`` of an fp4 layer, into
        ``rows [T, bytes]`` uint8 from byte ``start`` on."""
        ...

    # Products

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
        """Packs ``weight [N, K]`` once for :meth:`linear`. A ``QuantTensor`` may carry one global scale per row (shape ``[N]``),
        so that weights sharing an input can be concatenated and packed as one."""
        ...

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
        """``x [M, K] float32 -> [M, N] float32`` by the sum order of ``w.kind`` (see ``reference/linear.py``). Around it, if
        asked: RMSNorm of the rows before (``norm [K]``); SwiGLU of the result (``gated``: ``[M, N / 2]``), ``residual`` added."""
        ...

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
        """:meth:`linear` (``w4a4``) with what the codes of its input tell a learner in ``bits`` a value; the output has the
        same bits."""
        ...

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
        """Packs ``gate_up [E, 2I, H]`` (gate rows first) and ``down [E, H, I]`` once for :meth:`experts`."""
        ...

    def experts(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> Tensor:
        """Routed SwiGLU experts: ``x [M, H] f32, expert_ids [M, k] int32, gates [M, k] f32 -> [M, H] f32``."""
        ...

    def experts_recorded(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> ExpertsRecord:
        """:meth:`experts` (``w4a4``) with the codes of its two quantised activations; the output has the same bits."""
        ...

    # Elementwise

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of ``x [M, D]`` with ``weight [D]``, all float32."""
        ...

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates ``x [M, heads, D]`` at ``positions [M] int64`` with tables ``[P, D/2]`` (half-split convention)."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``gate_up [M, 2I]``, gate first: ``[M, I]`` float32."""
        ...

    def route(self, logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """Ids ``[T, k] int32`` of the largest of ``logits [T, E] float32`` (ties to the lower) and their gates ``[T, k]``:
        softmax over the chosen ones (``normalise``) or over all."""
        ...

    # KV cache and attention

    def new_kv_layer(
        self, n_pages: int, page_size: int, n_kv: int, head_dim: int, kind: KvKind, spec: QuantSpec | None = None
    ) -> KvLayer:
        """An empty page array of one layer; ``page_size`` is a multiple of 16."""
        ...

    def store_kv(self, layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Writes ``k, v [T, Hkv, D] f32`` at ``slots [T] int64`` (page * page_size + offset), rounding as ``layer.kind`` says."""
        ...

    def copy_pages(self, layer: KvLayer, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies pages ``src[i]`` over pages ``dst[i]`` (copy-on-write of shared prompt pages)."""
        ...

    def attention(
        self, q: Tensor, layer: KvLayer, page_table: Tensor, query_start: Tensor, context_len: Tensor, scale: float
    ) -> Tensor:
        """Causal paged attention, ``q [T, H, D] -> [T, H, D]`` float32."""
        ...

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
        """All between two projections, in one call: ``qkv [T, (H + 2 Hkv) D] -> [T, H D]``. Head norms ``[D]`` (where given),
        rotation, :meth:`store_kv`, :meth:`attention`; bit-equal to those steps one by one."""
        ...

    # Sampling

    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Log-probabilities of ``logits [S, V] / temperature [S]``, float32."""
        ...

    def token_logprobs(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, supports: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """Log-probabilities ``[S] f32`` of given ``ids [S] int64``, bit-equal to those :meth:`sample` returns for them."""
        ...

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
        """Token ids ``[S] int64`` and their log-probabilities ``[S] f32`` under the distribution sampled from."""
        ...
