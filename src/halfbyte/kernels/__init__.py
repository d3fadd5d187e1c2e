"""Kernels: one protocol, a reference implementation in torch and a native one in C++ (design.md, "Native code").

Names load on first use, so that the parts that need no torch (``halfbyte.refit``) can reach the extension without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOME = {
    "AttentionStep": "attention_step",
    "Kernels": "protocol",
    "LinearKind": "weights",
    "PackedExperts": "weights",
    "PackedLinear": "weights",
    "active": "registry",
    "available": "registry",
    "describe": "registry",
    "get": "registry",
}


if not TYPE_CHECKING:  # a checker would believe that the package has every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
