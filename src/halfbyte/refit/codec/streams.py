"""Streams: zstd level 1 or stored, whichever is shorter; decompressed sizes are known before anything is decompressed."""

from __future__ import annotations

import numpy as np
import zstandard

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.arena import Arena

__all__ = ["Packer", "Unpacker"]

_SHORTEST = 16  # bytes; a frame costs about ten
_LEVEL = 1
_FRAME_HEADER = 18  # bytes, at most


class Packer:
    """Compresses streams; not for two threads at once."""

    def __init__(self) -> None:
        # Matches are accidents in these streams: what helps is the entropy coding. A small table of long matches finds
        # runs and repeats and otherwise gets out of the way.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, hash_log=8, min_match=7, write_content_size=1, write_checksum=0, write_dict_id=0
        )
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)

    def pack(self, raw: Bytes) -> tuple[bool, bytes]:
        """(whether it is a zstd frame, the bytes to store)."""
        if raw.size >= _SHORTEST:
            frame = self._zstd.compress(raw.data)
            if len(frame) < raw.size:
                return True, frame
        return False, raw.tobytes()


class Unpacker:
    """Decompresses streams; not for two threads at once."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def unpack(self, stored: Bytes, is_zstd: bool, size: int, arena: Arena | None = None) -> Bytes:
        """The stream of exactly ``size`` bytes, in ``arena`` where one is given.

        Raises:
            RefitError: no zstd frame, or one of another size; found out before memory of that size is taken.
        """
        if not is_zstd:
            if stored.size != size:
                raise RefitError(f"a stream has {stored.size} bytes, its table says {size}")
            return stored
        try:
            claimed = zstandard.get_frame_parameters(stored[:_FRAME_HEADER].data).content_size
            if claimed != size:
                raise RefitError(f"a zstd frame of {claimed} bytes, its table says {size}")
            raw = np.frombuffer(self._zstd.decompress(stored.data, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise RefitError(f"a damaged zstd frame ({error})") from error
        if raw.size != size:
            raise RefitError(f"a zstd frame held {raw.size} bytes, its table says {size}")
        return raw if arena is None else arena.put(raw)
