"""Top-k routing of tokens to experts: from router logits to expert ids and gate weights, the same for every execution.

The reproducible :func:`route` uses basic IEEE operations only (our own exp, sums in expert order), so a token's route does
not depend on its neighbours. :func:`gates_for` recomputes differentiable gate weights for given routes from live router
logits: with router replay the experts are the rollout's while the router still learns (arXiv 2510.11370, "R3"; also
arXiv 2610.07767).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.kernels.reference.elementary import exp

__all__ = ["gate_values", "gates_for", "route"]


def route(logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` experts with the largest logits, largest first, ties to the lower id.

    Arguments:
        logits: [T, E] float32.
        k: experts a token.
        normalise: divide the gates by their sum (``norm_topk_prob``); otherwise they are softmax probabilities.

    Returns:
        (ids [T, k] int32, gates [T, k] float32).
    """
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
    return order.to(torch.int32), gate_values(logits, order, normalise=normalise)


def gate_values(logits: Tensor, ids: Tensor, *, normalise: bool) -> Tensor:
    """The reproducible gates of given routes: logits [T, E], ids [T, k] int64 -> [T, k], those of :func:`route` for its own."""
    weights = exp(logits - logits.amax(dim=1, keepdim=True))
    chosen = weights.gather(1, ids)
    total = _sum_columns(chosen if normalise else weights)
    return (chosen / total[:, None]).contiguous()


def gates_for(logits: Tensor, ids: Tensor, *, normalise: bool) -> Tensor:
    """Differentiable gates of given routes: logits [T, E], ids [T, k] int64 -> [T, k]."""
    if normalise:
        return torch.softmax(logits.gather(1, ids), dim=1)
    return torch.softmax(logits, dim=1).gather(1, ids)


def _sum_columns(x: Tensor) -> Tensor:
    total = x[:, 0].clone()
    for j in range(1, x.shape[1]):
        total += x[:, j]
    return total
