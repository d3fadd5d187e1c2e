"""Which implementation of the codec's kernels runs."""

from __future__ import annotations

import os
from functools import cache

from halfbyte.errors import ConfigError
from halfbyte.refit.codec.kernels import CodecKernels
from halfbyte.refit.codec.reference import ReferenceCodec

__all__ = ["available", "kernels"]


def available() -> list[str]:
    """Names that :func:`kernels` accepts here, the fastest last."""
    return list(_implementations())


def kernels(name: str = "") -> CodecKernels:
    """The kernels of that name; by default those that ``HALFBYTE_KERNELS`` names, or the fastest.

    Raises:
        ConfigError: not built, or not for this processor.
    """
    found = _implementations()
    name = name or os.environ.get("HALFBYTE_KERNELS") or "native"
    if name == "native":
        return list(found.values())[-1]
    if name not in found:
        raise ConfigError(
            f"there are no codec kernels named {name!r} here",
            where="HALFBYTE_KERNELS or the argument of kernels()",
            expected="native, " + ", ".join(found),
        )
    return found[name]


@cache
def _implementations() -> dict[str, CodecKernels]:
    found: dict[str, CodecKernels] = {"reference": ReferenceCodec()}
    try:
        from halfbyte.refit.codec import native
    except ImportError:
        return found
    return found | {isa: native.NativeCodec(isa) for isa in native.instruction_sets()}
