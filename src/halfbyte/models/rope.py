"""Rotary position embedding: frequencies and cos/sin tables.

Rotation is RoFormer's (arXiv 2104.09864) in the half-split order that Hugging Face checkpoints use: dimension ``i``
turns with dimension ``i + head_dim/2``. Context extensions: linear position interpolation (arXiv 2306.15595), the three
bands of Llama 3.1 (arXiv 2407.21783 and its reference code), YaRN (arXiv 2309.00071).

Everything is computed in float64 and rounded to float32 once. transformers forms ``position * inv_freq`` in float32, so
the two agree to the rounding of that angle: a few times ``angle * 2**-24``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfbyte.errors import CheckpointError
from halfbyte.models.config_fields import ConfigFields

__all__ = ["RopeScaling", "inverse_frequencies", "rope_tables"]

_KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies were changed to reach a longer context.

    Arguments:
        kind: ``linear``, ``llama3`` or ``yarn``.
        factor: by how much the context was extended.
        original_max_positions: context length before the extension (``llama3`` and ``yarn``).
        low_freq_factor, high_freq_factor: borders of Llama 3's bands, in rotations over the original context.
        attention_factor: multiplies cos and sin (``yarn``); None takes YaRN's ``0.1 ln(factor) + 1``.
        mscale, mscale_all_dim: DeepSeek's variant of the attention factor; both or neither.
        beta_fast, beta_slow: borders of YaRN's ramp, in rotations over the original context.
        truncate: round YaRN's borders to whole dimensions.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, entry: dict[str, Any], max_positions: int, where: str) -> RopeScaling | None:
        """Read ``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5); None where nothing is scaled.

        Raises:
            CheckpointError: a kind we do not know, a key that is missing or cannot be used, or rotation of a part of
                the head only.
        """
        kind = entry.get("rope_type", entry.get("type", "default"))
        if entry.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"partial_rotary_factor {entry['partial_rotary_factor']!r} is not supported",
                where=where,
                expected="rotation of the whole head (1.0)",
            )
        if kind in ("default", None):
            return None
        if kind not in _KINDS:
            raise CheckpointError(
                f"rotary scaling {kind!r} is not supported", where=where, expected=f"default, {', '.join(_KINDS)}"
            )
        fields = ConfigFields(entry, f"{where}, rotary scaling {kind!r}")
        factor = fields.number("factor", least=1.0)
        if kind == "linear":
            return cls(kind="linear", factor=factor)
        original = fields.positive("original_max_position_embeddings", default=max_positions)
        if kind == "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            _require_order(fields, "low_freq_factor", low, "high_freq_factor", high)
            return cls("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
        fast, slow = fields.number("beta_fast", default=32.0), fields.number("beta_slow", default=1.0)
        _require_order(fields, "beta_slow", slow, "beta_fast", fast)
        present = [k for k in ("attention_factor", "mscale", "mscale_all_dim") if entry.get(k) not in (None, 0)]
        return cls(
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            **{key: fields.number(key) for key in present},
            beta_fast=fast,
            beta_slow=slow,
            truncate=fields.flag("truncate", default=True),
        )

    def to_hf(self) -> dict[str, Any]:
        """The entry that transformers reads back, with the keys this kind uses."""
        entry: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind != "linear":
            entry["original_max_position_embeddings"] = self.original_max_positions
        if self.kind == "llama3":
            entry |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            entry |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            for key in ("attention_factor", "mscale", "mscale_all_dim"):
                if getattr(self, key) is not None:
                    entry[key] = getattr(self, key)
        return entry

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by: 1 except for YaRN (its section 3.4)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(self.factor, self.mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)


def _require_order(fields: ConfigFields, low: str, low_value: float, high: str, high_value: float) -> None:
    if low_value >= high_value:
        raise CheckpointError(
            f"{low!r} is {low_value:g} and {high!r} is {high_value:g}",
            where=fields.where,
            expected=f"{low} below {high}",
        )


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float64 [head_dim/2]."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    plain = theta ** (-pairs / head_dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling)
    return _yarn_frequencies(plain, head_dim, theta, scaling)


def rope_tables(
    n_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, float32 [n_positions, head_dim/2] each, rounded once from float64."""
    angles = torch.arange(n_positions, dtype=torch.float64)[:, None] * inverse_frequencies(head_dim, theta, scaling)
    factor = 1.0 if scaling is None else scaling.table_scale
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _llama3_frequencies(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow frequencies divided by the factor, fast ones kept, linear in rotations per original context between them."""
    rotations = scaling.original_max_positions * plain / (2 * math.pi)
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn_frequencies(plain: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Ramp from kept (fast) to interpolated (slow) dimensions; the borders are dimensions (YaRN, section 3.2)."""

    def border(rotations: float) -> float:
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = border(scaling.beta_fast), border(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
