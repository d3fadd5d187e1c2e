"""The objective of reinforcement learning, as pure functions on flat tensors; usable inside other trainers.

One step: :func:`advantages` -> :func:`token_gap` and a correction -> :func:`counted_tokens`, :func:`count_batch`,
:func:`token_scale` over the global batch -> :func:`policy_loss` per micro-batch -> :func:`merge`, :func:`read`.
Tokens are flat: tensors [T], ``sequence_index`` [T] maps them to samples, ``mask`` [T] says which count.
"""

from __future__ import annotations

from halfbyte.objective.advantages import AdvantageMethod, AdvantageMetrics, AdvantageResult, advantages
from halfbyte.objective.aggregate import Statistic, Statistics, extreme_of, mean_of, merge, read, total_of
from halfbyte.objective.correction import Correction, CorrectionInput, CorrectionResult
from halfbyte.objective.corrections import CORRECTIONS, NoCorrection, TokenTis, make_correction
from halfbyte.objective.denominators import BatchCounts, DenominatorMethod, count_batch, counted_tokens, token_scale
from halfbyte.objective.entropy import entropy_statistics, token_entropy
from halfbyte.objective.exponent import EXPONENT_LIMIT, clamped_exp
from halfbyte.objective.gap import GapMetrics, effective_sample_size, gap_metrics, token_gap
from halfbyte.objective.kl import KlEstimator, kl_estimate
from halfbyte.objective.policy_loss import LossInput, LossResult, policy_loss, require_compatible
from halfbyte.objective.policy_settings import PolicySettings, Proximal
from halfbyte.objective.ratio import RatioLevel, importance_ratio, log_ratio
from halfbyte.objective.sequences import dense_index, sequence_sum, spread

__all__ = [
    "CORRECTIONS",
    "EXPONENT_LIMIT",
    "AdvantageMethod",
    "AdvantageMetrics",
    "AdvantageResult",
    "BatchCounts",
    "Correction",
    "CorrectionInput",
    "CorrectionResult",
    "DenominatorMethod",
    "GapMetrics",
    "KlEstimator",
    "LossInput",
    "LossResult",
    "NoCorrection",
    "PolicySettings",
    "Proximal",
    "RatioLevel",
    "Statistic",
    "Statistics",
    "TokenTis",
    "advantages",
    "clamped_exp",
    "count_batch",
    "counted_tokens",
    "dense_index",
    "effective_sample_size",
    "entropy_statistics",
    "extreme_of",
    "gap_metrics",
    "importance_ratio",
    "kl_estimate",
    "log_ratio",
    "make_correction",
    "mean_of",
    "merge",
    "policy_loss",
    "read",
    "require_compatible",
    "sequence_sum",
    "spread",
    "token_entropy",
    "token_gap",
    "token_scale",
    "total_of",
]
