"""Deltas of other systems: read against independent writers, written for independent readers, hostile files refused."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.refit.arrays import flat_bytes
from halfbyte.refit.errors import CorruptError, LayoutError, RefitError, WrongBaseError
from halfbyte.refit.interop import read_arc, read_index, read_index_delta, write_index_delta
from halfbyte.refit.interop.hf_index import INDEX

Arrays = dict[str, np.ndarray]


def model(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.integers(0, 2**16, (32, 16), dtype=np.uint16),
        "layers.0.norm": rng.standard_normal(7).astype(np.float32),
        "layers.0.codes": rng.integers(0, 256, (5, 3), dtype=np.uint8),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(3, np.int64),
    }


def step(base: Arrays, seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    target = {name: array.copy() for name, array in base.items()}
    target["embed.weight"].reshape(-1)[rng.random(512) < 0.05] ^= 0x8001
    target["layers.0.norm"][3] = -0.0
    return target


def foreign(folder: Path, base: Arrays, target: Arrays, **metadata: Any) -> Path:
    """A version as slime writes it: by the safetensors library, XOR or overwrite, checksums of the target."""
    facts = {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    } | metadata
    streams, sums = {}, {}
    for name in base:
        old, new = (np.frombuffer(a[name].tobytes(), np.uint8) for a in (base, target))
        if np.array_equal(old, new):
            continue
        if facts["delta_encoding"] == "xor":
            raw = (old ^ new).tobytes()
        else:
            at = np.flatnonzero(old != new)
            raw = np.uint32(len(at)).tobytes() + at.astype("<u4").tobytes() + new[at].tobytes()
        streams[name] = np.frombuffer(zstandard.compress(raw, 1), np.uint8)
        sums[name] = (
            f"{zlib.adler32(new):08x}" if facts["checksum_format"] == "adler32" else xxhash.xxh3_128_hexdigest(new)
        )
    folder.mkdir(parents=True)
    (folder / "model-00000-of-00001.safetensors").write_bytes(safetensors.numpy.save(streams, metadata=sums))
    index = {"metadata": facts, "weight_map": dict.fromkeys(streams, "model-00000-of-00001.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def applied(base: Arrays, changes: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: (changes[name] if name in changes else flat_bytes(base[name])).tobytes() for name in base}


def as_bytes(arrays: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", ["adler32", "xxh3-128"])
def test_reads_what_the_layouts_own_writer_writes(encoding: str, kind: str, tmp_path: Path) -> None:
    base, target = model(), step(model())
    folder = foreign(tmp_path / "v", base, target, delta_encoding=encoding, checksum_format=kind)
    before = as_bytes(base)
    changes = dict(read_index_delta(folder, base, base_version="6"))
    assert sorted(changes) == ["embed.weight", "layers.0.norm"]
    assert applied(base, changes) == as_bytes(target)
    assert as_bytes(base) == before


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_what_is_written_is_read_by_an_independent_reader(encoding: Any, tmp_path: Path) -> None:
    base, target = model(), step(model())
    write_index_delta(
        tmp_path / "v", base, target, version="000001", base_version="000000", encoding=encoding, shard_bytes=64
    )
    index = json.loads((tmp_path / "v" / INDEX).read_text())
    assert index["metadata"] == {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    assert set(index["weight_map"].values()) == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    for name, shard in index["weight_map"].items():
        stream = safetensors.numpy.load_file(tmp_path / "v" / shard)[name]
        raw = zstandard.ZstdDecompressor().decompress(stream.tobytes())
        new = bytearray(base[name].tobytes())
        if encoding == "xor":
            new = bytearray(a ^ b for a, b in zip(new, raw, strict=True))
        else:
            count = int.from_bytes(raw[:4], "little")
            for i in range(count):
                new[int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "little")] = raw[4 + 4 * count + i]
        assert bytes(new) == target[name].tobytes()
        with safetensors.safe_open(tmp_path / "v" / shard, "np") as file:
            assert file.metadata()[name] == f"{zlib.adler32(bytes(new)):08x}"


@given(st.integers(0, 2**32), st.sampled_from(["xor", "overwrite"]), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_round_trip_of_any_bytes(tmp_path_factory: Any, seed: int, encoding: Any, share: float) -> None:
    rng = np.random.default_rng(seed)
    base = {f"t{i}": rng.integers(0, 256, rng.integers(0, 70), dtype=np.uint8) for i in range(3)}
    target = {
        n: np.where(rng.random(len(a)) < share, rng.integers(0, 256, len(a)), a).astype(np.uint8)
        for n, a in base.items()
    }
    folder = tmp_path_factory.mktemp("delta") / "v"
    write_index_delta(
        folder, base, target, version="2", base_version="1", encoding=encoding, checksum_format="xxh3-128"
    )
    assert applied(base, dict(read_index_delta(folder, base))) == as_bytes(target)


def test_a_wrong_base_is_refused_by_version_by_name_and_by_content(tmp_path: Path) -> None:
    base, target = model(), step(model())
    folder = foreign(tmp_path / "v", base, target)
    with pytest.raises(WrongBaseError, match="000006"):
        list(read_index_delta(folder, base, base_version="5"))
    with pytest.raises(WrongBaseError, match=r"layers\.0\.norm"):
        list(read_index_delta(folder, {k: v for k, v in base.items() if k != "layers.0.norm"}))
    with pytest.raises(WrongBaseError, match="after the change"):
        list(read_index_delta(folder, target))  # an XOR applied twice would revert


def test_stitch_53_a_map_that_is_missing_is_not_an_empty_change(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "v", model(), step(model()))
    index = json.loads((folder / INDEX).read_text())
    for broken in ({"metadata": index["metadata"]}, {"weight_map": {}}, [], {**index, "weight_map": None}):
        (folder / INDEX).write_text(json.dumps(broken))
        with pytest.raises(CorruptError):
            read_index(folder)
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": {}}))
    assert list(read_index_delta(folder, model())) == []


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", 3, "a\\b.safetensors"]
)
def test_modelexpress_716_a_shard_name_is_no_path(shard: object, tmp_path: Path) -> None:
    folder = foreign(tmp_path / "v", model(), step(model()))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["embed.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(LayoutError, match="same folder"):
        list(read_index_delta(folder, model()))


@pytest.mark.parametrize(
    "metadata",
    [
        {"delta_encoding": "sum"},
        {"compression_format": "gzip"},
        {"checksum_format": "crc32"},
        {"version": None},
        {"base_version": True},
        {"base_version": ""},
    ],
)
def test_unknown_choices_are_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    folder = foreign(tmp_path / "v", model(), step(model()))
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= metadata
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(RefitError, match=next(iter(metadata))):
        read_index(folder)


def test_every_truncation_and_every_flipped_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    base, target = model(), step(model())
    folder = foreign(tmp_path / "v", base, target)
    shard = folder / "model-00000-of-00001.safetensors"
    whole = shard.read_bytes()
    for cut in range(0, len(whole), 3):
        shard.write_bytes(whole[:cut])
        with pytest.raises(RefitError):
            list(read_index_delta(folder, base))
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x41
        shard.write_bytes(damaged)
        try:
            changes = dict(read_index_delta(folder, base))
        except RefitError:
            continue
        assert applied(base, changes) == as_bytes(target), "a flip in what does not matter, such as a frame's header"


def bomb(size: int) -> np.ndarray:
    return np.frombuffer(zstandard.compress(bytes(size), 1), np.uint8)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_bomb_is_not_unpacked(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = model()
    folder = foreign(tmp_path / "v", base, step(base), delta_encoding=encoding)
    shard = folder / "model-00000-of-00001.safetensors"
    with safetensors.safe_open(shard, "np") as file:
        sums = file.metadata()
    shard.write_bytes(
        safetensors.numpy.save({n: bomb(2**28) for n in ("embed.weight", "layers.0.norm")}, metadata=sums)
    )
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(CorruptError, match="more than"):
        list(read_index_delta(folder, base))
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x01\0\0", np.uint32(1).tobytes() + np.uint32(1024).tobytes() + b"x",
     np.array([2, 5, 5], "<u4").tobytes() + b"ab", np.array([2, 9, 5], "<u4").tobytes() + b"ab",
     np.uint32(2**32 - 1).tobytes()],
)  # fmt: skip
def test_positions_that_lie_are_refused(raw: bytes, tmp_path: Path) -> None:
    base = model()
    folder = foreign(tmp_path / "v", base, step(base), delta_encoding="overwrite")
    shard = folder / "model-00000-of-00001.safetensors"
    with safetensors.safe_open(shard, "np") as file:
        sums = file.metadata()
    stream = np.frombuffer(zstandard.compress(raw, 1), np.uint8)
    shard.write_bytes(safetensors.numpy.save(dict.fromkeys(("embed.weight", "layers.0.norm"), stream), metadata=sums))
    with pytest.raises(CorruptError):
        list(read_index_delta(folder, base))


def arc(path: Path, base: Arrays, target: Arrays, compress: Any = zstandard.compress) -> Path:
    streams = {
        n: np.frombuffer(compress(bytes(a ^ b for a, b in zip(base[n].tobytes(), target[n].tobytes()))), np.uint8)
        for n in base
    }
    sums = {n: str(zlib.adler32(target[n].tobytes())) for n in base}
    path.write_bytes(safetensors.numpy.save(streams, metadata=sums))
    return path


@pytest.mark.parametrize(("form", "compress"), [("arc_v2", zstandard.compress), ("arc_v1", zlib.compress)])
def test_arc_is_read(form: str, compress: Any, tmp_path: Path) -> None:
    base, target = model(), step(model())
    path = arc(tmp_path / "d.safetensors", base, target, compress)
    changes = dict(read_arc(path, base, compression_format=form))
    assert applied(base, changes) == as_bytes(target)
    with pytest.raises(WrongBaseError, match="Adler"):
        list(read_arc(path, target, compression_format=form))
    with pytest.raises(WrongBaseError, match="scalar"):
        list(read_arc(path, {n: a for n, a in base.items() if n != "scalar"}, compression_format=form))
    with pytest.raises(CorruptError):
        list(read_arc(path, base, compression_format="arc_v1" if form == "arc_v2" else "arc_v2"))


class Bang:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was read",))


def test_fireworks_arc_v3_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    base = model()
    path = arc(tmp_path / "d.safetensors", base, step(base))
    with pytest.raises(LayoutError, match=r"arc_v3.*pickle"):
        list(read_arc(path, base, compression_format="arc_v3"))
    for payload in (b"ARC3_ENVELOPE\0" + pickle.dumps(Bang()), *(pickle.dumps(Bang(), p) for p in range(2, 6))):
        streams = {n: np.frombuffer(payload, np.uint8) for n in base}
        path.write_bytes(safetensors.numpy.save(streams, metadata=dict.fromkeys(base, "1")))
        with pytest.raises(LayoutError, match="pickle"):
            list(read_arc(path, base))
        folder = foreign(tmp_path / "v", base, step(base))
        shard = folder / "model-00000-of-00001.safetensors"
        shard.write_bytes(safetensors.numpy.save(streams, metadata=dict.fromkeys(base, "1")))
        with pytest.raises(LayoutError, match="pickle"):
            list(read_index_delta(folder, base))
        shutil.rmtree(folder)


def test_arc_v2_of_the_real_package_is_read(tmp_path: Path) -> None:
    package = pytest.importorskip("fireworks_delta_compression")
    torch = pytest.importorskip("torch")
    base, target = model(), step(model())
    tensors = [{n: torch.from_numpy(a.copy()) for n, a in arrays.items()} for arrays in (base, target)]
    package.compression.delta_compress_dicts_to_file(
        src=tensors[0], dst=tensors[1], diff_file=str(tmp_path / "d.safetensors"), compression_format="arc_v2"
    )
    assert applied(base, dict(read_arc(tmp_path / "d.safetensors", base))) == as_bytes(target)


def test_modelexpress_reads_what_we_write(tmp_path: Path) -> None:
    pytest.importorskip("modelexpress_rl")
    from modelexpress_rl.inference import receiver

    base, target = model(), step(model())
    write_index_delta(tmp_path / "v", base, target, version="b", base_version="a")
    data = (tmp_path / "v" / INDEX).read_bytes()
    version = type("V", (), {"version_id": "b", "base_version_id": "a"})()
    metadata, weight_map = receiver._parse_index_manifest(data, is_delta=True, version=version)
    assert metadata["checksum_format"] == "adler32"
    assert sorted(weight_map) == ["embed.weight", "layers.0.norm"]
