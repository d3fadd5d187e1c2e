"""The engine's budgets out of a run's configuration, the same in every process that generates for it."""

from __future__ import annotations

from halfbyte.config import Config
from halfbyte.rollout.engine import EngineOptions

__all__ = ["engine_options"]


def engine_options(config: Config, longest: int) -> EngineOptions:
    """The engine's budgets as the ``rollout`` section says, for sequences of up to ``longest`` tokens."""
    rollout = config.rollout
    return EngineOptions(
        max_batch_tokens=rollout.max_batch_tokens,
        max_sequences=rollout.max_sequences,
        kv_memory_mb=rollout.kv_memory_mb,
        page_size=rollout.page_size,
        max_length=longest,
    )
