"""What the rollout rounded, kept by token until the learner has used it.

While a sample runs its guidance lies beside its KV pages, at the same slots: copy-on-write copies it, a prefix page that a later
prompt reuses brings it along, a recomputed token overwrites it, so the last written code wins. Keys and values are not written a
second time: their codes are the pages'. A finished sample takes its rows with it (:class:`Shelf`), in memory up to a budget and
in an unnamed file beyond it. The key is (trajectory, position, layer, site): the row is the position, the layout finds the rest.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfbyte.errors import DataError
from halfbyte.formats import Payload, PayloadBits, QuantTensor
from halfbyte.guidance.layout import Layout, encode_global
from halfbyte.kernels import Kernels
from halfbyte.kernels.kv import KvLayer

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

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow the pool's copy-on-write."""
        paged = self.rows.reshape(self.n_pages, self.page_size, -1)
        paged[list(targets)] = paged[list(sources)]

    def take(self, slots: npt.NDArray[np.int64]) -> Bytes:
        """Rows [len(slots), recorded_bytes] of the tokens at ``slots``."""
        return np.take(self.rows, slots, axis=0)

    def take_kv(self, pages: Sequence[int], kv: Sequence[KvLayer], kernels: Kernels) -> Bytes:
        """Rows [P * page_size, row_bytes - recorded_bytes] of the tokens in ``pages``, from what the KV pages themselves hold."""
        count = len(pages) * self.page_size
        parts = []
        for layer, *fields in self.layout.pages():
            for field, (codes, scales) in zip(fields, kv[layer].page_codes(pages)):
                if field is not None:
                    shape = (count, field.place.rows, field.place.width)
                    q = QuantTensor(codes, scales, torch.ones(()), field.place.spec, shape)
                    payload = kernels.payload(q, field.bits)
                    parts += [payload.codes.reshape(count, -1), payload.scales.reshape(count, -1)]
        return torch.cat(parts, dim=1).numpy() if parts else np.empty((count, 0), dtype=np.uint8)


class PassRecord:
    """What one forward pass writes, gathered a site at a time and stored at its slots once.

    Arguments:
        tokens: rows of the pass. A site that some of them leave out (phases of different precision) reads as not recorded there.
    """

    def __init__(self, arena: Arena, tokens: int) -> None:
        self.arena, self.tokens = arena, tokens
        self._parts: dict[tuple[int, str], tuple[Tensor, Tensor, Tensor]] = {}

    def bits(self, layer: int, site: str) -> PayloadBits | None:
        """Payload bits of a site, None where it is not recorded."""
        field = self.arena.layout.by_place.get((layer, site))
        return None if field is None else field.bits

    def write(self, layer: int, site: str, payload: Payload, tokens: Tensor | None = None) -> None:
        """Note the payload of a site: its rows are those of all tokens of the pass, or of ``tokens`` [R] int64."""
        place = self.arena.layout.by_place[layer, site].place
        count = self.tokens if tokens is None else len(tokens)
        if count == 0:
            return
        g = encode_global(payload.global_scale.reshape(-1), place.spec)
        if len(g) != count * place.rows:  # a constant scale, the same for all
            g = g.expand(count * place.rows, -1)
        parts = (payload.codes.reshape(count, -1), payload.scales.reshape(count, -1), g.reshape(count, -1))
        if tokens is not None:
            parts = (self._spread(parts[0], tokens), self._spread(parts[1], tokens), self._spread(parts[2], tokens))
        self._parts[layer, site] = parts

    def commit(self, slots: Tensor) -> None:
        """Store the rows at ``slots`` [T]."""
        if self.arena.layout.recorded_bytes:
            self.arena.rows[slots.numpy()] = torch.cat([part for f in self._fields() for part in f], dim=1).numpy()

    def _fields(self) -> Iterator[tuple[Tensor, ...]]:
        for f in self.arena.layout.fields:
            if f.place.site not in ("k", "v"):
                nothing = (torch.zeros(self.tokens, f.stop - f.start, dtype=torch.uint8),)
                yield self._parts.get((f.place.layer, f.place.site), nothing)

    def _spread(self, part: Tensor, tokens: Tensor) -> Tensor:
        return part.new_zeros(self.tokens, part.shape[1]).index_copy_(0, tokens, part)


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
