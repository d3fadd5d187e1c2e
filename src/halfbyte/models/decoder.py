"""The one forward pass: a pre-norm decoder with rotary, grouped-query attention and SwiGLU or routed experts.

Llama, Qwen2 (biased q/k/v), Qwen3 (normed q/k) and Qwen3-MoE differ only in what ``Architecture`` says.
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.models.architecture import Architecture
from halfbyte.models.execution import Execution

__all__ = ["hidden_states", "logits"]


def hidden_states(arch: Architecture, run: Execution, ids: Tensor) -> Tensor:
    """Final-norm hidden states of flat tokens.

    Arguments:
        ids: [T] int64 token ids.

    Returns:
        [T, hidden] float32.
    """
    x = run.embed(ids)
    for index in range(arch.n_layers):

        def block(h: Tensor, index: int = index) -> Tensor:
            return _layer(arch, run, index, h)

        x = run.layer(index, block, x)
    return run.norm(x, "model.norm")


def logits(arch: Architecture, run: Execution, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Logits of the chosen ``rows`` ([R] int64, default all): [R, vocab] float32."""
    x = hidden_states(arch, run, ids)
    return run.head(x if rows is None else x.index_select(0, rows))


def _layer(arch: Architecture, run: Execution, index: int, x: Tensor) -> Tensor:
    prefix = f"model.layers.{index}"
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = run.linear(x, (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"), norm=f"{prefix}.input_layernorm")
    h = run.linear(run.attend(index, qkv), (f"{attn}.o_proj",), residual=x)
    norm = f"{prefix}.post_attention_layernorm"
    if arch.is_moe_layer(index):
        return h + run.experts(index, run.norm(h, norm))
    inner = run.linear(h, (f"{mlp}.gate_proj", f"{mlp}.up_proj"), norm=norm, gated=True)
    return run.linear(inner, (f"{mlp}.down_proj",), residual=h)
