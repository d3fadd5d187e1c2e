"""Top-k routing by definition: basic IEEE operations only (our own exp, sums in expert order), so that a token's route does not
depend on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.kernels.reference.elementary import exp

__all__ = ["check_route", "gate_values", "route"]


def check_route(logits: Tensor, k: int) -> None:
    """Raise ShapeError unless logits are [T, E] with E of at least k, and k is at least 1."""
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ShapeError(
            f"route: {k} experts cannot be chosen",
            where=f"logits {tuple(logits.shape)}",
            expected="[T, E] with 1 <= k <= E",
        )


def route(logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` experts with the largest logits, largest first, ties to the lower id.

    Arguments:
        logits: [T, E] float32.
        k: experts a token.
        normalise: divide the gates by their sum (``norm_topk_prob``); otherwise they are softmax probabilities.

    Returns:
        (ids [T, k] int32, gates [T, k] float32).
    """
    check_route(logits, k)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
    return order.to(torch.int32), gate_values(logits, order, normalise=normalise)


def gate_values(logits: Tensor, ids: Tensor, *, normalise: bool) -> Tensor:
    """The reproducible gates of given routes: logits [T, E], ids [T, k] int64 -> [T, k], those of :func:`route` for its own."""
    weights = exp(logits - logits.amax(dim=1, keepdim=True))
    chosen = weights.gather(1, ids)
    total = _sum_columns(chosen if normalise else weights)
    return (chosen / total[:, None]).contiguous()


def _sum_columns(x: Tensor) -> Tensor:
    total = x[:, 0].clone()
    for j in range(1, x.shape[1]):
        total += x[:, j]
    return total
