"""The corrections by name. A new rule is one module here and one line in ``CORRECTIONS``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from halfbyte.errors import ConfigError
from halfbyte.objective.correction import Correction
from halfbyte.objective.corrections.none import NoCorrection
from halfbyte.objective.corrections.token_tis import TokenTis

__all__ = ["CORRECTIONS", "NoCorrection", "TokenTis", "make_correction"]

CORRECTIONS: Mapping[str, Callable[..., Correction]] = MappingProxyType({"none": NoCorrection, "token_tis": TokenTis})
"""Name -> class. Read only: rules of other packages are passed as objects, not registered."""

_OPTIONS = "objective.correction_options"


def make_correction(name: str, /, **parameters: float) -> Correction:
    """Build a correction from configuration.

    Arguments:
        name: a key of ``CORRECTIONS``.
        parameters: the fields of that class, for example ``cap=2.0``.

    Raises:
        ConfigError: unknown name or parameter, or a value that the rule refuses.
    """
    if name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {name!r}", where="correction", expected=", ".join(CORRECTIONS))
    rule = CORRECTIONS[name]
    defaults = {key: item.default for key, item in inspect.signature(rule).parameters.items()}
    for key, value in parameters.items():
        if key not in defaults:
            raise ConfigError(
                f"correction {name!r} has no option {key!r}",
                where=f"{_OPTIONS}.{key}",
                expected=f"one of: {', '.join(defaults)}" if defaults else "no options",
            )
        if not _fits(value, defaults[key]):
            raise ConfigError(
                f"option {key!r} of correction {name!r} is {value!r}",
                where=f"{_OPTIONS}.{key}",
                expected=f"a value like {defaults[key]!r}",
            )
    return rule(**parameters)


def _fits(value: object, default: object) -> bool:
    """Whether ``value`` has the type of the default; an integer is a number, a truth value is not."""
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return default is inspect.Parameter.empty or default is None or type(value) is type(default)
