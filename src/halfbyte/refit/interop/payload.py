"""What the foreign formats share: bounded decompression, checksums of a target, and the refusal of pickles."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import xxhash
import zstandard

from halfbyte.errors import MissingExtraError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.errors import CorruptError, LayoutError

__all__ = ["CHECKSUMS", "checksum", "inflate", "refuse_pickle", "unzstd"]

#: The largest window a frame may ask for, bytes: a hostile header cannot make the decoder allocate more.
_WINDOW = 2**27
_ARC3 = b"ARC3_ENVELOPE\0"


def unzstd(payload: Bytes, size: int, where: str, *, exact: bool = True) -> Bytes:
    """A zstd frame as uint8, which must hold ``size`` bytes (at most ``size`` where not ``exact``); no more than that is ever
    decompressed.

    Raises:
        CorruptError: it is no zstd, holds fewer or more bytes, or asks for a window above 128 MiB.
    """
    out = np.empty(size + 1, np.uint8)  # the extra byte notices a frame that holds more
    filled = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(payload.data) as reader:
            while filled < len(out):
                count = reader.readinto(out.data[filled:])
                if count == 0:
                    break
                filled += count
    except zstandard.ZstdError as error:
        raise CorruptError(f"a payload is not zstd: {error}", where=where) from error
    return _sized(out, filled, size, where, exact=exact)


def inflate(payload: Bytes, size: int, where: str) -> Bytes:
    """A zlib stream as uint8, exactly ``size`` bytes. Errors as in :func:`unzstd`."""
    try:
        data = zlib.decompressobj().decompress(payload.data, size + 1)
    except zlib.error as error:
        raise CorruptError(f"a payload is not zlib: {error}", where=where) from error
    return _sized(np.frombuffer(data, np.uint8), len(data), size, where, exact=True)


def _sized(out: Bytes, filled: int, size: int, where: str, *, exact: bool) -> Bytes:
    if filled > size or (exact and filled < size):
        held = f"more than {size}" if filled > size else str(filled)
        raise CorruptError(f"a payload holds {held} bytes", where=where, expected=f"{size}: the tensor's own size")
    return out[:filled]


def refuse_pickle(payload: Bytes, where: str) -> None:
    """Raises:
    LayoutError: the payload is an arc_v3 envelope or a pickle: reading it could run anything.
    """
    head = payload[:16].tobytes()
    pickled = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5
    if head.startswith(_ARC3) or pickled:
        name = "an arc_v3 envelope, which holds a pickle" if head.startswith(_ARC3) else "a pickle"
        raise LayoutError(
            f"the payload is {name}; reading one can run any code, so it is never read",
            where=where,
            expected="zstd or zlib of the XOR (arc_v2, arc_v1)",
            fix="publish with compression_format arc_v2",
        )


def _adler32(data: Bytes) -> str:
    return f"{zlib.adler32(data.data):08x}"


def _xxh3(data: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data.data)


def _blake3(data: Bytes) -> str:
    try:
        module = importlib.import_module("blake3")
    except ImportError as error:
        raise MissingExtraError(
            "checksums of kind blake3 need the package blake3", where="checksum_format", fix="pip install blake3"
        ) from error
    return str(module.blake3(data.data).hexdigest())


#: Names in the index -> hexadecimal digest of a tensor's bytes.
CHECKSUMS: Mapping[str, Callable[[Bytes], str]] = MappingProxyType(
    {"adler32": _adler32, "xxh3-128": _xxh3, "blake3": _blake3}
)


def checksum(kind: str, data: Bytes) -> str:
    """The digest of ``kind``.

    Raises:
        LayoutError: an unknown kind.
        MissingExtraError: blake3 without its package.
    """
    if kind not in CHECKSUMS:
        raise LayoutError(
            f"unknown checksum_format {kind!r}", where="the index", expected="one of " + ", ".join(CHECKSUMS)
        )
    return CHECKSUMS[kind](data)
