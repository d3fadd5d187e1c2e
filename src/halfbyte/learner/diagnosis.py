"""The tokens of a step as the objective's record, cut into segments; and the metrics of the mismatch's sign structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from halfbyte import objective
from halfbyte.models.trajectory import Trajectory

__all__ = ["Monitor", "Tokens", "rows_of_samples"]


def rows_of_samples(samples: Sequence[Trajectory]) -> list[Tensor]:
    """Where the response tokens of each sample lie in :class:`Tokens`, int64."""
    ends = np.cumsum([len(t.response_ids) for t in samples])
    return [torch.arange(end - len(t.response_ids), end) for end, t in zip(ends.tolist(), samples)]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What trajectories say about their response tokens, flat in order of trajectory; R tokens.

    Arguments:
        ids: [R] int64. rollout_logp: [R] float32. mask, turn_starts: [R] bool. sequence, versions: [R] int64.
    """

    ids: Tensor
    rollout_logp: Tensor
    mask: Tensor
    turn_starts: Tensor
    sequence: Tensor
    versions: Tensor

    @classmethod
    def of(cls, samples: Sequence[Trajectory]) -> Tokens:
        """The tokens of all samples."""
        lengths = torch.tensor([len(t.response_ids) for t in samples])
        first = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        turn_starts = torch.zeros(int(lengths.sum()), dtype=torch.bool)
        for start, t in zip(first.tolist(), samples):
            turn_starts[[start + turn for turn in t.turns if turn < len(t.response_ids)]] = True

        def flat(name: str, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate([getattr(t, name) for t in samples])).to(dtype)

        return cls(
            ids=flat("response_ids", torch.int64),
            rollout_logp=flat("logprobs", torch.float32),
            mask=flat("mask", torch.bool),
            turn_starts=turn_starts,
            sequence=torch.repeat_interleave(torch.arange(len(samples)), lengths),
            versions=flat("versions", torch.int64),
        )


@dataclass
class Monitor:
    """Segments of a step and what they show, with a healthy reference of its own whatever correction is in use.

    Arguments:
        segmenter: cuts responses.
        delimiters: [V] bool, which token ids end a line or sentence; needed by the segmenter ``delimiter``.
        triage: gates and reference of the leading indicator.
    """

    segmenter: objective.Segmenter
    delimiters: Tensor | None = None
    triage: objective.Triage = field(default_factory=objective.Triage)

    def record(
        self, tokens: Tokens, learner_logp: Tensor, advantages: Tensor, version: int
    ) -> objective.CorrectionInput:
        """What corrections and quadrants look at.

        Arguments:
            learner_logp, advantages: [R] float32, of each token. version: current weight version.
        """
        gap = objective.token_gap(learner_logp, tokens.rollout_logp, tokens.mask, tokens.sequence)
        layout = objective.SegmentInput(
            mask=tokens.mask,
            sequence_index=tokens.sequence,
            versions=tokens.versions,
            turn_starts=tokens.turn_starts,
            delimiters=None if self.delimiters is None else self.delimiters[tokens.ids],
            gap=gap,
            advantages=advantages,
        )
        return objective.CorrectionInput(
            gap=gap,
            advantages=advantages,
            mask=tokens.mask,
            sequence_index=tokens.sequence,
            segments=self.segmenter(layout),
            versions=tokens.versions,
            learner_version=version,
            rollout_logp=tokens.rollout_logp,
        )

    def look(self, record: objective.CorrectionInput, weights: Tensor | None) -> dict[str, float]:
        """Metrics of a step: size of the gap and its sign structure. Changes nothing, see :meth:`learn`.

        Old tokens have staleness in their gap; where there are any, the size is also told apart (``gap/current/``, ``/stale/``).
        """
        numbers = objective.gap_metrics(record.gap, record.mask, record.sequence_index).to_dict()
        stale = record.mask & ~record.current
        if bool(stale.any()):
            for name, chosen in (("current", record.current), ("stale", stale)):
                found = objective.gap_metrics(record.gap, chosen, record.sequence_index)
                numbers |= found.to_dict(f"gap/{name}/")
        return numbers | objective.quadrants(record, weights, triage=self.triage)

    def learn(self, record: objective.CorrectionInput) -> None:
        """Take a step that succeeded into the reference."""
        self.triage = self.triage.with_state(self.triage.learnt(self.triage.diagnose(record)))

    def state(self) -> dict[str, float]:
        """The reference, for a checkpoint."""
        return self.triage.state()

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with the reference of a checkpoint."""
        self.triage = self.triage.with_state(state)
