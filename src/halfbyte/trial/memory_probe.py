"""How much memory a server's processes take while they serve, sampled: PSS on Linux, and NVML where there is a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from halfbyte.errors import MissingExtraError

__all__ = ["MemoryProbe", "available_memory", "nvml", "process_tree", "resident_bytes"]

_SECONDS = 0.1
PROPORTIONAL = Path("/proc/self/smaps_rollup").exists()


def process_tree(pid: int) -> list[int]:
    """A process and its descendants that are alive.

    Raises:
        MissingExtraError: psutil is not installed.
    """
    try:
        import psutil
    except ImportError as error:
        what = f"memory of a server is read with psutil, which cannot be imported: {error}"
        raise MissingExtraError(what, expected="psutil installed", fix="pip install 'halfbyte[trial]'") from error
    try:
        top = psutil.Process(pid)
        return [pid, *(child.pid for child in top.children(recursive=True))]
    except psutil.Error:
        return []


def resident_bytes(pids: list[int]) -> int:
    """Proportional set size of processes, bytes: pages that several share count once over all of them.

    Where the system does not tell it (it is Linux's), the resident set size. A process that has ended, or that we may not look
    into, counts 0.
    """
    total = 0
    for pid in pids:
        if not PROPORTIONAL:
            total += _resident_set(pid)
            continue
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _resident_set(pid: int) -> int:
    import psutil

    try:
        size: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return size


def available_memory() -> int | None:
    """Bytes that processes started now may take: MemAvailable, or what a control group leaves, where that is less."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        if limit.isdigit():
            found.append(max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def nvml() -> ModuleType | None:
    """The module, initialised; None without it or without a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the package raises its own classes, and the library may be missing
        return None
    module: ModuleType = pynvml
    return module


class MemoryProbe:
    """Samples a process tree in a thread from ``with`` to its end.

    Arguments:
        pid: of the server; None samples nothing (a remote server).
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._resident = self._on_gpu = 0
        self._nvml = None if pid is None else nvml()

    @property
    def peak_bytes(self) -> int | None:
        """Most at one moment; GPU memory where the server uses one, else PSS; None where nothing was seen."""
        return (self._on_gpu or self._resident) or None

    @property
    def source(self) -> str:
        """``NVML``, ``PSS``, ``RSS`` or ``remote``."""
        return "remote" if self.peak_bytes is None else "NVML" if self._on_gpu else "PSS" if PROPORTIONAL else "RSS"

    def __enter__(self) -> MemoryProbe:
        if self._pid is not None:
            self._sample()  # so that even the shortest segment has one
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._pid is not None:
            self._sample()

    def _work(self) -> None:
        while not self._stop.wait(_SECONDS):
            self._sample()

    def _sample(self) -> None:
        assert self._pid is not None
        pids = process_tree(self._pid)
        self._resident = max(self._resident, resident_bytes(pids))
        if self._nvml is not None:
            self._on_gpu = max(self._on_gpu, _gpu_bytes(self._nvml, set(pids)))


def _gpu_bytes(module: Any, pids: set[int]) -> int:
    """GPU memory of processes over all devices."""
    total = 0
    try:
        for index in range(module.nvmlDeviceGetCount()):
            device = module.nvmlDeviceGetHandleByIndex(index)
            for process in module.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid in pids and process.usedGpuMemory:
                    total += process.usedGpuMemory
    except Exception:  # a driver that will not say
        return 0
    return total
