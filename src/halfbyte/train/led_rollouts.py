"""Rollouts that rank 0 alone talks to, of a learner on several ranks: Ray workers, a vLLM server, a thread beside the learner.

Rank 0 has the backend; the other ranks make the same calls and get what it takes, so that every rank trains on the same
trajectories and decides alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from halfbyte.guidance.plan import Plan
from halfbyte.learner.ranks import Ranks, shared
from halfbyte.models.precision import Precision
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.refit.patch import Update
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.agreement import together
from halfbyte.train.rollouts import Deployed, Job, Rollouts, WeightSource
from halfbyte.train.trajectory_bytes import pack_trajectories, unpack_trajectories

__all__ = ["LedRollouts"]

Out = TypeVar("Out")


class LedRollouts:
    """See :class:`~halfbyte.train.rollouts.Rollouts`. Calls that submit, take, play, look, follow or guide are collective.

    Arguments:
        lead: rank 0's backend; None on the others.
        ranks: the run's.
        precision: of all trajectories.
    """

    def __init__(self, lead: Rollouts | None, ranks: Ranks, precision: Precision) -> None:
        self.lead, self.ranks, self.precision = lead, ranks, precision
        self._version = -1
        self._sampling: dict[int, SamplingParams] = {}

    @property
    def version(self) -> int:
        """See :class:`~halfbyte.train.rollouts.Rollouts`: what all ranks know to be served."""
        return self._version

    @property
    def in_fp4(self) -> bool:
        """See :class:`~halfbyte.train.rollouts.Rollouts`; rank 0 counts."""
        return self.lead is not None and self.lead.in_fp4

    @property
    def weights(self) -> RolloutWeights | None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        return None if self.lead is None else self.lead.weights

    def connect(self, source: WeightSource) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        if self.lead is not None:
            self.lead.connect(source)
        assert source.stamp.version is not None
        self._version = source.stamp.version

    def submit(self, job: Job) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        self._sampling[job.number] = job.sampling
        self._led(lambda lead: lead.submit(job))

    def take(self, number: int) -> list[Trajectory]:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        played = self._spread(lambda lead: lead.take(number), self._sampling[number])
        del self._sampling[number]
        return played

    def ready(self, *, wait: bool = False) -> set[int]:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        found = self._led(lambda lead: sorted(lead.ready(wait=wait)))
        return set(shared(self.ranks, found))

    def play(self, job: Job) -> list[Trajectory]:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        return self._spread(lambda lead: lead.play(job), job.sampling)

    def deploy(self, update: Update) -> Deployed:
        """See :class:`~halfbyte.train.rollouts.Rollouts`; on rank 0, and then :meth:`follow` on all."""
        assert self.lead is not None, "rank 0 deploys"
        return self.lead.deploy(update)

    def follow(self) -> None:
        """All ranks learn what rank 0 has deployed."""
        self._version = int(shared(self.ranks, None if self.lead is None else self.lead.version))

    def guide(self, plan: Plan) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        self._led(lambda lead: lead.guide(plan))

    def idle_seconds(self) -> float:
        """See :class:`~halfbyte.train.rollouts.Rollouts`; rank 0's."""
        return 0.0 if self.lead is None else self.lead.idle_seconds()

    def close(self) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        if self.lead is not None:
            self.lead.close()

    def _led(self, call: Callable[[Rollouts], Out]) -> Out | None:
        """Rank 0 makes a call; its error is everybody's."""
        lead = self.lead
        return together(self.ranks, lambda: None if lead is None else call(lead))

    def _spread(self, call: Callable[[Rollouts], list[Trajectory]], sampling: SamplingParams) -> list[Trajectory]:
        played = self._led(call)
        data = self.ranks.spread(b"" if played is None else pack_trajectories(played))
        return unpack_trajectories(data, sampling, self.precision) if played is None else played
