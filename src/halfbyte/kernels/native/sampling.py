"""Log-softmax and sampling, natively; definition in :mod:`halfbyte.kernels.reference.sampling`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.reference.sampling import Sampled, check_logits, check_parameters, check_supports

__all__ = ["log_softmax", "sample", "token_logprobs"]


def log_softmax(logits: Tensor, temperature: Tensor, *, isa: int = 2) -> Tensor:
    """See :func:`halfbyte.kernels.reference.sampling.log_softmax`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    logits, temperature = _inputs(logits, temperature)
    rows, vocabulary = logits.shape
    out = torch.empty_like(logits)
    addresses = (logits.data_ptr(), temperature.data_ptr())
    if _native.log_softmax(isa, *addresses, rows, vocabulary, out.data_ptr()) != -1:
        check_logits(logits, temperature)
    return out


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor,
    supports: Sequence[Tensor | None] | None = None,
    *,
    isa: int = 2,
) -> Tensor:
    """See :func:`halfbyte.kernels.reference.sampling.token_logprobs`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    logits, temperature = _inputs(logits, temperature)
    check_supports(logits.shape, ids, supports)
    ids = as_buffer(ids, torch.int64)
    rows, vocabulary = logits.shape
    out = torch.empty(rows)
    kept = start = None
    if supports is not None and any(s is not None for s in supports):
        sizes = [0 if s is None else s.numel() for s in supports]
        start = torch.tensor([0, *sizes]).cumsum(0)
        kept = torch.cat([s.to(torch.int64) for s in supports if s is not None])
    support = (0 if kept is None else kept.data_ptr(), 0 if start is None else start.data_ptr())
    addresses = (logits.data_ptr(), temperature.data_ptr())
    if _native.token_logprobs(isa, *addresses, rows, vocabulary, ids.data_ptr(), *support, out.data_ptr()) != -1:
        check_logits(logits, temperature)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    want_support: bool = False,
    isa: int = 2,
) -> Sampled:
    """See :func:`halfbyte.kernels.reference.sampling.sample`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    logits, temperature = _inputs(logits, temperature)
    rows, vocabulary = logits.shape
    if not top_k.shape == top_p.shape == min_p.shape == uniform.shape == (rows,):
        check_parameters(logits.shape, temperature, top_k, top_p, min_p, uniform)
    top_k, uniform = as_buffer(top_k, torch.int32), as_buffer(uniform, torch.float64)
    top_p, min_p = as_buffer(top_p), as_buffer(min_p)
    ids, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    kept = torch.ones(rows, vocabulary, dtype=torch.bool) if want_support else None
    parameters = [t.data_ptr() for t in (temperature, top_k, top_p, min_p, uniform)]
    results = (ids.data_ptr(), logprobs.data_ptr(), 0 if kept is None else kept.data_ptr())
    if _native.sample(isa, logits.data_ptr(), rows, vocabulary, *parameters, *results) != -1:
        check_logits(logits, temperature)
        check_parameters(logits.shape, temperature, top_k, top_p, min_p, uniform)
    support: list[Tensor | None] = []
    if kept is not None:
        support = [None] * rows
        for row in (~kept).any(1).nonzero().squeeze(1).tolist():
            support[row] = kept[row].nonzero().squeeze(1)
    return Sampled(ids, logprobs, support)


def _inputs(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    if logits.ndim != 2 or logits.shape[1] == 0 or temperature.shape != logits.shape[:1]:
        check_logits(logits, temperature)
    return as_buffer(logits), as_buffer(temperature)
