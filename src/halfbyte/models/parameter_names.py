"""Names, shapes and sites of a model's tensors, in checkpoint coordinates: Hugging Face names, experts one by one."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Literal, get_args

from halfbyte.errors import CheckpointError

if TYPE_CHECKING:
    from halfbyte.models.architecture import Architecture

__all__ = [
    "Site",
    "expert_names",
    "parameter_count",
    "parameter_shapes",
    "parameters_by_site",
    "router_name",
    "site_of",
]

Site = Literal["embed", "attention", "mlp", "experts", "router", "head", "norm"]


def expert_names(architecture: Architecture, layer: int, expert: int) -> tuple[str, str, str]:
    """Checkpoint names of one expert's gate, up and down weight."""
    if architecture.family == "mixtral":
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        return f"{prefix}.w1.weight", f"{prefix}.w3.weight", f"{prefix}.w2.weight"
    prefix = f"model.layers.{layer}.mlp.experts.{expert}"
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight"


def router_name(architecture: Architecture, layer: int) -> str:
    """Checkpoint name of a layer's router weight [n_experts, hidden_size]."""
    block = "block_sparse_moe" if architecture.family == "mixtral" else "mlp"
    return f"model.layers.{layer}.{block}.gate.weight"


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape of every tensor, experts one by one, in the order of the forward pass.

    A tied head has no entry: its matrix is ``model.embed_tokens.weight``.
    """
    a = architecture
    hidden, queries, keys = a.hidden_size, a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, hidden)}
    for layer in range(a.n_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in (
            ("q_proj", queries, hidden, a.qkv_bias),
            ("k_proj", keys, hidden, a.qkv_bias),
            ("v_proj", keys, hidden, a.qkv_bias),
            ("o_proj", hidden, queries, a.o_bias),
        ):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.self_attn.{name}.bias"] = (rows,)
        if a.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (a.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (a.head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if a.is_moe_layer(layer):
            shapes[router_name(a, layer)] = (a.n_experts, hidden)
            for expert in range(a.n_experts):
                gate, up, down = expert_names(a, layer, expert)
                shapes[gate] = shapes[up] = (a.moe_intermediate_size, hidden)
                shapes[down] = (hidden, a.moe_intermediate_size)
        else:
            shapes[f"{prefix}.mlp.gate_proj.weight"] = (a.intermediate_size, hidden)
            shapes[f"{prefix}.mlp.up_proj.weight"] = (a.intermediate_size, hidden)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, a.intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not a.tie_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, hidden)
    return shapes


def parameter_count(architecture: Architecture) -> int:
    """Number of weights; a tied matrix counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(architecture).values())


def parameters_by_site(architecture: Architecture) -> dict[Site, int]:
    """Number of weights at each site, for costing a precision. A tied head counts under ``embed`` only."""
    counts: dict[Site, int] = dict.fromkeys(get_args(Site), 0)
    for name, shape in parameter_shapes(architecture).items():
        counts[site_of(name)] += math.prod(shape)
    return counts


_SITES: tuple[tuple[str, Site], ...] = (
    (r"model\.embed_tokens\.weight", "embed"),
    (r"lm_head\.weight", "head"),
    (r"model\.norm\.weight|.*_layernorm\.weight|.*\.self_attn\.[qk]_norm\.weight", "norm"),
    (r".*\.self_attn\.[qkvo]_proj\.(weight|bias)", "attention"),
    (r".*\.(mlp|block_sparse_moe)\.gate\.weight", "router"),
    (r".*\.(mlp|block_sparse_moe)\.experts\..*", "experts"),
    (r".*\.mlp\.(gate|up|down)_proj\.weight", "mlp"),
)


@functools.cache
def site_of(name: str) -> Site:
    """The site a tensor belongs to, by its checkpoint name or its stacked name (:mod:`halfbyte.models.layout`).

    Raises:
        CheckpointError: a name that belongs to no family we run.
    """
    for pattern, site in _SITES:
        if re.fullmatch(pattern, name):
            return site
    raise CheckpointError(f"tensor {name!r} belongs to no known site", expected="a name of a supported family")
