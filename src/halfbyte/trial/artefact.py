"""A model folder as a preflight sees it: all there, how large, in which number format. Headers only, no weights, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError, RefitError
from halfbyte.files import read_object
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.memory import weight_bytes
from halfbyte.trial.settings import Target

__all__ = ["Artefact", "artefact_folder", "inspect_artefact", "licence_of"]

_LICENCES = ("licen[cs]e*", "LICEN[CS]E*", "Licen[cs]e*", "COPYING*")


@dataclass(frozen=True)
class Artefact:
    """What a folder holds.

    Arguments:
        weights_bytes: of all tensors, from the safetensors headers.
        format: ``nvfp4``, ``mxfp4``, ``fp8``, ``int4``, ``int8``, ``bf16``, ``fp16``, ``fp32``, or the name it gives itself.
        architectures: class names of config.json.
        calibration_sha256: of the text that set its input scales, as `halfbyte quantize` wrote down; None for none.
    """

    folder: Path
    weights_bytes: int
    format: str
    architectures: tuple[str, ...]
    calibration_sha256: str | None


def artefact_folder(folder: TrialFolder, target: Target) -> Path | None:
    """The model folder of a target; ``tiny`` is the policy in the package."""
    if target.artefact is None:
        return None
    if target.artefact == "tiny":
        from halfbyte.models.open_model import model_folder

        return model_folder("tiny")
    return folder.path / target.artefact


def inspect_artefact(folder: Path) -> Artefact:
    """Look at a model folder.

    Raises:
        CheckpointError: no folder, no config.json, no weights, a shard that the index names and the folder lacks, or a file cut
            short.
    """
    if not folder.is_dir():
        raise CheckpointError("there is no such model folder", where=str(folder))
    config = read_object(folder / "config.json")
    if config is None:
        raise CheckpointError("no config.json that can be read", where=str(folder))
    index = read_object(folder / "model.safetensors.index.json")
    named = index.get("weight_map", {}).values() if index is not None else ()
    missing = sorted({name for name in named if not (folder / name).is_file()})
    if missing:
        raise CheckpointError(f"shards are missing: {', '.join(missing[:5])}", where=str(folder))
    try:
        weights = weight_bytes(folder)
    except RefitError as error:
        raise CheckpointError(f"the weights are damaged or cut short: {error.what}", where=error.where) from error
    names = config.get("architectures")
    spec = read_object(folder / "fp4_spec.json") or {}
    calibration = spec.get("calibration_sha256")
    return Artefact(
        folder,
        weights.total,
        _format(folder, config, weights.by_dtype),
        tuple(map(str, names)) if isinstance(names, list) else (),
        calibration if isinstance(calibration, str) else None,
    )


def licence_of(folder: Path) -> Path | None:
    """The licence file in a model folder."""
    return next((path for pattern in _LICENCES for path in sorted(folder.glob(pattern)) if path.is_file()), None)


def _format(folder: Path, config: dict[str, Any], by_dtype: dict[str, int]) -> str:
    """What the configuration says of its quantisation; else the dtype of most bytes."""
    stated = config.get("quantization_config") or (read_object(folder / "hf_quant_config.json") or {}).get(
        "quantization"
    )
    spec = read_object(folder / "fp4_spec.json")
    text = json.dumps([stated, spec], default=str).lower() if stated or spec else ""
    for name, signs in (
        ("nvfp4", ("nvfp4",)),
        ("mxfp4", ("mxfp4",)),
        ("fp8", ("float-quantized", '"fp8"', "fp8_")),
        ("int4", ("awq", "gptq", '"int4"', "pack-quantized")),
        ("int8", ("int-quantized", '"int8"')),
    ):
        if any(sign in text for sign in signs):
            return name
    if isinstance(stated, dict):
        return str(stated.get("quant_method", stated.get("quant_algo", "unknown")))
    largest = max(by_dtype, key=lambda dtype: by_dtype[dtype], default="")
    return {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8"}.get(largest, largest.lower())
