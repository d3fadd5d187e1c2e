"""The corrections by name. A new rule is one module here and one line in ``CORRECTIONS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from halfbyte.objective.correction import Correction
from halfbyte.objective.corrections.none import NoCorrection
from halfbyte.objective.corrections.token_tis import TokenTis
from halfbyte.objective.options import build
from halfbyte.objective.triage import Triage

__all__ = ["CORRECTIONS", "NoCorrection", "TokenTis", "make_correction"]

CORRECTIONS: Mapping[str, Callable[..., Correction]] = MappingProxyType(
    {"none": NoCorrection, "token_tis": TokenTis, "triage": Triage}
)
"""Name -> class. Read only: rules of other packages are passed as objects, not registered."""


def make_correction(name: str, /, **parameters: object) -> Correction:
    """Build a correction from configuration.

    Arguments:
        name: a key of ``CORRECTIONS``.
        parameters: the fields of that class, for example ``cap=2.0``.

    Raises:
        ConfigError: unknown name or parameter, or a value that the rule refuses.
    """
    return build("correction", CORRECTIONS, name, parameters)
