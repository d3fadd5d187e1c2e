"""Trajectories as bytes between the ranks of a run: a JSON table, then the arrays it describes one behind the other.

Sampling parameters and precision are the run's own, the same on all ranks; they do not travel.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.models.precision import Precision
from halfbyte.models.trajectory import GuidanceRows, SamplingParams, Trajectory

__all__ = ["pack_trajectories", "unpack_trajectories"]

_ARRAYS = ("prompt_ids", "response_ids", "logprobs", "mask", "versions", "routes")
_PLAIN = ("finish_reason", "group", "sample", "turns", "reward", "info")


def pack_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """See the module's docstring."""
    arrays: list[np.ndarray] = []

    def place(array: np.ndarray | None) -> list[Any] | None:
        if array is None:
            return None
        arrays.append(np.ascontiguousarray(array))
        return [array.dtype.str, list(array.shape)]

    rows = []
    for t in trajectories:
        row = {name: getattr(t, name) for name in _PLAIN} | {name: place(getattr(t, name)) for name in _ARRAYS}
        row["supports"] = None if t.supports is None else [place(s) for s in t.supports]
        g = t.guidance
        row["guidance"] = None if g is None else [place(g.rows), place(g.kv), g.layout, g.version]
        rows.append(row)
    table = json.dumps(rows).encode()
    return b"".join([struct.pack("<Q", len(table)), table, *(array.tobytes() for array in arrays)])


def unpack_trajectories(data: bytes, sampling: SamplingParams, precision: Precision) -> list[Trajectory]:
    """What :func:`pack_trajectories` packed."""
    (length,) = struct.unpack_from("<Q", data)
    position = 8 + length

    def taken(place: list[Any] | None) -> Any:
        nonlocal position
        if place is None:
            return None
        dtype, shape = np.dtype(place[0]), tuple(place[1])
        array = np.frombuffer(data, dtype, count=int(np.prod(shape)), offset=position).reshape(shape).copy()
        position += array.nbytes
        return array

    out = []
    for row in json.loads(data[8 : 8 + length]):
        arrays = {name: taken(row[name]) for name in _ARRAYS}
        supports = None if row["supports"] is None else [taken(s) for s in row["supports"]]
        guidance = None
        if row["guidance"] is not None:
            rows, kv, layout, version = row["guidance"]
            guidance = GuidanceRows(taken(rows), taken(kv), layout, version)
        plain = {name: row[name] for name in _PLAIN} | {"turns": tuple(row["turns"])}
        out.append(
            Trajectory(**arrays, **plain, sampling=sampling, precision=precision, supports=supports, guidance=guidance)
        )
    return out
