"""What one rank of a run cannot do, none does: a user error of any of them is raised by all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from halfbyte import errors
from halfbyte.errors import UserError
from halfbyte.learner.ranks import Ranks

__all__ = ["together"]

Out = TypeVar("Out")


def together(ranks: Ranks, call: Callable[[], Out]) -> Out:
    """``call()`` on every rank, and its result there; collective.

    Raises:
        UserError: raised on the lowest rank that raised one, and then by all, marked as ``common``.
    """
    if ranks.size == 1:
        return call()
    said = b""
    try:
        out = call()
    except UserError as error:
        said = _written(error, ranks)
    for rank, data in enumerate(ranks.exchange(said)):
        if data:
            raise _read(data, rank, ranks.size)
    return out


def _written(error: UserError, ranks: Ranks) -> bytes:
    kind = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
    return json.dumps([kind, error.what, error.where, error.expected, error.fix]).encode()


def _read(data: bytes, rank: int, size: int) -> UserError:
    kind, what, where, expected, fix = json.loads(data)
    place = f"rank {rank} of {size}"
    error: UserError = getattr(errors, kind)(
        what, where=f"{where} ({place})" if where else place, expected=expected, fix=fix
    )
    error.common = True
    return error
