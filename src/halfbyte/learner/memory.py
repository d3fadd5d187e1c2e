"""How many tokens a micro-batch may hold for its activations to fit a memory budget."""

from __future__ import annotations

from halfbyte.models.architecture import Architecture

__all__ = ["activation_bytes_per_token", "tokens_that_fit"]

MIN_TOKENS = 64


def activation_bytes_per_token(arch: Architecture, *, checkpointing: bool) -> int:
    """Bytes the backward pass keeps for a token, an upper estimate.

    Float32 tensors that autograd keeps, counted in ``learner/autograd.py``: 16 of the hidden or projection width and 6 of
    the inner width a layer, and 4 of the vocabulary for a response token. With checkpointing one hidden state a layer, and one
    layer at a time in full.
    """
    queries = arch.n_heads * arch.head_dim
    inner = max(
        arch.experts_per_token * arch.moe_intermediate_size if arch.is_moe_layer(i) else arch.intermediate_size
        for i in range(arch.n_layers)
    )
    layer = 16 * max(arch.hidden_size, queries) + 6 * inner
    layers = arch.n_layers * arch.hidden_size + layer if checkpointing else arch.n_layers * layer
    return 4 * (layers + 4 * arch.vocab_size)


def tokens_that_fit(arch: Architecture, megabytes: float, *, checkpointing: bool) -> int:
    """Tokens whose activations fit ``megabytes`` MiB, at least 64."""
    return max(MIN_TOKENS, int(megabytes * 2**20) // activation_bytes_per_token(arch, checkpointing=checkpointing))
