"""What a table of numbers was measured on: threads and how they wait, kernels, versions, caches."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from halfbyte import __version__
from halfbyte.bench.buffers import cache_bytes
from halfbyte.kernels import describe

__all__ = ["kernel_threads", "machine"]

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def kernel_threads() -> int:
    """Threads of our kernels: the native pool's, or torch's where the reference runs."""
    return int(describe().get("threads") or torch.get_num_threads())


def machine() -> dict[str, Any]:
    """Facts for the head of a table and for its JSON file."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "halfbyte": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "largest_cache_bytes": cache_bytes(),
        "kernels": describe()["active"],
        "kernel_threads": kernel_threads(),
        "torch_threads": torch.get_num_threads(),
        "waiting": {name: os.environ[name] for name in _WAITING if name in os.environ},
        "load": load,
    }
