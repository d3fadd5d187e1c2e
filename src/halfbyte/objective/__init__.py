"""The objective of reinforcement learning, as pure functions on flat tensors; usable inside other trainers.

One step: :func:`advantages` -> :func:`token_gap` and a correction -> :func:`counted_tokens`, :func:`count_batch`,
:func:`token_scale` over the global batch -> :func:`policy_loss` per micro-batch -> :func:`merge`, :func:`read`.
Tokens are flat: tensors [T], ``sequence_index`` [T] maps them to samples, ``mask`` [T] says which count.
"""

from __future__ import annotations

from halfbyte.objective.advantages import AdvantageMethod, AdvantageMetrics, AdvantageResult, advantages
from halfbyte.objective.aggregate import Statistic, Statistics, extreme_of, mean_of, merge, read, total_of
from halfbyte.objective.correction import Correction, CorrectionInput, CorrectionResult, StatefulCorrection
from halfbyte.objective.corrections import CORRECTIONS, NoCorrection, TokenTis, make_correction
from halfbyte.objective.denominators import BatchCounts, DenominatorMethod, count_batch, counted_tokens, token_scale
from halfbyte.objective.distribution import Distribution, require_same_distribution, support_fingerprint
from halfbyte.objective.entropy import entropy_statistics, token_entropy
from halfbyte.objective.exponent import EXPONENT_LIMIT, clamped_exp
from halfbyte.objective.gap import GapMetrics, effective_sample_size, gap_metrics, gap_terms, token_gap
from halfbyte.objective.kl import KlEstimator, kl_estimate
from halfbyte.objective.policy_loss import LossInput, LossResult, policy_loss, require_compatible
from halfbyte.objective.policy_settings import PolicySettings, Proximal
from halfbyte.objective.quadrants import QUADRANTS, GapParts, quadrant_of, quadrants, split_gap
from halfbyte.objective.ratio import RatioLevel, importance_ratio, log_ratio
from halfbyte.objective.reference import Reference
from halfbyte.objective.segments import SEGMENTERS, Segmenter, SegmentInput, delimiter_flags, make_segmenter
from halfbyte.objective.sequences import dense_index, sequence_sum, spread
from halfbyte.objective.triage import Diagnosis, Triage

__all__ = [
    "CORRECTIONS",
    "EXPONENT_LIMIT",
    "QUADRANTS",
    "SEGMENTERS",
    "AdvantageMethod",
    "AdvantageMetrics",
    "AdvantageResult",
    "BatchCounts",
    "Correction",
    "CorrectionInput",
    "CorrectionResult",
    "DenominatorMethod",
    "Diagnosis",
    "Distribution",
    "GapMetrics",
    "GapParts",
    "KlEstimator",
    "LossInput",
    "LossResult",
    "NoCorrection",
    "PolicySettings",
    "Proximal",
    "RatioLevel",
    "Reference",
    "SegmentInput",
    "Segmenter",
    "StatefulCorrection",
    "Statistic",
    "Statistics",
    "TokenTis",
    "Triage",
    "advantages",
    "clamped_exp",
    "count_batch",
    "counted_tokens",
    "delimiter_flags",
    "dense_index",
    "effective_sample_size",
    "entropy_statistics",
    "extreme_of",
    "gap_metrics",
    "gap_terms",
    "importance_ratio",
    "kl_estimate",
    "log_ratio",
    "make_correction",
    "make_segmenter",
    "mean_of",
    "merge",
    "policy_loss",
    "quadrant_of",
    "quadrants",
    "read",
    "require_compatible",
    "require_same_distribution",
    "sequence_sum",
    "split_gap",
    "spread",
    "support_fingerprint",
    "token_entropy",
    "token_gap",
    "token_scale",
    "total_of",
]
