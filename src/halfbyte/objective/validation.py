"""Checks shared by the objective's records: shapes, dtypes, and finite values on the tokens that count."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError

__all__ = ["describe_token", "require_finite", "require_index", "require_mask", "require_real"]

_REAL = (torch.float32, torch.float64)


def require_mask(name: str, mask: Tensor, length: int | None = None) -> None:
    """Raise ShapeError unless ``mask`` is bool with shape [T] (a 0/1 float mask invites multiplication by NaN)."""
    if mask.dtype != torch.bool or mask.dim() != 1 or (length is not None and mask.shape[0] != length):
        raise ShapeError(
            f"{name} is {_kind(mask)}",
            where=name,
            expected=f"bool [{'T' if length is None else length}]",
            fix="compare the mask with zero (mask != 0) and flatten it like the log-probs",
        )


def require_real(name: str, values: Tensor, length: int) -> None:
    """Raise ShapeError unless ``values`` is float32 (or float64, for checks) with shape [length]."""
    if values.dtype not in _REAL or values.shape != (length,):
        raise ShapeError(
            f"{name} is {_kind(values)}",
            where=name,
            expected=f"float32 [{length}]",
            fix="flatten to one value a token; compute log-probs in float32 (16-bit ones round away the gap itself)",
        )


def require_index(name: str, index: Tensor, length: int, mask: Tensor | None = None) -> None:
    """Raise ShapeError unless ``index`` is int64 [length], not negative where ``mask`` is true (padding may be -1)."""
    if index.dtype != torch.int64 or index.shape != (length,):
        raise ShapeError(f"{name} is {_kind(index)}", where=name, expected=f"int64 [{length}]")
    real = index if mask is None else index[mask]
    if real.numel() and int(real.min()) < 0:
        raise ShapeError(
            f"{name} is negative on a token that counts",
            where=name,
            expected="0, 1, 2, ... on response tokens; -1 only where mask is false",
        )


def require_finite(name: str, values: Tensor, mask: Tensor, sequence_index: Tensor | None = None) -> None:
    """Raise NumericsError naming the first token that counts and whose value is NaN or infinite.

    Arguments:
        name: what the values are, for the message.
        values: [T] float.
        mask: [T] bool; values where it is false are not looked at.
        sequence_index: [T] int64, to name the sample in the message.
    """
    bad = mask & ~torch.isfinite(values.detach())
    if bool(bad.any()):
        position = int(torch.nonzero(bad)[0, 0])
        raise NumericsError(
            f"{name} is {float(values[position])} ({int(bad.sum())} such tokens)",
            where=describe_token(position, sequence_index),
            expected="a finite number for every response token",
            fix="look at the logits of this token; mask it if it is not a response token",
        )


def describe_token(position: int, sequence_index: Tensor | None) -> str:
    """'flat token 17 (sequence 3, its token 5)' for the flat position of a token."""
    if sequence_index is None:
        return f"flat token {position}"
    sequence = int(sequence_index[position])
    within = int((sequence_index[:position] == sequence).sum())
    return f"flat token {position} (sequence {sequence}, its token {within})"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
