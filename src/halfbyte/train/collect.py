"""Episodes, a batch at a time: prompts go to the engine, responses to the environment, until every sample is done and scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from halfbyte.envs import Environment, Prompt
from halfbyte.errors import DataError
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.protocol import TokenEngine
from halfbyte.rollout.request import Request, request_key
from halfbyte.train.episodes import Live

__all__ = ["collect", "encode_prompt", "play", "prompt_keys"]


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
    engine: TokenEngine,
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
    engine: TokenEngine,
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
    current = [Live(prompts[t.group], environment.start(prompts[t.group]), t, requests[t.group]) for t in trajectories]
    finished = list(trajectories)
    place = {id(sample): i for i, sample in enumerate(current)}
    while current:
        following: list[tuple[Live, Request]] = []
        for sample in current:
            request = sample.judge(tokenizer, engine.max_length)
            if request is not None:
                following.append((sample, request))
                continue
            finished[place[id(sample)]] = sample.trajectory
            if on_scored is not None:
                on_scored(sample.trajectory)
        for (sample, request), new in zip(following, engine.generate([r for _, r in following])):
            sample.go_on(request, new)
        current = [sample for sample, _ in following]
    return finished
