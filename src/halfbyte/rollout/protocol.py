"""What episodes need of an engine, native or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from halfbyte.models.trajectory import Trajectory
from halfbyte.rollout.request import Request

__all__ = ["TokenEngine"]


class TokenEngine(Protocol):
    """Token ids in, trajectories out."""

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and response."""

    @property
    def version(self) -> int:
        """The weight version that the next token will be stamped with."""

    def generate(self, requests: Iterable[Request], /) -> list[Trajectory]:
        """Run requests to their end; trajectories in order of request, then sample."""
