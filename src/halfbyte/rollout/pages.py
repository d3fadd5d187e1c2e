"""The pool of KV pages: reference counts, copy-on-write, and prefix pages that belong to one weight version.

A page holds ``page_size`` tokens of every layer (K and V, in the pool's KV kind) and, for MoE models, the expert ids those
tokens were routed to and the codes they were rounded to (guidance): what was written last to a slot is what the learner
replays. A full page may be registered under the digest of (weight version, all tokens up to its end); a later prompt with the
same beginning reuses it. Pages of another version can never match (NeMo RL #4018, lmdeploy #4917).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfbyte.errors import ConfigError
from halfbyte.guidance.cache import Arena
from halfbyte.guidance.layout import Layout
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision

__all__ = ["PagePool"]


class PagePool:
    """Pages for all layers.

    Arguments:
        n_pages: number of pages.
        page_size: tokens a page, a multiple of 16 (the attention kernel's key block).
        layout: what is recorded as guidance, beside the pages; None for nothing.
    """

    def __init__(
        self,
        arch: Architecture,
        precision: Precision,
        kernels: Kernels,
        n_pages: int,
        page_size: int,
        layout: Layout | None = None,
    ) -> None:
        if page_size < 16 or page_size % 16:
            raise ConfigError(
                f"page_size {page_size}", where="rollout.page_size", expected="a positive multiple of 16 tokens"
            )
        if n_pages < 1:
            raise ConfigError(
                "the KV memory budget does not hold one page",
                where="rollout.kv_memory_mb",
                expected=f"at least {self.page_bytes(arch, precision, page_size) / 2**20:,.3g} MiB",
            )
        self.kernels, self.page_size, self.n_pages, self.phased = kernels, page_size, n_pages, precision.phased
        self.layers = [
            kernels.new_kv_layer(n_pages, page_size, arch.n_kv_heads, arch.head_dim, precision.kv, precision.kv_spec)
            for _ in range(arch.n_layers)
        ]
        self.moe_layers = [i for i in range(arch.n_layers) if arch.is_moe_layer(i)]
        shape = (n_pages * page_size, len(self.moe_layers), arch.experts_per_token or 0)
        self.routes: npt.NDArray[np.int16] = np.full(shape, -1, dtype=np.int16)
        self.guidance: Arena | None = None
        self.record(layout)
        self._references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._copies: list[tuple[int, int]] = []  # promised by writable, not carried out yet
        self._prefix: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered pages nobody holds, least recently used first

    def record(self, layout: Layout | None) -> None:
        """Record guidance by ``layout`` from now on; what was recorded before is gone."""
        self.guidance = None if layout is None else Arena(layout, self.n_pages, self.page_size)

    @staticmethod
    def page_bytes(arch: Architecture, precision: Precision, page_size: int) -> int:
        """Bytes of one page over all layers: K and V in the pool's kind."""
        bits = {"fp32": 32.0, "bf16": 16.0, "fp4": 4.0 + 8.0 / precision.kv_spec.block}[precision.kv]
        return int(2 * arch.n_layers * arch.n_kv_heads * arch.head_dim * page_size * bits / 8)

    @property
    def available(self) -> int:
        """Pages that can be had now, counting cached prefix pages that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Cached prefix pages that nobody holds."""
        return len(self._idle)

    def allocate(self) -> int | None:
        """A page with one reference, evicting the least recently used idle prefix page if need be; None when full."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._references[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            if self._references[page] == 0:
                self._idle.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page; registered pages stay cached, others become free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def writable(self, page: int) -> int | None:
        """The page itself if only one sequence holds it, else a private copy (None when no page is free).

        The copy's contents are there after :meth:`flush_copies`.
        """
        if self._references[page] == 1:
            if page in self._digest_of:
                self._forget(page)
            return page
        copy = self.allocate()
        if copy is None:
            return None
        self._copies.append((page, copy))
        self.release([page])
        return copy

    def private(self, page: int) -> bool:
        """Whether a single sequence holds the page and may write to it."""
        return self._references[page] == 1 and page not in self._digest_of

    def flush_copies(self) -> None:
        """Carry out the copies that :meth:`writable` promised, all at once; call before pages are written or freed."""
        if not self._copies:
            return
        sources, targets = ([pair[i] for pair in self._copies] for i in (0, 1))
        self._copies = []
        for layer in self.layers:
            self.kernels.copy_pages(layer, sources, targets)
        if self.moe_layers:
            paged = self.routes.reshape(self.n_pages, self.page_size, *self.routes.shape[1:])
            paged[targets] = paged[sources]
        if self.guidance is not None:
            self.guidance.copy_pages(sources, targets)

    def digests(
        self, version: int, tokens: Sequence[int], count: int, generated: Sequence[bool] | None = None
    ) -> list[bytes]:
        """Chained digests of the first ``count`` full pages of ``tokens`` under a weight version.

        ``generated``: the tokens' phases, where prompt and generated tokens run in different precisions and so leave
        different keys and values behind.
        """
        out: list[bytes] = []
        parent = f"version {version} page_size {self.page_size}".encode()
        for i in range(count):
            chunk = np.asarray(tokens[i * self.page_size : (i + 1) * self.page_size], dtype=np.int64)
            phases = b"" if generated is None else bytes(generated[i * self.page_size : (i + 1) * self.page_size])
            parent = hashlib.blake2b(parent + chunk.tobytes() + phases, digest_size=16).digest()
            out.append(parent)
        return out

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix, each with a reference added."""
        pages: list[int] = []
        for digest in digests:
            page = self._prefix.get(digest)
            if page is None:
                break
            pages.append(page)
        self.share(pages)
        return pages

    def register(self, digest: bytes, page: int) -> None:
        """Let later prompts with the same beginning reuse a full page."""
        if digest not in self._prefix and page not in self._digest_of:
            self._prefix[digest] = page
            self._digest_of[page] = digest

    def forget_prefixes(self) -> None:
        """Drop every registered prefix (after a weight update); pages in use stay with their sequences."""
        for page in list(self._digest_of):
            self._forget(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._prefix[self._digest_of.pop(page)]
