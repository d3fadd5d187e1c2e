"""The ranks of a learner: processes that hold its weights together, or one process alone.

Everything that must be the same on all ranks goes through here, as tensors or as bytes; nothing is pickled. One process alone
answers itself and knows nothing of ``torch.distributed``; ``learner/sharded/group.py`` is the other implementation.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Alone", "Ranks", "any_of", "shared"]


class Ranks(Protocol):
    """Every call but the properties is collective: all ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process, from 0; rank 0 leads: it writes files and speaks to the user."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x`` (same shape, CPU), equal on all."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' ``x`` (same shape, CPU)."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on every rank."""
        ...

    def collect(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on rank 0; nothing elsewhere."""
        ...

    def spread(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        ...

    def wait(self) -> None:
        """Until all have come here."""
        ...


class Alone:
    """One process."""

    rank, size = 0, 1

    def add(self, x: Tensor) -> Tensor:
        """See :class:`Ranks`."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """See :class:`Ranks`."""
        return x

    def exchange(self, data: bytes) -> list[bytes]:
        """See :class:`Ranks`."""
        return [data]

    def collect(self, data: bytes) -> list[bytes]:
        """See :class:`Ranks`."""
        return [data]

    def spread(self, data: bytes) -> bytes:
        """See :class:`Ranks`."""
        return data

    def wait(self) -> None:
        """See :class:`Ranks`."""


def shared(ranks: Ranks, value: Any) -> Any:
    """Rank 0's ``value`` (JSON types), on every rank; the others' is not looked at."""
    return value if ranks.size == 1 else json.loads(ranks.spread(json.dumps(value).encode()))


def any_of(ranks: Ranks, flag: bool) -> bool:
    """Whether any rank says yes."""
    return flag if ranks.size == 1 else b"1" in ranks.exchange(b"1" if flag else b"0")
