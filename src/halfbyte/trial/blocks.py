"""What a trial records of a block: order, starts, timings, memory, what the engines' metrics said before and after."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.trial.records import Arm, Phase, Strict

__all__ = ["BlockRecord", "EngineFigures", "SegmentRecord"]


@dataclass(frozen=True)
class EngineFigures(Strict):
    """What an engine's /metrics says; None where it says nothing.

    Arguments:
        weights_bytes: resident weights.
        kv_bytes: the pool, used or not (vLLM #10207: it must never be counted as the model's need).
        kv_capacity_tokens: tokens that the pool holds.
        cache_queries, cache_hits: prefix-cache tokens asked for and found, since the start.
    """

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    kv_capacity_tokens: int | None = None
    cache_queries: int | None = None
    cache_hits: int | None = None


@dataclass(frozen=True)
class SegmentRecord(Strict):
    """A segment as it ran.

    Arguments:
        seconds: from the first request to the last response.
        start_seconds: that the start of its server took; None where it ran already.
        cache: ``restart``, ``reset`` (by the server's own endpoint) or ``kept``.
        peak_bytes: most memory of the server's processes while it served; None for a server that we cannot see into.
        memory_source: see ``ArmUsage.source``.
        server: version that the server reports, or "".
    """

    arm: Arm
    requests: int
    started: float
    seconds: float
    start_seconds: float | None
    cache: str
    before: EngineFigures
    after: EngineFigures
    peak_bytes: int | None
    memory_source: str
    server: str


@dataclass(frozen=True)
class BlockRecord(Strict):
    """A finished block, written after its records are on the disk.

    Arguments:
        records: in the block.
        end: bytes of the records file up to and with this block.
        chain: digest of the records' chain at ``end``.
        abandoned: records of unfinished tries of this block, moved to abandoned.jsonl before it was done again.
    """

    phase: Phase
    block: int
    order: str
    segments: tuple[SegmentRecord, ...]
    records: int
    end: int
    chain: str
    abandoned: int
