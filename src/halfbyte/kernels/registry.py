"""Which kernels run: chosen once at import, ``HALFBYTE_KERNELS`` overrides.

Names: ``reference`` (torch), ``native`` (the best instruction set of this processor) or one instruction set by its own name
(``generic``, ``avx2``, ``avx512``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from halfbyte.errors import ConfigError
from halfbyte.kernels.protocol import Kernels
from halfbyte.kernels.reference import ReferenceKernels

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


def for_device(device: str) -> Kernels:
    """The kernels for tensors on a device (``cpu``, ``cuda``, ...): those in use on the CPU, the reference elsewhere. What a
    learner calls of it (quantise, guided round, routes, log-probs) is torch throughout and asks where its tensors are."""
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
