"""Advantages from rewards, relative to the other samples of the same prompt (the group).

Statistics are taken per group over its valid samples only, in float64, with the group's own n: uneven groups, failed
rewards and groups of one are ordinary input (TRL #5773, slime #2230, the group of one reported for verl).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, ShapeError

__all__ = ["AdvantageMethod", "AdvantageMetrics", "AdvantageResult", "advantages"]

AdvantageMethod: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce"]


@dataclass(frozen=True)
class AdvantageMetrics:
    """Counts over one batch of rewards.

    Arguments:
        samples: all samples.
        invalid: samples left out: marked invalid, or with a NaN or infinite reward.
        groups: distinct group ids.
        groups_empty: groups without a valid sample.
        groups_of_one: groups with one valid sample; group-relative methods give it advantage 0.
        groups_degenerate: groups of two or more whose rewards are all equal: no learning signal.
        degenerate_share: groups_degenerate over the groups of two or more (0 if there are none).
    """

    samples: int
    invalid: int
    groups: int
    groups_empty: int
    groups_of_one: int
    groups_degenerate: int
    degenerate_share: float

    def to_dict(self, prefix: str = "advantage/") -> dict[str, float]:
        """The counts as floats, for a metrics line."""
        return {prefix + name: float(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class AdvantageResult:
    """What :func:`advantages` returns.

    Arguments:
        advantages: [N] float32, 0 for samples that are not valid.
        valid: [N] bool: samples that were used. Mask the tokens of the others out of the loss, or they count in the
            denominators with an advantage of 0.
        metrics: counts.
        warning: a sentence for the user if a group-relative method met a group of one, else None. The caller decides
            to say it once; this module keeps no state.
    """

    advantages: Tensor
    valid: Tensor
    metrics: AdvantageMetrics
    warning: str | None


def advantages(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None = None,
    method: AdvantageMethod = "grpo",
    *,
    unbiased: bool = True,
    epsilon: float = 1e-6,
) -> AdvantageResult:
    """Advantage of each sample.

    With the mean m and standard deviation s over the n valid samples of the group of sample i:

    - ``grpo``: (r_i - m) / (s + epsilon). DeepSeekMath, arXiv 2402.03300, section 4.1.2. The paper does not say which
      s; ``unbiased`` (default) divides by n - 1, as TRL and verl do; False divides by n. epsilon is ours: it keeps
      rounding noise between equal rewards from being blown up to +-1.
    - ``dr_grpo``: r_i - m. Dr. GRPO, arXiv 2503.20783, section 3.2: no division by s.
    - ``rloo``: r_i minus the mean of the other n - 1. Kool et al. 2019; Ahmadian et al., arXiv 2402.14740.
    - ``reinforce``: r_i, no baseline; groups do not matter.

    In the first three a group whose valid rewards are all equal, or with one valid sample, gets exactly 0.

    Arguments:
        rewards: [N] floating point; NaN and infinity make a sample invalid.
        groups: [N] int64 group ids, in any order, not necessarily dense.
        valid: [N] bool, False for samples whose reward failed; None means all.
        method: see above.
        unbiased: which standard deviation ``grpo`` uses.
        epsilon: added to it, in units of reward.

    Raises:
        ShapeError: shapes or dtypes do not fit together.
        ConfigError: unknown method, or an epsilon that is not positive.
    """
    _check(rewards, groups, valid, method, epsilon)
    finite = torch.isfinite(rewards)
    used = finite if valid is None else finite & valid
    # Select before any arithmetic: a NaN reward multiplied by a zero mask is still NaN.
    values = torch.where(used, rewards.double(), 0.0)
    ids, index = torch.unique(groups, return_inverse=True)
    n_groups = int(ids.shape[0])

    count = _sum(used.double(), index, n_groups)
    mean = _sum(values, index, n_groups) / count.clamp(min=1.0)
    low = _extreme(torch.where(used, values, torch.inf), index, n_groups, "amin")
    high = _extreme(torch.where(used, values, -torch.inf), index, n_groups, "amax")
    single = count == 1
    degenerate = (count >= 2) & (low == high)

    if method == "reinforce":
        result = values
    else:
        centred = torch.where(used, values - mean[index], 0.0)
        if method == "grpo":
            freedom = (count - 1.0 if unbiased else count).clamp(min=1.0)
            deviation = torch.sqrt(_sum(centred * centred, index, n_groups) / freedom)
            result = centred / (deviation[index] + epsilon)
        elif method == "dr_grpo":
            result = centred
        else:
            # r - (sum - r)/(n - 1) = (r - mean) * n/(n - 1)
            result = centred * (count / (count - 1.0).clamp(min=1.0))[index]
        # Exact zeros: the mean of equal numbers may be off by a rounding.
        result = torch.where((single | degenerate)[index], 0.0, result)

    several = int((count >= 2).sum())
    n_degenerate, n_single = int(degenerate.sum()), int(single.sum())
    metrics = AdvantageMetrics(
        samples=int(rewards.shape[0]),
        invalid=int((~used).sum()),
        groups=n_groups,
        groups_empty=int((count == 0).sum()),
        groups_of_one=n_single,
        groups_degenerate=n_degenerate,
        degenerate_share=n_degenerate / several if several else 0.0,
    )
    warning = None
    if n_single and method != "reinforce":
        warning = (
            f"{n_single} of {n_groups} groups have one valid sample: nothing to compare with, "
            f"so {method} gives advantage 0. Sample at least 2 responses a prompt, or look at the failed rewards."
        )
    return AdvantageResult(torch.where(used, result, 0.0).float(), used, metrics, warning)


def _sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, index, values)


def _extreme(values: Tensor, index: Tensor, count: int, reduce: str) -> Tensor:
    start = torch.zeros(count, dtype=torch.float64, device=values.device)
    return start.scatter_reduce(0, index, values, reduce, include_self=False)


def _check(rewards: Tensor, groups: Tensor, valid: Tensor | None, method: str, epsilon: float) -> None:
    n = rewards.shape
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ShapeError(f"rewards are {rewards.dtype} {list(n)}", where="rewards", expected="floating point [N]")
    if groups.shape != n or groups.dtype != torch.int64:
        raise ShapeError(
            f"groups are {groups.dtype} {list(groups.shape)}", where="groups", expected=f"int64 {list(n)}, as rewards"
        )
    if valid is not None and (valid.shape != n or valid.dtype != torch.bool):
        raise ShapeError(
            f"valid is {valid.dtype} {list(valid.shape)}", where="valid", expected=f"bool {list(n)}, as rewards"
        )
    if method not in get_args(AdvantageMethod):
        raise ConfigError(
            f"unknown advantage method {method!r}", where="method", expected=", ".join(get_args(AdvantageMethod))
        )
    if not epsilon > 0.0:
        raise ConfigError(f"epsilon is {epsilon}", where="epsilon", expected="a positive number")
