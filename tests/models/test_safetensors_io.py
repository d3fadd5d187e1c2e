"""Our reader and writer against the safetensors library, and against damaged and hostile files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.errors import CheckpointError
from halfbyte.models import safetensors_io
from halfbyte.models.safetensors_io import DTYPE_NAMES, SafetensorsFile, write_safetensors

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else b""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=9).filter(lambda n: n != "__metadata__"), unique=True)):
        dtype = draw(st.sampled_from(list(DTYPE_NAMES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = int(torch.tensor(shape, dtype=torch.int64).prod()) if shape else 1
        if dtype == torch.bool:
            raw = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
        else:
            size = count * dtype.itemsize
            raw = torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size)) + b"\0"), dtype=torch.uint8)
            raw = raw[:size].clone().view(dtype)
        tensors[name] = raw.reshape(shape)
    return tensors


@FIXTURES
@given(tables())
def test_the_library_reads_what_we_write(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "ours.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        assert all(same(file.get_tensor(name), tensors[name]) for name in tensors)


@FIXTURES
@given(tables())
def test_we_read_what_the_library_writes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(safetensors.torch.save(tensors, {"note": "x"}))
    file = SafetensorsFile(path)
    assert file.metadata == {"note": "x"}
    assert set(file) == set(tensors)
    assert len(file) == len(tensors)
    assert all(same(file[name], tensors[name]) for name in tensors)


def test_strided_and_lazy_tensors_are_written_in_order(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    write_safetensors(tmp_path / "a", {"b": base.t(), "a": base[:, ::2], "c": torch.tensor(7)})
    file = SafetensorsFile(tmp_path / "a")
    assert list(file) == ["b", "a", "c"]
    assert torch.equal(file["b"], base.t())
    assert torch.equal(file["a"], base[:, ::2])
    write_safetensors(tmp_path / "b", file)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_writing_to_a_view_never_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_safetensors(path, {"x": torch.zeros(5)})
    before = path.read_bytes()
    view = SafetensorsFile(path)["x"]  # the mapping object is gone; the view keeps the map alive
    view.add_(1)
    assert view.tolist() == [1.0] * 5
    assert path.read_bytes() == before


def test_unaligned_data_is_read_right(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"\x07" + struct.pack("<2f", 1.5, -2.0))
    file = SafetensorsFile(tmp_path / "a")
    assert file["b"].tolist() == [1.5, -2.0]
    assert file["a"].tolist() == [7]


def raw_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (raw_file({}, length=1 << 60), "claims"),
        (raw_file(b"[]"), "not an object"),
        (raw_file(b"{"), "JSON"),
        (raw_file(b"\xff{}"), "not an object"),
        (raw_file(b"{" + b'"a":[' * 100_000), "JSON"),
        (raw_file(b'{"a":1,"a":2}'), "twice"),
        (raw_file({"a": 3}), "not an object"),
        (raw_file({"a": entry(0, 4)}, b"12345"), "too long"),
        (raw_file({"a": entry(0, 4)}, b"123"), "cut short"),
        (raw_file({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "overlaps"),
        (raw_file({"a": entry(0, 4), "b": entry(5, 6)}, b"123456"), "hole"),
        (raw_file({"a": entry(1, 2)}, b"12"), "hole"),
        (raw_file({"a": entry(0, 4, [3])}, b"1234"), "needs 3 bytes"),
        (raw_file({"a": entry(0, 4, [1], "F64")}, b"1234"), "needs 8 bytes"),
        (raw_file({"a": entry(0, 0, [1 << 40, 1 << 40, 1 << 40], "F64")}), "needs"),
        (raw_file({"a": entry(0, 4, [-1, -4])}, b"1234"), "shape"),
        (raw_file({"a": entry(0, 4, [True, 4])}, b"1234"), "shape"),
        (raw_file({"a": entry(0, 4, [4.0])}, b"1234"), "shape"),
        (raw_file({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, b"1234"), "data_offsets"),
        (raw_file({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}, b"1234"), "data_offsets"),
        (raw_file({"a": {"dtype": "U8", "shape": [4]}}, b"1234"), "data_offsets"),
        (raw_file({"a": entry(0, 4, dtype="F4")}, b"1234"), "F4"),
        (raw_file({"a": entry(0, 4, dtype=["U8"])}, b"1234"), "dtype"),
        (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
    ],
)
def test_damaged_and_hostile_headers_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = safetensors.torch.save({"a": torch.arange(6.0), "b": torch.zeros(2, dtype=torch.bfloat16)})
    path = tmp_path / "cut"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
    path.write_bytes(whole)
    SafetensorsFile(path)


@FIXTURES
@given(st.data())
def test_a_changed_header_is_refused_or_read_as_the_library_reads_it(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(safetensors.torch.save({"a": torch.arange(6.0), "bc": torch.arange(5, dtype=torch.int8)}))
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzzed"
    path.write_bytes(content)
    try:
        ours = {name: (t.dtype, tuple(t.shape), bits(t)) for name, t in SafetensorsFile(path).items()}
    except CheckpointError:
        return
    theirs = {name: (t.dtype, tuple(t.shape), bits(t)) for name, t in safetensors.torch.load(bytes(content)).items()}
    assert ours == theirs


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file") as caught:
        SafetensorsFile(tmp_path / "absent.safetensors")
    assert "absent.safetensors" in str(caught.value)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_safetensors(path, {"x": torch.ones(3)})
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(safetensors_io.os, "fsync", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_safetensors(path, {"x": torch.zeros(300)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_dtype_the_format_lacks_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        write_safetensors(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [[2] * 100_000, [0] * 100_000, [2**70, 0], [10**4000]])
def test_a_shape_beyond_all_tensors_is_refused(tmp_path: Path, shape: list[int]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="tensor 'a'") as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 1000
