"""From logits to tokens and log-probabilities: one definition for the rollout and for the learner.

z = logits / temperature (prime-rl #697: never log-probs / temperature); m = max z; e = exp(z - m); total = the float64
:func:`~halfbyte.kernels.reference.sums.lane_sum` of e in vocabulary order; log-prob = float32((z - m) - log(total)).
With filters the same holds over the kept tokens: log-probs are those of the distribution sampled from (TRL #6789).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import DataError, NumericsError, ShapeError
from halfbyte.kernels.reference.elementary import exp, log
from halfbyte.kernels.reference.sums import BLOCK, block_sums, running_sum

__all__ = ["Sampled", "check_logits", "check_parameters", "check_supports", "log_softmax", "sample", "token_logprobs"]

_LOWEST = torch.finfo(torch.float32).min


class Sampled(NamedTuple):
    """Sampled tokens.

    ids [S] int64; logprobs [S] float32; support: for each row the kept ids (int64, ascending) where a filter removed
    tokens, None where the distribution is the full softmax; empty unless asked for.
    """

    ids: Tensor
    logprobs: Tensor
    support: list[Tensor | None]


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities [S, V] (float32) of softmax(logits / temperature); temperature [S], 0 counts as 1.

    Raises: NumericsError naming the row for non-finite logits; ShapeError.
    """
    z = check_logits(logits, temperature)
    d, e = _exponentials(z, None)
    return _log_probability(d, running_sum(block_sums(e))[:, -1:])


def token_logprobs(
    logits: Tensor, ids: Tensor, temperature: Tensor, supports: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Log-probability [S] (float32) of ids [S] under softmax(logits [S, V] / temperature [S]), for teacher forcing.

    ``supports``: for each row the ids that the sampler had kept, or None for all; the distribution is renormalised over
    them, so the same logits give bit for bit the log-probs of :func:`sample`.
    Raises: NumericsError naming the row for non-finite logits; DataError when an id is outside its support or the
    vocabulary; ShapeError.
    """
    z = check_logits(logits, temperature)
    check_supports(z.shape, ids, supports)
    kept = None
    if supports is not None and any(s is not None for s in supports):
        kept = torch.ones(z.shape, dtype=torch.bool, device=z.device)
        for row, support in enumerate(supports):
            if support is not None:
                kept[row] = False
                kept[row, support] = True
    d, e = _exponentials(z, kept)
    return _log_probability(d.gather(1, ids.unsqueeze(1)), running_sum(block_sums(e))[:, -1:]).squeeze(1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    want_support: bool = False,
) -> Sampled:
    """Draw one token a row from logits [S, V] (float32) by inverse CDF.

    Filters in this order, each on what the one before kept, renormalised; ties go to the lower id:
    top_k [S] int32 (0 = off) keeps the k most probable; top_p [S] (1 = off) the smallest set of most probable tokens
    whose probability reaches p; min_p [S] (0 = off) those with probability >= min_p * the largest.
    temperature [S] float32: 0 means greedy (most probable token, lowest id on ties, filters without effect, log-prob of
    the temperature-1 distribution). uniform [S] float64 in [0, 1).
    The CDF is the float64 sum of e in vocabulary order over kept tokens: blocks of 1024 ids by
    :func:`~halfbyte.kernels.reference.sums.block_sums`, token by token inside the block; the first token whose CDF
    exceeds uniform * total is drawn, never one of probability 0.

    Raises: NumericsError naming the row for non-finite logits; DataError for parameters out of range; ShapeError.
    """
    z = check_logits(logits, temperature)
    check_parameters(z.shape, temperature, top_k, top_p, min_p, uniform)
    greedy = temperature == 0
    kept = _filter(z, torch.where(greedy, 0, top_k), torch.where(greedy, 1.0, top_p), torch.where(greedy, 0.0, min_p))
    d, e = _exponentials(z, kept)
    prefix = running_sum(block_sums(e))
    total = prefix[:, -1:]
    ids = torch.where(greedy, z.argmax(1), _inverse_cdf(e, prefix, uniform))
    logprobs = _log_probability(d.gather(1, ids.unsqueeze(1)), total).squeeze(1)
    support: list[Tensor | None] = [None] * (z.shape[0] if want_support else 0)
    if want_support and kept is not None:
        for row in (~kept).any(1).nonzero().squeeze(1).tolist():
            support[row] = kept[row].nonzero().squeeze(1)
    return Sampled(ids, logprobs, support)


def check_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / temperature (0 counts as 1); raise ShapeError, DataError or NumericsError where that cannot be used."""
    if logits.ndim != 2 or logits.shape[1] == 0 or temperature.shape != logits.shape[:1]:
        raise ShapeError(
            "sampling: shapes do not fit",
            where=f"logits {tuple(logits.shape)}, temperature {tuple(temperature.shape)}",
            expected="logits [S, V] with V >= 1, temperature [S]",
        )
    if not bool(((temperature >= 0) & torch.isfinite(temperature)).all()):
        raise DataError(
            "a temperature cannot be used", where=f"temperature {temperature.tolist()}", expected="finite, >= 0"
        )
    z = logits / torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
    finite = torch.isfinite(z).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        column = int((~torch.isfinite(z[row])).nonzero()[0])
        raise NumericsError(
            "a logit is not finite",
            where=f"row {row}, token {column}: logit {float(logits[row, column])}, "
            f"temperature {float(temperature[row])}",
            expected="finite logits / temperature",
        )
    return z


def check_parameters(
    shape: torch.Size, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> None:
    """Raise ShapeError or DataError for sampling parameters that cannot be used."""
    named = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    for name, t in named.items():
        if t.shape != shape[:1]:
            raise ShapeError(
                f"sampling: {name} does not fit the logits",
                where=f"{name} {tuple(t.shape)}, logits {tuple(shape)}",
                expected=f"{name} [{shape[0]}]",
            )
    ranges = (
        (("top_k", top_k >= 0, ">= 0 (0 = off)")),
        ("top_p", (top_p > 0) & (top_p <= 1), "in (0, 1] (1 = off)"),
        ("min_p", (min_p >= 0) & (min_p <= 1), "in [0, 1] (0 = off)"),
        ("uniform", (uniform >= 0) & (uniform < 1), "in [0, 1)"),
    )
    for name, good, expected in ranges:
        if not bool(good.all()):
            row = int((~good).nonzero()[0])
            raise DataError(f"{name} cannot be used", where=f"row {row}: {named[name][row].item()}", expected=expected)


def check_supports(shape: torch.Size, ids: Tensor, supports: Sequence[Tensor | None] | None) -> None:
    """Raise ShapeError or DataError unless every id lies in its support and in the vocabulary."""
    if ids.shape != shape[:1] or (supports is not None and len(supports) != shape[0]):
        raise ShapeError(
            "token_logprobs: shapes do not fit",
            where=f"ids {tuple(ids.shape)}, logits {tuple(shape)}",
            expected="ids [S] and one support (or None) a row",
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < shape[1]:
        raise DataError(
            "a token id is outside the vocabulary",
            where=f"ids {int(ids.min())}..{int(ids.max())}",
            expected=f"0..{shape[1] - 1}",
        )
    for row, support in enumerate(supports or ()):
        if support is not None and support.numel() and not 0 <= int(support.min()) <= int(support.max()) < shape[1]:
            raise DataError(
                "a support holds ids outside the vocabulary", where=f"row {row}", expected=f"0..{shape[1] - 1}"
            )
        if support is not None and not bool((support == ids[row]).any()):
            raise DataError(
                "a token is outside the support it was sampled from",
                where=f"row {row}: id {int(ids[row])}",
                fix="store the support that sample() returned with the token",
            )


def _exponentials(z: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """z - max over kept tokens, and its exp with 0 where a token is not kept. Never non-finite for finite z."""
    m = (z if kept is None else torch.where(kept, z, -torch.inf)).amax(1, keepdim=True)
    d = (z - m).clamp(min=_LOWEST)
    e = exp(d)
    return d, e if kept is None else torch.where(kept, e, 0.0)


def _log_probability(d: Tensor, total: Tensor) -> Tensor:
    return (d.to(torch.float64) - log(total)).to(torch.float32)


def _filter(z: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """Kept tokens [S, V] bool, or None when no row filters."""
    v = z.shape[1]
    some_k, some_p, some_min = ((top_k > 0) & (top_k < v)), (top_p < 1), (min_p > 0)
    if not bool((some_k | some_p | some_min).any()):
        return None
    kept = torch.ones_like(z, dtype=torch.bool)
    rows = (some_k | some_p).nonzero().squeeze(1)
    if rows.numel():
        k = torch.where(some_k, top_k.long(), v)[rows]
        sorted_z, order = z[rows].sort(dim=1, descending=True, stable=True)
        keep = torch.arange(v) < k.unsqueeze(1)
        e = torch.where(keep, exp((sorted_z - sorted_z[:, :1]).clamp(min=_LOWEST)), 0.0)
        by_id = torch.zeros_like(e).scatter_(1, order, e)
        total = running_sum(block_sums(by_id))[:, -1:]
        before = torch.cat([torch.zeros(len(rows), 1, dtype=torch.float64), running_sum(e)[:, :-1]], dim=1)
        p = top_p[rows].to(torch.float64).unsqueeze(1)
        keep &= (before < p * total) | (p >= 1)
        kept[rows] = torch.zeros_like(keep).scatter_(1, order, keep)
    if bool(some_min.any()):
        _, e = _exponentials(z, None)
        kept &= e >= min_p.to(torch.float32).unsqueeze(1)
    return kept


def _inverse_cdf(e: Tensor, prefix: Tensor, uniform: Tensor) -> Tensor:
    """First id whose running sum exceeds uniform * total."""
    v = e.shape[1]
    target = uniform.to(torch.float64).unsqueeze(1) * prefix[:, -1:]
    block = (prefix > target).to(torch.uint8).argmax(1)  # argmax returns the first maximum
    before = torch.where(block > 0, prefix.gather(1, (block - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    index = block.unsqueeze(1) * BLOCK + torch.arange(min(BLOCK, v))
    inside = torch.where(index < v, e.gather(1, index.clamp(max=v - 1)), 0.0)
    cdf = running_sum(torch.cat([before.unsqueeze(1), inside.to(torch.float64)], dim=1))[:, 1:]
    above = cdf > target
    # Rounding may leave the block's last running sum at or below the target: then the block's last token that has mass.
    last = min(BLOCK, v) - 1 - (inside > 0).flip(1).to(torch.uint8).argmax(1)
    local = torch.where(above.any(1), above.to(torch.uint8).argmax(1), last)
    return block * BLOCK + local
