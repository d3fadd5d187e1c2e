"""Writing model folders that transformers and others load: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from halfbyte.errors import CheckpointError, ShapeError
from halfbyte.models.architecture import Architecture, parameter_shapes
from halfbyte.models.checkpoint import check_finite
from halfbyte.models.layout import ParameterLayout
from halfbyte.models.safetensors_io import write_safetensors

__all__ = [
    "TOKENIZER_FILES",
    "copy_tokenizer",
    "refuse_to_clobber",
    "replaced_folder",
    "save_checkpoint",
    "write_json",
    "write_weights",
]

#: Files that travel with the weights, where they exist.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def save_checkpoint(
    folder: str | os.PathLike[str],
    architecture: Architecture,
    tensors: Mapping[str, torch.Tensor],
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> Path:
    """Write a model folder; it appears under its name only when complete and on disk.

    Everything is written to a hidden folder beside it, synced, and renamed. With ``overwrite`` the old folder is
    renamed away first and deleted last, so at every moment one complete folder exists under one of the two names.

    Arguments:
        folder: to create. It may exist if it is empty, or holds a checkpoint and ``overwrite`` is true.
        architecture: of the weights.
        tensors: by checkpoint name or by parameter name (experts stacked); written as they are, one by one.
        tokenizer_from: a folder whose tokenizer files and generation_config.json are copied.
        shard_bytes: above this many bytes of weights the files are split, each at most this large.
        overwrite: replace an existing checkpoint.
    Returns:
        The folder.
    Raises:
        CheckpointError: the folder is in the way, a tensor is missing or unexpected, or there is no tokenizer to copy.
        ShapeError: a tensor has the wrong shape.
        NumericsError: a weight is NaN or infinite.
    """
    target = Path(folder)
    refuse_to_clobber(target, overwrite)
    chosen = _in_checkpoint_names(architecture, tensors)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in chosen.values()))
    with replaced_folder(target, overwrite=overwrite) as work:
        write_weights(work, chosen, shard_bytes)
        write_json(work / "config.json", architecture.to_hf(dtype=str(dtype).removeprefix("torch.")))
        if tokenizer_from is not None:
            copy_tokenizer(Path(tokenizer_from), work)
    return target


@contextmanager
def replaced_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden folder to write to, which takes the place of ``target`` when the block ends well; see :func:`save_checkpoint`.

    Raises:
        CheckpointError: the folder is in the way.
    """
    refuse_to_clobber(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        _sync(work)
        _swap(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _in_checkpoint_names(architecture: Architecture, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views by checkpoint name, checked for names, shapes and finite values."""
    layout, shapes = ParameterLayout(architecture), parameter_shapes(architecture)
    chosen: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for name, location in layout.locations.items():
        source = name if name in tensors else location.parameter
        if source not in tensors:
            raise CheckpointError(f"cannot save: tensor {name!r} is missing")
        used.add(source)
        view = tensors[name].detach() if name in tensors else layout.view(tensors, name)
        if tuple(view.shape) != shapes[name]:
            raise ShapeError(f"cannot save: tensor {name!r} has shape {tuple(view.shape)}", expected=str(shapes[name]))
        check_finite(view, name)
        chosen[name] = view
    if unexpected := sorted(set(tensors) - used):
        raise CheckpointError(
            f"cannot save: {len(unexpected)} tensors do not belong to this {architecture.family} model: "
            + ", ".join(unexpected[:5]),
            fix="a tied model has no lm_head.weight" if "lm_head.weight" in unexpected else "",
        )
    return chosen


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], shard_bytes: int) -> None:
    """model.safetensors, or shards of at most ``shard_bytes`` each with their index."""
    metadata = {"format": "pt"}
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", tensors, metadata)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, metadata)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(_n_bytes(tensor) for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: dict[str, torch.Tensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """In order, as many tensors as fit; a tensor larger than a shard gets its own."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + _n_bytes(tensor) > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += _n_bytes(tensor)
    yield shard


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of :data:`TOKENIZER_FILES` that exist.

    Raises:
        CheckpointError: there is no tokenizer.json.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if "tokenizer.json" not in found:
        raise CheckpointError("there is no tokenizer.json to copy", where=str(source), expected="a model folder")
    for name in found:
        shutil.copyfile(source / name, folder / name)


def refuse_to_clobber(target: Path, overwrite: bool) -> None:
    """Raises:
    CheckpointError: a file, or a folder that is not empty (and not a checkpoint, with ``overwrite``).
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError("a file is in the way of the model folder", where=str(target))
    contents = {path.name for path in target.iterdir()}
    if contents and not (overwrite and "config.json" in contents):
        raise CheckpointError(
            "the folder is not empty" + (" and holds no checkpoint" if overwrite else ""),
            where=str(target),
            fix="choose another folder" + ("" if overwrite else ", or ask to overwrite a checkpoint"),
        )


def _swap(work: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    replaces = target.exists() and any(target.iterdir())
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    elif target.exists():
        target.rmdir()
    try:
        os.rename(work, target)
    except OSError:
        if replaces:
            os.rename(old, target)
        raise
    _sync_folder(target.parent)
    if replaces:
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
