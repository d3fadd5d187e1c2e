"""Episodes beside the learner: a thread drives the engine while the trainer updates the weights.

The native kernels let go of the interpreter, so the two share a machine's cores. A job with a version is played wholly by the
weights that were served when it was submitted, whatever is deployed meanwhile: the same trajectories as played at once. A job
without one meets every deployment at a token boundary: samples in flight are recomputed under the new weights and go on.

Environments are called from here: prompts come from the trainer's thread, turns are scored in this one.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from halfbyte.envs import Environment
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import Trajectory
from halfbyte.refit.patch import Update
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.refit_target import Served, SharedEngineTarget
from halfbyte.rollout.request import Request
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.collect import encode_prompt
from halfbyte.train.episodes import Live
from halfbyte.train.gate import Gate
from halfbyte.train.rollouts import Deployed, Job, LocalRollouts, WeightSource, deploy_to

__all__ = ["BackgroundRollouts"]


@dataclass(eq=False)
class _Playing:
    """A job in work.

    Arguments:
        weights, plan: what it is bound to; None for whatever is served.
        waiting: places of prompts that are not begun.
        trajectories: by place, then sample; None until complete.
    """

    job: Job
    weights: RolloutWeights | None
    plan: Plan | None
    waiting: deque[int]
    trajectories: list[Trajectory | None]


@dataclass(eq=False)
class _Sample:
    """A sample in flight: its place in a job's trajectories, what it was asked for with, and its turns so far."""

    playing: _Playing
    place: int
    request: Request
    live: Live | None = None


class BackgroundRollouts:
    """:class:`halfbyte.train.rollouts.Rollouts` with a thread of its own.

    Arguments:
        engine: serves the learner's published weights; nobody else uses it.
        plan: what it records.
        prompt_limit: longest prompt, in tokens.
        width: samples in flight at a time; of a step, say. More of them would start earlier and end later.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        tokenizer: Tokenizer,
        plan: Plan,
        *,
        width: int,
        prompt_limit: int | None = None,
    ) -> None:
        self.engine, self.environment, self.tokenizer = engine, environment, tokenizer
        self.width, self.prompt_limit = width, prompt_limit
        self._aside = LocalRollouts(engine, environment, tokenizer, prompt_limit)
        self._door, self._plan = _Door(engine), plan
        self._served_plan = plan
        self.gate = Gate()
        self.target: SharedEngineTarget
        self._queue: deque[_Playing] = deque()
        self._jobs: dict[int, _Playing] = {}
        self._samples: dict[int, _Sample] = {}  # by order of arrival
        self._following: list[tuple[_Sample, Request]] = []
        self._in_flight = 0
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="halfbyte-rollouts", daemon=True)

    @property
    def version(self) -> int:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        return self._door.weights.version

    @property
    def in_fp4(self) -> bool:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        return self._aside.in_fp4

    @property
    def weights(self) -> RolloutWeights | None:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        return self._door.weights

    def connect(self, source: WeightSource) -> None:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        self.target = _GatedTarget(self._door, source, self.gate)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        bound = job.version is not None
        assert job.version in (None, self.version), "a job is bound to what is served when it is submitted"
        assert job.recorded, "jobs without guidance are played at once"
        playing = _Playing(
            job,
            self._door.weights if bound else None,
            self._plan if bound else None,
            deque(range(len(job.prompts))),
            [None] * (len(job.prompts) * job.samples),
        )
        with self.gate.changed:
            self._raise()
            self._queue.append(playing)
            self._jobs[job.number] = playing
            self.gate.changed.notify_all()

    def take(self, number: int) -> list[Trajectory]:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        with self.gate.changed:
            self.gate.changed.wait_for(lambda: self._error is not None or self._complete(number))
            self._raise()
            return [t for t in self._jobs.pop(number).trajectories if t is not None]

    def ready(self, *, wait: bool = False) -> set[int]:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        with self.gate.changed:
            if wait and self._jobs:
                self.gate.changed.wait_for(
                    lambda: self._error is not None or any(self._complete(number) for number in self._jobs)
                )
            self._raise()
            return {number for number in self._jobs if self._complete(number)}

    def play(self, job: Job) -> list[Trajectory]:
        """See :class:`halfbyte.train.rollouts.Rollouts`. Samples in flight wait, and are recomputed afterwards."""
        with self.gate.held(), self.engine.aside():
            self._raise()
            before = self.engine.weights
            self.engine.swap(self._door.weights)
            try:
                return self._aside.play(job)
            finally:
                self.engine.swap(before)

    def deploy(self, update: Update) -> Deployed:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        return deploy_to(self.target, update)

    def guide(self, plan: Plan) -> None:
        """See :class:`halfbyte.train.rollouts.Rollouts`. Unbound samples in flight are recomputed and recorded anew."""
        self._plan = plan
        with self.gate.held():
            if self._door.bound:
                return
            with self.engine.aside():
                self.engine.guide(plan)
            self._served_plan = plan

    def idle_seconds(self) -> float:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        return self.gate.idle_seconds()

    def close(self) -> None:
        """See :class:`halfbyte.train.rollouts.Rollouts`."""
        with self.gate.changed:
            self._closed = True
            self.gate.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=60)  # a pass of the engine, or a reward function that does not come back

    def _complete(self, number: int) -> bool:
        return all(t is not None for t in self._jobs[number].trajectories)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self.gate.enter(lambda: self._closed, lambda: bool(self._queue or self._in_flight)):
                try:
                    self._admit()
                    finished = self.engine.step()
                finally:
                    self.gate.leave()
                for order, trajectory in finished:
                    self._judge(self._samples.pop(order), trajectory)
        except BaseException as error:
            with self.gate.changed:
                self._error = error
                self.gate.changed.notify_all()

    def _admit(self) -> None:
        """Ask the engine for the next turns of episodes, and for prompts as far as there is room."""
        for sample, request in self._following:
            self._ask(sample, request)
        self._following = []
        while self._queue:
            playing = self._queue[0]
            if not self._serves(playing):
                return
            job = playing.job
            while playing.waiting and (not self._in_flight or self._in_flight + job.samples <= self.width):
                place = playing.waiting.popleft()
                ids = encode_prompt(self.tokenizer, job.prompts[place], self.prompt_limit)
                request = Request(ids, job.sampling, n=job.samples, key=job.keys[place], group=place)
                for index, order in enumerate(self.engine.add(request)):
                    self._samples[order] = _Sample(playing, place * job.samples + index, request)
                self._in_flight += job.samples
            if playing.waiting:
                return
            self._queue.popleft()

    def _serves(self, playing: _Playing) -> bool:
        """Whether the engine serves what the job needs, once it is idle if need be."""
        weights = self._door.weights if playing.weights is None else playing.weights
        plan = self._served_plan if playing.plan is None else playing.plan
        right = self.engine.weights is weights and self._served_plan is plan
        if not right and self._in_flight:
            return False
        if self.engine.weights is not weights:
            self.engine.swap(weights)
        if self._served_plan is not plan:
            self.engine.guide(plan)
            self._served_plan = plan
        self._door.bound = playing.weights is not None
        return True

    def _judge(self, sample: _Sample, trajectory: Trajectory) -> None:
        if sample.live is None:
            prompt = sample.playing.job.prompts[trajectory.group]
            sample.live = Live(prompt, self.environment.start(prompt), trajectory, sample.request)
        else:
            sample.live.go_on(sample.request, trajectory)
        following = sample.live.judge(self.tokenizer, self.engine.max_length)
        if following is not None:
            self._following.append((sample, following))
            return
        with self.gate.changed:
            sample.playing.trajectories[sample.place] = sample.live.trajectory
            self._in_flight -= 1
            self.gate.changed.notify_all()

    def _ask(self, sample: _Sample, request: Request) -> None:
        (order,) = self.engine.add(request)
        sample.request = request
        self._samples[order] = sample


class _Door:
    """The weights deployed last. The engine serves them too, unless it is bound to a job's."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._weights, self.bound = engine, engine.weights, False

    @property
    def arch(self) -> Architecture:
        return self._engine.arch

    @property
    def precision(self) -> Precision:
        return self._engine.precision

    @property
    def kernels(self) -> Kernels:
        return self._engine.kernels

    @property
    def weights(self) -> RolloutWeights:
        return self._weights

    def swap(self, weights: RolloutWeights) -> None:
        self._weights = weights
        if not self.bound:
            self._engine.swap(weights)


class _GatedTarget(SharedEngineTarget):
    """Pauses the thread at a token boundary for the commit."""

    def __init__(self, door: Served, source: WeightSource, gate: Gate) -> None:
        super().__init__(door, source.latest, stamp=source.stamp)
        self._gate = gate

    def pause(self) -> None:
        """Wait for the forward pass in work."""
        self._gate.hold()

    def resume(self) -> None:
        """Go on."""
        self._gate.release()
