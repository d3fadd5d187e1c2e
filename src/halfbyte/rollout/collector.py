"""From samples that are done, while their pages are still theirs, to trajectories with routes and guidance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfbyte.guidance.cache import Shelf, split_rows
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
        arena = self.pool.guidance
        if arena is None or not samples:
            return [self._trajectory(sample, None) for sample in samples]
        rows = self.shelf.keep(arena.take([page for sample in samples for page in sample.pages], self.pool.layers))
        held = [min(sample.computed, len(sample.tokens) - 1) for sample in samples]
        parts = split_rows(rows, [len(sample.pages) for sample in samples], held, self.pool.page_size)
        return [
            self._trajectory(sample, GuidanceRows(part, arena.text, version)) for sample, part in zip(samples, parts)
        ]

    def _trajectory(self, sample: Sample, guidance: GuidanceRows | None) -> Trajectory:
        start = sample.prompt_length
        response = np.array(sample.tokens[start:], dtype=np.int32)
        assert sample.finish is not None
        routes = None
        if self.pool.moe_layers:
            size = self.pool.page_size
            routes = np.full((len(sample.tokens) - 1, *self.pool.routes.shape[1:]), -1, dtype=np.int16)
            held = min(sample.computed, len(routes))
            slots = [sample.pages[p // size] * size + p % size for p in range(held)]
            routes[:held] = self.pool.routes[slots]
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
