"""Fireworks arc_v1 and arc_v2, read: one safetensors file, a U8 stream a tensor, zlib or zstd of the XOR of all bytes.

The file's metadata holds the Adler-32 of each tensor after the change, in decimal. Every tensor of the base is there, also
those that did not change. arc_v3 wraps a pickle and is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.refit.arrays import Bytes, flat_bytes
from halfbyte.refit.errors import CorruptError, LayoutError, WrongBaseError
from halfbyte.refit.interop.payload import inflate, refuse_pickle, unzstd
from halfbyte.refit.objects import ObjectReader

__all__ = ["read_arc"]

_FORMATS = {"arc_v1": inflate, "xor_one_to_one_zlib": inflate, "arc_v2": unzstd, "xor_one_to_one_zstd": unzstd}


def read_arc(path: Path, base: Mapping[str, Any], *, compression_format: str = "arc_v2") -> Iterator[tuple[str, Bytes]]:
    """(name, bytes of the tensor after the change) of every tensor, in order of name; ``base`` is not touched.

    Arguments:
        base: tensors by name, numpy or torch; exactly those of the file.
        compression_format: the file does not say; ``arc_v2`` (zstd) or ``arc_v1`` (zlib).
    Raises:
        WrongBaseError: other names than the base has, or a checksum that differs after the change.
        LayoutError: an unknown format; arc_v3, whose payload is a pickle.
        CorruptError: a damaged file, a payload of another size, a bomb.
    """
    if compression_format not in _FORMATS:
        why = ": its payload is a pickle, which is never read" if compression_format == "arc_v3" else ""
        raise LayoutError(
            f"compression_format {compression_format!r} cannot be read{why}",
            where=str(path),
            expected="one of " + ", ".join(_FORMATS),
            fix="publish with compression_format arc_v2",
        )
    decompress = _FORMATS[compression_format]
    try:
        streams = ObjectReader(path.read_bytes(), where=str(path))
    except FileNotFoundError:
        raise LayoutError("there is no such file", where=str(path)) from None
    if set(streams) != set(base):
        odd = sorted(set(streams) ^ set(base))
        raise WrongBaseError(f"base and delta differ in names: {', '.join(odd[:5])}", where=str(path))
    for name in sorted(streams):
        where = f"{path}: {name}"
        if name not in streams.metadata:
            raise CorruptError(f"tensor {name!r} has no checksum", where=str(path))
        refuse_pickle(streams[name], where)
        old = flat_bytes(base[name])
        difference = decompress(streams[name], len(old), where)
        new = np.bitwise_xor(old, difference)
        if str(zlib.adler32(new.data)) != streams.metadata[name]:
            raise WrongBaseError(
                f"{name!r} has another Adler-32 after the change than the delta says",
                where=str(path),
                expected=streams.metadata[name],
                fix="the base is another version, or the file is damaged: load a full checkpoint",
            )
        yield name, new
