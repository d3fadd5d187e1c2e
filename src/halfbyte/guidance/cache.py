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
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfbyte.errors import DataError
from halfbyte.formats import Payload, PayloadBits
from halfbyte.guidance.layout import Layout, global_source
from halfbyte.kernels import Kernels
from halfbyte.kernels.kv import KvLayer
from halfbyte.kernels.reference.guidance_rows import RowPart

__all__ = ["Arena", "PassRecord", "Shelf"]

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
        self.tensor = torch.from_numpy(self.rows)  # the same memory

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow the pool's copy-on-write."""
        paged = self.rows.reshape(self.n_pages, self.page_size, -1)
        paged[list(targets)] = paged[list(sources)]

    def take(self, slots: npt.NDArray[np.int64]) -> Bytes:
        """Rows [len(slots), recorded_bytes] of the tokens at ``slots``."""
        return np.take(self.rows, slots, axis=0)

    def take_kv(self, slots: npt.NDArray[np.int64], kv: Sequence[KvLayer], kernels: Kernels) -> Bytes:
        """Rows [len(slots), row_bytes - recorded_bytes] of the tokens at ``slots``, from what the KV pages themselves hold."""
        own = self.layout.recorded_bytes
        out = torch.empty(len(slots), self.layout.row_bytes - own, dtype=torch.uint8)
        where = torch.from_numpy(slots)
        for field in self.layout.kv_fields:
            part: Literal["k", "v"] = "k" if field.place.site == "k" else "v"
            kernels.read_kv(kv[field.place.layer], part, where, field.bits, out, field.start - own)
        return out.numpy()


class PassRecord:
    """What one forward pass writes: noted a site at a time, stored at its slots at once.

    Arguments:
        slots: [T] int64 of the tokens of the pass. A site that some of them leave out (phases of different precision) reads as
            not recorded there.
    """

    def __init__(self, arena: Arena, slots: Tensor) -> None:
        self.arena, self.slots = arena, slots
        self._whole: list[RowPart] = []
        self._partial: list[tuple[Tensor, list[RowPart]]] = []
        self._left = {f.start for f in arena.layout.fields if f.place.site not in ("k", "v")}

    def bits(self, layer: int, site: str) -> PayloadBits | None:
        """Payload bits of a site, None where it is not recorded."""
        field = self.arena.layout.by_place.get((layer, site))
        return None if field is None else field.bits

    def write(self, layer: int, site: str, payload: Payload, tokens: Tensor | None = None) -> None:
        """Note the payload of a site: its rows are those of all tokens of the pass, or of ``tokens`` [R] int64."""
        field = self.arena.layout.by_place[layer, site]
        count = len(self.slots) if tokens is None else len(tokens)
        if count == 0:
            return
        parts = [
            (payload.codes, field.start),
            (payload.scales, field.scales_at),
            (global_source(payload.global_scale, field.place.spec, count, field.place.rows), field.global_at),
        ]
        if tokens is None:
            self._whole += parts
            self._left.discard(field.start)
        else:
            self._partial.append((self.slots.index_select(0, tokens), parts))

    def commit(self, kernels: Kernels) -> None:
        """Store everything that was noted."""
        arena = self.arena
        if not arena.layout.recorded_bytes:
            return
        if self._left:  # what is not written for all tokens was, perhaps, for those who had these slots before
            arena.rows[self.slots.numpy()] = 0
        kernels.store_parts(arena.tensor, self.slots, self._whole)
        for slots, parts in self._partial:
            kernels.store_parts(arena.tensor, slots, parts)


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
                np.ascontiguousarray(rows).tofile(file)
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
