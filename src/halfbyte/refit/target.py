"""What takes new weights: an engine, a module, a folder. The subscriber drives it through these calls.

    read ...        any time: the bytes now served, in checkpoint coordinates
    stage(update)   any time, may be slow, may fail: get everything ready; nothing that is served changes
    pause()         no token is drawn until resume(); the target may be paused already, after a failure
    commit(update)  quick: the staged update becomes what is served, with its stamp
    rollback(update) quick: back to what was served before, as if nothing had happened
    resume()        serve again, with prefix caches of other weights dropped
    discard(update) any time after stage: forget what was staged

``commit`` may fail half-way: the subscriber then calls ``rollback``, which must work from any half-written state, also without
``stage`` before it (a new process undoes or completes what a killed one was writing: rollback, then perhaps commit).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.patch import Stamp, Update

__all__ = ["Target"]


class Target(Protocol):
    """See the module's docstring for the order of calls.

    ``survives`` says that the weights outlive this process and are changed in place (shared or mapped memory): the
    subscriber then keeps a log on disk, so that a process killed while writing is completed or undone by the next one.
    """

    survives: bool

    def infos(self) -> Mapping[str, TensorInfo]:
        """Name -> dtype and shape of what is served, in checkpoint coordinates. Tied names appear once."""
        ...

    def stamp(self) -> Stamp | None:
        """What is served; None where the target cannot say (the subscriber then compares bytes)."""
        ...

    def read(self, name: str) -> Bytes:
        """A tensor's bytes as served, uint8[n]; a read-only view where that is possible, else a copy."""
        ...

    def stage(self, update: Update) -> None:
        """Prepare ``update``: allocate, convert, copy. Raises whatever goes wrong; nothing served has changed."""
        ...

    def pause(self) -> None:
        """Stop drawing tokens (an engine finishes or keeps the sequences in flight)."""
        ...

    def commit(self, update: Update) -> None:
        """Make the staged update what is served, and ``update.target`` the stamp."""
        ...

    def rollback(self, update: Update) -> None:
        """Make ``update.source`` what is served again, from whatever state ``commit`` left."""
        ...

    def resume(self) -> None:
        """Draw tokens again. Prefix caches computed under weights that are no longer served are invalid."""
        ...

    def discard(self, update: Update) -> None:
        """Drop what ``stage`` prepared; called after commit and rollback, too. Never fails."""
        ...
