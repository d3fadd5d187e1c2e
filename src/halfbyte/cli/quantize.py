"""``halfbyte quantize``: a model as an FP4 checkpoint that vLLM, SGLang, transformers and this engine load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.parameter import flag

__all__ = ["quantize"]


def quantize(
    model: Annotated[str, Parameter(help="Model folder, or tiny for the policy in the package.")],
    out: Annotated[Path, Parameter(help="Folder to write.")],
    /,
    *,
    format: Annotated[
        Literal["compressed-tensors", "modelopt", "halfbyte"], Parameter(help="Whose tensor names and conventions.")
    ] = "compressed-tensors",
    precision: Annotated[
        Literal["w4a4", "w4a16", "experts-only"],
        Parameter(help="FP4 weights with FP4 inputs, with BF16 inputs, or W4A4 for the routed experts alone."),
    ] = "w4a4",
    spec: Annotated[
        str, Parameter(help="Rule of the codes: halfbyte (NVFP4), mx_floor, mx_even, mx_rceil (MXFP4), ...")
    ] = "halfbyte",
    calibration: Annotated[
        Path | None, Parameter(help='JSON lines with "prompt" or "messages", for the input scales of NVFP4 W4A4.')
    ] = None,
    tensor_parallel: Annotated[
        int, Parameter(help="Ranks that will share the model; a split that cuts a block is refused.")
    ] = 1,
    overwrite: Annotated[bool, flag("Replace the checkpoint in OUT.")] = False,
    as_json: Annotated[bool, Parameter("--json"), flag("Print one JSON object.")] = False,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
) -> int:
    """Write a model's weights in FP4, bit for bit as the engine packs them."""
    thread_policy.apply(threads)

    from halfbyte.quantize.export import quantize_model

    report = quantize_model(
        model,
        out,
        style=format,
        kind=precision,
        spec_name=spec,
        calibration=calibration,
        tensor_parallel=tensor_parallel,
        overwrite=overwrite,
    )
    facts = {
        "folder": str(report.folder),
        "quantised_weights": report.quantised.weights,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "relative_error": report.relative_error,
        "left": list(report.plan.left),
        "notes": list(report.notes),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    share = report.bytes_after / max(report.bytes_before, 1)
    print(f"{report.quantised.weights} weights in FP4, {len(report.plan.left)} modules left as they are: {out}")
    print(f"bytes        {report.bytes_before:,} -> {report.bytes_after:,} ({share:.3f})")
    print(f"rounding     {report.relative_error:.4f} of the size of the quantised weights (root mean square)")
    for note in report.notes:
        print(f"note         {note}")
    return 0
