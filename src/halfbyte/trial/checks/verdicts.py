"""How an interval lies to a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halfbyte.trial.outcome import Check, Detail, Unit

__all__ = ["at_most", "finite", "unknown"]


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def at_most(
    name: str,
    unit: Unit,
    estimate: float,
    interval: tuple[float, float] | None,
    limit: float | None,
    note: str,
    details: Mapping[str, Detail],
) -> Check:
    """A quantity that may not exceed ``limit``: held if all of the interval is below, broken if all of it is above."""
    low, high = interval if interval is not None else (None, None)
    if limit is None:
        ok: bool | None = True
    elif low is None or high is None:
        ok = None
    else:
        ok = True if high <= limit else False if low > limit else None
    return Check(name, unit, "at most", finite(estimate), finite(low), finite(high), limit, ok, note, dict(details))


def unknown(name: str, unit: Unit, limit: float | None, note: str, details: dict[str, Detail] | None = None) -> Check:
    """Nothing can be said: inconclusive if there is a limit, shown as such if there is none."""
    return Check(name, unit, "at most", None, None, None, limit, True if limit is None else None, note, details or {})
