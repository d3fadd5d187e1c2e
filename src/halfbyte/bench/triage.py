"""What finds planted damage: segmenters and gates of TRIAGE, and selection by token, sequence or size at the same budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench.planted import SCENARIOS, Batch, Scenario, plant
from halfbyte.objective import CorrectionInput, Segmenter, Triage, dense_index, make_segmenter, quadrants, sequence_sum
from halfbyte.objective.selection import Gates

__all__ = ["METHODS", "SelectionRow", "SpeedRow", "detect", "rank", "speed"]

HEALTHY_BATCHES = 8
_FIRST_HEALTHY = 1_000_000  # seeds of healthy batches, apart from those that are scored

SEGMENTERS: Mapping[str, tuple[str, dict[str, object]]] = {
    "turn": ("turn", {}),
    "delimiter": ("delimiter", {}),
    "fixed 16": ("fixed", {"size": 16}),
    "fixed 32": ("fixed", {"size": 32}),
    "change_point": ("change_point", {}),
}
GATES: Mapping[str, float] = {"default": Gates.alpha, "without direction test": 1.0}
"""Name -> alpha."""


@dataclass(frozen=True)
class SelectionRow:
    """What a method selected in the batches of a scenario, tokens pooled over batches.

    Arguments:
        mode: ``detect`` (the method decides how much) or ``rank`` (as many tokens as are damaged).
        batches, touched: batches drawn, and those in which anything was selected.
        selected, damaged: tokens, mean over batches.
        precision, recall, f1: of tokens in damaged clusters; None where nothing was selected or damaged.
        found: share of the planted nats inside the selection; None without damage.
    """

    scenario: str
    mode: str
    method: str
    gates: str
    batches: int
    touched: int
    selected: float
    damaged: float
    precision: float | None
    recall: float | None
    f1: float | None
    found: float | None

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


@dataclass(frozen=True)
class SpeedRow:
    """CPU seconds of one thread for a batch: cutting into segments, correcting, and all quadrant metrics."""

    method: str
    tokens: int
    segment: float
    correct: float
    quadrants: float

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def detect(scenario: Scenario, batches: int, *, q_max: float = 1.0) -> Iterator[SelectionRow]:
    """TRIAGE's own selection with each segmenter and set of gates.

    Arguments:
        q_max: token budget; 1 shows what the gates do on their own.
    """
    drawn = [plant(scenario, seed) for seed in range(batches)]
    for name, (kind, parameters) in SEGMENTERS.items():
        segmenter = make_segmenter(kind, **parameters)
        healthy = _reference(scenario, segmenter)
        segmented = [_segmented(batch, segmenter) for batch in drawn]
        for gates, alpha in GATES.items():
            triage = Triage(q_max=q_max, alpha=alpha).with_state(healthy)
            chosen = [triage.diagnose(tokens).selected_tokens(len(tokens.mask)) for tokens in segmented]
            yield _row(scenario, "detect", name, gates, drawn, chosen)


def rank(scenario: Scenario, batches: int) -> Iterator[SelectionRow]:
    """Selection by each score in ``METHODS``, highest first, as many tokens as are damaged."""
    drawn = [plant(scenario, seed) for seed in range(batches)]
    if not any(bool(batch.damaged.any()) for batch in drawn):
        return
    for name, score in METHODS.items():
        chosen = [_top(score(batch, scenario), int(batch.damaged.sum())) for batch in drawn]
        yield _row(scenario, "rank", name, "", drawn, chosen)


def speed(tokens: int = 1_000_000) -> Iterator[SpeedRow]:
    """Time of each segmenter on one batch, on one thread."""
    batch = plant(SCENARIOS[0], 0, samples=tokens // 4000, length=4000)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (kind, parameters) in SEGMENTERS.items():
            marks = [time.thread_time()]
            segmented = replace(batch.tokens, segments=make_segmenter(kind, **parameters)(batch.layout))
            marks.append(time.thread_time())
            weights = Triage()(segmented).weights
            marks.append(time.thread_time())
            quadrants(segmented, weights)
            marks.append(time.thread_time())
            yield SpeedRow(name, len(batch.damaged), *(b - a for a, b in pairwise(marks)))
    finally:
        torch.set_num_threads(before)


def _reference(scenario: Scenario, segmenter: Segmenter) -> dict[str, float]:
    """From healthy batches: the scenario's kind of noise, at its usual size."""
    usual = Scenario("").noise if scenario.tail == 0 else 0.05
    healthy = replace(scenario, prevalence=0.0, decoys=0.0, noise=usual)
    triage = Triage(reference_batches=HEALTHY_BATCHES)
    for index in range(HEALTHY_BATCHES):
        found = triage.diagnose(_segmented(plant(healthy, _FIRST_HEALTHY + index), segmenter))
        triage = triage.with_state(triage.learnt(found))
    return triage.state()


def _segmented(batch: Batch, segmenter: Segmenter) -> CorrectionInput:
    return replace(batch.tokens, segments=segmenter(batch.layout))


def _row(
    scenario: Scenario, mode: str, method: str, gates: str, drawn: Sequence[Batch], chosen: Sequence[Tensor]
) -> SelectionRow:
    selected = sum(int(choice.sum()) for choice in chosen)
    damaged = sum(int(batch.damaged.sum()) for batch in drawn)
    hits = sum(int((batch.damaged & choice).sum()) for batch, choice in zip(drawn, chosen))
    pushed = sum(float(batch.push.sum()) for batch in drawn)
    found = sum(float(batch.push[choice].sum()) for batch, choice in zip(drawn, chosen))
    return SelectionRow(
        scenario=scenario.name,
        mode=mode,
        method=method,
        gates=gates,
        batches=len(drawn),
        touched=sum(bool(choice.any()) for choice in chosen),
        selected=selected / len(drawn),
        damaged=damaged / len(drawn),
        precision=hits / selected if selected else None,
        recall=hits / damaged if damaged else None,
        f1=2 * hits / (selected + damaged) if damaged else None,
        found=found / pushed if pushed else None,
    )


def _top(score: Tensor, budget: int) -> Tensor:
    """[T] bool: the ``budget`` tokens of highest score; within a segment of equal scores from its start."""
    out = torch.zeros(score.shape[0], dtype=torch.bool)
    out[torch.argsort(score, descending=True, stable=True)[:budget]] = True
    return out & (score > -torch.inf)


def _by_z(name: str) -> Callable[[Batch, Scenario], Tensor]:
    """Score of a token: z of its segment, against a healthy reference."""
    kind, parameters = SEGMENTERS[name]
    segmenter = make_segmenter(kind, **parameters)
    calibrated: dict[Scenario, Triage] = {}

    def score(batch: Batch, scenario: Scenario) -> Tensor:
        if scenario not in calibrated:
            calibrated[scenario] = Triage().with_state(_reference(scenario, segmenter))
        found = calibrated[scenario].diagnose(_segmented(batch, segmenter))
        out = torch.full((len(batch.damaged),), -torch.inf)
        out[found.segments.places] = found.verdict.z[found.segments.segment]
        return out

    return score


def _amplification(batch: Batch) -> Tensor:
    """[T] a of negative-advantage tokens, no score elsewhere."""
    return torch.where(batch.tokens.advantages < 0, (-batch.tokens.gap).clamp(min=0), -torch.inf)


def _mean_over(values: Tensor, labels: Tensor) -> Tensor:
    index, count = dense_index(labels)
    return (sequence_sum(values, index, count) / torch.bincount(index, minlength=count))[index]


def _negative(batch: Batch, score: Tensor) -> Tensor:
    return torch.where(batch.tokens.advantages < 0, score, -torch.inf)


def _size_by_segment(batch: Batch, scenario: Scenario) -> Tensor:
    labels = make_segmenter("fixed")(batch.layout)
    return _negative(batch, _mean_over(batch.tokens.gap.abs(), labels))


METHODS: Mapping[str, Callable[[Batch, Scenario], Tensor]] = {
    **{f"segments by z, {name}": _by_z(name) for name in SEGMENTERS},
    "segments by mean |g|, fixed 16": _size_by_segment,
    "tokens by a": lambda batch, scenario: _amplification(batch),
    "tokens by |g|, A < 0": lambda batch, scenario: _negative(batch, batch.tokens.gap.abs()),
    "tokens by |g|": lambda batch, scenario: batch.tokens.gap.abs(),
    "sequences by mean -g": lambda batch, scenario: _negative(
        batch, _mean_over(-batch.tokens.gap, batch.tokens.sequence_index)
    ),
    "sequences by |mean g|": lambda batch, scenario: _mean_over(batch.tokens.gap, batch.tokens.sequence_index).abs(),
}
"""Score of each token: what a method would select first."""
