"""What can go wrong between a trainer and a vLLM server."""

from __future__ import annotations

from halfbyte.errors import RefitError, UserError

__all__ = ["VllmError", "WrongWeightsError"]


class VllmError(UserError):
    """A vLLM server that cannot be reached, is not set up as needed, or answered with something that cannot be used."""


class WrongWeightsError(RefitError):
    """After an update the server does not hold what a fresh load of the same version gives. It must not serve."""
