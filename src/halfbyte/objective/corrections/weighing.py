"""What the rules of this package share: log-ratios by sequence, and the result with its metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.aggregate import extreme_of, mean_of
from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.sequences import dense_index, sequence_sum

__all__ = ["real_gap", "refuse", "result", "sequence_gap"]


def real_gap(tokens: CorrectionInput) -> Tensor:
    """[N] float32: gaps of the tokens that count."""
    return tokens.gap[tokens.mask].float()


def sequence_gap(tokens: CorrectionInput, *, mean: bool) -> Tensor:
    """[N] float32: for each token that counts the sum or mean of the gaps of its sample (of tokens that count)."""
    gap = real_gap(tokens)
    index, count = dense_index(tokens.sequence_index[tokens.mask])
    total = sequence_sum(gap, index, count)
    if mean:
        total = total / sequence_sum(torch.ones_like(gap), index, count)
    return total[index]


def result(tokens: CorrectionInput, weights: Tensor, rejected: Tensor, ratio: Tensor | None = None) -> CorrectionResult:
    """The result from values of the N tokens that count.

    Arguments:
        weights: [N] float32 before rejection. rejected: [N] bool. ratio: [N] float32, raw, for the metrics.
    """
    kept = torch.where(rejected, 0.0, weights)
    metrics = {
        "correction/weight_mean": mean_of(kept),
        "correction/weight_max": extreme_of(kept, "max"),
        "correction/rejected_share": mean_of(rejected),
    }
    if ratio is not None:
        metrics["correction/ratio_mean"] = mean_of(ratio)
        metrics["correction/cut_share"] = mean_of(~rejected & (weights != ratio))
    flat = torch.zeros_like(tokens.gap, dtype=torch.float32).masked_scatter(tokens.mask, kept)
    thrown = torch.zeros_like(tokens.mask).masked_scatter(tokens.mask, rejected)
    return CorrectionResult(flat, thrown, metrics)


def refuse(rule: str, checks: Mapping[str, tuple[float, bool, str]]) -> None:
    """Raise ConfigError for the first option whose check is false.

    Arguments:
        checks: option -> its value, whether it is good, what was expected.
    """
    for name, (value, good, expected) in checks.items():
        if not good:
            raise ConfigError(f"{name} is {value}", where=f"{rule}.{name}", expected=expected)
