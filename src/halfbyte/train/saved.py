"""Trajectories as lines of a file: text to read, and per token what ``halfbyte diagnose`` and the report's pictures need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.learner.decisions import Decisions
from halfbyte.learner.learner import Learner
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import Trajectory
from halfbyte.objective import AdvantageMethod, advantages

__all__ = ["add_decisions", "saved_rows"]

_DECIMALS = 8


def saved_rows(
    trajectories: Sequence[Trajectory], count: int, learner: Learner, tokenizer: Tokenizer, method: AdvantageMethod
) -> list[dict[str, Any]]:
    """The first ``count`` samples of a step, before the learner's update.

    Arguments:
        trajectories: all of the step: advantages need whole groups.
    """
    shown = trajectories[:count]
    rewards = torch.tensor([float("nan") if t.reward is None else t.reward for t in trajectories])
    found = advantages(rewards, torch.tensor([t.group for t in trajectories]), method=method)
    # A sample whose scoring failed is not trained on: its advantage counts as 0.
    values = torch.where(found.valid, found.advantages, 0.0).tolist()
    learnt = learner.score(shown).logp.split([len(t.response_ids) for t in shown])
    return [_row(t, tokenizer, value, logp) for t, value, logp in zip(shown, values, learnt)]


def add_decisions(rows: Sequence[dict[str, Any]], decisions: Decisions | None) -> None:
    """Add ``weights`` and ``selected`` (0/1) to the rows of samples that were trained on."""
    if decisions is None:
        return
    for index, (weights, selected) in decisions.by_sample().items():
        if index < len(rows):
            rows[index]["weights"] = [round(w, _DECIMALS) for w in weights]
            rows[index]["selected"] = [int(s) for s in selected]


def _row(t: Trajectory, tokenizer: Tokenizer, advantage: float, learner_logp: torch.Tensor) -> dict[str, Any]:
    learner = [round(x, _DECIMALS) if m else 0.0 for x, m in zip(learner_logp.tolist(), t.mask.tolist())]
    return {
        "group": t.group,
        "sample": t.sample,
        "prompt_text": tokenizer.decode(t.prompt_ids.tolist()),
        "response_text": tokenizer.decode(t.response_ids.tolist()),
        "prompt_ids": t.prompt_ids.tolist(),
        "response_ids": t.response_ids.tolist(),
        "logprobs": [round(float(x), _DECIMALS) for x in t.logprobs],
        "learner_logprobs": learner,
        "mask": [int(m) for m in t.mask],
        "turns": list(t.turns),
        "versions": t.versions.tolist(),
        "advantage": advantage,
        "reward": t.reward,
        "correct": bool(t.info.get("correct")),
        "finish_reason": t.finish_reason,
        "info": t.info,
    }
