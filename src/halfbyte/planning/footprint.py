"""What a model costs in memory at each precision, computed from its shapes; nothing is loaded.

The counting follows what the rollout packs (``halfbyte.rollout.weights``): projections that share an input are one
matrix, rows are padded to panels of 16, FP4 weights take 4 bits, a scale byte a block and an FP32 global scale a row, a
tied head is packed as a matrix of its own, embedding and norms stay as published. A matrix whose inputs are no
multiple of the block stays in BF16 (torchao #3233) and is listed. Tests compare with weights really packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from halfbyte.models import (
    Architecture,
    load_checkpoint,
    parameter_count,
    parameter_shapes,
    parameters_by_site,
    site_of,
)
from halfbyte.models.checkpoint import read_json
from halfbyte.models.parameter_names import Site
from halfbyte.models.precision import PRESETS, Kind, Precision

__all__ = ["footprint", "kv_bytes", "open_architecture", "weight_bytes"]

PANEL = 16
#: FP32 a weight: master, rounded copy, its gradient, two AdamW moments. Activations come on top.
LEARNER_BYTES = 20


@dataclass(frozen=True)
class _Matrix:
    """A weight [rows, columns], ``copies`` times (experts)."""

    site: Site
    rows: int
    columns: int
    copies: int = 1


def open_architecture(folder: Path) -> Architecture:
    """The architecture of a model folder, or of a config.json by itself; ties are resolved from the weights where they are there.

    Raises:
        CheckpointError: no config.json, or one that is not supported; weights that do not fit it.
    """
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return load_checkpoint(folder, finite=False).architecture
    path = folder / "config.json" if folder.is_dir() or folder.suffix != ".json" else folder
    return Architecture.from_hf(read_json(path), str(path))


def footprint(architecture: Architecture, context: int) -> dict[str, Any]:
    """Weights, KV cache and learner memory, in bytes.

    Arguments:
        context: tokens in the KV cache.
    """
    rows = []
    for precision in PRESETS.values():
        by_site, notes = weight_bytes(architecture, precision)
        per_token = kv_bytes(architecture, precision)
        if per_token is None:
            notes.append(f"head_dim {architecture.head_dim} holds no whole blocks of 16: no FP4 KV cache")
        weights = sum(by_site.values())
        rows.append(
            {
                "precision": precision.name,
                "weight_bytes": weights,
                "weight_bytes_by_site": by_site,
                "kv_bytes_per_token": per_token,
                "kv_bytes": None if per_token is None else per_token * context,
                "total_bytes": None if per_token is None else weights + per_token * context,
                "notes": notes,
            }
        )
    count = parameter_count(architecture)
    return {
        "family": architecture.family,
        "parameters": count,
        "parameters_by_site": dict(parameters_by_site(architecture)),
        "learner_bytes": LEARNER_BYTES * count,
        "context": context,
        "precisions": rows,
    }


def weight_bytes(architecture: Architecture, precision: Precision) -> tuple[dict[str, int], list[str]]:
    """Resident bytes of the packed weights by site, and notes on what stays in BF16."""
    exact = "fp32" in precision.kinds("attention")
    published = 4 if exact else 2
    by_site: dict[str, int] = dict.fromkeys(get_args(Site), 0)
    for name, shape in parameter_shapes(architecture).items():
        if name == "model.embed_tokens.weight":
            by_site["embed"] += published * math.prod(shape)
        elif len(shape) == 1:  # norms and biases are FP32 vectors
            by_site[site_of(name)] += 4 * math.prod(shape)
    kept: dict[str, int] = {}
    for matrix in _matrices(architecture):
        for kind in precision.kinds(matrix.site):
            fits = kind in ("fp32", "bf16") or matrix.columns % precision.weight_spec.block == 0
            if not fits:
                kept[matrix.site] = kept.get(matrix.site, 0) + matrix.copies
            by_site[matrix.site] += matrix.copies * _packed(matrix, kind if fits else "bf16", precision)
    block = precision.weight_spec.block
    notes = [f"{n} {site} matrices stay in BF16 (inputs no multiple of {block})" for site, n in kept.items()]
    return by_site, notes


def kv_bytes(architecture: Architecture, precision: Precision) -> int | None:
    """Bytes of KV cache a token over all layers; None where the head cannot be cut into FP4 blocks."""
    values = architecture.kv_values_per_token
    if precision.kv != "fp4":
        return values * (4 if precision.kv == "fp32" else 2)
    if architecture.head_dim % precision.kv_spec.block:
        return None
    return values // 2 + values // precision.kv_spec.block


def _packed(matrix: _Matrix, kind: Kind, precision: Precision) -> int:
    rows = -(-matrix.rows // PANEL) * PANEL
    if kind in ("fp32", "bf16"):
        return rows * matrix.columns * (4 if kind == "fp32" else 2)
    return rows * (matrix.columns // 2 + matrix.columns // precision.weight_spec.block + 4)


def _matrices(architecture: Architecture) -> list[_Matrix]:
    """Every matrix as packed: q, k and v as one, gate and up as one, experts with their number of copies."""
    a = architecture
    attention_out = a.n_heads * a.head_dim
    qkv = attention_out + 2 * a.n_kv_heads * a.head_dim
    found = [_Matrix("head", a.vocab_size, a.hidden_size)]
    for layer in range(a.n_layers):
        found += [_Matrix("attention", qkv, a.hidden_size), _Matrix("attention", a.hidden_size, attention_out)]
        if a.is_moe_layer(layer):
            found += [
                _Matrix("router", a.n_experts, a.hidden_size),
                _Matrix("experts", 2 * a.moe_intermediate_size, a.hidden_size, a.n_experts),
                _Matrix("experts", a.hidden_size, a.moe_intermediate_size, a.n_experts),
            ]
        else:
            found += [
                _Matrix("mlp", 2 * a.intermediate_size, a.hidden_size),
                _Matrix("mlp", a.hidden_size, a.intermediate_size),
            ]
    return found
