"""No correction: the arm that everything else is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult

__all__ = ["NoCorrection"]


@dataclass(frozen=True)
class NoCorrection:
    """Weight exactly 1 for every token that counts, so loss and gradient are bitwise those without weights."""

    @property
    def name(self) -> str:
        """Registry name."""
        return "none"

    @property
    def uses_ratio(self) -> bool:
        """The weights do not contain the ratio."""
        return False

    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        return CorrectionResult(tokens.mask.to(torch.float32), torch.zeros_like(tokens.mask), {})
