"""The named specs: ours, with reasons, and those that reproduce four libraries bit for bit.

Ours (NVFP4). ``halfbyte``: weights, one global scale a tensor. ``halfbyte_token``: activations, one a token.
``halfbyte_kv``: KV cache, the constant 0.125. ``halfbyte_2d``: weights with 16x16 tiles. ``halfbyte_frozen`` and
``halfbyte_hysteretic``: weights whose global scale outlives updates. Reasons for their rule:

- A power-of-two global scale makes the dequantised value, global included, exact in BF16, and divides exactly.
- An amax that moves by an ulp rarely moves a power of two, so one changed weight does not re-roll every code of a
  tensor (the refit avalanche: 3.6% of the codes with amax / 2688).
- A global scale per token, or constant, never depends on what shares the batch: prefill, decode and the learner agree.
- A true division and ties to even leave nothing to the instruction set; zeros are +0, so equal values have equal codes.

The libraries (torchao 0.18.0, nvidia-modelopt 0.47.0, compressed-tensors 0.20.1, fouroversix 1.0.5, on CPU): see the
test against their vectors. Deviations: an all-zero tensor stays finite (torchao and modelopt write NaN scales); MXFP4
blocks below 2^-124 divide by the scale they store (torchao divides by 2^-126, or 1); ``mx_rceil`` is the exact rule
where torchao on CPU takes a float32 logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from halfbyte.errors import ConfigError
from halfbyte.formats.spec import QuantSpec

__all__ = ["SPECS", "get_spec"]

_HALFBYTE = QuantSpec(name="halfbyte")
_TORCHAO = QuantSpec(
    name="torchao",
    global_rounding="none",
    zero_global=0.0,
    scale_floor=2.0**-6,
    element_scale="reciprocal_global",
    zero_sign="keep",
)
_MODELOPT = QuantSpec(
    name="modelopt",
    global_rounding="none",
    zero_global=0.0,
    block_scale="divide_product",
    scale_floor=2.0**-9,
    zero_scale=1.0,
    zero_sign="negative",
)
_COMPRESSED_TENSORS = QuantSpec(
    name="compressed_tensors",
    global_rounding="none",
    global_convention="reciprocal",
    global_division="reciprocal",
    arithmetic="input",
    block_scale="multiply_inverse",
    zero_scale=0.125,
    element_scale="divide_ratio",
    zero_sign="keep",
)
_FOUROVERSIX = QuantSpec(
    name="fouroversix_static6",
    global_rounding="none",
    global_convention="amax",
    zero_global=0.0,
    block_scale="multiply_inverse",
    element_scale="reciprocal_product",
    zero_sign="negative",
    overflow="wrap",
)
_MX = QuantSpec(name="mx_floor", format="mxfp4", global_scale="none", global_rounding="none", zero_sign="keep")

SPECS: Mapping[str, QuantSpec] = MappingProxyType(
    {
        s.name: s
        for s in (
            _HALFBYTE,
            _HALFBYTE.replace(name="halfbyte_token", global_scale="token"),
            _HALFBYTE.replace(name="halfbyte_kv", global_scale="constant", constant=0.125),
            _HALFBYTE.replace(name="halfbyte_2d", scale_rows=16),
            _HALFBYTE.replace(name="halfbyte_frozen", global_update="frozen"),
            _HALFBYTE.replace(name="halfbyte_hysteretic", global_update="hysteretic"),
            _TORCHAO,
            _MODELOPT,
            _COMPRESSED_TENSORS,
            _FOUROVERSIX,
            _FOUROVERSIX.replace(name="fouroversix_mse", four_over_six="mse", scale_max=256.0),
            _MX,
            _MX.replace(name="mx_even", mx_scale="even"),
            _MX.replace(name="mx_rceil", mx_scale="rceil"),
            _MX.replace(name="mx_modelopt", mx_scale="modelopt", ties="toward_zero", zero_sign="nonpositive"),
            _MX.replace(name="mx_naive", mx_scale="naive"),
        )
    }
)


def get_spec(name: str) -> QuantSpec:
    """The spec of that name, or a :class:`ConfigError` that lists the names."""
    if name not in SPECS:
        raise ConfigError(f"there is no QuantSpec named {name!r}", expected="one of " + ", ".join(sorted(SPECS)))
    return SPECS[name]
