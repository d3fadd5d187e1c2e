"""Memory for many small results that live equally long.

The first touch of a page can cost more than the codec's work on it (4 us on a virtual machine), and pieces that are kept touch
new pages for ever. One array for all of them is asked for in huge pages: numpy does so from 4 MB on.
"""

from __future__ import annotations

import numpy as np

from halfbyte.refit.arrays import Bytes

__all__ = ["Arena", "roomy"]

_LEAST = 4 << 20  # bytes from which on numpy asks for huge pages,
_HUGE = 2 << 20  # of so many bytes, at multiples of that
_WORTH = 1 << 18  # bytes: below, a huge page would be mostly empty


def roomy(size: int) -> Bytes:
    """uint8 [size], whatever it holds."""
    if size < _WORTH:
        return np.empty(size, np.uint8)
    memory = np.empty(max(size, _LEAST) + _HUGE, np.uint8)
    begin = -memory.ctypes.data % _HUGE
    return memory[begin : begin + size]


class Arena:
    """Copies of pieces, one behind the other. Pieces stay valid as long as somebody holds them."""

    def __init__(self, size: int) -> None:
        self._memory, self._used = roomy(size), 0

    def put(self, piece: bytes | Bytes) -> Bytes:
        """The copy. Where there is no room left, everything moves to twice the memory: copies from before are then apart."""
        end = self._used + len(piece)
        if end > self._memory.size:
            memory = roomy(2 * end)
            memory[: self._used] = self._memory[: self._used]
            self._memory = memory
        copy = self._memory[self._used : end]
        copy[:] = np.frombuffer(piece, np.uint8)
        self._used = end
        return copy

    @property
    def content(self) -> Bytes:
        """All pieces, in order."""
        return self._memory[: self._used]
