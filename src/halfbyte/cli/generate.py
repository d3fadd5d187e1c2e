"""``halfbyte generate``: prompts in, responses out, as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.parameter import flag

__all__ = ["generate"]


def generate(
    *,
    model: Annotated[str, Parameter(help="Model folder, or tiny for the policy in the package.")],
    input: Annotated[Path, Parameter(help='JSON lines with "prompt" (text) or "messages" (chat).')],
    output: Annotated[Path, Parameter(help="JSON lines, one per response.")],
    precision: Annotated[str, Parameter(help="Precision preset.")] = "w4a4kv4",
    max_tokens: Annotated[
        int | None, Parameter(help="Most new tokens of a response; by default 256, or what the model has room for.")
    ] = None,
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, Parameter(help="Keep the smallest set of tokens with this mass; 1 is off.")] = 1.0,
    top_k: Annotated[int, Parameter(help="Keep this many most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[float, Parameter(help="Keep tokens above this share of the largest probability.")] = 0.0,
    seed: Annotated[int, Parameter(help="Same seed, prompt and sample: same tokens, whatever shares the batch.")] = 0,
    n: Annotated[int, Parameter(help="Responses per prompt.")] = 1,
    stop: Annotated[tuple[str, ...], flag("Text that ends a response; may be repeated.")] = (),
    logprobs: Annotated[bool, flag("Write token ids and their log-probs.")] = False,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
) -> int:
    """Generate responses with the rollout engine."""
    thread_policy.apply(threads)

    from halfbyte.rollout.generate import generate_file

    count = generate_file(
        model,
        input,
        output,
        precision=precision,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        n=n,
        stop=stop,
        logprobs=logprobs,
    )
    print(f"{count} responses: {output}")
    return 0
