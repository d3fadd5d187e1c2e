"""Kernels: one protocol, a reference implementation in torch and a native one in C++ (design.md, "Native code")."""

from halfbyte.kernels.protocol import Kernels
from halfbyte.kernels.registry import active, available, describe, get
from halfbyte.kernels.weights import LinearKind, PackedExperts, PackedLinear

__all__ = ["Kernels", "LinearKind", "PackedExperts", "PackedLinear", "active", "available", "describe", "get"]
