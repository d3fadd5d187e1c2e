"""What a rollout hands to a learner: token ids, log-probs of the distribution sampled, and what is needed to replay it.

Token ids never leave as text and come back (ms-swift #10012, verl #6719). Everything is numpy, so trajectories cross
processes and files without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.errors import ConfigError, DataError
from halfbyte.models.precision import Precision

__all__ = ["FinishReason", "GuidanceRows", "SamplingParams", "Trajectory"]

FinishReason = Literal["eos", "stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. The declared distribution is: logits / temperature, then top-k, top-p, min-p, renormalised.

    Arguments:
        temperature: 0 means greedy (the log-prob is then that of the temperature-1 distribution); otherwise 1e-6 to 1e4,
            so that logits divided by it stay finite in float32.
        top_k: keep the k most likely tokens; 0 keeps all. Below 2**31.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        min_p: keep tokens with at least ``min_p`` times the largest probability; 0 keeps all.
        max_tokens: at most this many new tokens.
        stop_ids: ids that end a response, kept as its last token (every EOS id of the model is added by the engine).
        stop: strings that end a response; the ids stay as sampled.
        seed: key of the counter-based generator, with the request's key, the sample's index and the position.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature <= 1e4, "0 (greedy), or 1e-6 to 1e4"),
            ("top_k", 0 <= self.top_k < 2**31, "an integer >= 0 (0 is off) and below 2**31"),
            ("top_p", 0.0 < self.top_p <= 1.0, "0 < top_p <= 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 <= min_p <= 1"),
            ("max_tokens", self.max_tokens >= 1, "an integer >= 1"),
            ("stop", all(self.stop), "non-empty strings"),
        )
        for name, good, expected in checks:
            if not good:
                raise ConfigError(f"{name} = {getattr(self, name)!r}", where=f"sampling.{name}", expected=expected)

    @property
    def filtered(self) -> bool:
        """True when some filter may drop tokens, so that the kept set travels with the trajectory."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def same_distribution(self, other: SamplingParams) -> bool:
        """True when both draw from the same distribution given the same logits."""
        keys = ("temperature", "top_k", "top_p", "min_p")
        return all(getattr(self, k) == getattr(other, k) for k in keys)


@dataclass(frozen=True, eq=False)
class GuidanceRows:
    """What the rollout rounded the tokens to, for a learner that follows it (``halfbyte.guidance`` reads it).

    Arguments:
        rows: [n, bytes] uint8, what was recorded, for each of the first n tokens; at most all but the last, which is never
            computed.
        kv: [n, bytes] uint8, what their KV pages held.
        layout: JSON text that says how a row is cut, with the specs that its codes were made by.
        version: weight version that the rows were recorded under.
    """

    rows: npt.NDArray[np.uint8]
    kv: npt.NDArray[np.uint8]
    layout: str
    version: int = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.rows)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token over all sites."""
        return int(self.rows.shape[1] + self.kv.shape[1])


@dataclass
class Trajectory:
    """One sampled response and all that a learner needs to score it.

    Arguments:
        prompt_ids: [P] int32.
        response_ids: [R] int32, with the token that ended it.
        logprobs: [R] float32, of the distribution sampled from.
        mask: [R] bool, tokens the policy produced (False for observations of an environment between turns).
        versions: [R] int32, weight version that produced each token.
        sampling: the sampling parameters.
        precision: the precision of the rollout, with its specs.
        finish_reason: why it ended.
        group: samples of one prompt share a group.
        sample: index in the group.
        routes: [P + R - 1, moe layers, k] int16 expert ids in slot order, -1 where not recorded; None for dense models.
        supports: for filtered sampling, the kept token ids of each response token (None: all).
        guidance: what the rollout rounded its tokens to (TRACE); None without.
        turns: response offsets at which a new turn of the policy begins; (0,) for single-turn.
        reward: the reward, None when scoring failed.
        info: what the environment said (``correct``, error tracebacks); JSON values only.
    """

    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int32]
    sampling: SamplingParams
    precision: Precision
    finish_reason: FinishReason
    group: int = 0
    sample: int = 0
    routes: npt.NDArray[np.int16] | None = None
    supports: list[npt.NDArray[np.int32] | None] | None = None
    guidance: GuidanceRows | None = None
    turns: tuple[int, ...] = (0,)
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of tokens, prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """[P + R] int32, prompt then response."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    def check(self, vocab_size: int) -> None:
        """Verify shapes, id range and finite log-probs.

        Raises:
            DataError: naming the field that does not fit.
        """
        n, where = len(self.response_ids), f"trajectory group {self.group} sample {self.sample}"
        for name in ("logprobs", "mask", "versions"):
            if len(getattr(self, name)) != n:
                raise DataError(f"{name} has {len(getattr(self, name))} entries", where=where, expected=f"{n}")
        ids = self.ids
        if len(self.prompt_ids) == 0 or n == 0:
            raise DataError("an empty prompt or response", where=where, expected="at least one token of each")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise DataError(
                f"token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary",
                where=where,
                expected=f"0 <= id < {vocab_size}",
            )
        if not np.isfinite(self.logprobs[self.mask]).all():
            raise DataError("a log-prob is not finite", where=where, expected="finite log-probs from the engine")
        if self.routes is not None and len(self.routes) != len(ids) - 1:
            raise DataError(f"routes cover {len(self.routes)} tokens", where=where, expected=f"{len(ids) - 1}")
        if self.guidance is not None and not len(self.guidance) == len(self.guidance.kv) < len(ids):
            raise DataError(
                f"guidance covers {len(self.guidance)} and {len(self.guidance.kv)} tokens",
                where=where,
                expected=f"both alike and at most {len(ids) - 1}",
            )
