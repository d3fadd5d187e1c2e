"""How many threads, and what they do while they wait. Must run before torch is imported.

torch's OpenMP threads spin at every barrier. On cores that several processes share (a trainer beside an engine, or
anything else that is busy), they spin away the time of the thread they wait for. Here they give up their core at once. On
two cores that cost about 5% where nothing else ran, and saved a factor of ten and more where something did
(``bench/threads.py`` measures it); a short spin was no better in either case. A waiting policy of the user's is left alone.

How many, the first that is set: the argument (``--threads``, or ``train.threads`` of a configuration),
``HALFBYTE_THREADS``, ``OMP_NUM_THREADS``, the cores this process may use (affinity and container quota). The native
kernels' own pool follows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from halfbyte.errors import ConfigError

__all__ = ["apply", "usable_cores"]

#: Variables by which a user says how threads wait: standard, GNU, and LLVM or Intel.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


def apply(count: int | None = None, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the environment variables that OpenMP and the native pool read when they load.

    Arguments:
        count: threads; None takes the environment's word, or the usable cores.
        environ: the environment to change; the process's own by default.

    Raises:
        ConfigError: a count that is not a positive integer.
    """
    target = os.environ if environ is None else environ
    if count is not None and count < 1:
        raise ConfigError(f"{count} threads", where="--threads", expected="a positive integer")
    asked = count if count is not None else _positive(target, "HALFBYTE_THREADS")
    if asked is not None:
        target["HALFBYTE_THREADS"] = target["OMP_NUM_THREADS"] = str(asked)
    elif not target.get("OMP_NUM_THREADS"):
        target["OMP_NUM_THREADS"] = str(usable_cores())
    if not any(name in target for name in WAITING):
        target["OMP_WAIT_POLICY"] = "PASSIVE"
    if environ is None and asked is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(asked)  # too late for the variables


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, less where a Linux container has a smaller quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP.read_text().split()[:2]
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # not Linux, or no such controller
    return max(1, cores)


def _positive(environ: MutableMapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"{name} is {text!r}", where="environment", expected="a positive integer")
    return int(text)
