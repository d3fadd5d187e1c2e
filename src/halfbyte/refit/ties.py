"""Tied tensors: one memory under two names, or a name whose tensor a checkpoint leaves out. Decided, never guessed.

A tie that is published twice and patched by XOR twice is undone (miles #1235), and a tie missing in the base made others skip
the head with a warning. Here the trainer's mapping says which names share memory, one of them (the first in the
mapping's order) is published, and the rest are recorded as ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from halfbyte.refit.arrays import flat_bytes, info_of
from halfbyte.refit.errors import LayoutError

__all__ = ["TiePolicy", "find_ties", "untie"]

#: ``once``: publish a shared tensor under its first name and record the others. ``refuse``: sharing is an error.
#: ``separate``: publish every name by itself (for receivers that hold copies).
TiePolicy = Literal["once", "refuse", "separate"]


def find_ties(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Name -> earlier name of the very same memory (same address, dtype and shape), in the mapping's order.

    Raises:
        LayoutError: two tensors overlap without being the same: publishing both would write some bytes twice.
    """
    spans: list[tuple[int, int, str]] = []
    for name, array in tensors.items():
        data = flat_bytes(array)
        if data.size and _is_view(array, data):
            spans.append((data.ctypes.data, data.size, name))
    order = {name: n for n, name in enumerate(tensors)}
    spans.sort(key=lambda item: (item[0], order[item[2]]))
    ties: dict[str, str] = {}
    for (begin, size, name), (next_begin, next_size, next_name) in pairwise(spans):
        if next_begin >= begin + size:
            continue
        first, second = info_of(name, tensors[name]), info_of(next_name, tensors[next_name])
        if (begin, size, first.dtype, first.shape) != (next_begin, next_size, second.dtype, second.shape):
            raise LayoutError(
                f"tensors {name!r} and {next_name!r} share a part of their memory",
                expected="tensors that are apart, or the same tensor under two names",
                fix="publish the fused tensor or its parts, not both",
            )
        ties[next_name] = ties.get(name, name)
    return ties


def untie(tensors: Mapping[str, Any], policy: TiePolicy) -> tuple[dict[str, Any], dict[str, str]]:
    """(tensors to publish, ties: name -> published name) under a policy.

    Raises:
        LayoutError: tensors share memory and the policy is ``refuse``; or they overlap in part.
    """
    ties = find_ties(tensors)
    if policy == "separate":
        return dict(tensors), {}
    if ties and policy == "refuse":
        shown = ", ".join(f"{name} = {first}" for name, first in list(ties.items())[:5])
        raise LayoutError(
            f"{len(ties)} names share their memory with another: {shown}", fix='ties="once" or untie them'
        )
    return {name: array for name, array in tensors.items() if name not in ties}, ties


def _is_view(array: Any, data: Any) -> bool:
    """Whether ``data`` is the array's own memory rather than a copy (a copy cannot tell what is shared)."""
    pointer = array.data_ptr() if hasattr(array, "data_ptr") else getattr(getattr(array, "ctypes", None), "data", None)
    return bool(pointer == data.ctypes.data)
