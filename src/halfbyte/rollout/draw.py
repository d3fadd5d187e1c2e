"""Drawing the next token of every sample whose logits are there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfbyte.kernels import Kernels
from halfbyte.rollout.philox import uniform
from halfbyte.rollout.request import Sample

__all__ = ["draw"]


def draw(kernels: Kernels, samples: Sequence[Sample], logits: Tensor, version: int) -> None:
    """Append to each sample its next token, with log-prob, kept set, alternatives and ``version``.

    Arguments:
        logits: [S, V] float32, a row for each sample.
    Raises:
        NumericsError: a logit is not finite; no sample has changed.
    """
    params = [s.request.sampling for s in samples]
    numbers = uniform(
        _words([p.seed for p in params]),
        _words([s.request.key for s in samples]),
        _words([s.index for s in samples]),
        _words([len(s.tokens) for s in samples]),
    )
    filtered = any(p.filtered for p in params)
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    drawn = kernels.sample(
        logits,
        temperatures,
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.from_numpy(numbers),
        want_support=filtered,
    )
    ids, logprobs = drawn.ids.tolist(), drawn.logprobs.tolist()
    supports = drawn.support if filtered and drawn.support else [None] * len(samples)
    others = {
        i: _alternatives(kernels, logits[i], temperatures[i], supports[i], sample.request.alternatives)
        for i, sample in enumerate(samples)
        if sample.request.alternatives
    }
    for i, sample in enumerate(samples):
        sample.tokens.append(ids[i])
        sample.logprobs.append(logprobs[i])
        sample.versions.append(version)
        support = supports[i]
        sample.supports.append(None if support is None else support.numpy().astype(np.int32))
        if i in others:
            sample.alternatives.append(others[i])


def _alternatives(
    kernels: Kernels, logits: Tensor, temperature: Tensor, support: Tensor | None, count: int
) -> list[tuple[int, float]]:
    """(id, log-prob) of the ``count`` most likely tokens that could have been drawn; of equals the lower id first.

    Their log-probs are those that drawing them would have recorded, bit for bit.
    """
    candidates = torch.arange(len(logits)) if support is None else support
    order = torch.sort(logits[candidates], descending=True, stable=True).indices[:count]
    ids = candidates[order]
    rows = logits.expand(len(ids), -1).contiguous()
    values = kernels.token_logprobs(rows, ids, temperature.expand(len(ids)).contiguous(), [support] * len(ids))
    return list(zip(ids.tolist(), values.tolist()))


def _words(values: list[int]) -> npt.NDArray[np.uint64]:
    return np.array([v & 0xFFFFFFFFFFFFFFFF for v in values], dtype=np.uint64)
