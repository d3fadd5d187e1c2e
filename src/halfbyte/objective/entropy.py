"""Entropy of the next-token distribution, from logits, in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.objective.aggregate import Statistics, extreme_of, mean_of
from halfbyte.objective.validation import describe_token, require_mask, require_real

__all__ = ["entropy_statistics", "token_entropy"]


def token_entropy(
    logits: Tensor,
    mask: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    sequence_index: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Entropy of softmax(logits / temperature) at every token that counts.

    Differentiable; wrap it in ``torch.no_grad`` when it is only a metric.

    Arguments:
        logits: [T, V] float of any precision. -inf means a token that a filter removed; it adds nothing.
        mask: [T] bool. Rows where it is false may hold anything.
        temperature: positive; a number or [T]. It divides the logits, never the log-probs (prime-rl #697).
        sequence_index: [T] int64, to name a sample in an error.
        chunk: rows in float32 at a time, at least 1.

    Returns:
        [T] float32, nats; 0 where mask is false.

    Raises:
        NumericsError: a row that counts holds NaN, +inf or only -inf; the message names it.
        ShapeError: shapes do not fit.
        ConfigError: a temperature on a token that counts is not positive.
    """
    require_mask("mask", mask)
    if logits.dim() != 2 or logits.shape[0] != mask.shape[0] or not logits.is_floating_point():
        raise ShapeError(
            f"logits are {logits.dtype} {list(logits.shape)}", expected=f"floating point [{mask.shape[0]}, V]"
        )
    if not isinstance(temperature, Tensor):
        temperature = torch.full(mask.shape, float(temperature), device=mask.device)
    require_real("temperature", temperature, mask.shape[0])
    positions = torch.nonzero(mask)[:, 0]
    if not bool((temperature[positions] > 0).all()):
        raise ConfigError(
            "temperature is not positive", where="temperature", fix="greedy decoding has no entropy; use temperature 1"
        )
    pieces = [logits.new_zeros(0, dtype=torch.float32)]
    for start in range(0, positions.shape[0], chunk):
        rows = positions[start : start + chunk]
        scaled = logits[rows].float() / temperature[rows].float()[:, None]
        _require_distribution(scaled, rows, sequence_index)
        logp = torch.log_softmax(scaled, dim=-1)
        # 0 * -inf: removed tokens leave before the product.
        removed = torch.isneginf(logp)
        kept = torch.where(removed, 0.0, logp)
        pieces.append(-torch.where(removed, 0.0, torch.exp(kept) * kept).sum(dim=-1))
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, torch.cat(pieces))


def entropy_statistics(entropy: Tensor, mask: Tensor) -> Statistics:
    """Mean and smallest entropy over the tokens that count, mergeable over micro-batches.

    Arguments:
        entropy: [T] float32, nats. mask: [T] bool.
    """
    require_mask("mask", mask)
    require_real("entropy", entropy, mask.shape[0])
    real = entropy.detach()[mask]
    return {"entropy/mean": mean_of(real), "entropy/min": extreme_of(real, "min")}


def _require_distribution(rows: Tensor, positions: Tensor, sequence_index: Tensor | None) -> None:
    top = rows.detach().amax(dim=-1)  # amax passes NaN on; -inf here means that every token is removed
    bad = ~torch.isfinite(top)
    if bool(bad.any()):
        first = int(torch.nonzero(bad)[0, 0])
        raise NumericsError(
            f"the largest logit is {float(top[first])}",
            where=describe_token(int(positions[first]), sequence_index),
            expected="finite logits, or -inf for tokens that a filter removed, at least one finite",
        )
