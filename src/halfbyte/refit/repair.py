"""Repair of single blocks: their content is fetched by byte range from the last full version and brought up to date.

A torn write, a flipped bit or another program's scribble costs the damaged blocks, not a reload of the model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec import TensorDelta, apply, block_hash, block_span
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.fetch import Fetcher
from halfbyte.refit.head import Catalogue, Head
from halfbyte.refit.keys import object_key
from halfbyte.refit.manifest import Manifest, ObjectRef, TensorChange
from halfbyte.refit.objects import HEADER_LIMIT, read_object
from halfbyte.refit.route import find_route
from halfbyte.refit.state import StateHash

__all__ = ["StoreRepair"]


class StoreRepair:
    """Fetches blocks of HEAD's version.

    Arguments:
        fetcher: reads the store.
        catalogue, head: the way to the version.
    """

    def __init__(self, fetcher: Fetcher, catalogue: Catalogue, head: Head) -> None:
        self.fetcher, self.catalogue, self.head = fetcher, catalogue, head
        self.repaired_blocks = 0
        self._offsets: dict[str, dict[str, tuple[int, int]]] = {}

    def __call__(self, wanted: Mapping[str, Sequence[int]], state: StateHash) -> dict[str, dict[int, Bytes]]:
        """Blocks of the version whose hashes are ``state``: tensor -> block number -> bytes.

        Raises:
            CorruptError: the store's own content does not have these hashes.
        """
        route = find_route(self.catalogue, self.head, None)
        buffers: dict[str, Bytes] = {}
        for manifest in self.fetcher.steps(route, self.head)[: len(route)]:
            for change in manifest.tensors:
                name = change.info.name
                if name not in wanted or change.object is None:
                    continue
                ref = manifest.objects[change.object]
                if change.operation == "patch":
                    entry = read_object(self.fetcher.objects([ref])[ref.digest])[name]
                    apply(
                        change.info.dtype, buffers[name], TensorDelta.from_bytes(entry)
                    )  # fits the wanted blocks only
                else:
                    buffers[name] = self._blocks(ref, change, manifest, wanted[name])
        found: dict[str, dict[int, Bytes]] = {}
        for name, numbers in wanted.items():
            info, hashes = state.infos[name], state.hashes(name)
            for index in numbers:
                begin, end = block_span(info.dtype, info.elements, index, state.block)
                content = buffers[name][begin:end] if name in buffers else np.empty(0, np.uint8)
                if block_hash(content) != hashes[index]:
                    raise CorruptError(
                        f"block {index} of tensor {name!r} is damaged here and cannot be repaired from the store",
                        where=repr(self.fetcher.store),
                        fix="let the publisher write a full version",
                    )
                found.setdefault(name, {})[index] = content.copy()
                self.repaired_blocks += 1
        return found

    def _blocks(self, ref: ObjectRef, change: TensorChange, manifest: Manifest, numbers: Sequence[int]) -> Bytes:
        """A buffer as long as the tensor, of which only the wanted blocks are filled (the rest costs no memory)."""
        info = change.info
        buffer = np.zeros(info.bytes, np.uint8)
        start, stop = self._span(ref, info.name)
        if stop - start != info.bytes:
            raise CorruptError(f"{stop - start} bytes for tensor {info.name!r}", where=object_key(ref.digest))
        for index in numbers:
            begin, end = block_span(info.dtype, info.elements, index, manifest.block)
            data = self.fetcher.store.get_range(object_key(ref.digest), start + begin, start + end)
            if len(data) != end - begin:
                raise CorruptError("the object is shorter than its header says", where=object_key(ref.digest))
            self.fetcher.fetched_bytes += len(data)
            buffer[begin:end] = np.frombuffer(data, np.uint8)
        return buffer

    def _span(self, ref: ObjectRef, name: str) -> tuple[int, int]:
        """Where an entry lies in its object, from the header alone. A lie is found by the blocks' hashes."""
        if ref.digest not in self._offsets:
            store, key = self.fetcher.store, object_key(ref.digest)
            prefix = store.get_range(key, 0, 8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT + 1
            if length > min(HEADER_LIMIT, ref.size - 8):
                raise CorruptError("not an object", where=key)
            try:
                header = json.loads(store.get_range(key, 8, 8 + length))
                spans = {n: tuple(e["data_offsets"]) for n, e in header.items() if n != "__metadata__"}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CorruptError("the object's header is damaged", where=key) from error
            self._offsets[ref.digest] = {
                n: (8 + length + s[0], 8 + length + s[1])
                for n, s in spans.items()
                if len(s) == 2 and all(type(x) is int for x in s) and 0 <= s[0] <= s[1] <= ref.size
            }
        found = self._offsets[ref.digest].get(name)
        if found is None:
            raise CorruptError(f"the object does not hold tensor {name!r}", where=object_key(ref.digest))
        return found
