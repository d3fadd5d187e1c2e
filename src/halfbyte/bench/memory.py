"""Resident bytes of packed weights, beside what was predicted and beside BF16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.rollout.weights import RolloutWeights

__all__ = ["MemoryRow", "resident"]


@dataclass(frozen=True)
class MemoryRow:
    """Weights of a model at one precision, in bytes.

    Arguments:
        measured_bytes: everything packed, embedding and norms included.
        predicted_bytes: what ``halfbyte doctor`` says.
        quantised_bytes, quantised_bf16_bytes: of the FP4 matrices alone, and of the same matrices unpadded in BF16.
    """

    model: str
    precision: str
    measured_bytes: int
    predicted_bytes: int
    quantised_bytes: int
    quantised_bf16_bytes: int

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_bytes / self.predicted_bytes

    @property
    def quantised_ratio(self) -> float | None:
        """FP4 matrices over BF16; None where nothing is quantised."""
        return self.quantised_bytes / self.quantised_bf16_bytes if self.quantised_bf16_bytes else None

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return {**asdict(self), "ratio": self.ratio, "quantised_ratio": self.quantised_ratio}


def resident(model: str, weights: RolloutWeights, predicted: int) -> MemoryRow:
    """Count what ``weights`` holds."""
    pairs = list(_quantised(weights))
    return MemoryRow(
        model,
        weights.precision.name,
        weights.nbytes,
        predicted,
        sum(packed for packed, _ in pairs),
        sum(plain for _, plain in pairs),
    )


def _quantised(weights: RolloutWeights) -> Iterator[tuple[int, int]]:
    """(packed bytes, BF16 bytes) of every FP4 weight; biases are not counted."""
    for linear in weights.linears.values():
        if linear.kind in ("w4a4", "w4a16"):
            yield linear.store.nbytes, 2 * linear.n * linear.k
    for experts in weights.experts.values():
        if experts.kind in ("w4a4", "w4a16"):
            yield experts.nbytes, 6 * experts.n_experts * experts.intermediate * experts.hidden
