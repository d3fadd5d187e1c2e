"""The protocol between the one forward pass and the two ways of executing it.

``models/decoder.py`` says *what* is computed; an :class:`Execution` says *how*: packed FP4 kernels over a paged KV cache
(``rollout/packed.py``) or autograd over master weights with straight-through quantisers (``learner/autograd.py``). Every
numeric difference between sampler and learner lives in one of those two files.

Tokens are flat: ``T`` rows, one a token, sequences one behind the other. What the rows mean (positions, sequence borders,
pages, replayed routes) is bound into the execution object, so the forward pass never sees it. Tensors are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

__all__ = ["Execution"]


class Execution(Protocol):
    """How to execute the operations of the decoder. ``names`` are checkpoint names without the ``.weight`` suffix."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] int64 -> embeddings [T, hidden]."""
        ...

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension of ``x`` [..., D]."""
        ...

    def linear(
        self,
        x: Tensor,
        names: tuple[str, ...],
        *,
        norm: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Projections that share the input ``x`` [T, K], concatenated: [T, sum N]. Biases are added where they exist.

        ``norm``: RMSNorm of ``x`` by this name comes first. ``gated``: the two projections are gate and up, the result is
        silu(gate) * up, [T, N]. ``residual`` is added last.
        """
        ...

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """All between two projections: the heads of ``qkv`` [T, (H + 2 Hkv) * D], RMSNorm of query and key heads where the
        family has it, rotary embedding at the bound positions (half-split convention), causal grouped-query attention:
        [T, H * D]."""
        ...

    def experts(self, layer: int, x: Tensor) -> Tensor:
        """Routed SwiGLU experts of ``layer``: x [T, hidden] -> [T, hidden]. Routes are recorded or replayed."""
        ...

    def head(self, x: Tensor) -> Tensor:
        """Final hidden states [R, hidden] -> logits [R, vocab]."""
        ...

    def layer(self, index: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run one decoder layer; the place for activation checkpointing and for finding the first non-finite layer."""
        ...
