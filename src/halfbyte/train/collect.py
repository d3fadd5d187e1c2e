"""Episodes: prompts go to the engine, responses to the environment, until every sample is done and scored.

A later turn continues the token ids of the turns before it; observations of the environment are encoded once, alone, and
nothing is decoded and encoded again (ms-swift #10012, verl #6719).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfbyte.envs import Environment, Episode, Prompt, Turn
from halfbyte.errors import DataError
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.request import Request, request_key

__all__ = ["collect", "encode_prompt", "play", "prompt_keys"]


@dataclass(eq=False)
class _Live:
    """A sample whose episode goes on."""

    prompt: Prompt
    episode: Episode
    trajectory: Trajectory
    request: Request


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
    """Token ids of a prompt: a chat through the model's template, plain text as it is.

    Raises:
        DataError: the prompt encodes to nothing, or to more than ``max_tokens``.
    """
    if prompt.messages is not None:
        ids = tokenizer.encode_chat(prompt.messages)
    else:
        ids = tokenizer.encode(prompt.text or "", add_special_tokens=True)
    if not ids:
        raise DataError("a prompt encodes to no token", where=f"prompt {prompt.id}")
    if max_tokens is not None and len(ids) > max_tokens:
        raise DataError(
            f"a prompt of {len(ids)} tokens",
            where=f"prompt {prompt.id}",
            expected=f"at most env.max_prompt_tokens = {max_tokens}",
            fix="raise env.max_prompt_tokens, or shorten the prompts",
        )
    return tuple(ids)


def prompt_keys(key: Sequence[object], prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """What the randomness of each prompt is keyed by beside the seed, the sample and the position.

    Arguments:
        key: tells one playing of a prompt from another (``("train", step)``, say).
    """
    seen: Counter[str] = Counter()  # a small data set may repeat a prompt in a step; the repeats are other samples
    keys = []
    for prompt in prompts:
        keys.append(request_key(*key, prompt.id, seen[prompt.id]))
        seen[prompt.id] += 1
    return tuple(keys)


def collect(
    engine: Engine,
    environment: Environment,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    key: Sequence[object],
    max_prompt_tokens: int | None = None,
    on_scored: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Finished, scored trajectories: ``samples`` for each prompt, in order; ``group`` is the prompt's place.

    Arguments:
        key: what the randomness is keyed by beside the seed, the prompt's id, the sample and the position (the step, say).
    """
    keys = prompt_keys(key, prompts)
    return play(
        engine,
        environment,
        tokenizer,
        prompts,
        sampling,
        samples=samples,
        keys=keys,
        max_prompt_tokens=max_prompt_tokens,
        on_scored=on_scored,
    )


def play(
    engine: Engine,
    environment: Environment,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int | Sequence[tuple[int, int]],
    keys: Sequence[int],
    max_prompt_tokens: int | None = None,
    on_scored: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """:func:`collect` with a key of the generator for each prompt, see :func:`prompt_keys`.

    Arguments:
        samples: of each prompt; or (first, count) for each, the part of its samples that is played here.
    """
    spans = [(0, samples)] * len(prompts) if isinstance(samples, int) else samples
    requests = [
        Request(ids, sampling, n=count, key=key, group=group, first_sample=first)
        for group, (prompt, key, (first, count)) in enumerate(zip(prompts, keys, spans, strict=True))
        for ids in (encode_prompt(tokenizer, prompt, max_prompt_tokens),)
    ]
    trajectories = engine.generate(requests)
    live = [_Live(prompts[t.group], environment.start(prompts[t.group]), t, requests[t.group]) for t in trajectories]
    finished = list(trajectories)
    place = {id(sample): i for i, sample in enumerate(live)}
    current = live
    while current:
        following: list[tuple[_Live, Request]] = []
        for sample in current:
            turn = _score(sample, tokenizer)
            request = None
            if not turn.done and turn.error is None and sample.trajectory.finish_reason != "length":
                request = _next_request(sample, turn, tokenizer, engine)
            if request is None:
                if not turn.done and turn.error is None:
                    _cut(sample.trajectory)
                finished[place[id(sample)]] = sample.trajectory
                if on_scored is not None:
                    on_scored(sample.trajectory)
            else:
                following.append((sample, request))
        current = []
        for (sample, request), new in zip(following, engine.generate([r for _, r in following])):
            sample.trajectory = _joined(sample.trajectory, request, new)
            current.append(sample)
    return finished


def _score(sample: _Live, tokenizer: Tokenizer) -> Turn:
    t = sample.trajectory
    last = t.response_ids[t.turns[-1] :]
    text = tokenizer.decode(last.tolist())
    turn: Turn = sample.episode.step(text, tuple(last.tolist()))
    t.info = {**t.info, **turn.info}
    if turn.error is not None:  # a sample whose scoring failed has no reward, whatever earlier turns gave
        t.reward = None
    elif turn.reward is not None:
        t.reward = (t.reward or 0.0) + turn.reward
    return turn


def _cut(t: Trajectory) -> None:
    """An episode that ran out of tokens ends where it is: what it has earned so far, 0 if nothing, and not correct."""
    t.finish_reason = "length"
    t.reward = t.reward or 0.0
    t.info = {**t.info, "correct": False}


def _next_request(sample: _Live, turn: Turn, tokenizer: Tokenizer, engine: Engine) -> Request | None:
    """The next turn, or None when the context is full."""
    t = sample.trajectory
    observation = tokenizer.encode(turn.observation or "")
    prompt = (*t.ids.tolist(), *observation)
    generated = (*([False] * len(t.prompt_ids)), *t.mask.tolist(), *([False] * len(observation)))
    budget = min(t.sampling.max_tokens, engine.max_length - len(prompt))
    if budget < 1:
        return None
    return Request(
        prompt,
        replace(t.sampling, max_tokens=budget),
        key=sample.request.key,
        group=t.group,
        first_sample=t.sample,
        generated=generated,
    )


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
