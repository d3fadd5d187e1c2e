"""The three ways in which files hold an FP4 weight: names of its parts, their dtypes, and which way round the global scale is.

| style | codes | block scales | global scale | input scale |
| --- | --- | --- | --- | --- |
| compressed-tensors | ``M.weight_packed`` | ``M.weight_scale`` | ``M.weight_global_scale`` | ``M.input_global_scale`` |
| modelopt | ``M.weight`` | ``M.weight_scale`` | ``M.weight_scale_2`` | ``M.input_scale`` |
| halfbyte | ``M.weight.codes`` | ``M.weight.scales`` | ``M.weight.global_scale`` | ``M.weight.input_scale`` |

compressed-tensors stores 2688 / amax and divides by it, the other two amax / 2688 and multiply; one read as the other is off
by its square (llama.cpp #21095).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.formats import QuantSpec, QuantTensor, to_convention

__all__ = ["STYLES", "Style", "StyleName", "global_is_exact"]

StyleName = Literal["compressed-tensors", "modelopt", "halfbyte"]


@dataclass(frozen=True)
class Style:
    """Suffixes that follow the module's name, and conventions.

    Arguments:
        name: as in ``--format``.
        convention: of global scales, weights' and inputs'.
        global_shape: shape of a stored scale: compressed-tensors has one element, ModelOpt none.
        fused: engines that read this style take q, k and v as one matrix with one global scale, and gate and up too.
    """

    name: StyleName
    codes: str
    scales: str
    global_scale: str
    input_scale: str
    convention: Literal["multiplier", "reciprocal"]
    global_shape: tuple[int, ...]
    fused: bool

    def parts(self, q: QuantTensor, module: str, input_multiplier: float | None = None) -> dict[str, Tensor]:
        """The tensors that a file stores for the weight of ``module``.

        Arguments:
            q: its codes, with one global scale.
            input_multiplier: the global scale of the module's input as a multiplier (amax / 2688); None: not stored.
        """
        out = {module + self.codes: q.codes.contiguous(), module + self.scales: q.scales.contiguous()}
        if q.spec.format == "nvfp4":
            out[module + self.scales] = q.scales.contiguous().view(torch.float8_e4m3fn)
            stored = to_convention(q.global_scale, q.spec, self.convention)[0]
            # Some conventions store 0 for an all-zero tensor, which would divide to infinity here; its codes are all 0.
            stored = torch.where(stored > 0, stored, 1.0)
            out[module + self.global_scale] = stored.reshape(self.global_shape).to(torch.float32)
        if input_multiplier is not None:
            scale = torch.tensor(input_multiplier, dtype=torch.float32)
            out[module + self.input_scale] = (1.0 / scale if self.convention == "reciprocal" else scale).reshape(
                self.global_shape
            )
        return out


STYLES: Mapping[StyleName, Style] = {
    "compressed-tensors": Style(
        "compressed-tensors",
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        ".input_global_scale",
        "reciprocal",
        (1,),
        fused=True,
    ),
    "modelopt": Style(
        "modelopt", ".weight", ".weight_scale", ".weight_scale_2", ".input_scale", "multiplier", (), fused=True
    ),
    "halfbyte": Style(
        "halfbyte",
        ".weight.codes",
        ".weight.scales",
        ".weight.global_scale",
        ".weight.input_scale",
        "multiplier",
        (),
        fused=False,
    ),
}


def global_is_exact(spec: QuantSpec, style: Style) -> bool:
    """Whether a global scale by this rule can be stored in this style without rounding."""
    stored_as_is = spec.global_convention == style.convention
    return spec.format == "mxfp4" or spec.global_rounding == "power_of_two" or stored_as_is


def require_exact(spec: QuantSpec, style: Style) -> None:
    """Refuse a rule whose weights a style can only hold approximately.

    Raises:
        ConfigError: also for a rule that is not one for weights.
    """
    if spec.global_scale not in ("tensor", "none"):
        raise ConfigError(
            f"spec {spec.name!r} is a rule for activations or KV, not for weights",
            where="--spec",
            expected="a global scale for each tensor, or none",
        )
    if not global_is_exact(spec, style):
        raise ConfigError(
            f"{style.name} stores global scales as {style.convention}, spec {spec.name!r} as {spec.global_convention}",
            where="--spec",
            expected="a conversion without rounding: power-of-two global scales, or the same convention",
            fix="use halfbyte, or the spec named after the format",
        )
