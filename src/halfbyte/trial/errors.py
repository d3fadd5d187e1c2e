"""Why a trial cannot be believed, or cannot be run: the command line tells them apart by exit code."""

from __future__ import annotations

from halfbyte.errors import DataError, UserError

__all__ = ["IntegrityError", "UnavailableError"]


class IntegrityError(DataError):
    """Records, limits or settings are not what was locked or recorded: the trial is invalid (exit code 3)."""


class UnavailableError(UserError):
    """Something the trial needs is not there: a server, a model, a file, an earlier step (exit code 4)."""
