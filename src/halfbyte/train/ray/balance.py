"""Which worker plays which piece: the one that would be done first, by the tokens it has in flight and its measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.train.ray.pieces import Piece

__all__ = ["Load", "share_out"]

_MEMORY = 0.7  # share of the old value that a new measurement of the speed leaves


@dataclass
class Load:
    """What a worker has to do.

    Arguments:
        capacity: samples that it runs at once; more would only wait there.
        samples, tokens: in flight.
        speed: tokens a second, None before the first measurement.
    """

    capacity: int
    samples: int = 0
    tokens: int = 0
    speed: float | None = None

    def takes(self, piece: Piece) -> bool:
        """Whether there is room; an idle worker takes a piece of any size."""
        return self.samples == 0 or self.samples + piece.count <= self.capacity

    def add(self, piece: Piece, sign: int = 1) -> None:
        """Count a piece in, or with ``sign=-1`` out."""
        self.samples += sign * piece.count
        self.tokens += sign * piece.tokens

    def measure(self, tokens: int, seconds: float) -> None:
        """Note that ``tokens`` took so long."""
        if seconds > 0:
            now = tokens / seconds
            self.speed = now if self.speed is None else _MEMORY * self.speed + (1 - _MEMORY) * now


def share_out(pieces: Sequence[Piece], loads: Sequence[Load]) -> tuple[list[list[Piece]], list[Piece]]:
    """Give pieces to workers, the largest first, and count them into their loads.

    Returns:
        The pieces of each worker, and those that nobody has room for now.
    """
    shares: list[list[Piece]] = [[] for _ in loads]
    known = [load.speed for load in loads if load.speed]
    usual = sum(known) / len(known) if known else 1.0  # a worker that was not measured yet counts as an average one
    left = []
    for piece in sorted(pieces, key=lambda p: -p.tokens):
        able = [i for i, load in enumerate(loads) if load.takes(piece)]
        if not able:
            left.append(piece)
            continue
        best = min(able, key=lambda i: (loads[i].tokens + piece.tokens) / (loads[i].speed or usual))
        loads[best].add(piece)
        shares[best].append(piece)
    return shares, left
