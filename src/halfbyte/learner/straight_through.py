"""Straight-through rounding: the forward value is rounded, the gradient passes unchanged (Bengio et al., arXiv 1308.3432)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from halfbyte.formats import QuantSpec
from halfbyte.kernels import Kernels

__all__ = ["fake_quantise", "round_bf16"]


def fake_quantise(kernels: Kernels, x: Tensor, spec: QuantSpec, name: str) -> Tensor:
    """``x`` [..., K] float32 as the rollout's quantiser would see it, dequantised; dy/dx = 1."""
    return cast(Tensor, _FakeQuantise.apply(x, spec, kernels, name))  # type: ignore[no-untyped-call]


def round_bf16(x: Tensor) -> Tensor:
    """``x`` rounded to BF16 and back to float32; dy/dx = 1."""
    return cast(Tensor, _RoundBf16.apply(x))  # type: ignore[no-untyped-call]


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, kernels: Kernels, name: str) -> Tensor:
        return kernels.fake_quantise(x.detach().contiguous(), spec, name=name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class _RoundBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
