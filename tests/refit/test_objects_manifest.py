"""Objects, manifests and the state hash: what is written is read back, anything else is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.refit.arrays import TensorInfo, flat_bytes, info_of
from halfbyte.refit.codec import TensorDelta, block_hashes, encode
from halfbyte.refit.errors import RefitError
from halfbyte.refit.manifest import Manifest, ObjectRef, Signer, TensorChange, canonical
from halfbyte.refit.objects import content_hash, read_object, write_object
from halfbyte.refit.state import StateHash

A, B, C = "a" * 64, "b" * 64, "c" * 64
GOOD = Manifest(
    run="run-1",
    epoch=2,
    version=7,
    kind="delta",
    schema=A,
    state=B,
    block=1 << 20,
    parent=6,
    parent_digest=C,
    objects=(ObjectRef(A, 100), ObjectRef(B, 0)),
    tensors=(
        TensorChange(TensorInfo("embed.weight", "BF16", (4, 4)), "patch", 1, 3),
        TensorChange(TensorInfo("gone", "F32", ()), "remove", None),
        TensorChange(TensorInfo("layers.0/q é", "F4", (2, 8)), "replace", 0, 16),
    ),
    aliases={"lm_head.weight": "embed.weight"},
    statistics={"changed": 19, "density": 0.25},
    created=1.5e9,
)
SIGNER = Signer(b"0123456789abcdef")


def test_objects_are_ordinary_safetensors_files_and_depend_on_content_only() -> None:
    from safetensors.numpy import load

    entries = {"b": b"xyz", "a/ü": np.arange(5, dtype=np.uint8), "empty": b""}
    data = write_object(entries, {"k": "v"})
    assert data == write_object(dict(reversed(entries.items())), {"k": "v"})
    assert {name: array.tobytes() for name, array in load(data).items()} == {n: bytes(v) for n, v in entries.items()}
    found = read_object(data, digest=content_hash(data))
    assert {name: array.tobytes() for name, array in found.items()} == {n: bytes(v) for n, v in entries.items()}
    assert not found["b"].flags.writeable
    with pytest.raises(RefitError, match="content hash"):
        read_object(data[:-1] + b"!", digest=content_hash(data))
    with pytest.raises(RefitError):
        write_object({"__metadata__": b""})


def test_an_object_cut_anywhere_or_changed_in_its_header_is_refused_or_the_same() -> None:
    entries = {"a": b"xyz", "b": b"12345"}
    data = write_object(entries)
    for length in range(len(data)):
        with pytest.raises(RefitError):
            read_object(data[:length])
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for at in range(header):
        for change in (1, 2, 0x80, 0xFF):
            bad = bytearray(data)
            bad[at] ^= change
            try:
                found = read_object(bytes(bad))
            except RefitError:
                continue
            assert [v.tobytes() for v in found.values()] == [b"xyz", b"12345"], (
                "only names may differ: the hash names them"
            )


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}}',
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}',
        b'{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":0}}',
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[-4],"data_offsets":[4,0]}}',
        b'{"__metadata__":{"k":1},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_object_headers_that_lie(header: bytes) -> None:
    with pytest.raises(RefitError):
        read_object(struct.pack("<Q", len(header)) + header + b"0123")
    with pytest.raises(RefitError):
        read_object(struct.pack("<Q", 2**63) + header)


def test_a_manifest_is_read_back_and_has_one_form() -> None:
    for signer in (None, SIGNER):
        data = GOOD.to_bytes(signer)
        assert Manifest.from_bytes(data, digest=GOOD.digest(), signer=signer) == GOOD
        assert Manifest.from_bytes(data).digest() == GOOD.digest()
        loose = json.dumps(json.loads(data)).encode()
        for other in (loose, data + b"\n", b" " + data, data.replace(b"\\u00e9", "é".encode())):
            with pytest.raises(RefitError, match="canonical"):
                Manifest.from_bytes(other)


def test_signatures() -> None:
    data = GOOD.to_bytes(SIGNER)
    with pytest.raises(RefitError, match="has no signature"):
        Manifest.from_bytes(GOOD.to_bytes(), signer=SIGNER)
    with pytest.raises(RefitError, match="is wrong"):
        Manifest.from_bytes(data, signer=Signer(b"another key of 16+"))
    table = json.loads(data)
    for change in ({"version": 8, "parent": 7}, {"state": A}, {"signature": 1}, {"signature": "é"}, {"signature": ""}):
        with pytest.raises(RefitError, match="signature"):
            Manifest.from_bytes(canonical(table | change), signer=SIGNER)
    assert "0123" not in repr(SIGNER)
    with pytest.raises(RefitError, match="16"):
        Signer(b"short")


def test_every_byte_of_a_manifest_changed_or_cut() -> None:
    data = GOOD.to_bytes(SIGNER)
    for at in range(len(data)):
        for change in (1, 0x10, 0x80):
            bad = bytearray(data)
            bad[at] ^= change
            with pytest.raises(RefitError):
                Manifest.from_bytes(bytes(bad), signer=SIGNER)
        with pytest.raises(RefitError):
            Manifest.from_bytes(data[:at])


@pytest.mark.parametrize(
    "change",
    [
        {"format": "halfbyte-refit-2"},
        {"version": True},
        {"version": 7.0},
        {"version": -1},
        {"version": 2**60},
        {"run": "../etc"},
        {"run": ""},
        {"run": 3},
        {"kind": "full"},
        {"kind": "unknown"},
        {"kind": "noop"},
        {"parent": 5},
        {"parent": 7},
        {"parent": None},
        {"parent_digest": None},
        {"parent_digest": "A" * 64},
        {"schema": "a" * 63},
        {"block": 3},
        {"block": 1 << 21},
        {"objects": [[A, 100]]},
        {"objects": [[A, 100], [A, 0]]},
        {"objects": [[A, 100], [B, 0], [C, 1]]},
        {"objects": [[A, 100], [B, -1]]},
        {"objects": [["../../x", 100], [B, 0]]},
        {"objects": {}},
        {"tensors": []},
        {"tensors": None},
        {"aliases": {"embed.weight": "gone"}},
        {"aliases": {"x": 1}},
        {"statistics": {"x": "y"}},
        {"statistics": {"x": True}},
        {"created": -1.0},
        {"created": 5},
        {"extra": 1},
    ],
)
def test_manifests_that_are_not_allowed(change: dict[str, Any]) -> None:
    """stitch #53: a delta that lists no names is an error, not "nothing changed"."""
    table = json.loads(GOOD.to_bytes())
    with pytest.raises(RefitError):
        Manifest.from_bytes(canonical(table | change))


@pytest.mark.parametrize("key", sorted(json.loads(GOOD.to_bytes())))
def test_a_missing_key_is_an_error(key: str) -> None:
    table = json.loads(GOOD.to_bytes())
    del table[key]
    with pytest.raises(RefitError):
        Manifest.from_bytes(canonical(table))


ROW = ["embed.weight", "BF16", [4, 4], "patch", 1, 3]


@pytest.mark.parametrize(
    "row",
    [
        ["", *ROW[1:]],
        ["a\nb", *ROW[1:]],
        ["a\0", *ROW[1:]],
        ["__metadata__", *ROW[1:]],
        ["e" * 1025, *ROW[1:]],
        [3, *ROW[1:]],
        [ROW[0], "F3", *ROW[2:]],
        [*ROW[:2], [4, -4], *ROW[3:]],
        [*ROW[:2], [2**62, 2**62], *ROW[3:]],
        [*ROW[:2], [1] * 65, *ROW[3:]],
        [*ROW[:2], "44", *ROW[3:]],
        [*ROW[:3], "delete", *ROW[4:]],
        [*ROW[:3], ["patch"], *ROW[4:]],
        [*ROW[:4], 2, 3],
        [*ROW[:4], True, 3],
        [*ROW[:4], None, 3],
        [*ROW[:4], 1, 17],
        ROW[:5],
        "row",
    ],
)
def test_tensor_rows_that_are_not_allowed(row: Any) -> None:
    table = json.loads(GOOD.to_bytes())
    table["tensors"][0] = row
    table["aliases"] = {}
    with pytest.raises(RefitError):
        Manifest.from_bytes(canonical(table))


def test_modelexpress_716_names_never_become_paths() -> None:
    """A name with dots and slashes is a name: objects are found by their hash, which is checked to be one."""
    odd = replace(
        GOOD,
        tensors=(TensorChange(TensorInfo("../../etc/passwd", "U8", (4,)), "patch", 0, 1),),
        objects=(ObjectRef(A, 1),),
        aliases={},
    )
    assert Manifest.from_bytes(odd.to_bytes()) == odd


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(json.loads(GOOD.to_bytes()))), json_values)
def test_any_json_in_any_place_is_a_manifest_or_a_refit_error(key: str, value: Any) -> None:
    table = json.loads(GOOD.to_bytes()) | {key: value}
    try:
        manifest = Manifest.from_bytes(canonical(table))
    except RefitError:
        return
    assert manifest.to_bytes() == canonical(table)


def arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.integers(0, 1 << 16, (3, 100 + i), dtype=np.uint16) for i in range(20)}


def test_the_state_hash_follows_deltas_and_finds_what_differs() -> None:
    old, new = arrays(0), arrays(0)
    new["t3"][1, 5] ^= 1
    new["t7"][:] = 0
    state, truth = StateHash.of(old, 64), StateHash.of(new, 64)
    before = state.copy()
    assert state.digest() == StateHash.of(dict(reversed(old.items())), 64).digest()
    assert state.differences(truth) == {"t3": (1,), "t7": tuple(range(6))[: len(truth.hashes("t7"))]}
    for name in ("t3", "t7"):
        state.patch(name, encode("U16", flat_bytes(old[name]), flat_bytes(new[name]), block=64))
    assert state.digest() == truth.digest() != before.digest()
    assert before.digest() == StateHash.of(old, 64).digest(), "a copy stays what it was"
    state.remove("t0")
    assert state.digest() != truth.digest()
    state.put(info_of("t0", new["t0"]), block_hashes("U16", flat_bytes(new["t0"]), 64))
    assert (state.digest(), state.schema()) == (truth.digest(), truth.schema())
    assert state.differences(truth) == {}


def test_the_state_hash_tells_names_dtypes_and_shapes_apart() -> None:
    x = np.arange(24, dtype=np.uint16)
    variants: list[dict[str, Any]] = [
        {"a": x},
        {"b": x},
        {"a": x.view(np.int16)},
        {"a": x.reshape(4, 6)},
        {"a": x.reshape(6, 4)},
        {},
        {"a": x, "b": x},
    ]
    assert len({StateHash.of(v, 64).digest() for v in variants}) == len(variants)
    assert len({StateHash.of(v, 64).schema() for v in variants}) == len(variants)


def test_a_patch_from_another_version_is_refused() -> None:
    old, new = arrays(0), arrays(1)
    state = StateHash.of(old, 64)
    back = encode("U16", flat_bytes(new["t3"]), flat_bytes(old["t3"]), block=64)
    with pytest.raises(RefitError, match="another version"):
        state.patch("t3", back)
    with pytest.raises(RefitError, match="does not have"):
        state.patch("t99", back)
    with pytest.raises(RefitError, match="blocks of 128"):
        state.patch("t3", encode("U16", flat_bytes(old["t3"]), flat_bytes(new["t3"]), block=128))
    with pytest.raises(RefitError, match="block hashes"):
        state.put(info_of("t3", old["t3"]), np.zeros(1, np.uint64))


def test_a_delta_survives_its_object() -> None:
    old, new = arrays(0)["t3"], arrays(1)["t3"]
    delta = encode("U16", flat_bytes(old), flat_bytes(new), block=64)
    entries = read_object(write_object({"t3": delta.to_bytes()}))
    assert TensorDelta.from_bytes(entries["t3"]).to_bytes() == delta.to_bytes()
