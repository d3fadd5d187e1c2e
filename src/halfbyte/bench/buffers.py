"""How much memory a rotation has to touch so that nothing is still in a cache when its turn comes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["cache_bytes", "copies", "rotation_bytes"]

T = TypeVar("T")

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
#: Where the caches cannot be read off, and the most we spend on one side of a comparison.
_UNKNOWN, _MOST = 64 * 2**20, 512 * 2**20


def cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Bytes of the largest cache of the first processor, None where the system does not say."""
    found = []
    for path in root.glob("index*/size"):
        try:
            text = path.read_text().strip()
            found.append(int(text[:-1]) * _UNITS[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(found, default=None)


def rotation_bytes() -> int:
    """What a rotation should exceed: the largest cache, but no more than 512 MiB."""
    return min(cache_bytes() or _UNKNOWN, _MOST)


def copies(first: T, nbytes: int, budget: int, again: Callable[[], T]) -> list[T]:
    """``first`` and as many more made by ``again`` as it takes to exceed ``budget`` bytes in total."""
    return [first, *(again() for _ in range(budget // max(nbytes, 1)))]
