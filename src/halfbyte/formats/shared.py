"""One global scale for tensors that are read together, and scales for tensors that calibration never reached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.formats.global_scale import multiplier_pair, stored_global
from halfbyte.formats.quantise import check_input, quantise
from halfbyte.formats.spec import QuantSpec
from halfbyte.formats.tensor import QuantTensor

__all__ = ["fill_uncalibrated", "quantise_shared", "shared_global"]

_LOG = logging.getLogger(__name__)


def shared_global(tensors: Sequence[Tensor], spec: QuantSpec, *, names: Sequence[str] | None = None) -> Tensor:
    """The global scale of all tensors together: float32, shape (), in the spec's convention.

    Raises: ConfigError unless ``spec.global_scale`` is ``tensor``; the errors of :func:`quantise` for each tensor.
    """
    if spec.global_scale != "tensor":
        raise ConfigError(
            "only a per-tensor global scale can be shared",
            where=f"spec {spec.name!r}",
            expected="global_scale='tensor'",
        )
    if not tensors:
        raise ShapeError("no tensors to share a global scale", expected="at least one")
    for tensor, name in zip(tensors, names or [f"tensor {i}" for i in range(len(tensors))]):
        check_input(tensor, spec, name)
    largest = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]
    return stored_global(torch.stack(largest).amax(), spec)


def quantise_shared(
    tensors: Sequence[Tensor], spec: QuantSpec, *, names: Sequence[str] | None = None
) -> list[QuantTensor]:
    """Quantise tensors that a fused kernel reads as one (gate and up of an expert; q, k and v) with one global scale.

    The codes and block scales are computed under the shared scale. Making two scales equal after the fact rescales one
    tensor's values (ModelOpt #1411, vLLM #54973).

    Raises: as :func:`shared_global`.
    """
    g = shared_global(tensors, spec, names=names)
    labels = names or [f"tensor {i}" for i in range(len(tensors))]
    # An all-zero group may store 0 in some conventions; quantise derives the same value itself.
    return [quantise(t, spec, global_scale=g if float(g) > 0 else None, name=n) for t, n in zip(tensors, labels)]


def fill_uncalibrated(global_scales: Tensor, spec: QuantSpec, *, name: str) -> tuple[Tensor, list[int]]:
    """Replace missing global scales (0, NaN, infinity) of one layer's experts by the layer's widest one.

    An expert that no calibration token reached has no usable input scale, and its logits become NaN at run time
    (compressed-tensors #595, vLLM #45212).

    Arguments:
        global_scales: float32 [experts], in the spec's convention.
        name: the layer, for the log.

    Returns: the filled scales and the indices that were filled (also logged as a warning).

    Raises: NumericsError when no expert has a usable scale.
    """
    usable = torch.isfinite(global_scales) & (global_scales > 0)
    if not bool(usable.any()):
        raise NumericsError(
            f"no expert of {name} has a calibrated global scale",
            where=name,
            expected="at least one positive finite scale",
            fix="calibrate on more tokens",
        )
    filled = [int(i) for i in (~usable).nonzero().flatten()]
    if filled:
        multipliers = torch.where(usable, multiplier_pair(global_scales, spec)[0], 0.0)
        global_scales = torch.where(usable, global_scales, global_scales[multipliers.argmax()])
        _LOG.warning(
            "%s: experts %s were never calibrated; their global scale is the widest of the layer", name, filled
        )
    return global_scales, filled
