"""Estimators of the KL divergence to a reference policy, one value a token."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.exponent import EXPONENT_LIMIT

__all__ = ["KlEstimator", "kl_estimate"]

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]


def kl_estimate(logp: Tensor, reference_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(pi || reference) from tokens sampled from pi.

    With d = reference_logp - logp (Schulman, "Approximating KL Divergence", 2020):

    - ``k1``: -d. Unbiased value, high variance, can be negative. As a loss its gradient is the score function, zero on
      average: a metric, not a penalty.
    - ``k2``: d^2 / 2. Biased value; its gradient is, for tokens from pi, the unbiased gradient of the token's KL given
      its prefix (Tang and Munos, arXiv 2506.09477; a per-token loss leaves out the effect on later tokens).
    - ``k3``: exp(d) - 1 - d. Unbiased value, low variance, never negative; used by GRPO (arXiv 2402.03300, equation 4).
      Its gradient is that of the other direction, KL(reference || pi).

    Tokens sampled from another policy (staleness, quantisation) bias all three; the loss does not reweigh them.

    Arguments:
        logp: [T] float, may require gradients. reference_logp: [T] float, constant. Real tokens only.
        estimator: see above.

    Returns:
        [T], nats. In k3 d is clamped at the top to EXPONENT_LIMIT.
    """
    difference = reference_logp.detach() - logp
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference * difference
    if estimator == "k3":
        bounded = torch.clamp(difference, max=EXPONENT_LIMIT)
        # expm1: at |d| = 1e-4 the value is 5e-9, which exp(d) - 1 - d loses in float32.
        return torch.expm1(bounded) - bounded
    raise ConfigError(f"unknown KL estimator {estimator!r}", where="kl", expected=", ".join(get_args(KlEstimator)))
