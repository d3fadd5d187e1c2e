"""A refit target whose engine is at rest between pause and resume."""

from __future__ import annotations

from collections.abc import Mapping

from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.patch import Stamp, Update
from halfbyte.refit.target import Target
from halfbyte.serve.loop import EngineLoop

__all__ = ["RestingTarget"]


class RestingTarget:
    """Passes every call on; ``pause`` also waits until the loop has given the engine away, ``resume`` gives it back.

    Arguments:
        inner: the engine's own target.
        loop: runs the engine.
    """

    def __init__(self, inner: Target, loop: EngineLoop) -> None:
        self.inner, self.loop = inner, loop
        self.survives = inner.survives

    def infos(self) -> Mapping[str, TensorInfo]:
        """See :class:`Target`, here and below."""
        return self.inner.infos()

    def stamp(self) -> Stamp | None:
        """What is served."""
        return self.inner.stamp()

    def read(self, name: str) -> Bytes:
        """A tensor's bytes."""
        return self.inner.read(name)

    def stage(self, update: Update) -> None:
        """While the engine serves."""
        self.inner.stage(update)

    def pause(self) -> None:
        """Samples in flight finish first, or stay where they are, as the loop was told."""
        self.loop.pause()
        self.inner.pause()

    def commit(self, update: Update) -> None:
        """The engine rests."""
        self.inner.commit(update)

    def rollback(self, update: Update) -> None:
        """The engine rests."""
        self.inner.rollback(update)

    def resume(self) -> None:
        """Serve again."""
        self.inner.resume()
        self.loop.resume()

    def discard(self, update: Update) -> None:
        """Forget what was staged."""
        self.inner.discard(update)
