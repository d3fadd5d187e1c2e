"""Trajectories as flat learner batches, in micro-batches under a token budget.

Packed: the real tokens of several sequences lie one behind the other and only attention knows the borders. Padded: every
sequence is filled up to the longest with tokens that are masked and never attended to. Neither changes a log-prob or the loss
(unsloth-zoo #840): positions count real tokens, and padding comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.guidance.batch import Alignment, BatchGuidance, gather
from halfbyte.kernels import Kernels, active
from halfbyte.models.trajectory import Trajectory

__all__ = ["LearnerBatch", "collate", "micro_batches"]


@dataclass(frozen=True, eq=False)
class LearnerBatch:
    """Flat tokens of ``S`` sequences.

    Arguments:
        ids, positions: [T] int64.
        starts: [S + 1] int64, sequence borders.
        generated: [T] bool, tokens in decode precision.
        routes: [T, moe layers, k] int64 with -1 where the learner routes for itself; None without replay.
        rows: [R] int64, rows whose next token is a response token.
        targets: [R] int64, those next tokens.
        temperature: [R] float32.
        supports: kept token ids of each of the ``R`` targets, or None.
        rollout_logprobs: [R] float32.
        mask: [R] bool, tokens the policy produced.
        versions: [R] int64.
        sequence: [R] int64, index into the trajectories that were collated.
        guidance: what the rollout rounded these tokens to; None without.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    generated: Tensor
    routes: Tensor | None
    rows: Tensor
    targets: Tensor
    temperature: Tensor
    supports: list[Tensor | None] | None
    rollout_logprobs: Tensor
    mask: Tensor
    versions: Tensor
    sequence: Tensor
    guidance: BatchGuidance | None = None

    def to(self, device: torch.device) -> LearnerBatch:
        """On another device; ``starts`` stays, since borders are counted on the CPU."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        supports = None if self.supports is None else [None if s is None else s.to(device) for s in self.supports]
        guidance = None if self.guidance is None else self.guidance.to(device)
        return replace(self, **(moved | {"starts": self.starts, "supports": supports, "guidance": guidance}))


def micro_batches(lengths: Sequence[int], budget: int, *, packing: bool) -> list[list[int]]:
    """Split sequences, in order, so that no micro-batch has more than ``budget`` token rows (padding counted when padded).

    A single sequence longer than the budget gets a micro-batch of its own.
    """
    out: list[list[int]] = []
    current: list[int] = []
    total = longest = 0
    for index, length in enumerate(lengths):
        rows = total + length if packing else max(longest, length) * (len(current) + 1)
        if current and rows > budget:
            out.append(current)
            current, total, longest = [], 0, 0
        current.append(index)
        total, longest = total + length, max(longest, length)
    return [*out, current] if current else out


def collate(
    trajectories: Sequence[Trajectory],
    *,
    packing: bool = True,
    replay_routes: bool = True,
    alignment: Alignment | None = None,
    moe_layers: Sequence[int] = (),
    version: int = 0,
    kernels: Kernels | None = None,
) -> LearnerBatch:
    """One flat batch of all ``trajectories``.

    Arguments:
        alignment: how the learner uses guidance; None leaves it out.
        moe_layers: the layers that ``routes`` are of.
        version: the learner's weight version.
    """
    longest = max(len(t) for t in trajectories)
    ids, positions, starts, generated, routes = [], [], [0], [], []
    rows, targets, temperature, logprobs, mask, versions, sequence = [], [], [], [], [], [], []
    supports: list[Tensor | None] = []
    routed = all(t.routes is not None for t in trajectories) and (replay_routes or alignment is not None)
    for index, t in enumerate(trajectories):
        n, prompt, response = len(t), len(t.prompt_ids), len(t.response_ids)
        width = n if packing else longest
        filler = width - n
        ids.append(np.pad(t.ids, (0, filler)))
        positions.append(np.arange(width))
        generated.append(np.concatenate([np.zeros(prompt, bool), t.mask, np.zeros(filler, bool)]))
        if routed:
            assert t.routes is not None
            routes.append(np.pad(t.routes, ((0, width - len(t.routes)), (0, 0), (0, 0)), constant_values=-1))
        rows.append(starts[-1] + np.arange(prompt - 1, n - 1))
        starts.append(starts[-1] + width)
        targets.append(t.response_ids)
        temperature.append(np.full(response, t.sampling.temperature, dtype=np.float32))
        logprobs.append(t.logprobs)
        mask.append(t.mask)
        versions.append(t.versions)
        sequence.append(np.full(response, index))
        kept = t.supports or [None] * response
        supports += [None if s is None else torch.as_tensor(s, dtype=torch.int64) for s in kept]

    def flat(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(np.concatenate(parts))).to(dtype)

    recorded = flat(routes, torch.int64) if routed else None
    guidance = None
    if alignment is not None:
        lengths = [len(t) for t in trajectories]
        guidance = gather(
            [t.guidance for t in trajectories],
            lengths,
            lengths if packing else [longest] * len(lengths),
            recorded,
            moe_layers,
            alignment,
            version,
            kernels or active(),
        )
    return LearnerBatch(
        ids=flat(ids, torch.int64),
        positions=flat(positions, torch.int64),
        starts=torch.tensor(starts, dtype=torch.int64),
        generated=flat(generated, torch.bool),
        routes=recorded if replay_routes else None,
        rows=flat(rows, torch.int64),
        targets=flat(targets, torch.int64),
        temperature=flat(temperature, torch.float32),
        supports=supports if any(s is not None for s in supports) else None,
        rollout_logprobs=flat(logprobs, torch.float32),
        mask=flat(mask, torch.bool),
        versions=flat(versions, torch.int64),
        sequence=flat(sequence, torch.int64),
        guidance=guidance,
    )
