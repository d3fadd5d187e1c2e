"""Which samples of a step have come back: each is taken once, whoever brings it and however often."""

from __future__ import annotations

from collections.abc import Iterable

from halfbyte.models.trajectory import Trajectory
from halfbyte.train.ray.pieces import Piece

__all__ = ["Ledger"]


class Ledger:
    """The samples of one step.

    Arguments:
        pieces: everything that is to come back.

    Attributes:
        duplicates: samples that came a second time (from a worker that was thought dead) and were dropped.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._taken: dict[tuple[int, int], Trajectory | None] = {}
        for piece in pieces:
            for key in piece.samples():
                assert key not in self._taken, f"sample {key} is in two pieces"
                self._taken[key] = None
        self.duplicates = 0
        self._open = len(self._taken)

    @property
    def complete(self) -> bool:
        """Whether every sample is here."""
        return self._open == 0

    def accept(self, trajectories: Iterable[Trajectory]) -> int:
        """Take what has not come yet; how many that were."""
        taken = 0
        for t in trajectories:
            key = (t.group, t.sample)
            assert key in self._taken, f"nobody asked for sample {key}"
            if self._taken[key] is None:
                self._taken[key] = t
                taken += 1
            else:
                self.duplicates += 1
        self._open -= taken
        return taken

    def trajectories(self) -> list[Trajectory]:
        """All of them, by group and then sample."""
        assert self.complete, f"{self._open} samples are missing"
        return [t for _, t in sorted(self._taken.items()) if t is not None]
