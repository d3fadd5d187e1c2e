"""``halfbyte quantize``: a model folder in, an FP4 checkpoint out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.formats import QuantTensor, get_spec
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint, read_json
from halfbyte.models.checkpoint_writer import (
    copy_tokenizer,
    refuse_to_clobber,
    replaced_folder,
    write_json,
    write_weights,
)
from halfbyte.models.fp4 import STYLES, Quantisation, StyleName
from halfbyte.models.fp4.quantisation import SPEC_FILE
from halfbyte.models.fp4.style import require_exact
from halfbyte.models.open_model import model_folder, open_model
from halfbyte.quantize.calibration import CONSTANT, filled, input_amax, read_calibration
from halfbyte.quantize.codes import Quantised, quantised_groups
from halfbyte.quantize.plan import KINDS, Kind, Plan, make_plan, require_split

__all__ = ["Report", "quantize_model"]


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        folder: the checkpoint.
        quantised: counts and errors of the pass.
        plan: what became codes and what stayed.
        bytes_before, bytes_after: of all tensors.
        notes: what a user should know of.
    """

    folder: Path
    quantised: Quantised
    plan: Plan
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = field(default=())

    @property
    def relative_error(self) -> float:
        """Root of the squared error over the squared size of the quantised weights."""
        return math.sqrt(self.quantised.error / self.quantised.energy) if self.quantised.energy else 0.0


def quantize_model(
    model: str,
    out: Path,
    *,
    style: StyleName,
    kind: Kind,
    spec_name: str = "halfbyte",
    calibration: Path | None = None,
    tensor_parallel: int = 1,
    overwrite: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> Report:
    """Write ``out`` with the weights of ``model`` as codes.

    The folder appears under its name only when it is whole, was read again, and holds the codes that were meant.

    Arguments:
        model: model folder, or ``tiny``.
        style: whose names and conventions.
        kind: which weights, and whether readers quantise inputs too.
        spec_name: the rule of the codes; NVFP4 or MXFP4.
        calibration: JSON lines with ``prompt`` or ``messages``, for the input scales of NVFP4 W4A4.
        tensor_parallel: ranks that the readers will split matrices over.
        overwrite: replace a checkpoint at ``out``.

    Raises:
        ConfigError: settings that do not go together.
        CheckpointError: the model cannot be used, or is quantised already; ``out`` is in the way.
        ShapeError: the split would cut a block.
        NumericsError: a weight is not finite, or no calibration token reached a layer's experts.
        DataError: calibration text that cannot be used.
    """
    layout, spec, (_, inputs) = STYLES[style], get_spec(spec_name), KINDS[kind]
    require_exact(spec, layout)
    if style == "modelopt" and spec.format == "mxfp4":
        raise ConfigError(
            "ModelOpt checkpoints have no MXFP4 that engines read", where="--format modelopt",
            expected="an NVFP4 spec", fix="use --format compressed-tensors for MXFP4",
        )  # fmt: skip
    scaled = inputs and spec.format == "nvfp4"
    if calibration is not None and not scaled:
        raise ConfigError(
            "nothing here has input scales to calibrate", where="--calibration",
            expected="NVFP4 with quantised inputs (w4a4, experts-only)",
        )  # fmt: skip
    refuse_to_clobber(out, overwrite)
    checkpoint = load_checkpoint(model_folder(model))
    if checkpoint.quantisation is not None:
        raise CheckpointError(
            f"the model is FP4 already ({checkpoint.quantisation.style.name})", where=model,
            expected="BF16, FP16 or FP32 weights", fix="quantise the model that it was made of",
        )  # fmt: skip
    arch = checkpoint.architecture
    plan = make_plan(arch, kind, spec, layout)
    require_split(plan, arch, spec, tensor_parallel)
    notes = [f"{name} stays as it is: its inputs are no multiple of {spec.block}" for name in plan.misfits]
    scales, missed = _input_scales(model, checkpoint, plan, calibration, needed=scaled and layout.fused)
    notes += [f"{name} saw no calibration token; its input scale is its layer's widest" for name in missed]
    source = "calibrated" if calibration is not None else "constant" if scales else "none"
    if source == "constant":
        notes.append(f"input scales are the constant {CONSTANT}: no calibration text was given")
    quantisation = Quantisation(layout, spec, inputs, plan.left, source)
    seen = Quantised()
    coded = set(plan.coded)
    tensors: dict[str, Tensor] = {name: t for name, t in checkpoint.tensors.items() if name not in coded}
    kept: dict[str, QuantTensor] = {}
    for name, q in quantised_groups(checkpoint.tensors, plan, spec, seen):
        kept[name] = q
        module = name.removesuffix(".weight")
        tensors |= layout.parts(q, module, scales.get(module))
    for name, count in seen.differing.items():
        notes.append(
            f"{name}: {count} values round otherwise than in the engine, under the scale shared with its neighbours"
        )
    with replaced_folder(out, overwrite=overwrite) as work:
        write_weights(work, tensors, shard_bytes)
        config = read_json(checkpoint.folder / "config.json")
        config |= {"tie_word_embeddings": arch.tie_embeddings, "quantization_config": quantisation.config()}
        write_json(work / "config.json", config)
        if (legacy := quantisation.legacy_config()) is not None:
            write_json(work / "hf_quant_config.json", legacy)
        write_json(
            work / SPEC_FILE, {**quantisation.record(), **_facts(checkpoint, kind, plan, missed, calibration, seen)}
        )
        if checkpoint.tokenizer_path is not None:
            copy_tokenizer(checkpoint.tokenizer_path, work)
        _read_again(work, kept)
    before = sum(t.nbytes for t in checkpoint.tensors.values())
    return Report(out, seen, plan, before, sum(t.nbytes for t in tensors.values()), tuple(notes))


def _input_scales(
    model: str, checkpoint: Checkpoint, plan: Plan, calibration: Path | None, *, needed: bool
) -> tuple[dict[str, float], list[str]]:
    modules = [name.removesuffix(".weight") for name in plan.coded]
    if calibration is None:  # our own engine scales each token
        return dict.fromkeys(modules, CONSTANT) if needed else {}, []
    opened, tokenizer = open_model(model)
    sequences = read_calibration(calibration, tokenizer, opened.architecture)
    return filled(input_amax(checkpoint, sequences), checkpoint.architecture, modules)


def _facts(
    checkpoint: Checkpoint, kind: Kind, plan: Plan, missed: list[str], calibration: Path | None, seen: Quantised
) -> dict[str, Any]:
    """What fp4_spec.json says beyond what reading needs."""
    text = None if calibration is None else hashlib.sha256(calibration.read_bytes()).hexdigest()
    return {
        "precision": kind,
        "family": checkpoint.architecture.family,
        "quantised_weights": seen.weights,
        "quantised_values": seen.values,
        "without_whole_blocks": list(plan.misfits),
        "uncalibrated_experts": missed,
        "calibration_sha256": text,
    }


def _read_again(folder: Path, kept: Mapping[str, QuantTensor]) -> None:
    """Raises:
    CheckpointError: the folder does not hold the codes that were written.
    """
    codes = load_checkpoint(folder).codes
    wrong = [name for name in kept if name not in codes or not _same(codes[name], kept[name])]
    if wrong or codes.keys() != kept.keys():
        raise CheckpointError(
            f"the folder does not hold what was written: {', '.join(wrong[:5])}", where=str(folder),
            fix="check the disk, and try again",
        )  # fmt: skip


def _same(a: QuantTensor, b: QuantTensor) -> bool:
    same_codes = torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
    return same_codes and torch.equal(a.multiplier(), b.multiplier())
