"""The sign structure of the mismatch: which updates amplify it, where they sit, and what the gap is made of.

Names of quadrants give the sign of the advantage, then that of the gap: ``neg_neg`` amplifies with no floor, ``pos_pos``
amplifies but limits itself, ``neg_pos`` and ``pos_neg`` contract. Tokens with A = 0 or g = 0 are in none.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from halfbyte.objective.correction import CorrectionInput
from halfbyte.objective.triage import Triage
from halfbyte.objective.validation import require_finite, require_mask, require_real

__all__ = ["QUADRANTS", "GapParts", "quadrant_of", "quadrants", "split_gap"]

QUADRANTS = ("neg_neg", "pos_pos", "neg_pos", "pos_neg")
"""In this order everywhere: the two amplifying ones first."""


def quadrant_of(advantages: Tensor, gap: Tensor) -> Tensor:
    """Index into ``QUADRANTS`` of each token, -1 where advantage or gap is 0 (or NaN).

    Arguments:
        advantages, gap: [T] float32.

    Returns:
        [T] int64.
    """
    out = torch.full_like(gap, -1, dtype=torch.int64)
    for index, (a, g) in enumerate(((-1, -1), (1, 1), (-1, 1), (1, -1))):
        out[(advantages * a > 0) & (gap * g > 0)] = index
    return out


@torch.no_grad()
def quadrants(
    tokens: CorrectionInput, weights: Tensor | None = None, *, triage: Triage | None = None
) -> dict[str, float]:
    """Numbers for a metrics line; only what the data can tell, so no number stands for "nothing to count".

    For each quadrant Q: ``quadrant/share_Q`` of the tokens that count, ``quadrant/mass_Q``: sum w |A| over that of all, and
    ``quadrant/gap_Q``: mean |g|, nats. ``quadrant/amplification`` = sum w A g / sum w |A g| in [-1, 1], 0 for a mismatch
    without preferred direction; ``quadrant/imbalance`` = (mass nn - mass pp) / (mass nn + mass pp).

    Of segments with negative-advantage tokens (see ``segment_statistics``): ``segment/count``, ``segment/tokens`` (mean n),
    ``segment/amplification`` and ``segment/contraction`` (mean E and C, nats), ``segment/imbalance`` (mean I),
    ``segment/z_max``, ``segment/over_threshold`` (the leading indicator: share that passes the gates), and
    ``segment/tail_share``: of the 1% of diagnosed tokens that amplify most, the share inside the 5% of segments that hold
    most of them (at least one): near the share of tokens there if damage is spread, towards 1 if it is clustered.

    Arguments:
        tokens: the batch; ``segments`` of it are used.
        weights: [T] float32, to see the masses after a correction; None for 1.
        triage: whose gates and reference define the leading indicator; the defaults with this batch as its own reference
            otherwise.
    """
    mask = tokens.mask
    if not bool(mask.any()):
        return {}
    gap, advantages = tokens.gap[mask].float(), tokens.advantages[mask].float()
    mass = advantages.abs().double() * (1.0 if weights is None else weights[mask].double())
    where = quadrant_of(advantages, gap)
    return _token_numbers(where, gap, mass) | _segment_numbers(tokens, triage or Triage(reference="batch"))


def _token_numbers(where: Tensor, gap: Tensor, mass: Tensor) -> dict[str, float]:
    n, size = gap.shape[0], gap.abs().double()
    inside = where >= 0
    bins = where[inside]
    counts = torch.bincount(bins, minlength=4)
    masses = torch.bincount(bins, weights=mass[inside], minlength=4)
    gaps = torch.bincount(bins, weights=size[inside], minlength=4)
    moved = torch.bincount(bins, weights=(mass * size)[inside], minlength=4)
    out: dict[str, float] = {}
    total = float(mass.sum())
    for index, name in enumerate(QUADRANTS):
        out[f"quadrant/share_{name}"] = float(counts[index]) / n
        if total > 0:
            out[f"quadrant/mass_{name}"] = float(masses[index]) / total
        if counts[index] > 0:
            out[f"quadrant/gap_{name}"] = float(gaps[index] / counts[index])
    if float(moved.sum()) > 0:
        out["quadrant/amplification"] = float((moved[0] + moved[1] - moved[2] - moved[3]) / moved.sum())
    if float(masses[:2].sum()) > 0:
        out["quadrant/imbalance"] = float((masses[0] - masses[1]) / masses[:2].sum())
    return out


def _segment_numbers(tokens: CorrectionInput, triage: Triage) -> dict[str, float]:
    found = triage.diagnose(tokens)
    segments = found.segments
    count = segments.count.shape[0]
    if count == 0:
        return {"segment/count": 0.0}
    out = {
        "segment/count": float(count),
        "segment/tokens": float(segments.count.mean()),
        "segment/amplification": float(segments.amplification.mean()),
        "segment/contraction": float(segments.contraction.mean()),
        "segment/imbalance": float(segments.imbalance.mean()),
        "segment/z_max": float(found.verdict.z.max()),
        "segment/over_threshold": float(found.verdict.suspicious.float().mean()),
    }
    tail = max(1, segments.amplifying.shape[0] // 100)
    bound = segments.amplifying.topk(tail).values[-1]
    if float(bound) > 0:
        in_tail = segments.amplifying >= bound
        held = torch.bincount(segments.segment[in_tail], minlength=count)
        most = held.topk(max(1, count // 20)).values
        out["segment/tail_share"] = float(most.sum() / held.sum())
    return out


@dataclass(frozen=True, eq=False, kw_only=True)
class GapParts:
    """Log-probs of the learner under settings that approach the rollout's, [T] float32 each; None where not known.

    Arguments:
        learner: as the learner scores: its own sampling parameters, routes and weights.
        same_sampling: with the rollout's temperature and kept sets.
        same_routes: and with the rollout's expert ids.
        same_weights: and with the weights that sampled the token.
        rollout: what the rollout recorded.
    """

    learner: Tensor
    rollout: Tensor
    same_sampling: Tensor | None = None
    same_routes: Tensor | None = None
    same_weights: Tensor | None = None


@torch.no_grad()
def split_gap(
    parts: GapParts, mask: Tensor, versions: Tensor | None = None, learner_version: int | None = None
) -> dict[str, float]:
    """What the gap is made of: g = sampling + routing + staleness + numerics, token by token, as differences of log-probs.

    Each part that the data know becomes ``split/NAME_mean`` and ``split/NAME_mean_abs`` (nats); a part whose log-probs are
    missing stays inside the next one. ``numerics`` is what remains, always present. Without ``same_weights``, versions
    still tell old tokens from current ones: ``split/current_mean_abs`` and ``split/stale_mean_abs`` are |g| of each, and
    ``split/stale_tokens`` the share of old ones.

    Raises:
        ShapeError, NumericsError: shapes do not fit, or a log-prob that counts is not finite.
    """
    require_mask("mask", mask)
    chain = [("learner", parts.learner)]
    for part, values in (
        ("sampling", parts.same_sampling),
        ("routing", parts.same_routes),
        ("staleness", parts.same_weights),
        ("numerics", parts.rollout),
    ):
        if values is not None:
            chain.append((part, values))
    for name, values in chain:
        require_real(name, values, mask.shape[0])
        require_finite(name, values, mask)
    out: dict[str, float] = {}
    if not bool(mask.any()):
        return out
    for (_, before), (name, after) in pairwise(chain):
        difference = before[mask].double() - after[mask].double()
        out[f"split/{name}_mean"] = float(difference.mean())
        out[f"split/{name}_mean_abs"] = float(difference.abs().mean())
    if versions is not None and learner_version is not None:
        gap = (parts.learner[mask].double() - parts.rollout[mask].double()).abs()
        stale = versions[mask] != learner_version
        out["split/stale_tokens"] = float(stale.double().mean())
        for name, chosen in (("current", ~stale), ("stale", stale)):
            if bool(chosen.any()):
                out[f"split/{name}_mean_abs"] = float(gap[chosen].mean())
    return out
