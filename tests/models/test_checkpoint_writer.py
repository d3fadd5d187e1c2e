"""Folders we write: transformers loads them to the same logits, and they appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.errors import CheckpointError, NumericsError, ShapeError
from halfbyte.models import checkpoint_writer, load_checkpoint, save_checkpoint
from halfbyte.models.safetensors_io import SafetensorsFile


def reload_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None] * 7 % 96).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000])
def test_transformers_loads_it_to_identical_logits(oracle: Any, tmp_path: Path, shard_bytes: int) -> None:
    checkpoint = load_checkpoint(oracle.folder)
    folder = save_checkpoint(tmp_path / "new", checkpoint.architecture, checkpoint.tensors, shard_bytes=shard_bytes)
    assert (folder / "model.safetensors").exists() == (shard_bytes > 20_000)
    assert torch.equal(reload_logits(folder), oracle.logits())


def test_stacked_parameters_write_the_same_bytes(oracle: Any, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(oracle.folder)
    a = checkpoint.architecture
    one = save_checkpoint(tmp_path / "one", a, checkpoint.tensors)
    two = save_checkpoint(tmp_path / "two", a, dict(oracle.model.named_parameters()))
    for name in ("model.safetensors", "config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_shards_fit_and_are_indexed(moe: Any, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(moe.folder)
    folder = save_checkpoint(tmp_path / "new", checkpoint.architecture, checkpoint.tensors, shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = {name: t.numel() * 4 for name, t in checkpoint.tensors.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"].keys() == sizes.keys()
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for shard in shards:
        assert sum(sizes[name] for name in SafetensorsFile(folder / shard)) <= 20_000


@pytest.mark.parametrize(("dtype", "stated"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_dtype_is_stated_and_kept(dense: Any, tmp_path: Path, dtype: torch.dtype, stated: str) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = load_checkpoint(dense.folder)
    weights = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    folder = save_checkpoint(tmp_path / "new", checkpoint.architecture, weights)
    assert json.loads((folder / "config.json").read_text())["dtype"] == stated
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == dtype


def test_reading_back_gives_the_same_architecture(oracle: Any, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(oracle.folder)
    folder = save_checkpoint(tmp_path / "deep" / "new", checkpoint.architecture, checkpoint.tensors)
    again = load_checkpoint(folder)
    assert again.architecture == checkpoint.architecture
    assert again.eos_ids == checkpoint.eos_ids
    assert again.notes == ()


def test_tokenizer_files_are_copied(dense: Any, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(dense.folder)
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        save_checkpoint(tmp_path / "a", checkpoint.architecture, checkpoint.tensors, tokenizer_from=source)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "secret.txt"):
        (source / name).write_text(name)
    folder = save_checkpoint(tmp_path / "a", checkpoint.architecture, checkpoint.tensors, tokenizer_from=source)
    assert (folder / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert not (folder / "secret.txt").exists()
    assert load_checkpoint(folder).tokenizer_path == folder
    assert load_checkpoint(dense.folder).tokenizer_path is None


def test_an_existing_folder_is_kept_unless_told(dense: Any, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(dense.folder)
    arguments = (checkpoint.architecture, checkpoint.tensors)
    folder = tmp_path / "model"
    folder.mkdir()
    save_checkpoint(folder, *arguments)  # an empty folder is not in the way
    with pytest.raises(CheckpointError, match="not empty"):
        save_checkpoint(folder, *arguments)
    (folder / "old").write_text("")
    save_checkpoint(folder, *arguments, overwrite=True)
    assert not (folder / "old").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        save_checkpoint(tmp_path / "home", *arguments, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file is in the way"):
        save_checkpoint(tmp_path / "file", *arguments, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "home", "model"]


@pytest.mark.parametrize("step", ["write_json", "_sync", "_swap"])
def test_a_failed_save_leaves_the_old_folder(
    dense: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    checkpoint = load_checkpoint(dense.folder)
    folder = save_checkpoint(tmp_path / "model", checkpoint.architecture, checkpoint.tensors)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*arguments: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(checkpoint_writer, step, fail)
    changed = {name: tensor + 1 for name, tensor in checkpoint.tensors.items()}
    with pytest.raises(OSError, match="disk gone"):
        save_checkpoint(folder, checkpoint.architecture, changed, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["model"]


def test_a_failed_rename_puts_the_old_folder_back(dense: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(dense.folder)
    folder = save_checkpoint(tmp_path / "model", checkpoint.architecture, checkpoint.tensors)
    rename = os.rename

    def fail_on_new(source: Any, target: Any) -> None:
        if str(source).endswith(".tmp"):
            raise OSError("disk gone")
        rename(source, target)

    monkeypatch.setattr(checkpoint_writer.os, "rename", fail_on_new)
    with pytest.raises(OSError, match="disk gone"):
        save_checkpoint(folder, checkpoint.architecture, checkpoint.tensors, overwrite=True)
    assert os.listdir(tmp_path) == ["model"]
    load_checkpoint(folder)


def test_weights_we_would_not_load_are_not_written(moe: Any, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(moe.folder)
    a, weights = checkpoint.architecture, dict(checkpoint.tensors)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    nan = weights[name].clone()
    nan[0, 0] = float("nan")
    cases: list[tuple[type[Exception], dict[str, torch.Tensor], str]] = [
        (NumericsError, {**weights, name: nan}, name),
        (ShapeError, {**weights, name: nan[1:]}, name),
        (CheckpointError, {n: t for n, t in weights.items() if n != name}, name),
        (CheckpointError, {**weights, "stray": nan}, "stray"),
    ]
    for kind, tensors, words in cases:
        with pytest.raises(kind, match=words.replace(".", r"\.")):
            save_checkpoint(tmp_path / "new", a, tensors)
    assert list(tmp_path.iterdir()) == []
