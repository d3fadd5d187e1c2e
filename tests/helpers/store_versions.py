"""Every version of a refit store as tensors, read step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec import TensorDelta, apply
from halfbyte.refit.fetch import Fetcher
from halfbyte.refit.head import read_catalogue, read_head
from halfbyte.refit.objects import read_object
from halfbyte.refit.store import FilesystemStore


def versions_of(store: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Version -> BF16 weights by checkpoint name."""
    opened = FilesystemStore(store)
    found = read_head(opened)
    assert found is not None
    fetcher = Fetcher(opened)
    held: dict[str, Bytes] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    out: dict[int, dict[str, torch.Tensor]] = {}
    for edge in sorted(read_catalogue(opened, found[0]).edges, key=lambda e: e.version):
        if edge.kind == "skip" or (edge.kind == "full" and held):
            continue
        manifest = fetcher.manifest(edge.manifest)
        objects = fetcher.objects(manifest.objects)
        entries = {n: data for ref in manifest.objects for n, data in read_object(objects[ref.digest]).items()}
        for change in (c for c in manifest.tensors if c.object is not None):
            name = change.info.name
            shapes[name] = tuple(change.info.shape)
            if change.operation == "patch":
                apply(change.info.dtype, held[name], TensorDelta.from_bytes(entries[name]))
            else:
                held[name] = np.array(entries[name])
        out[edge.version] = {
            name: torch.from_numpy(data.copy()).view(torch.bfloat16).reshape(shapes[name])
            for name, data in held.items()
        }
    return out
