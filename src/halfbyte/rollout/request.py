"""What the engine is asked for, and the state of one sample while it runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from halfbyte.models.trajectory import FinishReason, SamplingParams
from halfbyte.rollout.pages import PagePool

__all__ = ["Request", "Sample", "request_key"]


def request_key(*parts: object) -> int:
    """A 64-bit key from anything with a stable text form, for the counter-based generator."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Arguments:
        prompt_ids: token ids, at least one.
        sampling: sampling parameters.
        n: number of samples; their prompt is computed once and its pages are shared.
        key: request key of the generator; the same key, seed and sample index give the same tokens in any company.
        group: passed through to the trajectories.
        first_sample: index of the first sample (so that a group can be split over engines).
        generated: for later turns of a conversation, [P] bool marking prompt tokens the policy generated; they keep the
            decode precision where prefill and decode differ.
        alternatives: record that many of the most likely tokens beside each one drawn.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    key: int = 0
    group: int = 0
    first_sample: int = 0
    generated: tuple[bool, ...] | None = None
    alternatives: int = 0


@dataclass(eq=False)
class Sample:
    """One sample in flight. ``tokens`` are prompt and response; KV is in ``pages`` for the first ``computed`` of them.

    ``cached``: prompt tokens whose KV was there already when the sample first ran; None before, and for samples that share
    the prompt of another sample of their request.
    """

    request: Request
    index: int
    order: int
    tokens: list[int]
    stop_ids: frozenset[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    registered: int = 0
    digests: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[npt.NDArray[np.int32] | None] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    cached: int | None = None
    forks: list[Sample] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    def phases(self, count: int, pool: PagePool) -> list[bool] | None:
        """Phases of the first ``count`` tokens, or None where the pool's precision does not tell them apart."""
        return [self.is_generated(p) for p in range(count)] if pool.phased else None

    def is_generated(self, position: int) -> bool:
        """Whether the token at ``position`` was produced by the policy (and so runs in decode precision)."""
        if position >= self.prompt_length:
            return True
        return self.request.generated is not None and self.request.generated[position]
