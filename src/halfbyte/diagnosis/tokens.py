"""The tokens of one rollout batch with both log-probs: what a diagnosis looks at, whoever trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.errors import DataError
from halfbyte.objective import CorrectionInput, Segmenter, SegmentInput

__all__ = ["TokenTable", "table_of"]

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTable:
    """Flat over the response tokens of N samples, in order of sample and position; T tokens.

    Arguments:
        step: training step, or None where the source does not say.
        lengths: [N] int64, response tokens of each sample.
        ids: [T] int64.
        rollout_logp, learner_logp, advantages: [T] float32; NaN is allowed where ``mask`` is false.
        mask: [T] bool.
        versions: [T] int64, or None.
        turn_starts: [T] bool, or None.
        rewards: [N] float32 (NaN where unknown), or None.
    """

    step: int | None
    lengths: Integers
    ids: Integers
    rollout_logp: Floats
    learner_logp: Floats
    advantages: Floats
    mask: Flags
    versions: Integers | None = None
    turn_starts: Flags | None = None
    rewards: Floats | None = None

    @property
    def sequence_index(self) -> Integers:
        """[T] int64."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def gap(self) -> Floats:
        """[T] float32, 0 where mask is false."""
        with np.errstate(invalid="ignore"):
            return np.where(self.mask, self.learner_logp - self.rollout_logp, np.float32(0))

    def correction_input(
        self,
        segmenter: Segmenter | None = None,
        delimiters: Callable[[Integers], Flags] | None = None,
    ) -> CorrectionInput:
        """The record that corrections and ``quadrants`` take.

        Arguments:
            segmenter: cuts samples into segments; None: a sample is one.
            delimiters: which of [T] token ids end a line or a sentence, for segmenters that use them.
        """
        mask, sequence = torch.from_numpy(self.mask), torch.from_numpy(self.sequence_index)
        gap, advantages = torch.from_numpy(self.gap), torch.from_numpy(self.advantages)
        versions = None if self.versions is None else torch.from_numpy(self.versions)
        segments = None
        if segmenter is not None:
            layout = SegmentInput(
                mask=mask,
                sequence_index=sequence,
                versions=versions,
                turn_starts=None if self.turn_starts is None else torch.from_numpy(self.turn_starts),
                delimiters=None if delimiters is None else torch.from_numpy(delimiters(self.ids)),
                gap=gap,
                advantages=advantages,
            )
            segments = segmenter(layout)
        counted = None if versions is None else versions[mask]
        return CorrectionInput(
            gap=gap,
            advantages=advantages,
            mask=mask,
            sequence_index=sequence,
            segments=segments,
            versions=versions,
            # the newest weights that sampled are taken for the learner's: older tokens carry staleness as well
            learner_version=None if counted is None else int(counted.max()) if len(counted) else 0,
            rollout_logp=torch.from_numpy(self.rollout_logp),
        )


@dataclass(eq=False)
class _Columns:
    lengths: list[int] = field(default_factory=list)
    parts: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    def add(self, name: str, values: npt.NDArray[Any]) -> None:
        self.parts.setdefault(name, []).append(values)


def table_of(rows: Sequence[tuple[str, Mapping[str, Any]]], step: int | None) -> TokenTable:
    """A table from rows with our column names; values are lists or arrays, advantages may be one number a row.

    Arguments:
        rows: (place for messages, row). All of them have the same optional columns.

    Raises:
        DataError: a column has another length than the response, a value is no number, or a log-prob or advantage of a
            token that counts is not finite; the message names the place and the token.
    """
    columns = _Columns()
    for where, row in rows:
        _add_row(columns, row, where)
    joined = {name: np.concatenate(parts) for name, parts in columns.parts.items()}
    return TokenTable(
        step=step,
        lengths=np.array(columns.lengths, dtype=np.int64),
        ids=joined["response_ids"],
        rollout_logp=joined["rollout_logprobs"],
        learner_logp=joined["learner_logprobs"],
        advantages=joined["advantages"],
        mask=joined["mask"],
        versions=joined.get("versions"),
        turn_starts=joined.get("turns"),
        rewards=np.array(columns.rewards, dtype=np.float32) if columns.rewards else None,
    )


def _add_row(columns: _Columns, row: Mapping[str, Any], where: str) -> None:
    ids = _array(row["response_ids"], "response_ids", where, None, np.int64)
    n = len(ids)
    columns.lengths.append(n)
    columns.add("response_ids", ids)
    given = row.get("mask")
    mask = np.ones(n, bool) if given is None else _array(given, "mask", where, n, np.float32) != 0
    columns.add("mask", mask)
    for name in ("rollout_logprobs", "learner_logprobs", "advantages"):
        value = row[name]
        if name == "advantages" and np.ndim(value) == 0:
            value = np.repeat(_array([value], name, where, 1, np.float32), n)
        values = _array(value, name, where, n, np.float32)
        bad = mask & ~np.isfinite(values)
        if bad.any():
            token = int(np.flatnonzero(bad)[0])
            raise DataError(
                f"{name} is {values[token]} on a token that counts ({int(bad.sum())} such tokens)",
                where=f"{where}, token {token}",
                expected="numbers that are finite in float32, or mask 0",
            )
        if name != "advantages" and bool((values[mask] > 1e-3).any()):
            token = int(np.flatnonzero(mask & (values > 1e-3))[0])
            raise DataError(
                f"{name} is {values[token]}",
                where=f"{where}, token {token}",
                expected="log-probs, which are not above 0",
            )
        columns.add(name, values)
    if row.get("versions") is not None:
        versions = row["versions"]
        if np.ndim(versions) == 0:
            versions = np.repeat(_array([versions], "versions", where, 1, np.int64), n)
        columns.add("versions", _array(versions, "versions", where, n, np.int64))
    if row.get("turns") is not None:
        starts = _array(row["turns"], "turns", where, None, np.int64)
        if len(starts) and not (starts.min() >= 0 and starts.max() < max(n, 1)):
            raise DataError(f"turns begin at {starts.tolist()}", where=where, expected=f"places in 0..{n - 1}")
        flags = np.zeros(n, bool)
        flags[starts] = True
        columns.add("turns", flags)
    if "reward" in row:
        reward = row["reward"]
        parts = _array(np.ravel(reward).tolist(), "reward", where, None, np.float64)  # a number, or one a token
        columns.rewards.append(float("nan") if reward is None else float(parts.sum()))


def _array(value: Any, name: str, where: str, length: int | None, dtype: type[Any]) -> npt.NDArray[Any]:
    """``value`` as [length] of ``dtype``; None inside a list of floats is NaN."""
    try:
        floating = np.issubdtype(dtype, np.floating)
        out = np.asarray(value, dtype=np.float64 if floating or not isinstance(value, np.ndarray) else None)
        if not floating and len(out) and not (np.isfinite(out).all() and (out == np.trunc(out)).all()):
            raise ValueError("not integers")
        if not floating and len(out) and not (out.min() >= -(2.0**63) and out.max() < 2.0**63):
            raise ValueError("more than 64 bits")
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which is refused where the token counts
            out = out.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name} cannot be used: {error}", where=where, expected="a list of numbers") from error
    if out.ndim != 1 or (length is not None and len(out) != length):
        raise DataError(
            f"{name} has shape {list(out.shape)}",
            where=where,
            expected="a flat list" if length is None else f"one value for each of the {length} response ids",
        )
    return out
