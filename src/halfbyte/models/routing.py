"""Gates of given routes. ``Kernels.route`` chooses experts reproducibly; :func:`gates_for` recomputes differentiable gate weights
from live router logits: with router replay the experts are the rollout's while the router still learns (arXiv 2510.11370,
"R3"; also arXiv 2610.07767).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.kernels.reference.routing import gate_values

__all__ = ["gate_values", "gates_for"]


def gates_for(logits: Tensor, ids: Tensor, *, normalise: bool) -> Tensor:
    """Differentiable gates of given routes: logits [T, E], ids [T, k] int64 -> [T, k]."""
    if normalise:
        return torch.softmax(logits.gather(1, ids), dim=1)
    return torch.softmax(logits, dim=1).gather(1, ids)
