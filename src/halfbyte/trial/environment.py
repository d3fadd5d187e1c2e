"""What a trial ran on: machine, versions, servers. For the report, and for whoever repeats it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from halfbyte import __version__
from halfbyte.trial.blocks import BlockRecord
from halfbyte.trial.hardware import Machine
from halfbyte.trial.records import ARMS
from halfbyte.trial.settings import Settings

__all__ = ["environment", "servers"]

_PACKAGES = ("torch", "numpy", "aiohttp", "vllm", "transformers")
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def environment(machine: Machine) -> dict[str, Any]:
    """Versions and the machine, JSON types only."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "halfbyte": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "processor features": [name for name in _FEATURES if name in machine.cpu_features],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory free at the start, bytes": machine.memory_bytes,
        "load average at the start": [round(load, 1) for load in os.getloadavg()]
        if hasattr(os, "getloadavg")
        else None,
        "gpu compute capability": machine.gpu,
    }


def servers(settings: Settings, blocks: Sequence[BlockRecord]) -> dict[str, Any]:
    """Where each arm was served, and the versions that its server reported."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        target = settings.target(arm)
        versions = {segment.server for block in blocks for segment in block.segments if segment.arm == arm}
        found[arm] = {
            "served by": target.url or " ".join(target.serve or ()),
            "versions reported": sorted(versions - {""}),
            "starts": sum(
                segment.start_seconds is not None and segment.cache == "restart"
                for block in blocks
                for segment in block.segments
                if segment.arm == arm
            ),
        }
    return found


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor())
