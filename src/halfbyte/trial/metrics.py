"""An engine's ``/metrics`` (Prometheus text) as the few figures that a trial needs. Pure.

Names: halfbyte's own, and vLLM's where it has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from halfbyte.trial.blocks import EngineFigures

__all__ = ["engine_figures", "samples"]

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Field -> names, best first.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "weights_bytes": ("halfbyte_weights_bytes",),
    "kv_bytes": ("halfbyte_kv_bytes",),
    "kv_capacity_tokens": ("halfbyte_kv_capacity_tokens",),
    "cache_queries": ("halfbyte_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "cache_hits": ("halfbyte_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"),
}


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample; lines of another form are skipped."""
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            try:
                yield match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])
            except ValueError:
                continue


def engine_figures(text: str) -> EngineFigures:
    """The figures; samples of one name with several labels are added up."""
    totals: dict[str, float] = {}
    capacity = None
    for name, labels, value in samples(text):
        if math.isfinite(value) and value >= 0:
            totals[name] = totals.get(name, 0.0) + value
        if name == "vllm:cache_config_info":
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            capacity = int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None
    found = {
        field: next((int(totals[name]) for name in names if name in totals), None) for field, names in _NAMES.items()
    }
    if found["kv_capacity_tokens"] is None:
        found["kv_capacity_tokens"] = capacity
    return EngineFigures(**found)
