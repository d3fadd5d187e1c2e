"""Parameters that read alike in every command."""

from __future__ import annotations

from cyclopts import Parameter

__all__ = ["flag"]


def flag(help: str) -> Parameter:
    """A switch, or a value that may be repeated: no ``--no-`` twin, and no default worth showing."""
    return Parameter(negative="", show_default=False, help=help)
