"""Memory of this process, as far as the system tells."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

__all__ = ["peak_resident_bytes", "proportional_bytes", "resident_bytes"]

_PROC = Path("/proc/self")


def peak_resident_bytes() -> int:
    """The most that was resident at any time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else peak * 1024
    return max(peak, resident_bytes() or 0)  # Linux counts the two apart, and the peak a little behind


def resident_bytes() -> int | None:
    """Resident now; None where the system does not tell."""
    return _field("status", "VmRSS:")


def proportional_bytes() -> int | None:
    """Proportional set size: resident, with pages that several processes share divided among them."""
    return _field("smaps_rollup", "Pss:")


def _field(file: str, name: str) -> int | None:
    try:
        lines = (_PROC / file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
