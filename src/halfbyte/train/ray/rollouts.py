"""Rollouts by workers on Ray: jobs are cut into pieces, pieces go to workers, what a dead worker had goes to others.

A sample is a function of (weights, prompt, sampling, key, index), so nothing of this changes a number. Each is counted once by its
(job, group, sample), whoever brings it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision
from halfbyte.models.trajectory import Trajectory
from halfbyte.refit.local import take as take_update
from halfbyte.refit.patch import Update
from halfbyte.refit.store.filesystem import FilesystemStore
from halfbyte.refit.store.server import StoreServer
from halfbyte.rollout.code_changes import code_changes
from halfbyte.rollout.refit_target import SharedEngineTarget
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.ray.balance import share_out
from halfbyte.train.ray.cluster import Cluster, WorkerDied
from halfbyte.train.ray.events import Events, read_wanted
from halfbyte.train.ray.ledger import Ledger
from halfbyte.train.ray.messages import Bundle, Played, WorkerSpec
from halfbyte.train.ray.pieces import Piece, cut
from halfbyte.train.ray.pool import Pool, Worker
from halfbyte.train.rollouts import Deployed, Job, WeightSource

__all__ = ["RayRollouts", "Served", "Sending"]

TICK = 1.0  # seconds between looks at the head, and at how many workers are wanted


@dataclass(eq=False)
class Served:
    """The weights as workers have packed them, here: for the count of changed codes, and to explain a gap. Nothing runs on them."""

    arch: Architecture
    precision: Precision
    kernels: Kernels
    weights: RolloutWeights

    def swap(self, weights: RolloutWeights) -> None:
        """They serve these now."""
        self.weights = weights


@dataclass(eq=False)
class _Playing:
    """A job that is not taken yet."""

    job: Job
    ledger: Ledger
    queue: list[Piece]


@dataclass(frozen=True, eq=False)
class Sending:
    """Who plays what: a bundle on its way."""

    worker: Worker
    number: int
    pieces: tuple[Piece, ...]
    at: float


@dataclass
class _Busy:
    """Seconds that workers played, since somebody asked."""

    since: float
    played: float = 0.0
    workers: set[str] = field(default_factory=set)


class RayRollouts:
    """See the module's docstring and :class:`~halfbyte.train.rollouts.Rollouts`.

    Arguments:
        cluster: a connection to Ray, closed with this.
        make_pool: workers for a spec, see :class:`Pool`.
        spec: what workers are told, but for the store.
        served: the weights of the first version.
        prompt_tokens: length of a prompt in tokens, for the balance; checked by who plays.
        guidance: what is recorded.
        folder: of the run, where ``workers.want`` is looked for; None where nobody may ask.
        serve: read the store over HTTP from this process, instead of from the run's folder.
    """

    def __init__(
        self,
        cluster: Cluster,
        make_pool: Callable[[str, dict[str, str], str], Pool],
        served: Served,
        prompt_tokens: Callable[[Any], int],
        guidance: Plan,
        *,
        folder: Path | None,
        serve: bool,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster, self.make_pool, self.served, self.prompt_tokens = cluster, make_pool, served, prompt_tokens
        self.folder, self.serve, self.events, self.clock = folder, serve, events, clock
        self.pool: Pool | None = None
        self.server: StoreServer | None = None
        self.target: SharedEngineTarget
        self._guidance = guidance.to_json()
        self._playing: dict[int, _Playing] = {}
        self._sent: dict[Any, Sending] = {}
        self._following: dict[Any, Worker] = {}
        self._looked = float("-inf")
        self._gathered = False
        self._busy = _Busy(clock())
