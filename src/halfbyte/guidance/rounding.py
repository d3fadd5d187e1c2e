"""Rounding on the learner's side under guidance, with a straight-through gradient (TRACE, arXiv 2610.07767, section 3).

The numbers are the kernels' (``halfbyte.kernels.reference.guide`` defines them); here are the methods and the gradient. Guarantee
of ``trace`` with 4 bits, value by value, at one scale: |q* - q_roll| <= |round to nearest - q_roll|. With 1 bit it holds
wherever the rollout's code is one of the two neighbours, with 2 bits also one step beyond.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.formats import Payload, QuantSpec
from halfbyte.guidance.payload import check_spec
from halfbyte.kernels import Kernels
from halfbyte.kernels.reference.guide import check_guided

__all__ = ["HARD_REPLAY", "METHODS", "SCALE_ONLY", "TRACE", "RoundingMethod", "guided_round", "parse_method"]

MethodName = Literal["trace", "scale_only", "hard_replay", "shift"]


@dataclass(frozen=True)
class RoundingMethod:
    """How guidance is used.

    Arguments:
        name: ``trace``: the neighbour the payload points at. ``scale_only``: to nearest at the rollout's scales. ``hard_replay``:
            the rollout's values themselves (an oracle; needs 4 bits). ``shift``: between scale_only and trace.
        shift: for ``shift``, how far the threshold between two neighbours is moved: 0 is scale_only, 1 is trace.
    """

    name: MethodName
    shift: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(MethodName):
            raise ConfigError(f"there is no rounding method {self.name!r}", expected=_EXPECTED)
        if not 0.0 <= self.shift <= 1.0:
            raise ConfigError(f"a threshold shift of {self.shift}", expected="a number from 0 to 1")

    @property
    def threshold(self) -> float:
        """The shift that the kernel takes."""
        return self.shift if self.name == "shift" else 0.0 if self.name == "scale_only" else 1.0

    def __str__(self) -> str:
        return f"shift({self.shift:g})" if self.name == "shift" else self.name


_EXPECTED = "trace, scale_only, hard_replay or shift(t) with t from 0 to 1"
TRACE = RoundingMethod("trace")
SCALE_ONLY = RoundingMethod("scale_only")
HARD_REPLAY = RoundingMethod("hard_replay")
METHODS = (TRACE, SCALE_ONLY, HARD_REPLAY)


def parse_method(text: str) -> RoundingMethod:
    """``trace``, ``scale_only``, ``hard_replay`` or ``shift(0.5)``.

    Raises:
        ConfigError: anything else.
    """
    for method in METHODS:
        if text == method.name:
            return method
    match = re.fullmatch(r"shift\(\s*([0-9.eE+-]+)\s*\)", text)
    try:
        if match:
            return RoundingMethod("shift", float(match[1]))
    except ValueError:
        pass
    raise ConfigError(f"there is no rounding method {text!r}", expected=_EXPECTED)


def guided_round(
    x: Tensor,
    payload: Payload,
    spec: QuantSpec,
    method: RoundingMethod = TRACE,
    *,
    kernels: Kernels,
    guided: Tensor | None = None,
    name: str = "tensor",
) -> Tensor:
    """``x [..., K]`` (float32 or bfloat16) as the learner uses it under guidance; dy/dx = 1 everywhere.

    Arguments:
        payload: of ``x``'s shape.
        spec: the learner's rule, which has to be the payload's.
        guided: bool, rows (or leading dimensions) with guidance; the others take their own scale and round to nearest, and their
            part of the payload may hold anything.

    Raises:
        SpecMismatchError: names the field in which the rules differ.
        ConfigError: ``hard_replay`` with fewer than 4 bits.
        ShapeError: tensors that do not fit together.
        NumericsError: ``x`` holds NaN or infinity.
    """
    check_spec(payload, spec, name)
    if method.name == "hard_replay" and payload.bits != 4:
        raise ConfigError(
            f"hard_replay with guidance of {payload.bits} bits", where=name, expected="4 bits", fix="record 4 bits"
        )
    return cast(Tensor, _GuidedRound.apply(x, payload, method, kernels, guided, name))  # type: ignore[no-untyped-call]


class _GuidedRound(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        payload: Payload,
        method: RoundingMethod,
        kernels: Kernels,
        guided: Tensor | None,
        name: str,
    ) -> Tensor:
        x = x.detach()
        y = kernels.guided_round(x, payload, shift=method.threshold, guided=guided, name=name)
        if method.name != "hard_replay":
            return y
        rows = check_guided(x, payload, 1.0, guided, name)
        replayed = kernels.dequantise(payload.quantised(), x.dtype)
        return replayed if rows is None else torch.where(rows.unsqueeze(-1), replayed, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None
