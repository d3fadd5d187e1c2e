"""How many threads, and what they do while they wait. Must run before torch is imported.

torch's OpenMP threads spin at every barrier. On cores that several processes share (a trainer beside an engine, or
anything else that is busy), they spin away the time of the thread they wait for. Here they give up their core almost at
once (``bench/threads.py`` measures what that costs and saves). A waiting policy that the user has set is left alone.

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

__all__ = ["SPIN_COUNT", "apply", "usable_cores"]

#: Turns of its waiting loop that a thread of GNU OpenMP makes before it sleeps.
SPIN_COUNT = 100
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
    if "OMP_WAIT_POLICY" not in target and "GOMP_SPINCOUNT" not in target:
        target["OMP_WAIT_POLICY"] = "PASSIVE"  # every OpenMP runtime
        target["GOMP_SPINCOUNT"] = str(SPIN_COUNT)  # GNU's, which prefers it to the policy
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
