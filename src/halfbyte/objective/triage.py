"""TRIAGE: find the segments whose updates amplify the mismatch, and rebalance the objective there only.

Source: arXiv 2610.07043 for the idea (direction, not size; diagnosis by segment; rebalancing; bounded repair of what stays
severe). Its text settles no formula: every equation here is our reconstruction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.objective.aggregate import Statistics, extreme_of, mean_of
from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.exponent import clamped_exp
from halfbyte.objective.reference import Reference, measure
from halfbyte.objective.segment_statistics import SegmentStatistics, segment_statistics
from halfbyte.objective.selection import Gates, Suspicion, select_within, suspicion
from halfbyte.objective.sequences import sequence_sum

__all__ = ["Diagnosis", "ReferenceKind", "Triage", "TriageVariant"]

TriageVariant: TypeAlias = Literal["rebalance", "segment_is", "segment_mask", "cross_quadrant"]
ReferenceKind: TypeAlias = Literal["frozen", "ema", "batch"]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What TRIAGE sees in a batch.

    Arguments:
        segments: statistics of the S segments with a diagnosed token.
        verdict: z and suspicion of each.
        selected: [S] bool.
        reference: level and scale that z used, None without any segment ever.
    """

    segments: SegmentStatistics
    verdict: Suspicion
    selected: Tensor
    reference: Reference | None

    def selected_tokens(self, length: int) -> Tensor:
        """[T] bool: diagnosed tokens of selected segments."""
        out = torch.zeros(length, dtype=torch.bool, device=self.selected.device)
        out[self.segments.places] = self.selected[self.segments.segment]
        return out


@dataclass(frozen=True)
class Triage:
    """Direction-aware repair, once per rollout batch, before the optimisation epochs, without gradient.

    1. Segments come with the batch (``halfbyte.objective.segments``). Reconstruction.
    2. Diagnosis on current negative-advantage tokens: a = max(0, sign(A) g), c = max(0, -sign(A) g), E = mean a, C = mean
       c, z = sqrt(n / length) (E - loc) / max(scale, floor), I = (E - C) / (E + C). loc, scale and length come from the
       reference. Negative advantage and negative gap as the region of concern: the paper. Formulas: reconstruction.
    3. Selection: E > e_min, z > z_min, I > i_min, and the direction test at level alpha (ours, see ``suspicion``); the
       highest z first, up to ``q_max`` of the tokens that count. Reconstruction.
    4. Rebalance in selected segments: an amplifying token gets u = max(w_min, exp(-strength a)); the removed mass sum (1 -
       u)|A| goes in equal factors to the contracting tokens of the same segment, none above w_max. Reconstruction.
    5. Bounded repair: an amplifying token (A g > 0) of the current version, anywhere, with |g| > g_sev gets at most g_sev
       / |g|; at the end w_min <= w <= w_max. The paper has "bounded repair for residual severe mismatch"; the bound is a
       reconstruction.

    Variants (ablations): ``segment_is``: in selected segments w = exp(g) within [w_min, w_max], mass not conserved.
    ``segment_mask``: selected segments are rejected (weight 0). ``cross_quadrant``: the (-,-) tokens of selected segments
    share one factor that brings the |A| mass of (-,-) down to that of (+,+), not below w_min.

    Arguments:
        variant: what happens in selected segments.
        e_min, z_min, i_min, alpha, floor: the gates, see ``Gates``.
        q_max: in [0, 1], share of the tokens that count.
        strength: >= 0 per nat, lambda of step 4.
        w_min, w_max: bounds of the weights, 0 < w_min <= 1 <= w_max.
        g_sev: nats > 0, a gap beyond it is severe.
        reference: ``frozen`` after the first batches; ``ema`` goes on with segments that raised no suspicion; ``batch`` has
            no memory (goes blind once most segments are damaged; for comparison).
        reference_batches: batches averaged at first. ema_decay: of later ones.

    Raises:
        ConfigError: a value is out of range.
        SpecMismatchError: when called: the batch mixes temperatures, so its gaps are not of one kind.
    """

    variant: TriageVariant = "rebalance"
    e_min: float = Gates.e_min
    z_min: float = Gates.z_min
    i_min: float = Gates.i_min
    alpha: float = Gates.alpha
    floor: float = Gates.floor
    q_max: float = 0.15
    strength: float = 1.0
    w_min: float = 0.2
    w_max: float = 1.5
    g_sev: float = math.log(4.0)
    reference: ReferenceKind = "frozen"
    reference_batches: int = 8
    ema_decay: float = 0.98
    memory: Reference | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.gates  # noqa: B018 - checks its values
        for name, choice, choices in (
            ("variant", self.variant, get_args(TriageVariant)),
            ("reference", self.reference, get_args(ReferenceKind)),
        ):
            if choice not in choices:
                raise ConfigError(f"{name} is {choice!r}", where=f"triage.{name}", expected=", ".join(choices))
        for name, value, fits, expected in (
            ("q_max", self.q_max, 0.0 <= self.q_max <= 1.0, "a share from 0 to 1"),
            ("strength", self.strength, 0.0 <= self.strength < math.inf, "a number >= 0"),
            ("w_min", self.w_min, 0.0 < self.w_min <= 1.0, "0 < w_min <= 1: a token's sign must not vanish"),
            ("w_max", self.w_max, 1.0 <= self.w_max < math.inf, "a finite number >= 1"),
            ("g_sev", self.g_sev, 0.0 < self.g_sev < math.inf, "nats > 0"),
            ("reference_batches", self.reference_batches, self.reference_batches >= 1, "an integer >= 1"),
            ("ema_decay", self.ema_decay, 0.0 <= self.ema_decay < 1.0, "0 <= ema_decay < 1"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {value}", where=f"triage.{name}", expected=expected)

    @property
    def name(self) -> str:
        """Registry name."""
        return "triage"

    @property
    def uses_ratio(self) -> bool:
        """Inside selected segments exp(-strength a) and exp(g) are the ratio; the other variants do without it."""
        return self.variant in ("rebalance", "segment_is")

    @property
    def gates(self) -> Gates:
        """The gates of the selection."""
        return Gates(self.e_min, self.z_min, self.i_min, self.alpha, self.floor)

    def state(self) -> dict[str, float]:
        """See :class:`halfbyte.objective.correction.StatefulCorrection`."""
        return {} if self.memory is None else self.memory.to_state()

    def with_state(self, state: Mapping[str, float]) -> Triage:
        """See :class:`halfbyte.objective.correction.StatefulCorrection`."""
        other = replace(self)
        object.__setattr__(other, "memory", Reference.from_state(state))
        return other

    @torch.no_grad()
    def diagnose(self, tokens: CorrectionInput) -> Diagnosis:
        """Steps 2 and 3."""
        _require_one_temperature(tokens)
        segments = segment_statistics(tokens, floor=self.floor)
        reference = self._reference(segments)
        verdict = suspicion(segments, reference, self.gates)
        budget = self.q_max * int(tokens.mask.sum())
        selected = select_within(verdict.z, verdict.suspicious, segments.count, budget)
        return Diagnosis(segments, verdict, selected, reference)

    def learnt(self, found: Diagnosis) -> dict[str, float]:
        """The memory after a batch, for :meth:`with_state`."""
        memory = self._memory_after(found)
        return {} if memory is None else memory.to_state()

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        found = self.diagnose(tokens)
        segments = found.segments
        weights = tokens.mask.to(torch.float32)
        rejected = torch.zeros_like(tokens.mask)
        hit = found.selected[segments.segment]
        if self.variant == "segment_mask":
            rejected[segments.places] = hit
        else:
            mass = tokens.advantages[segments.places].abs().float()
            weights[segments.places] = self._repaired(found, hit, mass, tokens)
        severe = self._severe(tokens)
        size = tokens.gap[severe].abs().float()
        weights[severe] = torch.minimum(weights[severe], (self.g_sev / size).clamp(min=self.w_min))
        weights[rejected] = 0.0
        metrics = self._metrics(tokens, found, weights, severe)
        return CorrectionResult(weights, rejected, metrics, self.learnt(found))

    def _repaired(self, found: Diagnosis, hit: Tensor, mass: Tensor, tokens: CorrectionInput) -> Tensor:
        """Step 4: weights of the diagnosed tokens."""
        segments = found.segments
        amplifying = hit & (segments.amplifying > 0)
        contracting = hit & (segments.contracting > 0)
        ones = torch.ones_like(mass)
        if self.variant == "segment_is":
            ratio = clamped_exp(segments.contracting - segments.amplifying).clamp(self.w_min, self.w_max)
            return torch.where(hit, ratio, ones)
        if self.variant == "cross_quadrant":
            share = _cross_quadrant_factor(tokens, mass, amplifying, segments)
            return torch.where(amplifying, max(self.w_min, share), ones)
        kept = clamped_exp(-self.strength * segments.amplifying).clamp(min=self.w_min)
        kept = torch.where(amplifying, kept, ones)
        count = segments.count.shape[0]
        removed = sequence_sum((1.0 - kept.double()) * mass, segments.segment, count)
        room = sequence_sum(mass.double() * contracting, segments.segment, count)
        factor = 1.0 + (removed / room.clamp(min=1e-300)).clamp(max=self.w_max - 1.0)
        return torch.where(contracting, factor[segments.segment].float(), kept)

    def _severe(self, tokens: CorrectionInput) -> Tensor:
        """[T] bool: amplifying tokens of the current version with a severe gap."""
        current = tokens.current
        gap = torch.where(current, tokens.gap, 0.0)
        sign = torch.where(current, tokens.advantages, 0.0).sign()
        return sign * gap > self.g_sev

    def _reference(self, segments: SegmentStatistics) -> Reference | None:
        """Level and scale for this batch: the memory, with the batch itself while the memory is being filled."""
        own = measure(segments.amplification, segments.count)
        if own is None or self.reference == "batch":
            return own
        if self.memory is None:
            return own
        if self.memory.batches < self.reference_batches:
            return self.memory.mixed(own, 1.0 / (self.memory.batches + 1.0))
        return self.memory

    def _memory_after(self, found: Diagnosis) -> Reference | None:
        """The memory after this batch."""
        if self.reference == "batch" or found.reference is None:
            return self.memory
        if self.memory is None or self.memory.batches < self.reference_batches:
            return found.reference
        if self.reference == "frozen":
            return self.memory
        healthy = ~found.verdict.suspicious
        own = measure(found.segments.amplification[healthy], found.segments.count[healthy])
        return self.memory if own is None else self.memory.mixed(own, 1.0 - self.ema_decay)

    def _metrics(self, tokens: CorrectionInput, found: Diagnosis, weights: Tensor, severe: Tensor) -> Statistics:
        real = weights[tokens.mask]
        metrics = {
            "correction/weight_mean": mean_of(real),
            "correction/weight_min": extreme_of(real, "min"),
            "correction/weight_max": extreme_of(real, "max"),
            "correction/suspicious_segments": mean_of(found.verdict.suspicious),
            "correction/selected_segments": mean_of(found.selected),
            "correction/selected_tokens": mean_of(found.selected_tokens(len(tokens.mask))[tokens.mask]),
            "correction/severe_tokens": mean_of(severe[tokens.mask]),
            "correction/stale_tokens": mean_of(~tokens.current[tokens.mask]),
        }
        size = tokens.advantages[tokens.mask].abs().double()
        if bool((size > 0).any()):
            # Mean of w|A| over mean of |A|: 1 where all removed mass found a place.
            metrics["correction/mass_kept"] = mean_of((real.double() * size).sum() / size.sum())
        if found.reference is not None:
            metrics["correction/reference_loc"] = mean_of(real.new_tensor(found.reference.loc))
            metrics["correction/reference_scale"] = mean_of(real.new_tensor(found.reference.scale))
        return metrics


def _cross_quadrant_factor(
    tokens: CorrectionInput, mass: Tensor, amplifying: Tensor, segments: SegmentStatistics
) -> float:
    """One factor for the selected (-,-) tokens that makes the |A| mass of (-,-) that of (+,+); 1 if it is not larger."""
    current = tokens.current
    positive = current & (tokens.advantages > 0) & (tokens.gap > 0)
    target = float(tokens.advantages[positive].double().sum())
    total = float(mass[segments.amplifying > 0].double().sum())
    mine = float(mass[amplifying].double().sum())
    return 1.0 if total <= target or mine == 0.0 else max(0.0, (target - (total - mine)) / mine)


def _require_one_temperature(tokens: CorrectionInput) -> None:
    """Gaps at different temperatures have different sizes, so their statistics must not be pooled."""
    stated = tokens.rollout_distribution or tokens.learner_distribution
    if stated is None or not bool(tokens.mask.any()):
        return
    real = stated.temperature[tokens.mask]
    if bool((real != real[0]).any()):
        raise SpecMismatchError(
            f"one batch mixes temperatures from {float(real.min())} to {float(real.max())}",
            where="triage",
            expected="one temperature for all tokens of a batch",
            fix="diagnose samples of each temperature apart",
        )
