"""Sampled accuracy on held-out prompts, with an interval. The same prompts and random numbers at every evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.envs import Environment, Prompt
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine
from halfbyte.train.collect import collect
from halfbyte.train.interval import accuracy_interval

__all__ = ["evaluate", "scores"]


def evaluate(
    engine: Engine,
    environment: Environment,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    max_prompt_tokens: int | None = None,
) -> dict[str, float]:
    """Play ``samples`` responses to every prompt, without recording guidance, and return their :func:`scores`."""
    with engine.unrecorded():
        trajectories = collect(
            engine,
            environment,
            tokenizer,
            prompts,
            sampling,
            samples=samples,
            key=("eval",),
            max_prompt_tokens=max_prompt_tokens,
        )
    return scores(trajectories, len(prompts))


def scores(trajectories: Sequence[Trajectory], prompts: int) -> dict[str, float]:
    """``eval/accuracy``, ``_low``, ``_high`` (95%), ``eval/reward``, ``eval/length``, ``eval/failed`` and ``eval/n``.

    A sample whose scoring failed counts as wrong.
    """
    correct: list[list[bool]] = [[] for _ in range(prompts)]
    for t in trajectories:
        correct[t.group].append(t.reward is not None and bool(t.info.get("correct")))
    accuracy, low, high = accuracy_interval(correct)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": sum(rewards) / max(1, len(rewards)),
        "eval/length": sum(len(t.response_ids) for t in trajectories) / max(1, len(trajectories)),
        "eval/failed": float(len(trajectories) - len(rewards)),
        "eval/n": float(len(trajectories)),
    }
