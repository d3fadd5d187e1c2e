"""Small random models to quantise, their FP4 folders, and edits of what those folders hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.models.architecture import Architecture, parameter_shapes
from halfbyte.models.checkpoint_writer import save_checkpoint
from halfbyte.models.safetensors_io import SafetensorsFile, write_safetensors

DENSE = Architecture(
    family="llama",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_positions=64,
    eos_ids=(1,),
)
TIED = replace(DENSE, tie_embeddings=True)
BIASED = replace(DENSE, family="qwen2", qkv_bias=True)
MOE = replace(
    DENSE,
    family="qwen3_moe",
    qk_norm=True,
    n_experts=4,
    experts_per_token=2,
    moe_intermediate_size=32,
    mlp_only_layers=(0,),
)
MIXTRAL = replace(DENSE, family="mixtral", n_experts=4, experts_per_token=2, moe_intermediate_size=96)
MODELS = {"dense": DENSE, "tied": TIED, "biased": BIASED, "moe": MOE, "mixtral": MIXTRAL}


def weights(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Normal weights in BF16; the sizes of q, k, v, of gate and up, and of experts differ up to eightfold."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for i, (name, shape) in enumerate(parameter_shapes(arch).items()):
        size = 0.05 * 2.0 ** (i % 4)
        out[name] = (torch.randn(shape, generator=generator) * size).bfloat16()
        if len(shape) == 1:
            out[name] = (1 + out[name]).bfloat16()
    return out


def save(folder: Path, arch: Architecture, tensors: dict[str, Tensor] | None = None) -> Path:
    return save_checkpoint(folder, arch, weights(arch) if tensors is None else tensors)


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Rewrite model.safetensors after ``change`` has edited its tensors."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in SafetensorsFile(path).items()}
    change(tensors)
    write_safetensors(path, tensors, {"format": "pt"})
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
