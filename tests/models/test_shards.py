"""Sharded tensor files: any rows by anybody, damage found, and the same files as torch.distributed.checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from halfbyte.errors import CheckpointError
from halfbyte.models.safetensors_io import write_safetensors
from halfbyte.models.shards import open_tensors, shard_path, write_shard


def cut(rows: int, size: int) -> list[tuple[int, int]]:
    chunk = -(-rows // size)
    return [(min(rows, r * chunk), min(rows, (r + 1) * chunk)) for r in range(size)]


def write(folder: Path, tensors: dict[str, torch.Tensor], size: int) -> None:
    for rank in range(size):
        own, first = {}, {}
        for name, tensor in tensors.items():
            begin, end = cut(len(tensor), size)[rank]
            if begin < end:
                own[name], first[name] = tensor[begin:end], begin
        if own:
            write_shard(folder, rank, own, first)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.integers(1, 4),
    begin=st.integers(0, 9),
    count=st.integers(0, 9),
)
def test_rows_of_any_number_of_shards(
    rows: list[int], size: int, begin: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"w{i}": torch.randn(n, *([3] * (i % 2))) for i, n in enumerate(rows)}
    write(folder / "masters", tensors, size)
    found = open_tensors(folder, "masters")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.shape(name) == tuple(tensor.shape)
        assert torch.equal(found[name], tensor)
        assert torch.equal(found.rows(name, begin, begin + count), tensor[begin : begin + count])


def test_a_whole_file_is_read_alike(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5, 2), "step": torch.ones(1)}
    write_safetensors(tmp_path / "optimiser.safetensors", tensors)
    found = open_tensors(tmp_path, "optimiser")
    assert torch.equal(found.rows("w", 1, 4), tensors["w"][1:4])
    with pytest.raises(CheckpointError, match="no tensors"):
        open_tensors(tmp_path, "masters")


def test_torch_distributed_checkpoint_reads_ours(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(7, 4), "norm": torch.randn(3), "step": torch.ones(1)}
    write(tmp_path / "masters", tensors, 3)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "masters")), no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert not list(tmp_path.rglob("*metadata*")), "nothing is pickled"


def test_we_read_what_torch_distributed_checkpoint_writes(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(7, 4), "norm": torch.randn(3)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "masters"), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    found = open_tensors(tmp_path, "masters")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_missing_shard_is_found(tmp_path: Path) -> None:
    write(tmp_path / "masters", {"w": torch.randn(9, 2)}, 3)
    shard_path(tmp_path / "masters", 1).unlink()
    with pytest.raises(CheckpointError, match="'w' leave a hole"):
        open_tensors(tmp_path, "masters")


@pytest.mark.parametrize(
    "info",
    ["", "[]", "{}", '{"w": {}}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [0, 1]}}',
     '{"w": {"saved_offsets": [-1, 0]}}', '{"w": {"saved_offsets": [true, 0]}}', "[" * 100_000],
)  # fmt: skip
def test_hostile_offsets_are_refused(info: str, tmp_path: Path) -> None:
    (tmp_path / "masters").mkdir()
    path = shard_path(tmp_path / "masters", 0)
    write_safetensors(path, {"w": torch.zeros(2, 2)}, {"DCP_SHARDING_INFO": info})
    with pytest.raises(CheckpointError, match="DCP_SHARDING_INFO"):
        open_tensors(tmp_path, "masters")


def test_shards_of_other_shapes_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "masters", 0, {"w": torch.zeros(2, 2)}, {"w": 0})
    write_shard(tmp_path / "masters", 1, {"w": torch.zeros(2, 3)}, {"w": 2})
    with pytest.raises(CheckpointError, match="differ in shape"):
        open_tensors(tmp_path, "masters")


def test_metadata_is_what_the_format_says(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, {"w": torch.zeros(2, 2), "step": torch.ones(1)}, {"w": 4})
    from safetensors import safe_open

    with safe_open(shard_path(tmp_path, 1), framework="pt") as file:
        table = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    assert table == {"w": {"saved_offsets": [4, 0]}, "step": {"saved_offsets": [0]}}
