"""Generate from a file: JSON lines with prompts in, JSON lines with responses out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.errors import DataError
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request, request_key

__all__ = ["generate_file", "read_prompts"]


def read_prompts(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, object) of every line that is not blank; each has ``prompt`` (text) or ``messages`` (chat).

    Raises:
        DataError: with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 inside a string
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the prompts cannot be read: {error}", where=str(path), expected="JSON lines in UTF-8"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"not JSON: {error}", where=where) from error
        good = isinstance(row, dict) and (isinstance(row.get("prompt"), str) != isinstance(row.get("messages"), list))
        if not good:
            raise DataError(
                "a line holds no prompt", where=where, expected='"prompt" (text) or "messages" (a list), not both'
            )
        yield number, row


def generate_file(
    model: str,
    source: Path,
    target: Path,
    *,
    precision: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    n: int,
    stop: tuple[str, ...],
    logprobs: bool,
) -> int:
    """Write one JSON line a response, in order of prompt and sample; the file appears when all are done.

    Every line repeats its prompt's fields and adds ``sample``, ``response``, ``finish_reason`` and ``tokens`` (how many);
    with ``logprobs`` also ``token_ids`` and ``logprobs``. Stop strings are cut off the text, not off the ids.

    Returns:
        The number of responses.

    Raises:
        UserError: the model or a prompt cannot be used; nothing is written.
    """
    rows = list(read_prompts(source))
    if not rows:
        raise DataError("there are no prompts", where=str(source), expected="at least one line")
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        stop=stop,
        seed=seed,
    )
    checkpoint, tokenizer = open_model(model)
    requests = [
        Request(
            _encode(tokenizer, row),
            sampling,
            n=n,
            key=request_key("generate", json.dumps(row, sort_keys=True)),
            group=i,
        )
        for i, (_, row) in enumerate(rows)
    ]
    arch = checkpoint.architecture
    longest = min(arch.max_positions, max(len(r.prompt_ids) for r in requests) + max_tokens)
    engine = Engine(
        arch,
        precision_from(precision),
        checkpoint.tensors,
        detokeniser=tokenizer,
        options=EngineOptions(max_length=longest, max_sequences=256, kv_memory_mb=1024),
    )
    out = []
    for trajectory in engine.generate(requests):
        text = _cut(tokenizer.decode(trajectory.response_ids.tolist()), stop, trajectory)
        line = {
            **rows[trajectory.group][1],
            "sample": trajectory.sample,
            "response": text,
            "finish_reason": trajectory.finish_reason,
            "tokens": len(trajectory.response_ids),
        }
        if logprobs:
            line["token_ids"] = trajectory.response_ids.tolist()
            line["logprobs"] = trajectory.logprobs.tolist()
        out.append(json.dumps(line, ensure_ascii=False) + "\n")
    temporary = target.with_name(f".{target.name}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(out)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    return len(out)


def _encode(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[int, ...]:
    if "messages" in row and isinstance(row["messages"], list):
        return tuple(tokenizer.encode_chat(row["messages"]))
    return tuple(tokenizer.encode(row["prompt"], add_special_tokens=True))


def _cut(text: str, stop: tuple[str, ...], trajectory: Trajectory) -> str:
    found = [text.index(s) for s in stop if s in text] if trajectory.finish_reason == "stop" else []
    return text[: min(found)] if found else text
