"""Facts about this machine and installation, for ``halfbyte doctor``. Nothing here is guessed: unknown is None."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from halfbyte import __version__
from halfbyte.cli.threads import usable_cores
from halfbyte.kernels import Kernels, active, describe
from halfbyte.kernels.reference import ReferenceKernels
from halfbyte.models.precision import PRESETS

__all__ = ["extras", "halfbyte_version", "kernels", "precisions", "processor", "threads", "versions"]

#: Processor features that some kernel (ours or torch's) looks for, as Linux names them.
FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
PACKAGES = ("python", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "transformers")
#: extra -> the modules it brings.
EXTRAS = {
    "transformers": ("transformers",),
    "tasks": ("reasoning_gym", "math_verify"),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
    "trial": ("aiohttp", "jsonschema", "psutil"),
    "ray": ("ray",),
    "vllm": ("vllm",),
    "objectstore": ("obstore",),
    "parquet": ("pyarrow",),
    "track": ("trackio",),
}
THREAD_VARIABLES = ("HALFBYTE_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def halfbyte_version() -> str:
    """The installed version."""
    return __version__


def processor() -> dict[str, Any]:
    """Name, machine type, cores, the features of ``FEATURES`` it has, and memory in bytes."""
    fields = _cpuinfo()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "name": fields.get("model name") or platform.processor() or "unknown",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "features": [name for name in FEATURES if name in flags],
        "memory_bytes": _memory(),
    }


def threads() -> dict[str, Any]:
    """Threads in use by torch and the native pool, and the environment variables that decide."""
    return {
        "torch": torch.get_num_threads(),
        "native": describe().get("threads"),
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def kernels() -> dict[str, Any]:
    """The pick, what else there is, and which operations run natively and which on the reference."""
    facts = describe()
    operations = sorted(name for name, item in vars(Kernels).items() if callable(item) and not name.startswith("_"))
    picked = type(active())
    native = [n for n in operations if getattr(picked, n, None) is not getattr(ReferenceKernels, n, None)]
    return {
        "active": facts["active"],
        "available": facts["available"],
        "requested": facts["requested"],
        "native": native,
        "reference": [name for name in operations if name not in native],
    }


def versions() -> dict[str, str | None]:
    """Package -> version, None where it is not installed."""
    out: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            out[name] = platform.python_version() if name == "python" else metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def extras() -> dict[str, dict[str, Any]]:
    """Extra -> whether all its modules can be imported, and the command that installs it."""
    return {
        name: {
            "installed": all(importlib.util.find_spec(module) is not None for module in modules),
            "install": f"pip install 'halfbyte[{name}]'",
        }
        for name, modules in EXTRAS.items()
    }


def precisions() -> list[dict[str, str]]:
    """Each preset: the kind every site runs in (``prefill/decode`` where they differ) and the KV cache's kind."""
    rows = []
    for preset in PRESETS.values():
        row = {"name": preset.name}
        for site in ("attention", "mlp", "experts", "head", "router"):
            row[site] = "/".join(preset.kinds(site))
        row["kv"] = preset.kv
        rows.append(row)
    return rows


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
