"""The interface of everything that reweighs tokens because rollout and learner disagree.

``none``, truncated importance sampling, masking, TRIAGE: each is a function from one record of flat tensors to one
weight a token. It runs once per rollout batch, before the optimisation epochs, without gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from halfbyte.objective.aggregate import Statistics
from halfbyte.objective.validation import require_finite, require_index, require_mask, require_real

__all__ = ["Correction", "CorrectionInput", "CorrectionResult"]


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrectionInput:
    """What a correction may look at: the global batch, flat.

    Arguments:
        gap: [T] float32, log-prob of the learner minus that of the rollout, see ``token_gap``.
        advantages: [T] float32.
        mask: [T] bool, response tokens that count.
        sequence_index: [T] int64, the sample of a token.
        segments: [T] int64 or None: a segment id for each token (turn, sentence, fixed block), unique over the batch
            and never shared by two samples; None means that a sample is one segment.
        versions: [T] int64 or None: weight version that sampled the token; None means all are current.
        learner_version: the current weight version; needed with versions.
        rollout_logp: [T] float32 or None, for corrections that need probabilities, not only their ratio.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        NumericsError: a value on a token that counts is NaN or infinite. Elsewhere anything is allowed.
    """

    gap: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_index: Tensor
    segments: Tensor | None = None
    versions: Tensor | None = None
    learner_version: int | None = None
    rollout_logp: Tensor | None = None

    def __post_init__(self) -> None:
        require_mask("mask", self.mask)
        length = self.mask.shape[0]
        require_index("sequence_index", self.sequence_index, length, self.mask)
        for name, values in (("gap", self.gap), ("advantages", self.advantages), ("rollout_logp", self.rollout_logp)):
            if values is not None:
                require_real(name, values, length)
                require_finite(name, values, self.mask, self.sequence_index)
        for name, index in (("segments", self.segments), ("versions", self.versions)):
            if index is not None:
                require_index(name, index, length, self.mask)


@dataclass(frozen=True, eq=False)
class CorrectionResult:
    """What a correction decides.

    Arguments:
        weights: [T] float32, detached, finite, never negative; they multiply the surrogate of the policy loss only. 0
            where mask is false.
        rejected: [T] bool, tokens that counted and were thrown out (their weight is 0). Whether they stay in the
            denominators is the caller's explicit choice, see ``counted_tokens``.
        metrics: mergeable statistics, names prefixed ``correction/``.
    """

    weights: Tensor
    rejected: Tensor
    metrics: Statistics


@runtime_checkable
class Correction(Protocol):
    """A named rule from tokens to weights."""

    @property
    def name(self) -> str:
        """Name in the registry and in metrics."""

    @property
    def uses_ratio(self) -> bool:
        """True if the weights contain the ratio learner / rollout.

        Such a rule must not meet a loss whose own ratio is taken against the rollout: the mismatch would be corrected
        twice. ``require_compatible`` checks it.
        """

    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """Weights of the batch; the same for any order, padding or packing of its tokens."""
