"""The HF-index layout: a folder a version, an index in the shape of a sharded checkpoint, compressed differences in shards.

``weight_v000007/model.safetensors.index.json`` holds ``weight_map`` (tensor -> shard) and ``metadata``: ``version``,
``base_version``, ``delta_encoding`` (``xor``: of all bytes; ``overwrite``: u4 count, u4 byte positions, new bytes),
``compression_format`` (``zstd``) and ``checksum_format``. A shard holds one U8 stream a changed tensor, and in its metadata
the checksum of that tensor's bytes *after* the change. Tensors that are not in the map did not change.

Applied in place, such a delta is not safe (an XOR applied twice reverts, a failure half-way poisons the base). Here a
delta is decoded into new arrays and every checksum is compared before a caller sees one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

from halfbyte.refit.arrays import Bytes, flat_bytes
from halfbyte.refit.disk import Disk
from halfbyte.refit.errors import CorruptError, LayoutError, WrongBaseError
from halfbyte.refit.interop.payload import CHECKSUMS, checksum, refuse_pickle, unzstd
from halfbyte.refit.objects import ObjectReader, write_object

__all__ = ["INDEX", "DeltaIndex", "read_index", "read_index_delta", "write_index_delta"]

INDEX = "model.safetensors.index.json"

Encoding = Literal["xor", "overwrite"]


@dataclass(frozen=True)
class DeltaIndex:
    """What an index says.

    Arguments:
        version, base_version: as written; numbers are usually padded to six digits.
        encoding: ``xor`` or ``overwrite``.
        checksum_format: a key of ``CHECKSUMS``.
        weight_map: changed tensor -> shard file name.
    """

    version: str
    base_version: str
    encoding: Encoding
    checksum_format: str
    weight_map: dict[str, str]


def read_index(folder: Path) -> DeltaIndex:
    """Read and check the index of a version's folder.

    Raises:
        CorruptError: not JSON, or fields of other kinds. A missing ``weight_map`` is an error, not
            "nothing changed" (stitch #53).
        LayoutError: an encoding, compression or checksum that is unknown; a shard name that is a path (ModelExpress #716).
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LayoutError("there is no index", where=str(path), expected="a folder of the HF-index layout") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the index is not JSON: {error}", where=str(path)) from error
    metadata = index.get("metadata") if isinstance(index, dict) else None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise CorruptError("the index lacks metadata or weight_map", where=str(path))
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or Path(shard).name != shard
            or "\\" in shard
        ):
            raise LayoutError(
                f"tensor {name!r} lies in {shard!r}", where=str(path), expected="the name of a file in the same folder"
            )
    encoding = _one_of(metadata, "delta_encoding", ("xor", "overwrite"), path)
    _one_of(metadata, "compression_format", ("zstd",), path)
    return DeltaIndex(
        _version(metadata, "version", path),
        _version(metadata, "base_version", path),
        "xor" if encoding == "xor" else "overwrite",
        _one_of(metadata, "checksum_format", tuple(CHECKSUMS), path),
        dict(weight_map),
    )


def _one_of(metadata: Mapping[str, Any], key: str, allowed: tuple[str, ...], path: Path) -> str:
    value = metadata.get(key)
    if value not in allowed:
        raise LayoutError(f"{key} is {value!r}", where=str(path), expected="one of " + ", ".join(allowed))
    return str(value)


def _version(metadata: Mapping[str, Any], key: str, path: Path) -> str:
    value = metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise CorruptError(f"{key} is {value!r}", where=str(path), expected="a version")
    return str(value)


def read_index_delta(
    folder: Path, base: Mapping[str, Any], *, base_version: str | None = None
) -> Iterator[tuple[str, Bytes]]:
    """(name, bytes of the tensor after the change) of every changed tensor, in order of name; ``base`` is not touched.

    A caller commits after the last one: nothing is wrong with those that came before an error, but they are not a version.

    Arguments:
        base: tensors by name, numpy or torch.
        base_version: what ``base`` is; compared with the index as a number where both are numbers.
    Raises:
        WrongBaseError: the index names another base, a tensor is not in the base, or a checksum differs after the change.
        CorruptError, LayoutError: see :func:`read_index`; a damaged shard, a bomb, a pickle.
    """
    index = read_index(folder)
    if base_version is not None and not _same(index.base_version, base_version):
        raise WrongBaseError(
            f"the delta starts from version {index.base_version}", where=str(folder), expected=f"version {base_version}"
        )
    unknown = sorted(set(index.weight_map) - set(base))
    if unknown:
        raise WrongBaseError(
            f"{len(unknown)} tensors of the delta are not in the base: {', '.join(unknown[:5])}", where=str(folder)
        )
    for shard in sorted(set(index.weight_map.values())):
        where = str(folder / shard)
        try:
            data = (folder / shard).read_bytes()
        except FileNotFoundError:
            raise CorruptError("a shard of the index is missing", where=where) from None
        streams = ObjectReader(data, where=where)
        for name in sorted(n for n, s in index.weight_map.items() if s == shard):
            if name not in streams or name not in streams.metadata:
                raise CorruptError(f"tensor {name!r} or its checksum is missing", where=where)
            old = flat_bytes(base[name])
            refuse_pickle(streams[name], f"{where}: {name}")
            decode = _decode_xor if index.encoding == "xor" else _decode_overwrite
            new = decode(old, streams[name], f"{where}: {name}")
            if checksum(index.checksum_format, new) != streams.metadata[name]:
                raise WrongBaseError(
                    f"{name!r} has another {index.checksum_format} after the change than the delta says",
                    where=where,
                    expected=streams.metadata[name],
                    fix="the base is another version, or the shard is damaged: load a full checkpoint",
                )
            yield name, new


def _same(a: str, b: str) -> bool:
    return int(a) == int(b) if a.isdecimal() and b.isdecimal() else a == b


def _decode_xor(old: Bytes, stream: Bytes, where: str) -> Bytes:
    difference = unzstd(stream, len(old), where)
    return np.bitwise_xor(old, difference, out=difference)


def _decode_overwrite(old: Bytes, stream: Bytes, where: str) -> Bytes:
    # a count, and for each position four bytes and a value: more than this cannot be valid
    raw = unzstd(stream, 4 + 5 * len(old), where, exact=False)
    count = int(np.frombuffer(raw[:4].tobytes(), "<u4")[0]) if len(raw) >= 4 else -1
    if len(raw) != 4 + 5 * count:
        raise CorruptError(f"{len(raw)} bytes for {count} changes", where=where)
    positions = np.frombuffer(raw[4 : 4 + 4 * count].tobytes(), "<u4").astype(np.int64)
    if count and (int(positions[-1]) >= len(old) or bool((np.diff(positions) <= 0).any())):
        raise CorruptError("positions do not ascend within the tensor", where=where, expected=f"below {len(old)}")
    new = old.copy()
    new[positions] = raw[4 + 4 * count :]
    return new


def write_index_delta(
    folder: Path,
    base: Mapping[str, Any],
    target: Mapping[str, Any],
    *,
    version: str,
    base_version: str,
    encoding: Encoding = "xor",
    checksum_format: str = "adler32",
    shard_bytes: int = 2**32,
    disk: Disk | None = None,
) -> DeltaIndex:
    """Write the changes from ``base`` to ``target`` in this layout; the index comes last, so that a reader never sees a part.

    Arguments:
        version, base_version: slime and miles write numbers padded to six digits, ModelExpress any text.
        encoding, checksum_format: ModelExpress reads ``xor`` with ``adler32`` only.
        shard_bytes: a new shard begins after this many bytes.
    Raises:
        LayoutError: other names or sizes than the base has (the layout cannot add, remove or reshape a tensor), or a
            tensor too large for the u4 positions of ``overwrite``.
    """
    disk = disk or Disk()
    if set(base) != set(target):
        odd = sorted(set(base) ^ set(target))
        raise LayoutError(f"base and target differ in names: {', '.join(odd[:5])}", where=str(folder))
    disk.make_folders(folder)
    batches: list[dict[str, Bytes]] = [{}]
    checksums: dict[str, str] = {}
    size = 0
    compressor = zstandard.ZstdCompressor(level=1)
    for name in target:
        old, new = flat_bytes(base[name]), flat_bytes(target[name])
        if len(old) != len(new):
            raise LayoutError(f"{name!r} has {len(new)} bytes, its base {len(old)}", where=str(folder))
        difference = np.bitwise_xor(old, new)
        if not difference.any():
            continue
        raw = difference if encoding == "xor" else _overwrite(difference, new, name)
        stream = np.frombuffer(compressor.compress(raw.data), np.uint8)
        if batches[-1] and size + len(stream) > shard_bytes:
            batches.append({})
            size = 0
        batches[-1][name] = stream
        size += len(stream)
        checksums[name] = checksum(checksum_format, new)
    weight_map: dict[str, str] = {}
    filled = [batch for batch in batches if batch]
    for i, batch in enumerate(filled, 1):
        shard = f"model-{i:05d}-of-{len(filled):05d}.safetensors"
        disk.publish(folder / shard, [write_object(batch, {name: checksums[name] for name in batch})])
        weight_map |= dict.fromkeys(batch, shard)
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum_format,
    }
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, sort_keys=True)
    disk.publish(folder / INDEX, [text.encode()])
    return DeltaIndex(version, base_version, encoding, checksum_format, weight_map)


def _overwrite(difference: Bytes, new: Bytes, name: str) -> Bytes:
    if len(new) > 2**32:
        raise LayoutError(
            f"{name!r} has {len(new)} bytes",
            where="delta_encoding overwrite",
            expected="at most 2**32: positions are u4",
            fix="use xor",
        )
    positions = np.flatnonzero(difference)
    head = np.array([len(positions)], "<u4").view(np.uint8)
    return np.concatenate([head, positions.astype("<u4").view(np.uint8), new[positions]])
