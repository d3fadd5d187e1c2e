"""The corrections by name. A new rule is one module here and one line in ``CORRECTIONS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from halfbyte.errors import ConfigError
from halfbyte.objective.correction import Correction
from halfbyte.objective.corrections.none import NoCorrection
from halfbyte.objective.corrections.token_tis import TokenTis

__all__ = ["CORRECTIONS", "NoCorrection", "TokenTis", "make_correction"]

CORRECTIONS: Mapping[str, Callable[..., Correction]] = MappingProxyType({"none": NoCorrection, "token_tis": TokenTis})
"""Name -> class. Read only: rules of other packages are passed as objects, not registered."""


def make_correction(name: str, **parameters: float) -> Correction:
    """Build a correction from configuration.

    Arguments:
        name: a key of ``CORRECTIONS``.
        parameters: the fields of that class, for example ``cap=2.0``.

    Raises:
        ConfigError: unknown name or parameter, or a value that the rule refuses.
    """
    if name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {name!r}", where="correction", expected=", ".join(CORRECTIONS))
    try:
        return CORRECTIONS[name](**parameters)
    except TypeError as error:
        raise ConfigError(f"correction {name!r}: {error}", where="correction") from error
