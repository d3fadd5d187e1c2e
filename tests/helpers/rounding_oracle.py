"""Guided rounding of one number in plain Python, by enumeration: nothing of the package's arithmetic."""

from __future__ import annotations

GRID = [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def index_of(code: int) -> int:
    """Signed index -7..7 of a code."""
    return -(code & 7) if code & 8 else code & 7


def value_of(code: int) -> float:
    return GRID[index_of(code) + 7]


def bracket(z: float) -> tuple[float, float]:
    """The grid values around z; twice z where it is one of them, but for the two ends."""
    z = min(max(z, -6.0), 6.0)
    if z == 6.0:
        return 4.0, 6.0
    if z == -6.0:
        return -6.0, -4.0
    return max(v for v in GRID if v <= z), min(v for v in GRID if v >= z)


def nearest(z: float) -> float:
    """Ties to the even code: among equally near grid values the one with an even index."""
    z = min(max(z, -6.0), 6.0)
    return min(GRID, key=lambda v: (abs(v - z), GRID.index(v) % 2 == 0))


def guided(z: float, code: int, bits: int) -> float:
    """The grid value that replaces z when the rollout's code was ``code`` and ``bits`` of it are known."""
    low, high = bracket(z)
    pair = sorted({low, high})
    if bits == 4:
        return min(pair, key=lambda v: abs(v - value_of(code)))
    if bits == 1:
        same = [v for v in pair if GRID.index(v) % 2 == (index_of(code) + 7) % 2]
        return same[0] if same else pair[0]
    residue = index_of(code) % 4
    first = GRID.index(low) - 7
    if len(pair) == 1:  # one step to either side, or stay
        steps = [v for v in GRID if abs(GRID.index(v) - 7 - first) <= 1 and (GRID.index(v) - 7) % 4 == residue]
        return steps[0] if steps else low
    window = [i for i in range(first - 1, first + 3) if i % 4 == residue]  # exactly one
    believed = window[0]
    if believed < -7:
        believed += 4
    if believed > 7:
        believed -= 4
    return min(pair, key=lambda v: abs(GRID.index(v) - 7 - believed))
