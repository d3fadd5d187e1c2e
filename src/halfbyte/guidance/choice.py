"""Which places to guide, and with how many bits, when only so many bytes a token may be kept.

The measure is the number of codes a token that guidance makes equal: numbers of the site, times the share of the learner's own
codes that differ, times the share of those that a payload of b bits repairs (with 1 bit: that lie in the bracket, the adjacency
share).
Greedy by gain a byte, one step of bits at a time. The rule is ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfbyte.guidance.measure import Comparison
from halfbyte.guidance.plan import Entry, Plan, entry_bytes
from halfbyte.guidance.sites import Place, places
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision

__all__ = ["choose"]


def choose(
    plan: Plan,
    found: Mapping[tuple[int, str], Comparison],
    arch: Architecture,
    precision: Precision,
    budget: float,
) -> Plan:
    """The part of ``plan`` worth keeping within ``budget`` bytes a token.

    Arguments:
        found: comparisons of recorded 4-bit codes with the learner's own, with ``left_by_bits``; places without one stay out.
    """
    at = {(p.layer, p.site): p for p in places(arch, precision)}
    bits: dict[tuple[int, str], int] = {}
    spent = 0.0
    while True:
        best: tuple[float, tuple[int, str], int, float] | None = None
        for entry in plan:
            key = (entry.layer, entry.site)
            if key not in found or key not in at:
                continue
            held = bits.get(key, 0)
            for wanted in (b for b in (1, 2, 4) if b > held):
                cost = entry_bytes(at[key], wanted) - (entry_bytes(at[key], held) if held else 0.0)
                gain = _repaired(at[key], found[key], wanted) - _repaired(at[key], found[key], held)
                if gain > 0.0 and spent + cost <= budget and (best is None or gain / cost > best[0]):
                    best = gain / cost, key, wanted, cost
        if best is None:
            return plan.narrowed(Entry(*key, count) for key, count in bits.items())
        _, key, bits[key], cost = best
        spent += cost


def _repaired(place: Place, comparison: Comparison, bits: int) -> float:
    if bits == 0 or comparison.values == 0:
        return 0.0
    return place.numbers * (comparison.mismatched - comparison.left_by_bits[bits]) / comparison.values
