"""The state hash: one digest of all weights that is kept up to date in the time the change takes, not the model.

Leaves are the xxh3-64 of each block; a tensor's digest is SHA-256 over its info and its leaves; tensors are spread over
256 buckets by the SHA-256 of their names, and the root is SHA-256 over the buckets' digests. A patch re-hashes the
blocks it touched (the codec has those hashes already), its tensors and their buckets. Block hashes find faults, not
forgeries: against those, objects are named by SHA-256 and manifests can be signed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import TensorInfo, flat_bytes, info_of
from halfbyte.refit.codec import BLOCK, Hashes, TensorDelta, block_count, block_hashes

__all__ = ["StateHash", "schema_digest", "tensor_digest"]

_BUCKETS = 256


def schema_digest(infos: Iterable[TensorInfo]) -> str:
    """Hex SHA-256 over names, dtypes and shapes of all tensors, in name order."""
    rows = sorted([info.name, info.dtype, list(info.shape)] for info in infos)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def tensor_digest(info: TensorInfo, hashes: Hashes) -> bytes:
    """SHA-256 over one tensor's name, dtype, shape and block hashes."""
    head = json.dumps([info.name, info.dtype, list(info.shape)], separators=(",", ":")).encode()
    return hashlib.sha256(len(head).to_bytes(8, "little") + head + hashes.astype("<u8").tobytes()).digest()


class StateHash:
    """Block hashes and digests of a set of tensors; mutable, cheap to copy.

    Arguments:
        block: elements of a block, as in the deltas.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._infos: dict[str, TensorInfo] = {}
        self._hashes: dict[str, Hashes] = {}
        self._buckets: list[dict[str, bytes]] = [{} for _ in range(_BUCKETS)]
        self._digests: list[bytes | None] = [None] * _BUCKETS

    @classmethod
    def of(
        cls, tensors: Mapping[str, Any], block: int = BLOCK, *, infos: Mapping[str, TensorInfo] | None = None
    ) -> StateHash:
        """Hash everything: the full audit. ``infos`` for tensors that the arrays do not describe (packed F4)."""
        state = cls(block)
        for name, array in tensors.items():
            info = infos[name] if infos is not None else info_of(name, array)
            state.put(info, block_hashes(info.dtype, flat_bytes(array), block))
        return state

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Name -> info."""
        return self._infos

    def hashes(self, name: str) -> Hashes:
        """Block hashes of a tensor."""
        return self._hashes[name]

    def put(self, info: TensorInfo, hashes: Hashes) -> None:
        """Add or replace a tensor whole."""
        if hashes.shape != (block_count(info.elements, self.block),):
            raise RefitError(f"{hashes.size} block hashes for tensor {info.name!r} of {info.elements} elements")
        self._infos[info.name], self._hashes[info.name] = info, hashes.copy()
        self._touch(info.name, tensor_digest(info, hashes))

    def remove(self, name: str) -> None:
        """Forget a tensor."""
        del self._infos[name], self._hashes[name]
        self._touch(name, None)

    def patch(self, name: str, delta: TensorDelta) -> None:
        """Move a tensor to the delta's target, without looking at the weights.

        Raises:
            RefitError: no such tensor, another dtype, length or block, or hashes that are not the delta's base.
        """
        info = self._infos.get(name)
        if info is None:
            raise RefitError(f"a delta for tensor {name!r}, which this state does not have")
        if (delta.elements, delta.block, delta.dtype) != (info.elements, self.block, info.dtype):
            raise RefitError(
                f"the delta of tensor {name!r} is for {delta.elements} {delta.dtype} elements in blocks of {delta.block}",
                expected=f"{info.elements} {info.dtype} elements in blocks of {self.block}",
            )
        if not np.array_equal(self._hashes[name], delta.table["base"]):
            raise RefitError(f"the delta of tensor {name!r} starts from another version", fix="catch up from an anchor")
        self.put(info, delta.table["target"].astype(np.uint64))

    def digest(self) -> str:
        """Hex SHA-256 of the whole state."""
        for index, found in enumerate(self._digests):
            if found is None:
                rows = sorted(self._buckets[index].items())
                self._digests[index] = hashlib.sha256(
                    b"".join(hashlib.sha256(name.encode()).digest() + digest for name, digest in rows)
                ).digest()
        return hashlib.sha256(b"".join(digest for digest in self._digests if digest is not None)).hexdigest()

    def schema(self) -> str:
        """:func:`schema_digest` of the tensors."""
        return schema_digest(self._infos.values())

    def copy(self) -> StateHash:
        """An independent copy; hash arrays are shared, since they are replaced and never written."""
        other = StateHash(self.block)
        other._infos, other._hashes = dict(self._infos), dict(self._hashes)
        other._buckets, other._digests = [dict(bucket) for bucket in self._buckets], list(self._digests)
        return other

    def differences(self, other: StateHash) -> dict[str, tuple[int, ...]]:
        """Name -> numbers of blocks that differ; tensors that only one side has, or of another info, with no numbers."""
        found: dict[str, tuple[int, ...]] = {}
        for name in sorted(self._infos.keys() | other._infos.keys()):
            if self._infos.get(name) != other._infos.get(name):
                found[name] = ()
            elif (numbers := np.flatnonzero(self._hashes[name] != other._hashes[name])).size:
                found[name] = tuple(numbers.tolist())
        return found

    def _touch(self, name: str, digest: bytes | None) -> None:
        index = hashlib.sha256(name.encode()).digest()[0]
        if digest is None:
            del self._buckets[index][name]
        else:
            self._buckets[index][name] = digest
        self._digests[index] = None
