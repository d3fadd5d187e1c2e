"""Reading tiles of keys and values out of pages, for the reference attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halfbyte.kernels.kv import TILE, KvLayer

__all__ = ["STRIP", "Tiles", "read_tiles"]

STRIP = 64  # keys between two looks at the running maximum


@dataclass(frozen=True)
class Tiles:
    """Where the tiles of one strip lie: the page of every sequence and the tile in that page."""

    places: list[tuple[Tensor, int]]

    @staticmethod
    def at(layer: KvLayer, pages: Tensor, first: int, last: int) -> Tiles:
        """Tiles of keys first .. min(first + STRIP, last), pages [n, P]; a page that does not exist becomes page 0 or the
        last one (shorter sequences of a batch: those keys are masked).
        """
        per_page = layer.page_size // TILE
        used = range(first // TILE, -(-min(first + STRIP, last) // TILE))
        return Tiles([(pages[:, t // per_page].long().clamp(0, layer.n_pages - 1), t % per_page) for t in used])


def read_tiles(array: Tensor, tiles: Tiles) -> list[Tensor]:
    """The tiles with the sequences last: each [A, B, n, n_kv], from pages [P, n_kv, tiles, A, B]."""
    out = []
    for page, tile in tiles.places:
        found = array.select(2, tile).index_select(0, page)
        n, n_kv, a, b = found.shape
        out.append(found.reshape(n * n_kv, a * b).t().contiguous().view(a, b, n, n_kv))  # a plain 2-D transpose is fast
    return out
