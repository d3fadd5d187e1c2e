"""From a token table to numbers: size of the gap, its sign structure, and what each correction would do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.diagnosis.segmentation import DelimiterRule
from halfbyte.diagnosis.tokens import TokenTable
from halfbyte.objective import (
    CORRECTIONS,
    Correction,
    CorrectionInput,
    Segmenter,
    Triage,
    gap_metrics,
    make_correction,
    quadrants,
)

__all__ = ["CorrectionEffect", "Diagnosis", "diagnose"]


@dataclass(frozen=True)
class CorrectionEffect:
    """What a correction would do to the batch.

    Arguments:
        mass_kept: sum w |A| over sum |A|; 1 where there is no advantage.
        changed, rejected: share of the tokens that count whose weight is not 1, and that are thrown out.
        weight_min, weight_max: over the tokens that count.
    """

    mass_kept: float
    changed: float
    rejected: float
    weight_min: float
    weight_max: float


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Numbers of one batch, and per token what pictures need.

    Arguments:
        table: what was diagnosed.
        numbers: metrics by name: ``gap/...``, ``quadrant/...``, ``segment/...``, ``split/...``.
        effects: by name of the correction, with its defaults.
        weights: [T] float32 of the chosen correction.
        selected: [T] bool, tokens of segments that TRIAGE selects.
    """

    table: TokenTable
    numbers: dict[str, float]
    effects: dict[str, CorrectionEffect]
    weights: npt.NDArray[np.float32]
    selected: npt.NDArray[np.bool_]


@torch.no_grad()
def diagnose(
    table: TokenTable,
    *,
    segmenter: Segmenter | None = None,
    delimiters: DelimiterRule | None = None,
    correction: Correction | None = None,
    compare: Sequence[str] = tuple(CORRECTIONS),
) -> Diagnosis:
    """Diagnose one batch.

    Arguments:
        segmenter, delimiters: see ``TokenTable.correction_input``.
        correction: whose weights are kept; TRIAGE with this batch as its own reference by default.
        compare: corrections whose effect is measured.

    Raises:
        NumericsError, ShapeError: see ``CorrectionInput``.
    """
    tokens = table.correction_input(segmenter, delimiters)
    triage = Triage(reference="batch")
    numbers = gap_metrics(tokens.gap, tokens.mask, tokens.sequence_index).to_dict()
    numbers |= quadrants(tokens, triage=triage)
    if tokens.versions is not None:
        numbers |= _staleness(tokens)
    if table.rewards is not None and np.isfinite(table.rewards).any():
        numbers["reward/mean"] = float(np.nanmean(table.rewards.astype(np.float64)))
    effects = {name: _effect(tokens, _single_batch(name)) for name in compare}
    weights = (correction or triage)(tokens).weights
    selected = _whole_segments(tokens, triage)
    return Diagnosis(table, numbers, effects, weights.numpy(), selected.numpy())


def _single_batch(name: str) -> Correction:
    """A correction with its defaults; a file has no healthy past, so TRIAGE takes the batch as reference."""
    return make_correction(name, reference="batch") if name == "triage" else make_correction(name)


def _effect(tokens: CorrectionInput, correction: Correction) -> CorrectionEffect:
    result = correction(tokens)
    weights = result.weights[tokens.mask].double()
    if not len(weights):
        return CorrectionEffect(1.0, 0.0, 0.0, 1.0, 1.0)
    mass = tokens.advantages[tokens.mask].abs().double()
    total = float(mass.sum())
    return CorrectionEffect(
        mass_kept=float((weights * mass).sum()) / total if total else 1.0,
        changed=float((weights != 1.0).double().mean()),
        rejected=float(result.rejected[tokens.mask].double().mean()),
        weight_min=float(weights.min()),
        weight_max=float(weights.max()),
    )


def _staleness(tokens: CorrectionInput) -> dict[str, float]:
    """|g| of tokens from the newest weights and of older ones: as far as a file can split the gap."""
    assert tokens.versions is not None
    gap, old = tokens.gap[tokens.mask].double().abs(), (tokens.mask & ~tokens.current)[tokens.mask]
    if not len(gap):
        return {}
    out = {"split/stale_tokens": float(old.double().mean())}
    for name, chosen in (("current", ~old), ("stale", old)):
        if bool(chosen.any()):
            out[f"split/{name}_mean_abs"] = float(gap[chosen].mean())
    return out


def _whole_segments(tokens: CorrectionInput, triage: Triage) -> torch.Tensor:
    """[T] bool: all tokens of the selected segments, for outlines."""
    labels = tokens.sequence_index if tokens.segments is None else tokens.segments
    chosen = labels[triage.diagnose(tokens).selected_tokens(len(tokens.mask))].unique()
    return torch.isin(labels, chosen) & tokens.mask
