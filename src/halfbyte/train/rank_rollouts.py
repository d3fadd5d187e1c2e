"""Episodes on the ranks of a run: each plays its share of the prompts on an engine of its own, and all get all trajectories.

Sampling is keyed and kernels are batch-invariant, so it is the same to the bit which rank plays a prompt. Rank 0's engine takes
a published version as it is; the others read it from the run's refit store, as any engine elsewhere would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from halfbyte.envs import Environment
from halfbyte.learner.ranks import Ranks
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import Trajectory
from halfbyte.refit.store.filesystem import FilesystemStore
from halfbyte.refit.subscriber import Subscriber
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.refit_target import EngineTarget
from halfbyte.train.agreement import together
from halfbyte.train.rollouts import Job, LocalRollouts, WeightSource
from halfbyte.train.trajectory_bytes import pack_trajectories, unpack_trajectories

__all__ = ["RankRollouts"]


class RankRollouts(LocalRollouts):
    """See :class:`LocalRollouts`; calls that play or deploy are collective.

    Arguments:
        tensors: what ``engine`` was made from.
        ranks: the run's.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        tokenizer: Tokenizer,
        prompt_limit: int | None,
        tensors: Mapping[str, Tensor],
        ranks: Ranks,
    ) -> None:
        super().__init__(engine, environment, tokenizer, prompt_limit)
        self.ranks, self._tensors = ranks, tensors
        self._follower: Subscriber | None = None

    def connect(self, source: WeightSource) -> None:
        """See :class:`Rollouts`."""
        self.target = EngineTarget(self.engine, self._tensors, stamp=source.stamp)
        self._tensors = {}  # the target has a copy
        if self.ranks.rank:
            store = FilesystemStore(source.store)
            self._follower = Subscriber(store, self.target, name=f"rank{self.ranks.rank}", run=source.stamp.run)

    def follow(self) -> None:
        """Take HEAD from the store, on the ranks that were not handed an update.

        Raises:
            RefitError, NumericsError: what was served is served still.
        """
        if self._follower is not None:
            self._follower.refit()

    def _collect(self, job: Job) -> list[Trajectory]:
        own = range(self.ranks.rank, len(job.prompts), self.ranks.size)
        share = replace(job, prompts=job.prompts[own.start :: own.step], keys=job.keys[own.start :: own.step])
        played = together(self.ranks, lambda: super(RankRollouts, self)._collect(share) if share.prompts else [])
        for t in played:
            t.group = own[t.group]
        parts = self.ranks.exchange(pack_trajectories(played))
        out = [t for data in parts for t in unpack_trajectories(data, job.sampling, self.engine.precision)]
        return sorted(out, key=lambda t: (t.group, t.sample))
