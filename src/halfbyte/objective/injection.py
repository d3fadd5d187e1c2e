"""A development tool: put a gap of a chosen kind into one quadrant of a run that has none.

An exact run samples every token from the learner's own policy pi. Had a sampler mu been at work, the same token would
have come up mu / pi = exp(-g) times as often, g being the gap log pi - log mu. So :class:`InjectedCorrection` multiplies
what the token does to the gradient by exp(-g) (E over mu of f equals E over pi of exp(-g) f) and reports a rollout
log-prob lower by g. An uncorrected learner then takes the biased step that this mismatch causes, a correction sees the
gap as it would see a real one, and the weight exp(g) undoes the injection exactly. No 4-bit arithmetic is involved, so
direction and size of a mismatch can be chosen freely, in one quadrant of (sign of advantage, sign of gap) at a time.

What it is not: a policy. A real mu that takes some tokens more often takes others less often; a gap in one quadrant alone
cannot come from any mu. And the gap is drawn anew each step: nothing accumulates in the weights as in a real run.
Own tool; the question it answers (direction, not size) is that of arXiv 2610.07043.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.aggregate import mean_of
from halfbyte.objective.correction import Correction, CorrectionInput, CorrectionResult, StatefulCorrection
from halfbyte.objective.exponent import clamped_exp
from halfbyte.objective.quadrants import QUADRANTS
from halfbyte.objective.segments import Fixed, SegmentInput

__all__ = ["GapInjection", "InjectedCorrection", "Tail"]

Tail: TypeAlias = Literal["constant", "exponential", "heavy"]


@dataclass(frozen=True, kw_only=True)
class GapInjection:
    """Which tokens get a gap, and how large it is.

    Arguments:
        quadrant: one of ``QUADRANTS``: sign of the advantage, then sign of the gap.
        scale: nats, mean of |g| over the tokens that get one.
        tail: ``constant``; ``exponential``; or ``heavy`` (Lomax, shape 3: P(|g| > x) = (1 + x / 2 scale)^-3).
        share: of the blocks of ``block`` tokens, those damaged.
        density: of the tokens in a damaged block, those that get a gap.
        unlikely: |g| is multiplied by 1 - p of the token, as an error in a logit acts on a log-prob.
        largest: nats, bound on |g|.
        start: weight version from which on there is a gap (a reference of the healthy state can be taken before).
        seed: of the draws, together with the weight version of the learner.

    Raises:
        ConfigError: a value is out of range.
    """

    quadrant: str
    scale: float = 1.0
    tail: Tail = "exponential"
    share: float = 0.3
    density: float = 0.7
    block: int = 4
    unlikely: bool = False
    largest: float = 8.0
    start: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("quadrant", self.quadrant in QUADRANTS, ", ".join(QUADRANTS)),
            ("tail", self.tail in get_args(Tail), ", ".join(get_args(Tail))),
            ("scale", 0.0 <= self.scale < math.inf, "nats >= 0"),
            ("share", 0.0 <= self.share <= 1.0, "0 to 1"),
            ("density", 0.0 <= self.density <= 1.0, "0 to 1"),
            ("block", self.block >= 1, "an integer >= 1"),
            ("start", self.start >= 0, "a weight version"),
            ("largest", 0.0 < self.largest <= 20.0, "above 0, at most 20 nats"),
        ):
            if not good:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", where=f"injection.{name}", expected=expected)

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> Tensor:
        """The gap to add: [T] float32, 0 outside the quadrant and where mask is false.

        A pure function of the batch, ``seed`` and ``tokens.learner_version``.

        Raises:
            ConfigError: ``unlikely`` without ``rollout_logp``.
        """
        version = tokens.learner_version or 0
        if version < self.start:
            return torch.zeros_like(tokens.gap)
        negative, down = (sign == "neg" for sign in self.quadrant.split("_"))
        inside = tokens.mask & ((tokens.advantages < 0) if negative else (tokens.advantages > 0))
        blocks = Fixed(self.block)(SegmentInput(mask=tokens.mask, sequence_index=tokens.sequence_index))
        draws = np.random.Generator(np.random.Philox(key=[self.seed, 2**61 + version]))
        count = int(blocks.max()) + 1 if blocks.numel() else 0
        damaged = torch.from_numpy(draws.random(count + 1) < self.share)  # one more: for the -1 of masked tokens
        hit = inside & damaged[blocks.clamp(min=0)] & torch.from_numpy(draws.random(len(blocks)) < self.density)
        size = torch.from_numpy(self._sizes(draws, len(blocks))).float()
        if self.unlikely:
            if tokens.rollout_logp is None:
                raise ConfigError("unlikely needs the log-probs of the tokens", where="rollout_logp")
            likely = torch.where(tokens.mask, tokens.rollout_logp + tokens.gap, 0.0).exp().clamp(max=1.0)
            size = size * (1.0 - likely)
        size = size.clamp(max=self.largest)
        return torch.where(hit, -size if down else size, 0.0)

    def _sizes(self, draws: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if self.tail == "constant":
            return np.full(count, self.scale)
        if self.tail == "exponential":
            return draws.exponential(self.scale, count)
        return draws.pareto(3.0, count) * 2.0 * self.scale


@dataclass(frozen=True)
class InjectedCorrection:
    """A correction in a run whose sampler has, in effect, the injected gap.

    Arguments:
        inner: the correction under test; it sees the gap and the rollout log-probs with the injection.
        injection: what to inject; None for a control that takes the same path without any.
    """

    inner: Correction
    injection: GapInjection | None

    @property
    def name(self) -> str:
        """``injected`` and the name of the correction."""
        return f"injected:{self.inner.name}"

    @property
    def uses_ratio(self) -> bool:
        """As the correction under test."""
        return self.inner.uses_ratio

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`Correction`.

        Metrics, beside those of the correction: ``injected/share`` of tokens, ``injected/mean_abs`` and
        ``injected/ratio`` (mean of exp(-g)) over all tokens that count.
        """
        added = torch.zeros_like(tokens.gap) if self.injection is None else self.injection(tokens)
        rollout = tokens.rollout_logp
        reported = None if rollout is None else torch.where(tokens.mask, rollout - added, rollout)
        seen = replace(tokens, gap=tokens.gap + added, rollout_logp=reported)
        result = self.inner(seen)
        sampled = clamped_exp(-added)
        real, ratio = added[tokens.mask], sampled[tokens.mask]
        metrics = result.metrics | {
            "injected/share": mean_of(real != 0),
            "injected/mean_abs": mean_of(real.abs()),
            "injected/ratio": mean_of(ratio),
        }
        weights = torch.where(tokens.mask, result.weights * sampled, 0.0)
        return replace(result, weights=weights, metrics=metrics)

    def state(self) -> dict[str, float]:
        """The memory of the correction under test."""
        return self.inner.state() if isinstance(self.inner, StatefulCorrection) else {}

    def with_state(self, state: Mapping[str, float]) -> InjectedCorrection:
        """The same with this memory."""
        if isinstance(self.inner, StatefulCorrection):
            return replace(self, inner=self.inner.with_state(state))
        return self
