"""A target in the publisher's own process: it takes the change that the publisher decoded from what it stored."""

from __future__ import annotations

import time

from halfbyte.refit.patch import Update
from halfbyte.refit.target import Target

__all__ = ["take"]


def take(target: Target, update: Update) -> float:
    """Stage, pause, commit, resume; the seconds of the pause. Nothing is fetched or decoded again.

    Whatever goes wrong is raised after the target has been returned to its old version.
    """
    try:
        target.stage(update)
        started = time.perf_counter()
        target.pause()
        try:
            target.commit(update)
        except BaseException:
            target.rollback(update)
            target.resume()
            raise
        target.resume()
        return time.perf_counter() - started
    finally:
        target.discard(update)
