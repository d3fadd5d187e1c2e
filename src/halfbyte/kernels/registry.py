"""Which kernels run: chosen once at import, ``HALFBYTE_KERNELS`` overrides.

Names: ``reference`` (torch), ``native`` (the best instruction set of this processor) or one instruction set by its own name
(``generic``, ``avx2``, ``avx512``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.errors import ConfigError
from halfbyte.kernels.protocol import Kernels
from halfbyte.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from halfbyte.kernels.compiled.exact import Compile

__all__ = ["active", "available", "describe", "for_device", "get"]


def _implementations() -> dict[str, Kernels]:
    found: dict[str, Kernels] = {"reference": ReferenceKernels()}
    try:
        from halfbyte.kernels import native
    except ImportError:
        return found
    for isa in native.instruction_sets():
        found[isa] = native.NativeKernels(isa)
    found["native"] = found[native.instruction_sets()[-1]]
    return found


_KERNELS: Mapping[str, Kernels] = MappingProxyType(_implementations())


def available() -> list[str]:
    """Names that :func:`get` accepts here, the fastest last."""
    return list(_KERNELS)


def get(name: str) -> Kernels:
    """The kernels of that name.

    Raises:
        ConfigError: not built, or not for this processor.
    """
    if name not in _KERNELS:
        raise ConfigError(
            f"there are no kernels named {name!r} here",
            where="HALFBYTE_KERNELS or the argument of get()",
            expected="one of " + ", ".join(_KERNELS),
            fix="" if "native" in _KERNELS else "install a C++ compiler and reinstall halfbyte for the native kernels",
        )
    return _KERNELS[name]


_ACTIVE = get(os.environ.get("HALFBYTE_KERNELS") or ("native" if "native" in _KERNELS else "reference"))


def active() -> Kernels:
    """The kernels in use."""
    return _ACTIVE


def for_device(device: str, compile: Compile = "off") -> Kernels:
    """The kernels for tensors on a device (``cpu``, ``cuda``, ...).

    On the CPU those in use. On CUDA the reference, torch throughout, with FP4 products in Triton where Triton is installed. On
    any other device the reference.

    Arguments:
        compile: ``auto``: on CUDA with compiled quantise, fake_quantise and guided_round, or the plain one where a compiled one
            has other bits; ``on``: on the CPU too, and such a function is an error.

    Raises:
        ConfigError: ``on`` where torch cannot compile for the device.
    """
    cuda = device == "cuda" and torch.cuda.is_available()
    triton = cuda and find_spec("triton") is not None
    if compile == "on" and device == "cuda" and not triton:
        raise ConfigError(
            "torch cannot compile for this device",
            where="learner.compile",
            expected="a CUDA device, and triton installed",
        )
    compiled = compile == "on" or (compile == "auto" and triton)
    if triton:
        from halfbyte.kernels.gpu import CompiledTritonKernels, TritonKernels

        return CompiledTritonKernels(insist=compile == "on") if compiled else TritonKernels()
    if compiled:
        from halfbyte.kernels.compiled import CompiledKernels

        return CompiledKernels(insist=compile == "on")
    return _ACTIVE if device == "cpu" else _KERNELS["reference"]


def describe() -> dict[str, Any]:
    """What runs and why, for ``halfbyte doctor``: active, available, requested (``HALFBYTE_KERNELS``), threads."""
    out: dict[str, Any] = {
        "active": _ACTIVE.name,
        "available": available(),
        "requested": os.environ.get("HALFBYTE_KERNELS", ""),
    }
    if "native" in _KERNELS:
        from halfbyte.kernels import native

        out["threads"] = native.thread_count()
    return out
