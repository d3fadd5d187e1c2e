"""Sequences of similar length side by side, for attention over packed tokens.

A single grid [sequences, longest] would make one long response cost as much as if all were long. Buckets waste at most
30% of their cells, so attention stays in proportion to the tokens, as the micro-batch budget assumes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bucket", "length_buckets"]

SHORTEST = 0.7  # of the longest in a bucket


@dataclass(frozen=True, eq=False)
class Bucket:
    """A grid of ``n`` sequences by ``length`` cells.

    Arguments:
        rows: [n * length] int64, the packed row of each cell; a cell behind its sequence repeats the last row.
        real_cells: [tokens] int64, cells that hold a token.
        real_rows: [tokens] int64, their packed rows.
    """

    n: int
    length: int
    rows: Tensor
    real_cells: Tensor
    real_rows: Tensor

    def grid(self, x: Tensor) -> Tensor:
        """[T, H, D] -> [n, H, length, D]."""
        return x.index_select(0, self.rows).view(self.n, self.length, *x.shape[1:]).transpose(1, 2)


def length_buckets(starts: Tensor, device: torch.device | None = None) -> list[Bucket]:
    """Buckets of the sequences that ``starts`` [S + 1] borders, longest first; rows and cells on ``device`` (starts' own)."""
    lengths = starts.diff()
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    members: list[list[int]] = []
    for index in order:
        if not members or int(lengths[index]) < SHORTEST * int(lengths[members[-1][0]]):
            members.append([])
        members[-1].append(index)
    return [_bucket(starts, lengths, torch.tensor(indices), device or starts.device) for indices in members]


def _bucket(starts: Tensor, lengths: Tensor, indices: Tensor, device: torch.device) -> Bucket:
    length = int(lengths[indices[0]])
    offsets = torch.arange(length)[None]
    own = lengths[indices][:, None]
    rows = (starts[indices][:, None] + torch.minimum(offsets, own - 1)).view(-1)
    real = (offsets < own).view(-1)
    cells = real.nonzero().view(-1)
    return Bucket(len(indices), length, rows.to(device), cells.to(device), rows[cells].to(device))
