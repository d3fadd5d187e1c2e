"""Whether a server holds what a fresh load of the same version gives: weights bit by bit, and sampled log-probs.

Log-probs are asked for one prompt at a time with nothing else in flight: a vLLM batch of the same shape repeats bit for bit,
one of another shape need not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.vllm.answers import piece_of, sampling_of, seed_of
from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.errors import VllmError, WrongWeightsError

__all__ = ["Probes", "Verification", "require_processed_logprobs", "verify"]


@dataclass(frozen=True, eq=False)
class Answers:
    """Tokens and log-probs of all probes, one after the other."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Answers)
            and self.ids.tobytes() == other.ids.tobytes()
            and self.logprobs.tobytes() == other.logprobs.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]

    def distance(self, other: Answers) -> float:
        """Largest |difference| of log-probs at equal tokens; infinite where no token is equal."""
        n = min(len(self.ids), len(other.ids))
        same = self.ids[:n] == other.ids[:n]
        return float(np.abs(self.logprobs[:n] - other.logprobs[:n])[same].max()) if same.any() else float("inf")


@dataclass(frozen=True)
class Verification:
    """What was compared, and found equal.

    Arguments:
        tokens: sampled tokens whose ids and log-probs agree bit for bit.
        workers: whose weights agree with a fresh load.
        seconds: it took.
    """

    tokens: int
    workers: int
    seconds: float


class Probes:
    """Fixed prompts, spread over the vocabulary and the same for ever.

    Arguments:
        vocab_size: of the model.
        count, tokens: prompts, and tokens sampled after each.
    """

    def __init__(self, vocab_size: int, *, count: int = 4, tokens: int = 8) -> None:
        self.vocab_size, self.tokens = vocab_size, tokens
        draws = np.random.Generator(np.random.Philox(key=20260))
        self.prompts = [tuple(draws.integers(vocab_size, size=3 + 2 * i).tolist()) for i in range(count)]

    def ask(self, client: VllmClient) -> Answers:
        """Sample after every prompt at temperature 1, one at a time.

        Raises:
            VllmError: the server does not answer, or ended a request early.
        """
        sampling = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        ids, logprobs = [], []
        for number, prompt in enumerate(self.prompts):
            body = sampling_of(sampling, (), n=1, seed=seed_of(0, number, len(prompt)))
            choices = client.generate(prompt, body).get("choices")
            piece = piece_of(
                choices[0] if isinstance(choices, list) and choices else None,
                sampling=sampling,
                eos_ids=(),
                vocab_size=self.vocab_size,
                version=0,
                where=f"probe {number}",
            )
            if len(piece.ids) != self.tokens:
                raise VllmError(f"a probe ended after {len(piece.ids)} tokens ({piece.finish})", where=client.url)
            ids.append(piece.ids)
            logprobs.append(piece.logprobs)
        return Answers(np.concatenate(ids), np.concatenate(logprobs))


def verify(client: VllmClient, probes: Probes) -> Verification:
    """Compare the served model with a fresh load in every worker. Nothing else may be in flight.

    Raises:
        WrongWeightsError: naming what differs; the server must not be used.
        VllmError: the comparison itself failed.
    """
    started = time.perf_counter()
    results = client.rpc("halfbyte_compare")
    for rank, found in enumerate(results):
        for key, what in (("damaged", "host tensors are not those of the version"), ("different", "weights differ")):
            names = found.get(key) if isinstance(found, dict) else None
            if not isinstance(names, list):
                raise VllmError("a worker's comparison cannot be read", where=f"rank {rank}")
            if names:
                client.rpc("halfbyte_forget")
                raise _wrong(f"{len(names)} {what}: {_some(names)}", f"{client.url}, rank {rank}")
    try:
        client.reset_prefix_cache()
        served = probes.ask(client)
        client.reset_prefix_cache()
        client.rpc("halfbyte_exchange")
        try:
            fresh = probes.ask(client)
            client.reset_prefix_cache()
        finally:
            client.rpc("halfbyte_exchange")
    finally:
        client.rpc("halfbyte_forget")
    if served != fresh:
        raise _wrong(f"sampled log-probs differ by up to {served.distance(fresh):.3g}", client.url)
    return Verification(len(served.ids), len(results), time.perf_counter() - started)


def require_processed_logprobs(client: VllmClient, vocab_size: int) -> None:
    """Find out whether log-probs are of the distribution sampled from: at temperature 1/2 they are twice as far apart.

    Raises:
        VllmError: the server returns those of temperature 1 whatever the request says.
    """
    probes = Probes(vocab_size, count=4)
    gaps = {t: [_gap(client, prompt, t) for prompt in probes.prompts] for t in (1.0, 0.5)}
    raw = sum(abs(b - a) for a, b in zip(gaps[1.0], gaps[0.5]))
    processed = sum(abs(b - 2 * a) for a, b in zip(gaps[1.0], gaps[0.5]))
    if processed > raw:
        raise VllmError(
            "the server's log-probs are not of the distribution it samples from (temperature is left out)",
            where=client.url,
            expected="--logprobs-mode processed_logprobs",
        )


def _gap(client: VllmClient, prompt: Sequence[int], temperature: float) -> float:
    """How far apart the log-probs of the two likeliest tokens are."""
    sampling = SamplingParams(temperature=temperature, max_tokens=1, ignore_eos=True)
    body = sampling_of(sampling, (), n=1, seed=1) | {"logprobs": 3}
    try:
        rows = client.generate(prompt, body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        ranked = {row["rank"]: float(row["logprob"]) for row in rows}
        return ranked[1] - ranked[2]
    except (KeyError, IndexError, TypeError) as error:
        raise VllmError("the server returns no log-probs of likely tokens", where=client.url) from error


def _wrong(what: str, where: str) -> WrongWeightsError:
    return WrongWeightsError(
        f"after the update the server does not hold what a fresh load gives: {what}",
        where=where,
        expected="bit-equal weights and log-probs",
        fix="the server is paused and must not serve; start it again from a checkpoint of this version",
    )


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:3])) + (", ..." if len(names) > 3 else "")
