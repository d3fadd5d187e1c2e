"""Model folders: config.json, safetensors in one file or in shards, tokenizer files; read lazily, written atomically.

A folder is checked completely before anything uses it: every tensor there, none too many, every shape right, every
value finite. Pickled weights are never read.

Tied heads. Whether ``lm_head`` shares the embedding is decided once, here, by the ``ties`` argument:

    tie_word_embeddings   lm_head in the files        "auto" (default)
    true                  absent, or bit-equal        tied
    true                  different                   error: the config and the files disagree
    false                 present                     separate
    false or missing      absent                      tied, with a note
    missing               present and bit-equal       tied, with a note

``"tied"`` ignores any ``lm_head``; ``"separate"`` demands one.

FP4 weights (:mod:`halfbyte.models.fp4`) appear twice: as values in ``tensors``, so that everything that reads a checkpoint
reads them, and as they are in ``codes``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from halfbyte.errors import CheckpointError, NumericsError
from halfbyte.formats import QuantTensor
from halfbyte.models.architecture import Architecture, parameter_shapes
from halfbyte.models.fp4 import CodedSource, Quantisation, StoredCodes, find_coded, read_quantisation
from halfbyte.models.fp4.quantisation import SPEC_FILE
from halfbyte.models.layout import ParameterLayout
from halfbyte.models.safetensors_io import Entry, SafetensorsFile

__all__ = ["Checkpoint", "LazyTensors", "check_finite", "load_checkpoint", "read_json"]

ExpertRows = Literal["concatenated", "interleaved"]
Ties = Literal["auto", "tied", "separate"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Buffers that old checkpoints hold and every implementation recomputes.
_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.self_attn\.(masked_)?bias")
#: Scales of an FP8 KV cache, which our engine does not have.
_KV_SCALES = re.compile(r".*\.self_attn\.(k_proj\.k|v_proj\.v|attn\.[kv]|[kv])_scale")
_SIDE_FILES = ("hf_quant_config.json", SPEC_FILE)


@dataclass(frozen=True)
class Checkpoint:
    """A checked model folder.

    Attributes:
        folder: where it lies.
        architecture: from config.json, with ties resolved.
        tensors: checkpoint name -> tensor, exactly the names of ``parameter_shapes(architecture)``, read on access.
        eos_ids: every end-of-sequence id of config.json and generation_config.json (TRL #7039: models have several).
        tokenizer_path: the folder, if it has a tokenizer.json, else None.
        notes: decisions a user may want to know of, such as a tie that the config did not state.
        codes: weight name -> codes, for the weights that the files hold in FP4; read and checked on access.
        quantisation: how those are stored; None for an ordinary checkpoint.
        input_scales: module name -> global scale of its input as a multiplier, where the files hold one.
    """

    folder: Path
    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    eos_ids: tuple[int, ...]
    tokenizer_path: Path | None
    notes: tuple[str, ...] = ()
    codes: Mapping[str, QuantTensor] = field(default_factory=dict)
    quantisation: Quantisation | None = None
    input_scales: Mapping[str, float] = field(default_factory=dict)

    def parameters(self, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Own, contiguous parameters with experts stacked (:meth:`ParameterLayout.from_checkpoint`)."""
        return ParameterLayout(self.architecture).from_checkpoint(self.tensors, dtype=dtype)


class _Readable(Protocol):
    """A tensor somewhere in the files."""

    @property
    def where(self) -> str: ...

    def read(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Source:
    """A tensor, or a part of a stacked one, in a file."""

    file: SafetensorsFile
    name: str
    expert: int | None = None
    rows: slice | None = None

    @property
    def where(self) -> str:
        return str(self.file.path)

    def read(self) -> torch.Tensor:
        tensor = self.file[self.name]
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor if self.rows is None else tensor[self.rows]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Checkpoint name -> tensor. Each access returns a view of the file's memory map (of codes: their values); keep none
    longer than needed."""

    def __init__(self, sources: Mapping[str, _Readable]) -> None:
        self._sources = dict(sources)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._sources[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    ties: Ties = "auto",
    expert_rows: ExpertRows = "concatenated",
    finite: bool = True,
) -> Checkpoint:
    """Open a Hugging Face model folder.

    Experts may be stored one by one or stacked ([E, 2I, H] and [E, H, I]); both appear one by one in ``tensors``.

    Arguments:
        folder: with config.json and model.safetensors or model.safetensors.index.json.
        ties: the policy for the head; see the module.
        expert_rows: order of the rows of stacked ``gate_up_proj``: all gate rows and then all up rows, or
            ``interleaved`` (gate, up, gate, up, ..., as in gpt-oss). Nothing in a file tells, so it is never guessed.
        finite: read every weight once and refuse NaN and infinity.
    Raises:
        CheckpointError: a missing, truncated or inconsistent file; an unsupported architecture or quantisation; tensors
            that are missing, unexpected, mis-shaped or of the wrong dtype; a tied head that is quantised (vLLM #45543).
        NumericsError: a weight that is NaN or infinite; an FP4 scale that is NaN or has the sign bit set. The message names
            the tensor.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(
            "there is no model folder here", where=str(root), expected="a folder with config.json and model.safetensors"
        )
    config = read_json(root / "config.json")
    legacy, record = (read_json(root / name) if (root / name).is_file() else None for name in _SIDE_FILES)
    quantisation = read_quantisation(config, legacy, record, str(root))
    plain = config if quantisation is None else {k: v for k, v in config.items() if k != "quantization_config"}
    architecture = Architecture.from_hf(plain, str(root / "config.json"))
    stored = _open_files(root)
    if quantisation is not None:
        _refuse_coded_tie(config, quantisation, stored, root)
    architecture, notes = _resolve_ties(architecture, config, stored, ties, root, quantisation)
    coded: dict[str, CodedSource] = {}
    if quantisation is not None:
        coded = find_coded(quantisation, parameter_shapes(architecture), stored, str(root))
        notes += quantisation.notes
    sources = _locate(architecture, stored, expert_rows, root, coded)
    tensors = LazyTensors(sources)
    if finite:
        for name, tensor in tensors.items():
            check_finite(tensor, name, where=sources[name].where)
    has_tokenizer = (root / "tokenizer.json").is_file()
    reciprocal = quantisation is not None and quantisation.style.convention == "reciprocal"
    inputs = {name.removesuffix(".weight"): source.input_multiplier(reciprocal) for name, source in coded.items()}
    return Checkpoint(
        root,
        architecture,
        tensors,
        _eos_ids(root, architecture),
        root if has_tokenizer else None,
        notes,
        StoredCodes(coded),
        quantisation,
        {name: scale for name, scale in inputs.items() if scale is not None},
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path.name}: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path))
    return value


def check_finite(tensor: torch.Tensor, name: str, *, where: str = "") -> None:
    """Refuse NaN and infinity. Good tensors cost one pass and no memory: the extremes show every bad value.

    Raises:
        NumericsError: with the tensor's name and how many values are bad.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(flat)):
        return
    step = 1 << 22  # slices, so that no mask of the whole tensor is ever held
    bad = sum(int((~flat[i : i + step].isfinite()).sum()) for i in range(0, flat.numel(), step))
    raise NumericsError(
        f"tensor {name!r} has {bad} NaN or infinite values of {flat.numel()}",
        where=where,
        expected="finite weights",
        fix="use an earlier checkpoint, or convert from FP32 with saturation",
    )


def _open_files(root: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open file that holds it."""
    single, index = root / "model.safetensors", root / "model.safetensors.index.json"
    if single.is_file():
        file = SafetensorsFile(single)
        return dict.fromkeys(file, file)
    if not index.is_file():
        pickled = any(root.glob("*.bin")) or any(root.glob("*.pt"))
        raise CheckpointError(
            "the folder holds pickled weights only, which are never read" if pickled else "the folder holds no weights",
            where=str(root),
            expected="model.safetensors, or model.safetensors.index.json with its shards",
            fix="save the model as safetensors" if pickled else "",
        )
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or any(not isinstance(shard, str) for shard in listed.values()):
        raise CheckpointError("the index has no usable weight_map", where=str(index))
    shards = sorted(set(listed.values()))
    for shard in shards:
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", shard) or shard.startswith(".."):
            raise CheckpointError(
                f"the index names {shard!r} as a shard",
                where=str(index),
                expected="a safetensors file of the same folder",
            )
    stored: dict[str, SafetensorsFile] = {}
    for shard in shards:
        if not (root / shard).is_file():
            raise CheckpointError(f"shard {shard!r} is missing", where=str(root), fix="download the folder again")
        file = SafetensorsFile(root / shard)
        claimed = {name for name, place in listed.items() if place == shard}
        for what, names in (("lacks", claimed - set(file)), ("holds, unlisted,", set(file) - claimed)):
            if names:
                raise CheckpointError(
                    f"the index and shard {shard!r} disagree: the shard {what} {_some(sorted(names))}",
                    where=str(index),
                    fix="download the folder again",
                )
        stored.update(dict.fromkeys(file, file))
    return stored


def _refuse_coded_tie(
    config: dict[str, Any], quantisation: Quantisation, stored: dict[str, SafetensorsFile], root: Path
) -> None:
    """A head that shares the embedding cannot have codes of its own (vLLM #45543)."""
    head = _HEAD.removesuffix(".weight")
    codes, scales = head + quantisation.style.codes, head + quantisation.style.scales
    if config.get("tie_word_embeddings") and codes in stored and scales in stored:
        raise CheckpointError(
            f"config.json ties the head to the embedding, but the files hold a quantised head ({codes})",
            where=str(root),
            expected="a tied head is left alone",
            fix="quantise the original model with halfbyte quantize",
        )


def _resolve_ties(
    architecture: Architecture,
    config: dict[str, Any],
    stored: dict[str, SafetensorsFile],
    ties: Ties,
    root: Path,
    quantisation: Quantisation | None,
) -> tuple[Architecture, tuple[str, ...]]:
    """Apply the policy of the module's table; drops a redundant ``lm_head`` from ``stored``."""
    if ties not in ("auto", "tied", "separate"):
        raise CheckpointError(f"ties is {ties!r}", expected="auto, tied or separate")
    stated = config.get("tie_word_embeddings")
    coded_head = quantisation is not None and _HEAD.removesuffix(".weight") + quantisation.style.scales in stored
    present = _HEAD in stored or coded_head
    notes: tuple[str, ...] = ()
    if ties == "separate":
        tied = False
    elif ties == "tied" or not present:
        tied = True
        if not stated:
            reason = "asked for" if ties == "tied" else "the files hold no head"
            notes = (f"{_HEAD} is tied to {_EMBEDDING}: {reason}",)
    elif stated is False:
        tied = False
    else:
        tied = not coded_head and _EMBEDDING in stored and _same_bits(stored[_EMBEDDING], stored[_HEAD])
        if stated and not tied:
            raise CheckpointError(
                f"config.json ties the head to the embedding, but {_HEAD} differs from {_EMBEDDING}",
                where=str(root),
                expected="no lm_head, or the same values",
                fix='load with ties="tied" to drop lm_head, or ties="separate" to keep it',
            )
        if tied and not stated:
            notes = (f"{_HEAD} is tied to {_EMBEDDING}: the files hold the same bits twice",)
    if tied:
        stored.pop(_HEAD, None)
    return replace(architecture, tie_embeddings=tied), notes


def _same_bits(embedding: SafetensorsFile, head: SafetensorsFile) -> bool:
    a, b = embedding[_EMBEDDING], head[_HEAD]
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _locate(
    architecture: Architecture,
    stored: dict[str, SafetensorsFile],
    expert_rows: ExpertRows,
    root: Path,
    coded: Mapping[str, CodedSource],
) -> dict[str, _Readable]:
    """Checkpoint name -> source, from either expert layout; one error lists everything that does not fit."""
    if expert_rows not in ("concatenated", "interleaved"):
        raise CheckpointError(f"expert_rows is {expert_rows!r}", expected="concatenated or interleaved")
    layout, shapes = ParameterLayout(architecture), parameter_shapes(architecture)
    sources: dict[str, _Readable] = {}
    known = {part for source in coded.values() for part in source.names}
    missing: list[str] = []
    used: dict[str, tuple[int, ...]] = {}  # stored name -> the shape it must have
    for name, location in layout.locations.items():
        if name in coded:
            sources[name] = coded[name]
        elif name in stored:
            used[name] = shapes[name]
            sources[name] = _Source(stored[name], name)
        elif location.parameter in stored:
            used[location.parameter] = layout.shapes[location.parameter]
            rows = None if location.expert is None else slice(location.begin, location.end)
            if expert_rows == "interleaved" and location.parameter.endswith("gate_up_proj"):
                rows = slice(0 if location.begin == 0 else 1, None, 2)
            sources[name] = _Source(stored[location.parameter], location.parameter, location.expert, rows)
        else:
            missing.append(name)
    entries: dict[str, Entry] = {name: stored[name].entries[name] for name in used}
    unexpected = sorted(
        name
        for name in stored
        if name not in used
        and name not in known
        and not _RECOMPUTED.fullmatch(name)
        and not (coded and _KV_SCALES.fullmatch(name))
    )
    misshaped = [
        f"{name} {list(entries[name].shape)} instead of {list(shape)}"
        for name, shape in used.items()
        if entries[name].shape != shape
    ]
    foreign = [f"{name} ({entry.dtype})" for name, entry in entries.items() if entry.dtype not in _FLOATS]
    kinds = {"missing": missing, "unexpected": unexpected, "mis-shaped": misshaped, "not FP32, BF16 or FP16": foreign}
    problems = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"the tensors do not fit config.json; {'; '.join(problems)}",
            where=str(root),
            expected=f"{len(shapes)} tensors of {architecture.family}",
            fix="take config.json and weights from the same model",
        )
    return sources


def _eos_ids(root: Path, architecture: Architecture) -> tuple[int, ...]:
    found = list(architecture.eos_ids)
    path = root / "generation_config.json"
    if path.is_file():
        value = read_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int or not 0 <= item < architecture.vocab_size for item in ids):
            raise CheckpointError(
                f"eos_token_id is {value!r}", where=str(path), expected=f"ids below {architecture.vocab_size}"
            )
        found += ids
    return tuple(dict.fromkeys(found))


def _some(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{rest})"
