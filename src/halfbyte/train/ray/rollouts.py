"""Rollouts by workers on Ray: jobs are cut into pieces, pieces go to workers, what a dead worker had goes to others.

A sample is a function of (weights, prompt, sampling, key, index), so nothing of this changes a number. Each is counted once
by its (job, group, sample), whoever brings it.
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
from halfbyte.train.ray.messages import Bundle, Played
from halfbyte.train.ray.pieces import Piece, cut
from halfbyte.train.ray.pool import Pool, Worker
from halfbyte.train.rollouts import Deployed, Job, WeightSource, deploy_to

__all__ = ["RayRollouts", "Sending", "Shadow"]

GATHER = 60.0  # seconds that the first worker waits for the others before the first job
TICK = 1.0  # seconds between looks at the head, and at how many workers are wanted


@dataclass(eq=False)
class Shadow:
    """The weights as workers pack them, for the count of changed codes and to explain a gap. Nothing runs on them."""

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
        make_pool: (address of the refit store, headers for it, its run) -> workers that follow it.
        served: the weights of the first version.
        guidance: what is recorded.
        folder: of the run, where ``workers.want`` is looked for; None where nobody may ask.
        serve: read the store over HTTP from this process, instead of from the run's folder.
    """

    def __init__(
        self,
        cluster: Cluster,
        make_pool: Callable[[str, dict[str, str], str], Pool],
        served: Shadow,
        guidance: Plan,
        *,
        folder: Path | None,
        serve: bool,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cluster, self.make_pool, self.served = cluster, make_pool, served
        self.folder, self.serve, self.events, self.clock, self.sleep = folder, serve, events, clock, sleep
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

    # ---- the protocol

    @property
    def version(self) -> int:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        return self.served.weights.version

    @property
    def in_fp4(self) -> bool:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        return code_changes(self.served.weights, self.served.weights).codes > 0

    @property
    def weights(self) -> RolloutWeights | None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        return self.served.weights

    def connect(self, source: WeightSource) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`. Workers start, and fetch the first version from the store."""
        self.target = SharedEngineTarget(self.served, source.latest, stamp=source.stamp)
        address, headers = str(source.store.resolve()), {}
        if self.serve:
            self.server = StoreServer(FilesystemStore(source.store), host=self.cluster.address)
            address, headers = self.server.address, self.server.headers
        if self.folder is not None:
            (self.folder / "workers.want").unlink(missing_ok=True)  # of an earlier attempt
        self.events.add("connect", "", store="http" if self.serve else "folder", head=self.cluster.head)
        self.pool = self.make_pool(address, headers, source.stamp.run)
        self.pool.tend()

    def submit(self, job: Job) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        assert job.number not in self._playing, f"job {job.number} is there already"
        pool = self._pool()
        lengths = [1 + len(str(prompt.content)) // 4 for prompt in job.prompts]  # near enough for the balance
        pieces = cut(lengths, job.samples, job.sampling.max_tokens, pool.wanted, job.number)
        self._playing[job.number] = _Playing(job, Ledger(pieces), pieces)
        self._gather()
        if job.version is not None:
            self._hand_out()  # others go out together, in the next turn: a worker plays what it is given at once in one batch

    def take(self, number: int) -> list[Trajectory]:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        playing = self._playing[number]
        while not playing.ledger.complete:
            self._turn(TICK)
        del self._playing[number]
        if playing.ledger.duplicates:
            self.events.add("duplicates", "", job=number, samples=playing.ledger.duplicates)
        return playing.ledger.trajectories()

    def ready(self, *, wait: bool = False) -> set[int]:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        self._turn(0.0)
        while True:
            done = {number for number, playing in self._playing.items() if playing.ledger.complete}
            if done or not wait or not self._playing:
                return done
            self._turn(TICK)

    def play(self, job: Job) -> list[Trajectory]:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        self.submit(job)
        return self.take(job.number)

    def deploy(self, update: Update) -> Deployed:
        """See :class:`~halfbyte.train.rollouts.Rollouts`. Workers fetch the version while this process counts its changes."""
        for worker in self._pool().open:
            self._follow(worker, update.target.version)
        return deploy_to(self.target, update)

    def guide(self, plan: Plan) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        self._guidance = plan.to_json()

    def idle_seconds(self) -> float:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        now, busy = self.clock(), self._busy
        self._busy = _Busy(now)
        return max(0.0, now - busy.since - busy.played / max(1, len(busy.workers)))

    def close(self) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`."""
        if self.pool is not None:
            self.pool.close()
        if self.server is not None:
            self.server.close()
            self.events.add("served", "", bytes=self.server.bytes_sent)
            self.server = None
        self._playing.clear()
        self._sent.clear()
        self._following.clear()
        self.cluster.close()

    # ---- events

    def _pool(self) -> Pool:
        assert self.pool is not None, "connect comes first"
        return self.pool

    def _gather(self) -> None:
        """Before the first job: wait until all workers are there, or some have kept the others waiting for long."""
        if self._gathered:
            return
        self._gathered = True
        pool, end = self._pool(), None
        while len(pool.open) < pool.wanted:
            self._turn(TICK)
            if pool.open and end is None:
                end = self.clock() + GATHER
            if end is not None and self.clock() > end:
                return

    def _turn(self, seconds: float) -> None:
        """Take what has come, within ``seconds``; tend the pool; hand out.

        Raises:
            UserError: a worker has met one, or the cluster is gone.
        """
        pool = self._pool()
        self._hand_out()
        due = [*self._sent, *self._following, *(w.opening for w in pool.workers if w.opening is not None)]
        if due:
            for ref in self.cluster.wait(due, seconds):
                self._came(ref)
        elif seconds:
            self.sleep(min(seconds, 0.05))
        if self.clock() - self._looked >= TICK:
            self._looked = self.clock()
            self.cluster.check()
            wanted = None if self.folder is None else read_wanted(self.folder)
            if wanted is not None and wanted != pool.wanted:
                self.events.add("want", "", workers=wanted, before=pool.wanted)
                pool.wanted = wanted
        pool.tend()
        self._hand_out()

    def _came(self, ref: Any) -> None:
        pool = self._pool()
        if ref in self._sent:
            self._played(ref, self._sent.pop(ref))
        elif ref in self._following:
            worker = self._following.pop(ref)
            try:
                self.cluster.value(ref)
            except WorkerDied as error:
                self._died(worker, error)
        elif any(worker.opening is ref for worker in pool.workers):
            pool.opened(ref)
        # else it was due from a worker whose other result has told that it is gone: its pieces are with others

    def _played(self, ref: Any, sending: Sending) -> None:
        worker = sending.worker
        worker.bundles.discard(ref)
        for piece in sending.pieces:
            worker.load.add(piece, -1)
        try:
            played: Played = self.cluster.value(ref)
        except WorkerDied as error:
            self._died(worker, error)
            self._give_back(sending)
            return
        for piece, trajectories in zip(sending.pieces, played.by_piece, strict=True):
            self._playing[piece.job].ledger.accept(trajectories)
        seconds = self.clock() - sending.at
        worker.load.measure(played.tokens, played.seconds)
        self._busy.played += min(played.seconds, seconds)
        self._busy.workers.add(worker.name)
        worker.last = played
        self._pool().finished(worker)

    def _died(self, worker: Worker, error: WorkerDied) -> None:
        """Everything it had goes to others; its place is filled again by the pool."""
        self._pool().died(worker, error)
        for ref in [ref for ref, sending in self._sent.items() if sending.worker is worker]:
            self._give_back(self._sent.pop(ref))
        for ref in [ref for ref, follower in self._following.items() if follower is worker]:
            del self._following[ref]

    def _give_back(self, sending: Sending) -> None:
        for piece in sending.pieces:
            self._playing[piece.job].queue.append(piece)
        samples = sum(piece.count for piece in sending.pieces)
        jobs = sorted({piece.job for piece in sending.pieces})
        self.events.add("reissued", sending.worker.name, jobs=jobs, pieces=len(sending.pieces), samples=samples)

    # ---- handing out

    def _hand_out(self) -> None:
        workers = self._pool().takers
        if not workers:
            return
        alike: dict[Any, list[Piece]] = {}
        for playing in self._playing.values():
            if playing.queue:
                job = playing.job
                alike.setdefault((job.sampling, job.recorded, job.version), []).extend(playing.queue)
                playing.queue = []
        for pieces in alike.values():
            shares, left = share_out(pieces, [w.load for w in workers])
            for piece in left:
                self._playing[piece.job].queue.append(piece)
            for worker, share in zip(workers, shares):
                if share:
                    self._send(worker, share)

    def _send(self, worker: Worker, share: list[Piece]) -> None:
        pieces = tuple(sorted(share, key=lambda p: (p.job, p.group, p.first)))
        jobs = [self._playing[piece.job].job for piece in pieces]
        job = jobs[0]  # the others are played alike
        bundle = Bundle(
            pieces,
            tuple(job.prompts[p.group] for job, p in zip(jobs, pieces)),
            tuple(job.keys[p.group] for job, p in zip(jobs, pieces)),
            job.sampling,
            job.recorded,
            self.version if job.version is None else job.version,
            self._guidance,
        )
        ref = self.cluster.call(worker.actor.play, "play", bundle)
        worker.sent += 1
        if job.version is not None:
            worker.bound = worker.sent
        worker.bundles.add(ref)
        self._sent[ref] = Sending(worker, pieces, self.clock())

    def _follow(self, worker: Worker, version: int) -> None:
        self._following[self.cluster.call(worker.actor.follow, "weights", version, worker.bound)] = worker
