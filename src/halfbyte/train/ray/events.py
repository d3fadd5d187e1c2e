"""What happened to a run's workers, as lines of ``RUN/workers.jsonl``; and how many there should be, in ``RUN/workers.want``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfbyte.errors import ConfigError

__all__ = ["MOST_WORKERS", "Events", "read_events", "read_wanted", "summary", "write_wanted"]

MOST_WORKERS = 100_000
_STATES = {"start": "starting", "open": "plays", "reissued": "died", "closed": "ended with the run"}


class Events:
    """Appends to ``RUN/workers.jsonl``.

    Arguments:
        folder: of the run; None writes nothing.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.path = None if folder is None else folder / "workers.jsonl"
        self.clock = clock

    def add(self, event: str, worker: str, **facts: Any) -> None:
        """Write one line."""
        if self.path is not None:
            line = {"time": round(self.clock(), 3), "event": event, "worker": worker, **facts}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    path, out = folder / "workers.jsonl", []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                continue  # a kill cut it off
    return out


def summary(folder: Path) -> list[str]:
    """A line for each worker of the last attempt: where it was, what became of it, what its weights have cost."""
    known: dict[str, dict[str, Any]] = {}
    for event in read_events(folder):
        name = event["worker"]
        if event["event"] == "connect":
            known = {}
        elif name:
            known.setdefault(name, {}).update(event)
    return [
        f"{name}  {_STATES.get(e['event'], e['event'])}  {e.get('node', '?')} pid {e.get('pid', '?')}"
        + (f"  {e['refits']} refits, {e['fetched_bytes']} bytes, {e['refit_seconds']:.2f} s" if "refits" in e else "")
        + (f"  ({e['reason']})" if "reason" in e else "")
        for name, e in known.items()
    ]


def write_wanted(folder: Path, count: int) -> None:
    """Ask a run that goes on for another number of workers.

    Raises:
        ConfigError: not a number that can be, or no run there.
    """
    if not 1 <= count <= MOST_WORKERS:
        raise ConfigError(f"{count} workers", where="halfbyte workers", expected=f"1 to {MOST_WORKERS}")
    if not (folder / "config.json").is_file():
        raise ConfigError("there is no run", where=str(folder), expected="a run folder with config.json")
    temporary = folder / ".workers.want.tmp"
    temporary.write_text(f"{count}\n", encoding="utf-8")
    temporary.replace(folder / "workers.want")


def read_wanted(folder: Path) -> int | None:
    """The number last asked for, None where nobody has asked."""
    try:
        count = int((folder / "workers.want").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return count if 1 <= count <= MOST_WORKERS else None
