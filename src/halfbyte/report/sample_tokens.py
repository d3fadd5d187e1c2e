"""Saved samples as tokens: gap, log-prob and advantage. Read tolerantly, without torch: lines that lack a field are skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.report.records import parse_line

__all__ = ["SampleTokens", "read_tokens"]


@dataclass(frozen=True)
class SampleTokens:
    """One response.

    Arguments:
        gap, logp: of each token, nats (learner minus rollout, and rollout); None where masked.
        advantage: of each token; None where masked.
        weight: of a correction, or None where there is none.
        selected: whether the token lies in a segment that was selected for repair.
    """

    gap: Sequence[float | None]
    logp: Sequence[float | None]
    advantage: Sequence[float | None]
    weight: Sequence[float] | None = None
    selected: Sequence[bool] = ()


def read_tokens(path: Path) -> list[SampleTokens]:
    """The samples of a trajectory file that have log-probs of both sides; none where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    found = (_tokens(value) for line in lines if (value := parse_line(line)) is not None)
    return [tokens for tokens in found if tokens is not None]


def _tokens(value: dict[str, Any]) -> SampleTokens | None:
    rollout, learner, mask = (value.get(key) for key in ("logprobs", "learner_logprobs", "mask"))
    advantage = _number(value.get("advantage"))
    if not (isinstance(rollout, list) and isinstance(learner, list) and isinstance(mask, list)) or advantage is None:
        return None
    if not len(rollout) == len(learner) == len(mask):
        return None
    gap: list[float | None] = []
    logp: list[float | None] = []
    for r, t, m in zip(map(_number, rollout), map(_number, learner), mask):
        known = bool(m) and r is not None and t is not None
        logp.append(r if known else None)
        gap.append(t - r if known and t is not None and r is not None else None)
    weights, selected = value.get("weights"), value.get("selected")
    return SampleTokens(
        gap,
        logp,
        [None if g is None else advantage for g in gap],
        _numbers(weights, len(gap)),
        [bool(s) for s in selected] if isinstance(selected, list) and len(selected) == len(gap) else (),
    )


def _numbers(value: object, length: int) -> list[float] | None:
    if not isinstance(value, list) or len(value) != length:
        return None
    numbers = [_number(item) for item in value]
    return None if None in numbers else [number for number in numbers if number is not None]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
