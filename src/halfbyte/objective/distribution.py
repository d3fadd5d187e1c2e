"""The distribution a token was drawn from, as data, so that a gap between two different distributions is refused.

g = logp_learner - logp_rollout measures numerics only if both log-probs are of one distribution: the same temperature, and
the same kept set where top-p, top-k or min-p drop tokens (TRL #4159, #6789; invariant I13 of TRIAGE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import SpecMismatchError
from halfbyte.objective.validation import describe_token, require_index, require_real

__all__ = ["Distribution", "require_same_distribution", "support_fingerprint"]

# Two large odd constants (the golden ratio and a prime of SplitMix64, as signed 64-bit numbers).
_MIX = -7046029254386353131
_SPREAD = -4658895280553007687


@dataclass(frozen=True, eq=False)
class Distribution:
    """What one side declares about every token.

    Arguments:
        temperature: [T] float32, as it divided the logits.
        support: [T] int64, a fingerprint of the kept token ids (:func:`support_fingerprint`), 0 where nothing was dropped;
            None if nothing is ever dropped.
    """

    temperature: Tensor
    support: Tensor | None = None


def support_fingerprint(supports: Sequence[Tensor | None]) -> Tensor:
    """One number for each kept set, the same for any order of its ids.

    Arguments:
        supports: for each token the kept ids ([k] int64), or None where nothing was dropped.

    Returns:
        [T] int64, 0 for None. Two different sets share a number with chance 2^-64 or so.
    """
    out = torch.zeros(len(supports), dtype=torch.int64)
    found = [(i, ids.to(torch.int64).reshape(-1)) for i, ids in enumerate(supports) if ids is not None]
    if found:
        rows = torch.tensor([i for i, _ in found])
        lengths = torch.tensor([len(ids) for _, ids in found])
        mixed = (torch.cat([ids for _, ids in found]) + 1) * _MIX
        mixed = (mixed ^ (mixed >> 29)) * _SPREAD
        # Wraps modulo 2^64; a sum does not see the order. The length keeps an empty set apart from None.
        out.index_add_(0, rows, lengths + 1)
        out.index_add_(0, torch.repeat_interleave(rows, lengths), mixed)
    return out


def require_same_distribution(
    rollout: Distribution, learner: Distribution, mask: Tensor, sequence_index: Tensor | None = None
) -> None:
    """Refuse tokens whose two sides differ.

    Arguments:
        mask: [T] bool; what stands where it is false is not looked at. sequence_index: [T] int64, for the message.

    Raises:
        SpecMismatchError: another temperature or another kept set, naming the first such token and both values.
        ShapeError: shapes or dtypes do not fit.
    """
    length = mask.shape[0]
    for side, stated in (("rollout", rollout), ("learner", learner)):
        require_real(f"{side} temperature", stated.temperature, length)
        if stated.support is not None:
            require_index(f"{side} support", stated.support, length, torch.zeros_like(mask))
    _refuse("temperature", rollout.temperature, learner.temperature, mask, sequence_index)
    none = torch.zeros(length, dtype=torch.int64, device=mask.device)
    sides = [none if stated.support is None else stated.support for stated in (rollout, learner)]
    _refuse("kept set (top-p, top-k, min-p)", sides[0], sides[1], mask, sequence_index)


def _refuse(what: str, rollout: Tensor, learner: Tensor, mask: Tensor, sequence_index: Tensor | None) -> None:
    wrong = mask & (rollout != learner)
    if bool(wrong.any()):
        first = int(torch.nonzero(wrong)[0, 0])
        raise SpecMismatchError(
            f"rollout and learner differ in the {what}: {rollout[first].item()} and {learner[first].item()}"
            f" ({int(wrong.sum())} such tokens)",
            where=describe_token(first, sequence_index),
            expected="log-probs of one distribution on both sides",
            fix="score with the rollout's temperature and kept sets",
        )
