"""The gap g = logp_learner - logp_rollout of sampled tokens, and how large it is.

Same weights, same tokens, two executions: whatever is not zero here is numerics (or staleness, if versions differ).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.objective.exponent import EXPONENT_LIMIT
from halfbyte.objective.validation import require_finite, require_index, require_mask, require_real

if TYPE_CHECKING:
    from halfbyte.kernels.compiled.exact import Compile

__all__ = ["GapMetrics", "effective_sample_size", "gap_metrics", "gap_terms", "token_gap"]


def token_gap(learner_logp: Tensor, rollout_logp: Tensor, mask: Tensor, sequence_index: Tensor | None = None) -> Tensor:
    """Gap of every token that counts.

    Arguments:
        learner_logp, rollout_logp: [T] float32, of the same distribution (temperature and filters included).
        mask: [T] bool. sequence_index: [T] int64, only to name a sample in an error.

    Returns:
        [T] float32, detached; exactly 0 where mask is false, whatever stands there.

    Raises:
        NumericsError: NaN or infinity on a token that counts; the message names it.
        ShapeError: shapes or dtypes do not fit.
    """
    _check(learner_logp, rollout_logp, mask, sequence_index)
    gap = _difference(learner_logp.detach(), rollout_logp.detach(), mask)
    require_finite("gap", gap, mask, sequence_index)
    return gap


def gap_terms(
    learner_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    sequence_index: Tensor | None = None,
    *,
    compile: Compile = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`token_gap` and the k3 term of every token, where the log-probs lie.

    For trainers that keep log-probs on a device; our own learner takes them to the CPU. Only the gap is compiled:
    inductor's vectorised expm1 is exp(x) - 1 (on the CPU, torch 2.13), which loses small gaps, so the k3 term stays eager.

    Arguments, raises: as :func:`token_gap`, and
        compile: through ``torch.compile``, the bits unchanged: ``auto`` on CUDA, ``on`` anywhere (a ConfigError where the bits
            would change), or ``off``.

    Returns:
        the gap and exp(g) - 1 - g with g clamped at the top to EXPONENT_LIMIT, both [T] float32, 0 where mask is false.
    """
    _check(learner_logp, rollout_logp, mask, sequence_index)
    arguments = learner_logp.detach(), rollout_logp.detach(), mask
    function: Callable[..., Tensor] = _difference
    if (compile == "on" or (compile == "auto" and mask.is_cuda)) and len(mask) > 1:
        from halfbyte.kernels.compiled.exact import compile_exactly  # on use: the objective needs no kernels otherwise

        where = (mask.device, learner_logp.dtype, rollout_logp.dtype)
        function = compile_exactly(
            ("gap", *where), "gap_terms", _difference, lambda: _probe(*where), insist=compile == "on"
        )
    with torch.no_grad():
        gap = function(*arguments)
    require_finite("gap", gap, mask, sequence_index)
    bounded = torch.clamp(gap, max=EXPONENT_LIMIT)
    return gap, torch.expm1(bounded) - bounded


def _difference(learner: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask, learner, 0.0) - torch.where(mask, rollout, 0.0)).float()


def _probe(device: torch.device, learner: torch.dtype, rollout: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Gaps of all sizes, of both signs, beyond the limit, and none; NaN and infinity where nothing counts."""
    generator = torch.Generator().manual_seed(7)
    logp = -10.0 * torch.rand(4099, generator=generator)
    sizes = torch.exp(-20.0 + 24.0 * torch.rand(4099, generator=generator))
    other = torch.where(torch.rand(4099, generator=generator) < 0.5, logp - sizes, logp + sizes)
    other[::50] = logp[::50]
    mask = torch.rand(4099, generator=generator) < 0.9
    mask[:3] = False
    logp[0], other[1], logp[2] = torch.nan, torch.inf, -torch.inf
    return logp.to(device, learner), other.to(device, rollout), mask.to(device)


def _check(learner_logp: Tensor, rollout_logp: Tensor, mask: Tensor, sequence_index: Tensor | None) -> None:
    length = mask.shape[0] if mask.dim() else 0
    require_mask("mask", mask, length)
    if sequence_index is not None:
        require_index("sequence_index", sequence_index, length, mask)
    for name, values in (("learner_logp", learner_logp), ("rollout_logp", rollout_logp)):
        require_real(name, values, length)
        require_finite(name, values, mask, sequence_index)


@dataclass(frozen=True)
class GapMetrics:
    """Size of the gap over the tokens that count.

    Arguments:
        tokens: how many there are; with 0 every other field is 0 and means nothing.
        mean: mean g, nats. Its negative estimates KL(rollout || learner) without bias (k1).
        mean_abs, max_abs: of |g|, nats.
        p99_abs: the ceil(0.99 n)-th smallest |g| (nearest rank, so it is one of the values), nats.
        k3_kl: mean of exp(g) - 1 - g, nats: KL(rollout || learner) from tokens sampled by the rollout, where exp(g) is
            learner / rollout. Never negative. g is clamped at the top to EXPONENT_LIMIT.
        ess: effective sample size of the weights exp(g) over n, in (0, 1]; 1 without a gap.
    """

    tokens: int
    mean: float
    mean_abs: float
    max_abs: float
    p99_abs: float
    k3_kl: float
    ess: float

    def to_dict(self, prefix: str = "gap/") -> dict[str, float]:
        """The fields as floats, for a metrics line; without tokens only their count."""
        fields = asdict(self) if self.tokens else {"tokens": 0}
        return {prefix + name: float(value) for name, value in fields.items()}


def gap_metrics(gap: Tensor, mask: Tensor, sequence_index: Tensor | None = None) -> GapMetrics:
    """Measure the gap of a whole step (a quantile does not add up over micro-batches: concatenate the gaps first).

    Only tokens that count are seen: rows of padding change nothing (verl #7771). Computed in float64, because for a
    small gap k3 is g^2 / 2, far below the rounding of 1 + g in float32.

    Arguments:
        gap: [T] float32, see :func:`token_gap`. mask: [T] bool. sequence_index: [T] int64, for error messages.

    Raises:
        NumericsError: a gap that counts is NaN or infinite.
        ShapeError: shapes or dtypes do not fit.
    """
    require_mask("mask", mask)
    require_real("gap", gap, mask.shape[0])
    require_finite("gap", gap, mask, sequence_index)
    real = gap.detach()[mask].double()
    n = int(real.shape[0])
    if n == 0:
        return GapMetrics(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    size = real.abs()
    bounded = torch.clamp(real, max=EXPONENT_LIMIT)
    return GapMetrics(
        tokens=n,
        mean=float(real.mean()),
        mean_abs=float(size.mean()),
        max_abs=float(size.max()),
        p99_abs=float(torch.kthvalue(size, -(-99 * n // 100)).values),
        k3_kl=float((torch.expm1(bounded) - bounded).mean()),
        # The ratio does not change when all weights share a factor, so the largest is scaled to 1: no overflow.
        ess=effective_sample_size(torch.exp(real - real.max())),
    )


def effective_sample_size(weights: Tensor) -> float:
    """Share of the samples that weighted ones are worth: (sum w)^2 / (n sum w^2). Kish, "Survey Sampling", 1965.

    Arguments:
        weights: [n] float, not negative, real tokens only.

    Returns:
        a number in (0, 1]; 0 if there are no weights or all are 0.
    """
    values = weights.detach().double()
    squares = float((values * values).sum())
    return float(values.sum()) ** 2 / (values.numel() * squares) if squares > 0.0 else 0.0
