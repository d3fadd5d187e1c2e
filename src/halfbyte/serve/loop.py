"""The thread that owns the engine.

Everything that touches the engine happens here: other threads leave jobs and wishes in an inbox. What was drawn goes out in
one delivery a step. A refit asks for a pause, gets the engine at rest, and lets go again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from halfbyte.errors import UserError
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.request import Sample
from halfbyte.serve.job import Job, Piece
from halfbyte.serve.probation import Probation
from halfbyte.serve.settings import OnRefit

__all__ = ["Delivery", "EngineLoop", "Snapshot", "Stopped"]

#: What a step has to say: pieces, and failures of whole jobs.
Delivery = Sequence[tuple[Job, Piece | Exception]]


class Stopped(UserError):
    """The server is going down."""


@dataclass(frozen=True)
class Snapshot:
    """The engine after its last step, for whoever looks from another thread."""

    version: int
    weights_bytes: int
    running: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    faults: int = 0
    paused_seconds: float = 0.0


@dataclass
class _Track:
    """A sample in flight, whose it is, and how much of it has been delivered."""

    job: Job
    choice: int
    sample: Sample
    delivered: int = 0
    delivered_at: float = 0.0


class EngineLoop:
    """Runs an engine in a thread of its own.

    Arguments:
        engine: nobody else may touch it from :meth:`start` on, but inside :meth:`paused`.
        deliver: called in this thread with the news of a step; must be quick.
        on_refit: what a pause does with samples in flight.
        stream_seconds: shortest time between two pieces of a sample; its first and last token never wait.
        clock: seconds.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Delivery], None],
        *,
        on_refit: OnRefit = "finish",
        stream_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine, self._deliver, self._on_refit, self._clock = engine, deliver, on_refit, clock
        self._stream_seconds = stream_seconds
        self._lock = threading.Condition()
        self._inbox: list[tuple[Job, bool]] = []  # (job, whether it is wanted)
        self._pause = self._at_rest = self._stopping = False
        self._held: list[Job] = []
        self._tracks: dict[int, _Track] = {}
        self._probation: Probation | None = None
        self._fruitless = False  # the last probation found nobody to blame
        self._steps = self._faults = 0
        self._step_seconds = self._paused_seconds = 0.0
        self.snapshot = self._look()
        self._thread = threading.Thread(target=self._run, name="halfbyte-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; jobs in flight fail with :class:`Stopped`."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, job: Job) -> None:
        """Let a job run; from any thread."""
        self._tell(job, True)

    def cancel(self, job: Job) -> None:
        """Stop a job's samples and free their pages; from any thread."""
        self._tell(job, False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no step runs and the engine is the caller's. One caller at a time.

        Raises:
            Stopped: the loop ended before it came to rest.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """See :meth:`paused`; calling it while paused changes nothing."""
        with self._lock:
            self._pause = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._at_rest or self._stopping)
            if self._stopping:
                raise Stopped("the server is going down", where="EngineLoop.pause")

    def resume(self) -> None:
        """End the pause."""
        with self._lock:
            self._pause = self._at_rest = False
            self._lock.notify_all()

    # ---- the thread

    def _tell(self, job: Job, wanted: bool) -> None:
        with self._lock:
            self._inbox.append((job, wanted))
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._inbox or self._held or self._tracks or self._pause or self._stopping)
                if self._stopping:
                    break
                inbox, self._inbox = self._inbox, []
            for job, wanted in inbox:
                if wanted:
                    self._held.append(job)
                else:
                    self._drop(job)
            if not self._holding:
                self._admit()
            self.snapshot = self._look()
            if self._pause and not (self._tracks and self._on_refit == "finish") and self._probation is None:
                self._rest()
            elif self._tracks:
                self._step()
                self.snapshot = self._look()
        for job in {track.job for track in self._tracks.values()} | {*self._held} | {job for job, _ in self._inbox}:
            self._deliver([(job, Stopped("the server is going down"))])
        self.engine.abort()

    @property
    def _holding(self) -> bool:
        """Whether new jobs have to wait."""
        return self._probation is not None or (self._pause and self._on_refit == "finish")

    def _admit(self) -> None:
        held, self._held = self._held, []
        for job in held:
            choice = 0
            try:
                for request in job.requests:
                    for sample in self.engine.add(request):
                        self._tracks[sample.order] = _Track(job, choice, sample)
                        choice += 1
            except UserError as error:
                self._fail(job, error)

    def _rest(self) -> None:
        """Give the engine away until :meth:`resume`."""
        began = self._clock()
        with self._lock:
            while self._pause and not self._stopping:
                self._at_rest = True  # again after every wake: one pause may follow another at once
                self._lock.notify_all()
                self._lock.wait()
        self._paused_seconds += self._clock() - began
        self.snapshot = self._look()

    def _step(self) -> None:
        began = self._clock()
        try:
            self.engine.step()
        except Exception as error:
            self._faults += 1
            self._fault(error)
            return
        now = self._clock()
        self._steps += 1
        self._step_seconds += now - began
        news: list[tuple[Job, Piece | Exception]] = []
        for sample in self.engine.drawn:
            track = self._tracks[sample.order]
            due = track.job.stream and now - track.delivered_at >= self._stream_seconds
            if due or sample.finish is not None or track.delivered == 0:
                news.append((track.job, self._piece(track, now)))
            if sample.finish is not None:
                del self._tracks[sample.order]
        if news:
            self._deliver(news)
        if self._probation is None:
            self._fruitless = False
        elif self._probation.passed():
            self._next_group()

    def _piece(self, track: _Track, now: float) -> Piece:
        sample, begin = track.sample, track.delivered
        track.delivered, track.delivered_at = len(sample.logprobs), now
        first = sample.prompt_length + begin
        return Piece(
            track.choice,
            sample.tokens[first:],
            sample.logprobs[begin:],
            sample.versions[begin:],
            sample.alternatives[begin:],
            sample.finish,
            sample.cached if sample.finish is not None else None,
            now,
        )

    def _drop(self, job: Job) -> None:
        """A job that is not wanted any more."""
        self._held = [held for held in self._held if held is not job]
        self._fail(job, Stopped("the request was cancelled"))

    def _fail(self, job: Job, error: Exception) -> None:
        self.engine.abort(job.group)
        for order in [order for order, track in self._tracks.items() if track.job is job]:
            del self._tracks[order]
        if self._probation is not None:
            self._probation.forget(job.group)
            if self._probation.passed():
                self._next_group()
        self._deliver([(job, error)])

    # ---- one sample's error is not everybody's

    def _fault(self, error: Exception) -> None:
        """A step failed and the engine has dropped every sample. Find whose fault it was; let the others go on."""
        for order, track in [*self._tracks.items()]:
            if track.sample.finish is not None:  # it had drawn its last token when the step failed
                del self._tracks[order]
                self._deliver([(track.job, self._piece(track, self._clock()))])
        if self._probation is None:
            self._probation = Probation(self.engine, [track.sample for track in self._tracks.values()])
        guilty = self._probation.failed()
        if guilty is not None:
            self._fail(self._tracks[guilty.order].job, error)
        else:
            self._next_group()

    def _next_group(self) -> None:
        probation = self._probation
        if probation is None or probation.advance():
            return
        self._probation = None
        if not probation.found and self._fruitless:  # together they fail, apart they do not, and not for the first time
            error = UserError("the engine fails on these requests together", fix="lower --max-sequences")
            for job in {track.job for track in self._tracks.values()}:
                self._fail(job, error)
            return
        self._fruitless = not probation.found
        self.engine.restore(sorted(probation.cleared, key=lambda sample: sample.order))

    def _look(self) -> Snapshot:
        engine, pool = self.engine, self.engine.pool
        return Snapshot(
            version=engine.version,
            weights_bytes=self._weights_bytes(),
            running=len(engine.scheduler.running),
            pages_used=pool.n_pages - pool.available,
            pages_cached=pool.idle,
            steps=self._steps,
            step_seconds=self._step_seconds,
            tokens=engine.tokens_generated,
            preemptions=engine.scheduler.preemptions,
            faults=self._faults,
            paused_seconds=self._paused_seconds,
        )

    def _weights_bytes(self) -> int:
        """Counted once a version: it walks all weights."""
        held = getattr(self, "snapshot", None)
        if held is not None and held.version == self.engine.version:
            return int(held.weights_bytes)
        return self.engine.weights.nbytes
