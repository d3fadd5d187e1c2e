"""Kernels: one protocol, a reference implementation in torch and a native one in C++ (design.md, "Native code")."""

from halfbyte.kernels.attention_step import AttentionStep
from halfbyte.kernels.protocol import Kernels
from halfbyte.kernels.registry import active, available, describe, get
from halfbyte.kernels.weights import LinearKind, PackedExperts, PackedLinear

__all__ = [
    "AttentionStep",
    "Kernels",
    "LinearKind",
    "PackedExperts",
    "PackedLinear",
    "active",
    "available",
    "describe",
    "get",
]
