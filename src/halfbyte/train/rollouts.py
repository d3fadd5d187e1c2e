"""Where a run's episodes are played: the seam between the trainer and whatever generates.

A :class:`Job` is some prompts with the keys of their randomness. The trainer submits jobs and takes their scored trajectories;
the weights reach the backend by :meth:`Rollouts.deploy`. A sample is a function of (weights, precision, prompt, sampling, key,
index), so every backend that plays a job under the same weights hands back the same trajectories.

:class:`LocalRollouts` plays in this process and at once; ``background`` plays beside the learner.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from halfbyte.envs import Environment, Prompt
from halfbyte.guidance.plan import Plan
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.refit.local import take as take_update
from halfbyte.refit.patch import Stamp, Update
from halfbyte.rollout.code_changes import CodeChanges, code_changes
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.packer import Source
from halfbyte.rollout.protocol import TokenEngine
from halfbyte.rollout.refit_target import EngineTarget, SharedEngineTarget
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.collect import play

__all__ = [
    "Deployed",
    "Job",
    "LocalRollouts",
    "PlayedAtOnce",
    "RankedRollouts",
    "Rollouts",
    "WeightSource",
    "deploy_to",
]


@dataclass(frozen=True, eq=False)
class Job:
    """Prompts to play, ``samples`` times each.

    Arguments:
        number: names the job among those that are not taken yet.
        prompts: of the job.
        keys: one 64-bit request key a prompt (``halfbyte.train.collect.prompt_keys``).
        sampling: of every turn.
        samples: trajectories a prompt.
        recorded: record guidance for the learner; evaluations do without.
        version: the weight version that all its tokens are sampled from, deployed last when the job is submitted. None for
            whatever is deployed last at each token, so that a deployment reaches samples in flight.
    """

    number: int
    prompts: tuple[Prompt, ...]
    keys: tuple[int, ...]
    sampling: SamplingParams
    samples: int
    recorded: bool = True
    version: int | None = None


@dataclass(frozen=True, eq=False)
class WeightSource:
    """Where a backend finds the learner's published weights.

    Arguments:
        store: folder of the run's refit store; HEAD is the version that is to be served first.
        stamp: of that version.
        latest: the weights last published, in this process. Tensors are replaced by the next publication, never written to.
    """

    store: Path
    stamp: Stamp
    latest: Callable[[], Source]


@dataclass(frozen=True)
class Deployed:
    """What a deployment did.

    Arguments:
        codes: how the weights served before and after differ in FP4 coordinates.
        stage_seconds: getting the new version ready beside the old one. pause_seconds: no token was drawn.
    """

    codes: CodeChanges
    stage_seconds: float
    pause_seconds: float


class Rollouts(Protocol):
    """A backend. Used by one thread, in the order: connect; then submit, take, play, deploy and guide; close."""

    @property
    def version(self) -> int:
        """The weight version deployed last."""

    @property
    def in_fp4(self) -> bool:
        """Whether weights are served in FP4, so that :meth:`deploy` counts codes."""

    @property
    def weights(self) -> RolloutWeights | None:
        """The packed weights deployed last, None where they live in another process."""

    def connect(self, source: WeightSource) -> None:
        """The refit store is open: serve its HEAD, and follow it.

        Raises:
            RefitError: the weights served are not those.
        """

    def submit(self, job: Job) -> None:
        """Queue a job. It may be played here and now, or begin in the background.

        Raises:
            UserError: the job cannot be played; also from :meth:`take` and :meth:`ready`, where it is played in the background.
        """

    def take(self, number: int) -> list[Trajectory]:
        """The scored trajectories of a job, in order of prompt, then sample; ``group`` is the prompt's place in the job. Waits
        for them, and forgets the job.

        Raises:
            UserError: what went wrong while it was played.
        """

    def ready(self, *, wait: bool = False) -> set[int]:
        """Numbers of the jobs that are complete and not taken; waits until there is one if asked to and any is queued."""

    def play(self, job: Job) -> list[Trajectory]:
        """Play a job at once by the weights deployed last, whatever else is queued: evaluations."""

    def deploy(self, update: Update) -> Deployed:
        """The version that was just published is served from now on; jobs bound to an older version keep theirs.

        Raises:
            RefitError, NumericsError: what was served is served still.
        """

    def guide(self, plan: Plan) -> None:
        """Record guidance by ``plan`` in jobs submitted from now on; in those in flight as far as they allow."""

    def idle_seconds(self) -> float:
        """Seconds since the last call in which the backend could have generated and had nothing to do (mean over workers)."""

    def close(self) -> None:
        """Stop playing and let go of everything; also after an error, and twice."""


class RankedRollouts(Rollouts, Protocol):
    """Rollouts of a learner on several ranks."""

    def follow(self) -> None:
        """After rank 0 has deployed a version: all ranks come to it; collective.

        Raises:
            RefitError, NumericsError: what was served is served still.
        """


def deploy_to(target: EngineTarget, update: Update) -> Deployed:
    """Deploy to an engine of this process. Errors as in :meth:`Rollouts.deploy`."""
    before, started = target.engine.weights, time.perf_counter()
    pause = take_update(target, update)
    seconds = time.perf_counter() - started
    return Deployed(code_changes(before, target.engine.weights), seconds - pause, pause)


class PlayedAtOnce(ABC):
    """Jobs that are played when they are submitted, by the engine that ``_engine`` gives: the part that such backends share.

    Arguments:
        environment, tokenizer: of all jobs.
        prompt_limit: longest prompt, in tokens.
    """

    def __init__(self, environment: Environment, tokenizer: Tokenizer, prompt_limit: int | None) -> None:
        self.environment, self.tokenizer, self.prompt_limit = environment, tokenizer, prompt_limit
        self._done: dict[int, list[Trajectory]] = {}
        self._busy, self._since = 0.0, time.perf_counter()

    @property
    @abstractmethod
    def _engine(self) -> TokenEngine:
        """What plays them."""

    @property
    def version(self) -> int:
        """See :class:`Rollouts`."""
        return self._engine.version

    def submit(self, job: Job) -> None:
        """See :class:`Rollouts`."""
        self._done[job.number] = self.play(job)

    def take(self, number: int) -> list[Trajectory]:
        """See :class:`Rollouts`."""
        return self._done.pop(number)

    def ready(self, *, wait: bool = False) -> set[int]:
        """See :class:`Rollouts`."""
        return set(self._done)

    def play(self, job: Job) -> list[Trajectory]:
        """See :class:`Rollouts`."""
        assert job.version in (None, self.version), "jobs are played as they are submitted"
        started = time.perf_counter()
        try:
            return self._collect(job)
        finally:
            self._busy += time.perf_counter() - started

    def _collect(self, job: Job) -> list[Trajectory]:
        return play(
            self._engine,
            self.environment,
            self.tokenizer,
            job.prompts,
            job.sampling,
            samples=job.samples,
            keys=job.keys,
            max_prompt_tokens=self.prompt_limit,
        )

    def idle_seconds(self) -> float:
        """See :class:`Rollouts`."""
        now, busy = time.perf_counter(), self._busy
        whole = now - self._since
        self._busy, self._since = 0.0, now
        return max(0.0, whole - busy)

    def close(self) -> None:
        """See :class:`Rollouts`."""
        self._done.clear()


class LocalRollouts(PlayedAtOnce):
    """Episodes in this process.

    Arguments:
        engine: serves the learner's published weights.
        environment, tokenizer, prompt_limit: see :class:`PlayedAtOnce`.

    Attributes:
        target: takes updates for the engine; there after :meth:`connect`.
    """

    def __init__(
        self, engine: Engine, environment: Environment, tokenizer: Tokenizer, prompt_limit: int | None = None
    ) -> None:
        super().__init__(environment, tokenizer, prompt_limit)
        self.engine = engine
        self.target: EngineTarget

    @property
    def _engine(self) -> Engine:
        return self.engine

    @property
    def in_fp4(self) -> bool:
        """See :class:`Rollouts`."""
        return code_changes(self.engine.weights, self.engine.weights).codes > 0

    @property
    def weights(self) -> RolloutWeights | None:
        """See :class:`Rollouts`."""
        return self.engine.weights

    def connect(self, source: WeightSource) -> None:
        """See :class:`Rollouts`."""
        self.target = SharedEngineTarget(self.engine, source.latest, stamp=source.stamp)

    def deploy(self, update: Update) -> Deployed:
        """See :class:`Rollouts`."""
        return deploy_to(self.target, update)

    def guide(self, plan: Plan) -> None:
        """See :class:`Rollouts`."""
        self.engine.guide(plan)

    def _collect(self, job: Job) -> list[Trajectory]:
        if job.recorded:
            return super()._collect(job)
        with self.engine.unrecorded():
            return super()._collect(job)
