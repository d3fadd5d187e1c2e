"""From requests to vLLM's sampling parameters, and from its answers to trajectories. Pure functions."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.models.trajectory import FinishReason, SamplingParams
from halfbyte.rollout.request import request_key
from halfbyte.rollout.vllm.errors import VllmError

__all__ = ["Piece", "piece_of", "sampling_of", "seed_of"]


@dataclass(frozen=True, eq=False)
class Piece:
    """What one answer adds to a sample.

    Arguments:
        ids: new tokens, int32 [n]; none where the request was aborted before the first.
        logprobs: of the distribution sampled from, float32 [n].
        versions: weight version of each token, int32 [n].
        finish: why it ended.
        stop: the stop string or id that ended it, where the server said.
        supports: kept ids of each token, where the server returns them.
        routes: expert ids of [prompt + n - 1, moe layers, k] tokens, where the server returns them.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish: FinishReason
    stop: int | str | None = None
    supports: list[npt.NDArray[np.int32]] | None = None
    routes: npt.NDArray[np.int16] | None = None


def seed_of(seed: int, key: int, position: int) -> int:
    """The seed of a request's first sample; vLLM adds a sample's index to it.

    ``position`` is that of the first token drawn, so that a request that goes on after an abort draws other noise.
    """
    return request_key("vllm", seed, key, position) % 2**62


def sampling_of(
    sampling: SamplingParams, eos_ids: Sequence[int], *, n: int, seed: int, max_tokens: int | None = None
) -> dict[str, Any]:
    """vLLM's sampling parameters; all that the server could have defaults for are given.

    EOS ids go as stop ids, so that the ids that end a response are the model's own and not the server's. Stop strings need the
    server's tokenizer.
    """
    stops = dict.fromkeys(sampling.stop_ids)
    if not sampling.ignore_eos:
        stops |= dict.fromkeys(eos_ids)
    return {
        "n": n,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens if max_tokens is None else max_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(stops),
        "ignore_eos": True,
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
    }


def piece_of(
    choice: object, *, sampling: SamplingParams, eos_ids: Sequence[int], vocab_size: int, version: int, where: str
) -> Piece:
    """Read one choice of an answer.

    Arguments:
        version: stamps tokens where the server does not.
    Raises:
        VllmError: ids and log-probs that do not belong together, a log-prob that is not finite or above 0, an id outside the
            vocabulary, versions that do not cover the tokens, an unknown finish reason, or filtered sampling without kept ids.
    """
    if not isinstance(choice, Mapping):
        raise VllmError("a choice is not a JSON object", where=where)
    ids = _ids(choice.get("token_ids"), vocab_size, where)
    kept = choice.get("sampling_mask")
    if sampling.filtered and kept is None:
        raise VllmError(
            "the server does not return which tokens top-k, top-p or min-p kept",
            where=where,
            expected="sampling masks: a learner has to renormalise over the same tokens",
            fix="sample without filters, or start vLLM with --return-sampling-mask where its runner has it (not on CPU)",
        )
    supports = None
    if sampling.filtered and isinstance(kept, list):
        supports = [np.sort(_ids(row, vocab_size, where)) for row in kept]
        if len(supports) != len(ids):
            raise VllmError(f"{len(supports)} sampling masks for {len(ids)} tokens", where=where)
    return Piece(
        ids,
        _logprobs(choice.get("logprobs"), ids, where),
        _versions(choice.get("weight_versions"), len(ids), version, where),
        _finish(choice, eos_ids, where),
        choice.get("stop_reason"),
        supports,
        _routes(choice.get("routed_experts"), where),
    )


def _ids(value: object, vocab_size: int, where: str) -> npt.NDArray[np.int32]:
    if value is None:
        value = []
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise VllmError("token_ids are no list of integers", where=where, expected="ids, not text")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise VllmError(
            f"token ids from {min(value)} to {max(value)}",
            where=where,
            expected=f"0 <= id < {vocab_size}",
            fix="is it the same model?",
        )
    return np.array(value, np.int32)


def _logprobs(value: object, ids: npt.NDArray[np.int32], where: str) -> npt.NDArray[np.float32]:
    content = value.get("content") if isinstance(value, Mapping) else None
    rows = content or []
    if len(rows) != len(ids) or [row.get("token_id") for row in rows] != ids.tolist():
        raise VllmError(f"{len(rows)} log-probs for {len(ids)} tokens, or of other tokens", where=where)
    out = np.array([row.get("logprob") for row in rows], np.float64)
    bad = ~np.isfinite(out) | (out > 0) | (out <= -9999.0)  # what vLLM sends in place of NaN and -inf
    if bad.any():
        raise VllmError(f"log-prob {out[bad][0]} of a sampled token", where=where, expected="finite and at most 0")
    return out.astype(np.float32)


def _versions(value: object, count: int, version: int, where: str) -> npt.NDArray[np.int32]:
    """Spans [start, end) with a label each -> the version of every token."""
    out = np.full(count, version, np.int32)
    if value is None:
        return out
    covered = 0
    for span in value if isinstance(value, list) else [None]:
        label = span.get("version") if isinstance(span, Mapping) else None
        if not isinstance(span, Mapping) or span.get("start") != covered or not isinstance(span.get("end"), int):
            raise VllmError(f"weight versions {value}", where=where, expected="spans that follow each other")
        if label != "default":  # before the first label
            if not str(label).isdigit():
                raise VllmError(f"a token has weight version {label!r}", where=where, expected="a number")
            out[span["start"] : span["end"]] = int(str(label))
        covered = span["end"]
    if covered != count:
        raise VllmError(f"weight versions of {covered} tokens", where=where, expected=f"{count}")
    return out


def _finish(choice: Mapping[str, Any], eos_ids: Sequence[int], where: str) -> FinishReason:
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "stop":
        return "eos" if stop is None or (isinstance(stop, int) and stop in eos_ids) else "stop"
    plain: dict[object, Literal["length", "abort"]] = {"length": "length", "abort": "abort"}
    if reason in plain:
        return plain[reason]
    raise VllmError(f"a request ended with {reason!r}", where=where, expected="stop, length or abort")


def _routes(value: object, where: str) -> npt.NDArray[np.int16] | None:
    if value is None:
        return None
    try:
        found = np.lib.format.read_array(io.BytesIO(base64.b64decode(str(value), validate=True)), allow_pickle=False)
    except (ValueError, OSError, EOFError, binascii.Error) as error:
        raise VllmError(f"routed experts that cannot be read: {error}", where=where) from error
    if (
        found.ndim != 3
        or not np.issubdtype(found.dtype, np.integer)
        or (found.size and math.fabs(found.max()) >= 2**15)
    ):
        raise VllmError(f"routed experts of shape {found.shape}, {found.dtype}", where=where)
    return np.asarray(found, np.int16)
