"""From samples that are done, while their pages are still theirs, to trajectories with routes and guidance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfbyte.guidance.cache import Shelf
from halfbyte.models.precision import Precision
from halfbyte.models.trajectory import GuidanceRows, Trajectory
from halfbyte.rollout.pages import PagePool
from halfbyte.rollout.request import Sample

__all__ = ["Collector"]


class Collector:
    """Reads routes and guidance of finished samples out of a pool's pages.

    Arguments:
        precision: what the rollout ran in.
        shelf: where guidance is kept until nobody holds the trajectory any more.
    """

    def __init__(self, pool: PagePool, precision: Precision, shelf: Shelf) -> None:
        self.pool, self.precision, self.shelf = pool, precision, shelf

    def collect(self, samples: Sequence[Sample], version: int) -> list[Trajectory]:
        """Trajectories of samples that are done, in their order; guidance is read for all at once.

        Arguments:
            version: the weight version that their pages were computed under.
        """
        if not samples:
            return []
        size = self.pool.page_size
        held = [min(sample.computed, len(sample.tokens) - 1) for sample in samples]
        counts = [len(sample.pages) for sample in samples]
        pages = [page for sample in samples for page in sample.pages]
        first = np.cumsum([0, *counts[:-1]]) * size  # of each sample, among the slots of all pages
        slots = (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        chosen = slots[np.concatenate([np.arange(n) + a for n, a in zip(held, first)])]
        spans = [slice(end - n, end) for n, end in zip(held, np.cumsum(held).tolist())]
        routes = self.pool.routes[chosen] if self.pool.moe_layers else None
        cut = [None if routes is None else routes[span] for span in spans]
        arena = self.pool.guidance
        if arena is None:
            return [self._trajectory(*each, None) for each in zip(samples, cut)]
        rows = self.shelf.keep(arena.take(chosen))
        kv = self.shelf.keep(arena.take_kv(chosen, self.pool.layers, self.pool.kernels))
        guidance = [GuidanceRows(rows[span], kv[span], arena.text, version) for span in spans]
        return [self._trajectory(*each) for each in zip(samples, cut, guidance)]

    def _trajectory(
        self, sample: Sample, recorded: npt.NDArray[np.int16] | None, guidance: GuidanceRows | None
    ) -> Trajectory:
        start = sample.prompt_length
        response = np.array(sample.tokens[start:], dtype=np.int32)
        assert sample.finish is not None
        routes = None
        if recorded is not None:
            routes = np.full((len(sample.tokens) - 1, *recorded.shape[1:]), -1, dtype=np.int16)
            routes[: len(recorded)] = recorded
        return Trajectory(
            prompt_ids=np.array(sample.request.prompt_ids, dtype=np.int32),
            response_ids=response,
            logprobs=np.array(sample.logprobs, dtype=np.float32),
            mask=np.ones(len(response), dtype=bool),
            versions=np.array(sample.versions, dtype=np.int32),
            sampling=sample.request.sampling,
            precision=self.precision,
            finish_reason=sample.finish,
            group=sample.request.group,
            sample=sample.index,
            routes=routes,
            supports=list(sample.supports) if any(s is not None for s in sample.supports) else None,
            guidance=guidance,
        )
