"""What a step decided about single tokens: weights of the correction, and segments selected for repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte import objective

__all__ = ["Decisions"]


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decisions of a step, flat over the response tokens of the samples trained on.

    Arguments:
        samples: which of the step's trajectories were trained on, in order.
        record: their tokens, as the correction saw them.
        weights: [R] float32, or None where nothing was weighed.
        triage: gates and reference that held in this step.
    """

    samples: Sequence[int]
    record: objective.CorrectionInput
    weights: Tensor | None
    triage: objective.Triage

    def by_sample(self) -> dict[int, tuple[list[float], list[bool]]]:
        """Trajectory -> (weight of each response token, whether it lies in a selected segment)."""
        mask, sequence = self.record.mask, self.record.sequence_index
        labels = sequence if self.record.segments is None else self.record.segments
        chosen = labels[self.triage.diagnose(self.record).selected_tokens(len(mask))].unique()
        selected = torch.isin(labels, chosen) & mask
        weights = mask.float() if self.weights is None else self.weights
        lengths = torch.bincount(sequence, minlength=len(self.samples)).tolist()
        parts = zip(self.samples, weights.split(lengths), selected.split(lengths))
        return {i: (w.tolist(), s.tolist()) for i, w, s in parts}
