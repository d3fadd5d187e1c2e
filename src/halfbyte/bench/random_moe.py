"""A mixture of experts with random weights, made tensor by tensor when asked for: no checkpoint, no copy held."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfbyte.models.architecture import Architecture, parameter_shapes

__all__ = ["RandomTensors", "moe_architecture"]


def moe_architecture(**changes: Any) -> Architecture:
    """A Qwen3-MoE shape of about 1B parameters: 12 layers of 64 experts, 8 a token.

    Arguments:
        changes: other values of fields.
    """
    sizes: dict[str, Any] = {
        "family": "qwen3_moe",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "n_layers": 12,
        "n_heads": 16,
        "n_kv_heads": 4,
        "head_dim": 64,
        "max_positions": 4096,
        "tie_embeddings": True,
        "qk_norm": True,
        "n_experts": 64,
        "experts_per_token": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "eos_ids": (0,),
    }
    return Architecture(**{**sizes, **changes})


class RandomTensors(Mapping[str, Tensor]):
    """Checkpoint names to BF16 weights, the same every time: normal with the deviation of a usual initialisation."""

    def __init__(self, architecture: Architecture) -> None:
        self.shapes = parameter_shapes(architecture)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape).normal_(std=shape[1] ** -0.5, generator=generator).to(torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
