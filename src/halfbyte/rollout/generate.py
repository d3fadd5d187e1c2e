"""Generate from a file: JSON lines with prompts in, JSON lines with responses out."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from halfbyte.errors import DataError
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from, with_weight_spec
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request, request_key
from halfbyte.rollout.stop import first_stop

__all__ = ["generate_file", "read_prompts"]

#: New tokens of a response where nothing else is said and the model has room for them.
USUAL_MAX_TOKENS = 256
_FIELDS = ("sample", "response", "finish_reason", "tokens")
_LOGPROB_FIELDS = ("token_ids", "logprobs")


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
            # An escaped half of a surrogate pair is valid JSON, but no text that a tokenizer or a file takes.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                "the line holds half of a surrogate pair", where=where, expected="text that UTF-8 can write"
            ) from error
        except (ValueError, RecursionError) as error:
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
    max_tokens: int | None,
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

    Arguments:
        max_tokens: most new tokens of a response; None takes 256, or what the model has room for behind the prompt.

    Returns:
        The number of responses.

    Raises:
        UserError: the model, a prompt or the target cannot be used; nothing is written. The target is tried first.
    """
    if os.path.realpath(target) == os.path.realpath(source):
        raise DataError("the responses would take the place of the prompts", where=str(target), fix="name another file")
    rows = list(read_prompts(source))
    if not rows:
        raise DataError("there are no prompts", where=str(source), expected="at least one line")
    _refuse_taken_fields(rows, source, logprobs)
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=USUAL_MAX_TOKENS if max_tokens is None else max_tokens,
        stop=stop,
        seed=seed,
    )
    with _replacing(target) as file:
        lines = list(_responses(model, source, rows, sampling, precision, n, logprobs, clamp=max_tokens is None))
        try:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(target, error) from error
    return len(lines)


def _responses(
    model: str,
    source: Path,
    rows: Sequence[tuple[int, Mapping[str, Any]]],
    sampling: SamplingParams,
    precision: str,
    n: int,
    logprobs: bool,
    clamp: bool,
) -> Iterator[str]:
    """The lines of the output, in order of prompt and sample."""
    checkpoint, tokenizer = open_model(model)
    arch = checkpoint.architecture
    requests = []
    for i, (number, row) in enumerate(rows):
        ids = _encode(tokenizer, row, f"{source}:{number}")
        fitting = _fitting(sampling, len(ids), arch.max_positions, clamp, f"{source}:{number}")
        key = request_key("generate", json.dumps(row, sort_keys=True))
        requests.append(Request(ids, fitting, n=n, key=key, group=i))
    longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
    chosen = precision_from(precision)
    if checkpoint.quantisation is not None:
        chosen = with_weight_spec(chosen, checkpoint.quantisation.spec)
    engine = Engine(
        arch,
        chosen,
        checkpoint.tensors,
        detokeniser=tokenizer,
        options=EngineOptions(max_length=longest, max_sequences=256, kv_memory_mb=1024),
        codes=checkpoint.codes,
    )
    for trajectory in engine.generate(requests):
        text = _cut(tokenizer.decode(trajectory.response_ids.tolist()), trajectory)
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
        yield json.dumps(line, ensure_ascii=False) + "\n"


@contextmanager
def _replacing(target: Path) -> Iterator[TextIO]:
    """A new file that takes the place of ``target`` once it is whole; after a failure neither it nor its folders stay.

    Raises:
        DataError: the target cannot be written.
    """
    made = [folder for folder in target.parents if not folder.exists()]
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    done = False
    try:
        try:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            target.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open("w", encoding="utf-8")
        except OSError as error:
            raise _unwritable(target, error) from error
        with file:
            yield file
        try:
            temporary.replace(target)
        except OSError as error:
            raise _unwritable(target, error) from error
        done = True
    finally:
        if not done:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()


def _unwritable(target: Path, error: OSError) -> DataError:
    return DataError(
        f"the responses cannot be written: {error.strerror or error}",
        where=str(target),
        expected="a file in a folder that can be written",
    )


def _refuse_taken_fields(rows: Iterable[tuple[int, Mapping[str, Any]]], source: Path, logprobs: bool) -> None:
    ours = (*_FIELDS, *(_LOGPROB_FIELDS if logprobs else ()))
    for number, row in rows:
        if taken := [name for name in ours if name in row]:
            raise DataError(
                f"the line has {', '.join(taken)}, which the output uses itself",
                where=f"{source}:{number}",
                expected=f"fields other than {', '.join(ours)}",
                fix="rename them in the input",
            )


def _encode(tokenizer: Tokenizer, row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    try:
        if isinstance(row.get("messages"), list):
            ids = tokenizer.encode_chat(row["messages"])
        else:
            ids = tokenizer.encode(row["prompt"], add_special_tokens=True)
    except DataError as error:
        place = f"{where} ({error.where})" if error.where else where
        raise DataError(error.what, where=place, expected=error.expected, fix=error.fix) from error
    if not ids:
        raise DataError("the prompt encodes to no token", where=where, expected="at least one token")
    return tuple(ids)


def _fitting(sampling: SamplingParams, prompt: int, positions: int, clamp: bool, where: str) -> SamplingParams:
    """``sampling`` with at most as many tokens as the model has room for, if that is allowed."""
    room = positions - prompt
    if room >= sampling.max_tokens:
        return sampling
    if room < 1 or not clamp:
        wanted = "" if room < 1 else f" and {sampling.max_tokens} new ones"
        raise DataError(
            f"the prompt's {prompt} tokens{wanted} do not fit the model",
            where=where,
            expected=f"at most {positions} positions in all",
            fix="shorten the prompt" if room < 1 else f"shorten the prompt, or lower --max-tokens to {room}",
        )
    return replace(sampling, max_tokens=room)


def _cut(text: str, trajectory: Trajectory) -> str:
    found = first_stop(text, trajectory.sampling.stop) if trajectory.finish_reason == "stop" else None
    return text if found is None else text[: found[0]]
