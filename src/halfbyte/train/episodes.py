"""An episode in work: a sample's turns so far, judged by the environment and continued by the engine.

A later turn continues the token ids of the turns before it; observations of the environment are encoded once, alone, and
nothing is decoded and encoded again (ms-swift #10012, verl #6719).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from halfbyte.envs import Episode, Prompt, Turn
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import Trajectory
from halfbyte.rollout.request import Request

__all__ = ["Live"]


@dataclass(eq=False)
class Live:
    """A sample whose episode goes on.

    Arguments:
        trajectory: all turns so far.
        request: what its last turn was asked for with.
    """

    prompt: Prompt
    episode: Episode
    trajectory: Trajectory
    request: Request

    def judge(self, tokenizer: Tokenizer, max_length: int) -> Request | None:
        """Let the environment score the last turn.

        Arguments:
            max_length: longest sequence of the engine.

        Returns:
            What to ask for the next turn with; None when the episode is over and ``trajectory`` is complete.
        """
        turn = self._score(tokenizer)
        if turn.done or turn.error is not None:
            return None
        if self.trajectory.finish_reason != "length":
            request = self._next_request(turn, tokenizer, max_length)
            if request is not None:
                return request
        _cut(self.trajectory)
        return None

    def go_on(self, request: Request, new: Trajectory) -> None:
        """Take the next turn: ``new`` answers ``request``."""
        self.trajectory = _joined(self.trajectory, request, new)

    def _score(self, tokenizer: Tokenizer) -> Turn:
        t = self.trajectory
        last = t.response_ids[t.turns[-1] :]
        text = tokenizer.decode(last.tolist())
        turn: Turn = self.episode.step(text, tuple(last.tolist()))
        t.info = {**t.info, **turn.info}
        if turn.error is not None:  # a sample whose scoring failed has no reward, whatever earlier turns gave
            t.reward = None
        elif turn.reward is not None:
            t.reward = (t.reward or 0.0) + turn.reward
        return turn

    def _next_request(self, turn: Turn, tokenizer: Tokenizer, max_length: int) -> Request | None:
        """The next turn, or None when the context is full."""
        t = self.trajectory
        observation = tokenizer.encode(turn.observation or "")
        prompt = (*t.ids.tolist(), *observation)
        generated = (*([False] * len(t.prompt_ids)), *t.mask.tolist(), *([False] * len(observation)))
        budget = min(t.sampling.max_tokens, max_length - len(prompt))
        if budget < 1:
            return None
        return Request(
            prompt,
            replace(t.sampling, max_tokens=budget),
            key=self.request.key,
            group=t.group,
            first_sample=t.sample,
            generated=generated,
        )


def _cut(t: Trajectory) -> None:
    """An episode that ran out of tokens ends where it is: what it has earned so far, 0 if nothing, and not correct."""
    t.finish_reason = "length"
    t.reward = t.reward or 0.0
    t.info = {**t.info, "correct": False}


def _joined(old: Trajectory, request: Request, new: Trajectory) -> Trajectory:
    """Turns so far, the observation (masked), and the new turn as one trajectory; routes and guidance come from the last
    pass over all."""
    observed = len(request.prompt_ids) - len(old)
    observation = np.array(request.prompt_ids[len(old) :], dtype=np.int32)
    supports = None
    if old.supports is not None or new.supports is not None:
        supports = [
            *(old.supports or [None] * len(old.response_ids)),
            *([None] * observed),
            *(new.supports or [None] * len(new.response_ids)),
        ]
    return replace(
        old,
        response_ids=np.concatenate([old.response_ids, observation, new.response_ids]),
        logprobs=np.concatenate([old.logprobs, np.zeros(observed, np.float32), new.logprobs]),
        mask=np.concatenate([old.mask, np.zeros(observed, bool), new.mask]),
        versions=np.concatenate([old.versions, np.full(observed, new.versions[0], np.int32), new.versions]),
        finish_reason=new.finish_reason,
        routes=new.routes,
        guidance=new.guidance,
        supports=supports,
        turns=(*old.turns, len(old.response_ids) + observed),
    )
