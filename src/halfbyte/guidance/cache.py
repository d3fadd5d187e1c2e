"""What the rollout rounded, kept by token until the learner has used it.

While a sample runs its guidance lies beside its KV pages, at the same slots: copy-on-write copies it, a prefix page that a later
prompt reuses brings it along, a recomputed token overwrites it, so the last written code wins. Keys and values are not written a
second time: their codes are the pages'. A finished sample takes its rows with it (:class:`Shelf`), in memory up to a budget and
in an unnamed file beyond it. The key is (trajectory, position, layer, site): the row is the position, the layout finds the rest.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfbyte.errors import DataError
from halfbyte.formats import Payload, PayloadBits
from halfbyte.formats.payload import payload_codes
from halfbyte.guidance.layout import Layout, encode_global
from halfbyte.kernels.kv import KvLayer

__all__ = ["Arena", "PassRecord", "Shelf", "split_rows"]

Bytes = npt.NDArray[np.uint8]


class Arena:
    """The guidance of every slot of a page pool.

    Arguments:
        layout: how a token's row is cut.
        n_pages, page_size: of the pool; a slot is page * page_size + offset.

    Memory: ``layout.recorded_bytes`` a slot, of which only slots that were ever written take up memory.
    """

    def __init__(self, layout: Layout, n_pages: int, page_size: int) -> None:
        self.layout, self.n_pages, self.page_size = layout, n_pages, page_size
        self.text = layout.to_text()
        # calloc: untouched pages of a large pool cost nothing
        self.rows: Bytes = np.zeros((n_pages * page_size, layout.recorded_bytes), dtype=np.uint8)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow the pool's copy-on-write."""
        paged = self.rows.reshape(self.n_pages, self.page_size, -1)
        paged[list(targets)] = paged[list(sources)]

    def take(self, pages: Sequence[int], kv: Sequence[KvLayer]) -> Bytes:
        """Whole rows [P * page_size, row_bytes] of the tokens in ``pages``; keys and values come from the pages of ``kv``."""
        layout, own = self.layout, self.layout.recorded_bytes
        out = np.empty((len(pages) * self.page_size, layout.row_bytes), dtype=np.uint8)
        if own:
            out.reshape(len(pages), self.page_size, -1)[:, :, :own] = self.rows.reshape(
                self.n_pages, self.page_size, own
            )[list(pages)]
        for layer, *fields in layout.pages():
            for field, (codes, scales) in zip(fields, kv[layer].page_codes(pages)):
                if field is not None:
                    out[:, field.start : field.scales_at] = (
                        payload_codes(codes, field.bits).reshape(len(out), -1).numpy()
                    )
                    out[:, field.scales_at : field.stop] = scales.reshape(len(out), -1).numpy()
        return out


class PassRecord:
    """What one forward pass writes, gathered a site at a time and stored at its slots once.

    Arguments:
        tokens: rows of the pass.
        sparse: some tokens may be left out of a site (phases of different precision); they read as not recorded.
    """

    def __init__(self, arena: Arena, tokens: int, *, sparse: bool = False) -> None:
        self.arena = arena
        make = torch.zeros if sparse else torch.empty
        self.rows = make((tokens, arena.layout.recorded_bytes), dtype=torch.uint8)

    def bits(self, layer: int, site: str) -> PayloadBits | None:
        """Payload bits of a site, None where it is not recorded."""
        field = self.arena.layout.by_place.get((layer, site))
        return None if field is None else field.bits

    def write(self, layer: int, site: str, payload: Payload, tokens: Tensor | None = None) -> None:
        """Note the payload of a site: its rows are those of all tokens of the pass, or of ``tokens`` [R] int64."""
        field = self.arena.layout.by_place[layer, site]
        count = len(self.rows) if tokens is None else len(tokens)
        if count == 0:
            return
        g = encode_global(payload.global_scale.reshape(-1), field.place.spec)
        if len(g) != count * field.place.rows:  # a constant scale, the same for all
            g = g.expand(count * field.place.rows, -1)
        parts = (
            (field.start, field.scales_at, payload.codes),
            (field.scales_at, field.global_at, payload.scales),
            (field.global_at, field.stop, g),
        )
        for start, stop, values in parts:
            if tokens is None:
                self.rows[:, start:stop] = values.reshape(count, -1)
            else:
                self.rows[tokens, start:stop] = values.reshape(count, -1)

    def commit(self, slots: Tensor) -> None:
        """Store the rows at ``slots`` [T]."""
        if self.rows.shape[1]:
            self.arena.rows[slots.numpy()] = self.rows.numpy()


class Shelf:
    """Rows of finished samples, within a memory budget; what does not fit lies in a file without a name.

    Arguments:
        memory_mb: budget of the rows that live in memory, MiB.
        folder: where the files go; None takes the system's temporary folder. A file's space is free again when the last
            trajectory that reads from it is gone, also after a crash.
    """

    def __init__(self, memory_mb: float = float("inf"), folder: Path | None = None) -> None:
        self.budget, self.folder = memory_mb * 2**20, folder
        self.held = 0
        self.spilled = 0

    def keep(self, rows: Bytes) -> Bytes:
        """``rows`` themselves, or the same bytes mapped from a file.

        Raises:
            DataError: the file cannot be written.
        """
        if self.held + rows.nbytes <= self.budget or rows.nbytes == 0:
            self.held += rows.nbytes
            weakref.finalize(rows, self._forget, rows.nbytes)
            return rows
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix=".guidance-") as file:
                file.write(memoryview(np.ascontiguousarray(rows)))
                file.flush()
                mapped = np.memmap(file, dtype=np.uint8, mode="r", shape=rows.shape)
        except OSError as error:
            raise DataError(
                f"guidance cannot be spilled to disk: {error}",
                where=str(self.folder or tempfile.gettempdir()),
                expected=f"room for {rows.nbytes} bytes",
                fix="raise alignment.memory_mb, or free disk space",
            ) from error
        self.spilled += rows.nbytes
        return mapped

    def _forget(self, count: int) -> None:
        self.held -= count


def split_rows(rows: Bytes, page_counts: Sequence[int], held: Sequence[int], page_size: int) -> list[Bytes]:
    """The rows of each sample: ``page_counts[i]`` pages each, of which the first ``held[i]`` tokens count."""
    starts = [0, *accumulate(count * page_size for count in page_counts)]
    return [rows[start : start + n] for start, n in zip(starts, held)]
