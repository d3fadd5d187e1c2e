"""Numbers as words of the report."""

from __future__ import annotations

from halfbyte.html.scale import number

__all__ = ["NONE", "memory", "money", "per_cent", "points", "ratio", "seconds", "share"]

NONE = "not known"
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def per_cent(value: float | None) -> str:
    """A share: 65.0%."""
    return NONE if value is None else f"{100 * value:.1f}%"


def points(value: float | None) -> str:
    """A difference of shares: -3.0 points."""
    return NONE if value is None else f"{100 * value:+.1f} points"


def share(part: int, whole: int) -> str:
    """A count of a count with the share: 13 of 20 (65.0%)."""
    return f"{part} of {whole}" + (f" ({per_cent(part / whole)})" if whole else "")


def ratio(value: float | None) -> str:
    """A ratio: 1.04 x."""
    return NONE if value is None else f"{value:.3g} x"


def seconds(value: float | None) -> str:
    """A duration: 340 ms, 1.25 s, 2.1 min."""
    if value is None:
        return NONE
    if abs(value) < 1:
        return f"{_digits(1000 * value)} ms"
    return f"{_digits(value)} s" if abs(value) < 120 else f"{_digits(value / 60)} min"


def memory(value: int | float | None) -> str:
    """Bytes: 270 MiB, 12.1 GiB."""
    if value is None:
        return NONE
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{value:.0f} bytes"


def money(value: float | None, currency: str) -> str:
    """An amount with its currency."""
    return NONE if value is None else f"{number(value, 4)} {currency}"


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
