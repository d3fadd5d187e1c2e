"""What goes to the rollouts and when, and which of it makes up a step: synchronous, some batches ahead, or as it gets ready.

Both feeds keep two promises. No token that a step trains on is older than ``staleness`` updates: whatever is submitted at step s
is taken at step s + staleness at the latest, and a step changes the version by one at most. And every group of every batch is
taken exactly once: groups are numbered through the run, ``prompts_per_step`` to a batch, and a group's randomness is keyed by its
own batch, so it is the same group whenever it is played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from halfbyte.envs import Prompt
from halfbyte.errors import CheckpointError
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.train.collect import prompt_keys
from halfbyte.train.flight import Flight
from halfbyte.train.rollouts import Job, Rollouts

__all__ = ["Feed", "GroupFeed", "Source", "StepFeed"]


@dataclass(frozen=True)
class Source:
    """The batches of a run.

    Arguments:
        prompts: step -> its prompts.
        sampling, samples: of every prompt.
        per_step: prompts a step.
        steps: how many there are.
        staleness: batches that may be submitted ahead of the one that is trained on.
        bound: jobs are played by the weights that are served when they are submitted, whatever comes.
    """

    prompts: Callable[[int], tuple[Prompt, ...]]
    sampling: SamplingParams
    samples: int
    per_step: int
    steps: int
    staleness: int
    bound: bool

    def keyed(self, step: int) -> tuple[tuple[Prompt, ...], tuple[int, ...]]:
        """A batch's prompts and the keys of their randomness."""
        prompts = self.prompts(step)
        return prompts, prompt_keys(("train", step), prompts)


class Feed(Protocol):
    """From the rollouts to the learner."""

    def next(self, step: int) -> list[Trajectory]:
        """Submit what may be submitted at ``step``, and wait for its batch: ``samples`` trajectories of ``per_step`` groups."""

    def flight(self) -> Flight:
        """For a checkpoint between two steps; waits for what has to be kept."""

    def counts(self) -> dict[str, float]:
        """Groups submitted, taken, dropped and in flight, over the whole run."""


class StepFeed:
    """Batches in order: the batch of step s is submitted at step s - k. Played at once or bound to its version, it is sampled
    from the weights of max(0, s - k) steps throughout, so a run can be repeated to the bit; checkpoints keep what is in flight.

    Arguments:
        step: to begin with. flight: of the checkpoint at this step.
    """

    def __init__(self, rollouts: Rollouts, source: Source, step: int, flight: Flight | None = None) -> None:
        self.rollouts, self.source = rollouts, source
        kept = {number: list(batch) for number, batch in (flight or Flight()).batches.items()}
        if sorted(kept) != list(range(step, step + len(kept))):
            raise CheckpointError(
                f"trajectories of steps {sorted(kept)} are in flight",
                where=f"the checkpoint of step {step}",
                expected=f"those of step {step} and the steps after it",
            )
        self._kept, self._taken, self._submitted = kept, step, step + len(kept)

    def next(self, step: int) -> list[Trajectory]:
        """See :class:`Feed`."""
        source = self.source
        while self._submitted <= min(step + source.staleness, source.steps - 1):
            prompts, keys = source.keyed(self._submitted)
            version = self.rollouts.version if source.bound else None
            job = Job(self._submitted, prompts, keys, source.sampling, source.samples, version=version)
            self.rollouts.submit(job)
            self._submitted += 1
        batch = self._kept.pop(step) if step in self._kept else self.rollouts.take(step)
        self._taken = step + 1
        return batch if source.bound else _of_one_plan(batch)

    def flight(self) -> Flight:
        """See :class:`Feed`."""
        for step in range(self._taken, self._submitted):
            if step not in self._kept:
                self._kept[step] = self.rollouts.take(step)
        return Flight(batches=dict(self._kept))

    def counts(self) -> dict[str, float]:
        """See :class:`Feed`."""
        return _counts(self._submitted * self.source.per_step, self._taken * self.source.per_step, 0)


class GroupFeed:
    """Groups as they get ready: a step takes those that are complete, of the oldest weights first, and longer ones go on. It
    waits for a group only where a later step could not take it in time.

    What is in flight at a checkpoint is played again after a resume.

    Arguments:
        step: to begin with. flight: of the checkpoint at this step.
    """

    def __init__(self, rollouts: Rollouts, source: Source, step: int, flight: Flight | None = None) -> None:
        self.rollouts, self.source = rollouts, source
        flight = flight or Flight()
        again = flight.groups
        if len(set(again)) != len(again) or len(again) + step * source.per_step != flight.next_group:
            raise CheckpointError(
                f"{len(again)} groups in flight and {flight.next_group} submitted",
                where=f"the checkpoint of step {step}",
                expected=f"{flight.next_group - step * source.per_step} different groups in flight",
            )
        self._again = sorted(again)
        self._of = -1  # the batch that was looked up last
        self._batch: tuple[tuple[Prompt, ...], tuple[int, ...]] = ((), ())
        self._next, self._taken, self._dropped = flight.next_group, step * source.per_step, flight.dropped + len(again)
        self._due: dict[int, int] = {}  # group in flight -> the last step that may take it
        self._done: dict[int, list[Trajectory]] = {}

    def next(self, step: int) -> list[Trajectory]:
        """See :class:`Feed`."""
        source = self.source
        most = source.per_step * (source.staleness + 1)
        while len(self._due) < most and (self._again or self._next < source.steps * source.per_step):
            group = self._again.pop(0) if self._again else self._next
            self._next = max(self._next, group + 1)
            self._due[group] = step + source.staleness
            self.rollouts.submit(self._job(group))
        self._receive(wait=False)
        while not self._enough(step):
            self._receive(wait=True)
        oldest = sorted(self._done, key=lambda group: (self._due[group], group))
        chosen = sorted(oldest[: source.per_step])
        batch = []
        for place, group in enumerate(chosen):
            del self._due[group]
            batch += [replace(t, group=place) for t in self._done.pop(group)]
        self._taken += len(chosen)
        return _of_one_plan(batch)

    def flight(self) -> Flight:
        """See :class:`Feed`."""
        return Flight(groups=tuple(sorted([*self._due, *self._again])), next_group=self._next, dropped=self._dropped)

    def counts(self) -> dict[str, float]:
        """See :class:`Feed`."""
        return _counts(self._taken + len(self._due) + self._dropped, self._taken, self._dropped)

    def _job(self, group: int) -> Job:
        source = self.source
        step, place = divmod(group, source.per_step)
        prompts, keys = self._batch if self._of == step else source.keyed(step)
        self._of, self._batch = step, (prompts, keys)
        version = self.rollouts.version if source.bound else None
        return Job(group, (prompts[place],), (keys[place],), source.sampling, source.samples, version=version)

    def _receive(self, *, wait: bool) -> None:
        for group in self.rollouts.ready(wait=wait):
            self._done[group] = self.rollouts.take(group)

    def _enough(self, step: int) -> bool:
        """Whether the oldest complete groups can make up this step without one in flight missing its last step later.

        Steps up to t can take ``per_step`` each, so of the groups due by then this one has to take what is left over.
        """
        size = self.source.per_step
        if len(self._done) < size:
            return False
        for last in range(step, step + self.source.staleness + 1):
            due = [group for group, when in self._due.items() if when <= last]
            if sum(group in self._done for group in due) < len(due) - size * (last - step):
                return False
        return True


def _of_one_plan(batch: list[Trajectory]) -> list[Trajectory]:
    """Where the plan of guidance has changed within a batch (``alignment.layers = auto`` narrows it once), what was recorded by
    the wider one is left out."""
    narrowest = min(
        (t.guidance for t in batch if t.guidance is not None), key=lambda g: g.bytes_per_token, default=None
    )
    if narrowest is None:
        return batch
    wider = [t.guidance is not None and t.guidance.layout != narrowest.layout for t in batch]
    return [replace(t, guidance=None) if drop else t for t, drop in zip(batch, wider)]


def _counts(submitted: int, taken: int, dropped: int) -> dict[str, float]:
    return {
        "flight/submitted": float(submitted),
        "flight/taken": float(taken),
        "flight/dropped": float(dropped),
        "flight/groups": float(submitted - taken - dropped),
    }
