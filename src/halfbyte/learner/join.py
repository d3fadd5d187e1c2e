"""What the ranks of a learner saw of a step, put together: equal on all of them, whatever each went over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from halfbyte import objective
from halfbyte.guidance.measure import Comparison
from halfbyte.learner.ranks import Ranks

__all__ = ["first_found", "joined_statistics"]


def joined_statistics(ranks: Ranks, own: Sequence[Mapping[str, objective.Statistic]]) -> list[objective.Statistics]:
    """Every rank's statistics, each merged, in order of rank; collective."""
    merged = objective.merge(own)
    table = {name: [s.kind, float(s.total), float(s.count)] for name, s in merged.items()}  # JSON keeps float64 exactly
    out = []
    for data in ranks.exchange(json.dumps(table).encode()):
        rows = json.loads(data).items()
        out.append({name: objective.Statistic(kind, _number(t), _number(n)) for name, (kind, t, n) in rows})
    return out


def first_found(ranks: Ranks, own: Mapping[tuple[int, str], Comparison]) -> dict[tuple[int, str], Comparison]:
    """The comparisons of the first rank that made any: each measures as many tokens as one process would; collective."""
    rows = [[layer, site, asdict(found)] for (layer, site), found in own.items()]
    for data in ranks.exchange(json.dumps(rows).encode()):
        if found := json.loads(data):
            return {(layer, site): _comparison(fields) for layer, site, fields in found}
    return {}


def _comparison(fields: dict[str, object]) -> Comparison:
    by_bits = fields["left_by_bits"]
    assert isinstance(by_bits, dict)
    return Comparison(**{**fields, "left_by_bits": {int(bits): n for bits, n in by_bits.items()}})  # type: ignore[arg-type]


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
