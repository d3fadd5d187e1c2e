"""What each arm used, from the blocks: time, and memory where somebody could look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halfbyte.trial.blocks import BlockRecord, SegmentRecord
from halfbyte.trial.records import ARMS, Arm, ArmUsage

__all__ = ["arm_peaks", "arm_usage"]


def arm_usage(blocks: Sequence[BlockRecord], headers: Mapping[Arm, int]) -> dict[Arm, ArmUsage]:
    """The usage of every arm that ran.

    Arguments:
        headers: weights by the safetensors headers, for engines that do not report theirs.
    """
    found: dict[Arm, ArmUsage] = {}
    for arm in ARMS:
        if served := _segments(blocks, arm):
            peak = max((s.peak_bytes for s in served if s.peak_bytes is not None), default=None)
            weights = max((s.after.weights_bytes for s in served if s.after.weights_bytes is not None), default=None)
            found[arm] = ArmUsage(
                arm=arm,
                seconds=sum(segment.seconds for segment in served),
                weights_bytes=headers.get(arm) if weights is None else weights,
                kv_bytes=max((s.after.kv_bytes for s in served if s.after.kv_bytes is not None), default=None),
                peak_bytes=peak,
                kv_capacity_tokens=max(
                    (s.after.kv_capacity_tokens for s in served if s.after.kv_capacity_tokens is not None), default=None
                ),
                source=next((s.memory_source for s in served if s.peak_bytes == peak), "remote"),
            )
    return found


def arm_peaks(blocks: Sequence[BlockRecord]) -> dict[Arm, list[int]]:
    """Peak bytes of each block, by arm, where they are known."""
    found: dict[Arm, list[int]] = {arm: [] for arm in ARMS}
    for block in blocks:
        for arm in ARMS:
            peaks = [s.peak_bytes for s in _segments([block], arm) if s.peak_bytes is not None]
            if peaks:
                found[arm].append(max(peaks))
    return found


def _segments(blocks: Sequence[BlockRecord], arm: Arm) -> list[SegmentRecord]:
    return [segment for block in blocks for segment in block.segments if segment.arm == arm]
