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
    h = x + _attention(run, index, run.norm(x, f"{prefix}.input_layernorm"))
    z = run.norm(h, f"{prefix}.post_attention_layernorm")
    if arch.is_moe_layer(index):
        return h + run.experts(index, z)
    mlp = f"{prefix}.mlp"
    inner = run.swiglu(run.linear(z, (f"{mlp}.gate_proj", f"{mlp}.up_proj")))
    return h + run.linear(inner, (f"{mlp}.down_proj",))


def _attention(run: Execution, index: int, x: Tensor) -> Tensor:
    name = f"model.layers.{index}.self_attn"
    qkv = run.linear(x, (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"))
    return run.linear(run.attend(index, qkv), (f"{name}.o_proj",))
