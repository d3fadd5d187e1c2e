"""Whether this machine can run weights of a format at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halfbyte.trial.memory_probe import available_memory, nvml

__all__ = ["Machine", "this_machine", "weights_run"]

#: Format -> compute capability from which engines multiply in it, and from which they at least decompress it on the fly.
#: From the requirements that vLLM prints for its kernels (NVFP4, MXFP4 native on Blackwell, Marlin from Ampere; FP8 from Ada).
_GPUS: Mapping[str, tuple[float, float]] = {
    "nvfp4": (10.0, 8.0),
    "mxfp4": (10.0, 8.0),
    "fp8": (8.9, 8.0),
    "int8": (7.5, 7.5),
    "int4": (7.5, 7.5),
    "bf16": (8.0, 8.0),
    "fp16": (7.0, 7.0),
    "fp32": (7.0, 7.0),
}
_ON_CPU = frozenset({"bf16", "fp16", "fp32", "int8", "int4"})


@dataclass(frozen=True)
class Machine:
    """What matters here.

    Arguments:
        cpu_features: of /proc/cpuinfo.
        memory_bytes: that processes started now may take; None unknown.
        gpu: compute capability of the first GPU; None without one.
        gpu_memory_bytes: of the first GPU, free now.
    """

    cpu_features: frozenset[str]
    memory_bytes: int | None
    gpu: float | None
    gpu_memory_bytes: int | None


def this_machine() -> Machine:
    """The machine at hand."""
    gpu, memory, module = None, None, nvml()
    if module is not None:
        try:
            device = module.nvmlDeviceGetHandleByIndex(0)
            major, minor = module.nvmlDeviceGetCudaComputeCapability(device)
            gpu, memory = major + minor / 10, module.nvmlDeviceGetMemoryInfo(device).free
        except Exception:  # a driver without a GPU, or one that will not say
            gpu = None
    return Machine(_features(), available_memory(), gpu, memory)


def weights_run(format: str, engine: str, machine: Machine) -> tuple[bool | None, str]:
    """Whether an engine can run weights of ``format`` here, and why; None where nobody can know.

    Arguments:
        engine: ``halfbyte``, or the program that the target starts.
    """
    if engine == "halfbyte":
        if format not in ("nvfp4", "mxfp4", "bf16", "fp16", "fp32"):
            return False, f"halfbyte serve has no {format} weights"
        fast = sorted(machine.cpu_features & {"avx2", "avx512_vnni", "avx512_bf16", "asimd"})
        return True, f"{format} on the CPU ({', '.join(fast) or 'the slow reference kernels: no vector features'})"
    if format not in _GPUS:
        return None, f"{format}: a format that this preflight does not know"
    if machine.gpu is None:
        if format in _ON_CPU:
            return True, f"{format} on the CPU"
        return False, f"{format} needs a GPU in {engine}, and this machine has none"
    native, least = _GPUS[format]
    if machine.gpu >= native:
        return True, f"{format} on a GPU of compute capability {machine.gpu:g}"
    if machine.gpu >= least:
        return (
            True,
            f"{format} is decompressed on the fly: compute capability {machine.gpu:g}, {native:g} multiplies in it",
        )
    return False, f"{format} needs a GPU of compute capability {least:g}, this one has {machine.gpu:g}"


def _features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
