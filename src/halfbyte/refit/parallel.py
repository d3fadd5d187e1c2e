"""Work on many tensors in a few threads, in batches: a model of experts has tens of thousands of small ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["each", "worker_threads"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_BATCHES = 8  # a thread: enough to even out tensors of different sizes


def worker_threads() -> int:
    """Threads for fetching, encoding and preparing: ``HALFBYTE_THREADS``, or up to four."""
    named = os.environ.get("HALFBYTE_THREADS", "")
    return max(1, int(named)) if named.isdigit() else min(4, os.cpu_count() or 1)


def each(work: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
    """``[work(item) for item in items]``, by ``threads`` threads. The first error is raised; started work ends first."""
    if threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    size = max(1, len(items) // (threads * _BATCHES))
    batches = [items[n : n + size] for n in range(0, len(items), size)]
    with ThreadPoolExecutor(threads) as pool:
        return [result for done in pool.map(lambda batch: [work(item) for item in batch], batches) for result in done]
