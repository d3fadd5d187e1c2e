"""The one function that turns logits into log-probabilities, for the rollout and for the learner.

Forward is the kernels' ``token_logprobs`` (our exp and log in a fixed order), so equal logits give equal log-probs bit for
bit; backward is the softmax gradient of the same declared distribution. Temperature divides the logits, never the
log-probs (prime-rl #697), and a filtered rollout's kept tokens are replayed, so that both sides speak of one distribution
(TRL #6789; "keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte.kernels import Kernels

__all__ = ["positive_temperature", "token_logprobs"]


def token_logprobs(
    kernels: Kernels,
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor,
    supports: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Differentiable log-probs of ``ids`` under softmax(logits / temperature), over the kept tokens only where given.

    Arguments:
        logits: [R, V] float32.
        ids: [R] int64.
        temperature: [R] float32; 0 stands for 1 (a greedy rollout's log-probs are those of temperature 1).
        supports: for each row the kept token ids (int64), or None.

    Returns:
        [R] float32.

    Raises:
        NumericsError: a logit is not finite.
    """
    return cast(Tensor, _TokenLogProbs.apply(logits, ids, temperature, supports, kernels))  # type: ignore[no-untyped-call]


def positive_temperature(temperature: Tensor) -> Tensor:
    """The temperature that divides the logits: 1 where a greedy rollout says 0."""
    return torch.where(temperature > 0, temperature, torch.ones_like(temperature))


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        temperature: Tensor,
        supports: Sequence[Tensor | None] | None,
        kernels: Kernels,
    ) -> Tensor:
        ctx.save_for_backward(logits, ids, temperature)
        ctx.supports = supports
        return kernels.token_logprobs(logits.detach(), ids, temperature, supports)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, temperature = ctx.saved_tensors
        scale = positive_temperature(temperature)
        scaled = logits / scale[:, None]
        if ctx.supports is not None:
            for row, kept in enumerate(ctx.supports):
                if kept is not None:
                    values = scaled[row, kept]
                    scaled[row] = float("-inf")
                    scaled[row, kept] = values
        out = torch.softmax(scaled, dim=1).neg_()
        out.scatter_add_(1, ids[:, None], torch.ones_like(ids, dtype=out.dtype)[:, None])
        return out.mul_((grad / scale)[:, None]), None, None, None, None
