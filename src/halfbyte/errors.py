"""User errors: what was wrong, where, what was expected, and what to do.

Every error a user can cause is a :class:`UserError`. The command line prints it without a traceback and exits with code 2;
``assert`` is kept for our own bugs. This module imports nothing, so every floor may use it.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "MissingExtraError",
    "NumericsError",
    "RefitError",
    "ShapeError",
    "SpecMismatchError",
    "UserError",
]


class UserError(Exception):
    """A mistake in what the user gave us.

    Arguments:
        what: what was wrong, in one sentence.
        where: the file, key, tensor or request concerned.
        expected: what would have been right.
        fix: what the user can do about it.

    Attributes:
        common: every rank of the run raised it at the same place, so they can still do things together.
    """

    common = False

    def __init__(self, what: str, *, where: str = "", expected: str = "", fix: str = "") -> None:
        self.what, self.where, self.expected, self.fix = what, where, expected, fix
        lines = [what]
        lines += [
            f"  {label}: {text}" for label, text in (("where", where), ("expected", expected), ("fix", fix)) if text
        ]
        super().__init__("\n".join(lines))


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class CheckpointError(UserError):
    """A model folder or tensor file that cannot be used."""


class DataError(UserError):
    """Prompts, answers, trajectories or rewards that cannot be used."""


class SpecMismatchError(UserError):
    """Two parts of a run disagree about a numeric choice (a field of ``QuantSpec`` or ``Precision``)."""


class ShapeError(UserError):
    """Tensors whose shapes do not fit together; the shapes are in the message."""


class NumericsError(UserError):
    """NaN or infinity where a finite number is needed; the tensor, layer or token is in the message."""


class RefitError(UserError):
    """A delta, manifest, object or store that cannot be used, or weights that are not the version a delta starts from."""


class ClusterError(UserError):
    """Workers or machines of a run that cannot be started, or do not come back."""


class MissingExtraError(UserError):
    """An optional dependency is not installed; the message names the command that installs it."""
