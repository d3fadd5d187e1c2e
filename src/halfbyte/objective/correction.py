"""The interface of everything that reweighs tokens because rollout and learner disagree.

``none``, truncated importance sampling, masking, TRIAGE: each is a function from one record of flat tensors to one
weight a token. It runs once per rollout batch, before the optimisation epochs, without gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.aggregate import Statistics
from halfbyte.objective.distribution import Distribution, require_same_distribution
from halfbyte.objective.validation import require_finite, require_index, require_mask, require_real

__all__ = ["Correction", "CorrectionInput", "CorrectionResult", "StatefulCorrection"]


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrectionInput:
    """What a correction may look at: the global batch, flat.

    Arguments:
        gap: [T] float32, log-prob of the learner minus that of the rollout, see ``token_gap``.
        advantages: [T] float32.
        mask: [T] bool, response tokens that count.
        sequence_index: [T] int64, the sample of a token.
        segments: [T] int64 or None: a segment id for each token (turn, sentence, fixed block), unique over the batch
            and never shared by two samples, see ``halfbyte.objective.segments``; None means that a sample is one segment.
        versions: [T] int64 or None: weight version that sampled the token; None means all are current.
        learner_version: the current weight version; needed with versions.
        rollout_logp: [T] float32 or None, for corrections that need probabilities, not only their ratio.
        rollout_distribution, learner_distribution: what each side declares, or None; if both do, they must agree.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        SpecMismatchError: the two sides scored different distributions (temperature or kept set).
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
    rollout_distribution: Distribution | None = None
    learner_distribution: Distribution | None = None

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
        if self.rollout_distribution is not None and self.learner_distribution is not None:
            sides = self.rollout_distribution, self.learner_distribution
            require_same_distribution(*sides, self.mask, self.sequence_index)

    @property
    def current(self) -> Tensor:
        """[T] bool: tokens that count and that the current weights sampled; older ones have staleness in their gap."""
        if self.versions is None:
            return self.mask
        if self.learner_version is None:
            raise ConfigError("versions without learner_version", where="learner_version", fix="pass both, or neither")
        return self.mask & (self.versions == self.learner_version)


@dataclass(frozen=True, eq=False)
class CorrectionResult:
    """What a correction decides.

    Arguments:
        weights: [T] float32, detached, finite, never negative; they multiply the surrogate of the policy loss only. 0
            where mask is false.
        rejected: [T] bool, tokens that counted and were thrown out (their weight is 0). Whether they stay in the
            denominators is the caller's explicit choice, see ``counted_tokens``.
        metrics: mergeable statistics, names prefixed ``correction/``.
        state: what the rule has learnt with this batch, see :class:`StatefulCorrection`; None for a rule without memory.
    """

    weights: Tensor
    rejected: Tensor
    metrics: Statistics
    state: Mapping[str, float] | None = None


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


@runtime_checkable
class StatefulCorrection(Correction, Protocol):
    """A rule with a memory (reference statistics). Calling it changes nothing: the next memory is in the result.

    The caller adopts it with ``with_state`` once the step has succeeded, and saves it in the checkpoint, so that a step
    that is repeated after a crash gives the same numbers.
    """

    def state(self) -> dict[str, float]:
        """The memory as numbers, for a checkpoint; empty at first."""

    def with_state(self, state: Mapping[str, float]) -> Correction:
        """The same rule with this memory."""
