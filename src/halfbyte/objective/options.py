"""Named rules with checked options: one builder for corrections and segmenters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from halfbyte.errors import ConfigError

__all__ = ["build"]

Rule = TypeVar("Rule")


def build(kind: str, rules: Mapping[str, Callable[..., Rule]], name: str, options: Mapping[str, object]) -> Rule:
    """The rule ``name`` with its options.

    Arguments:
        kind: what the rules are (``correction``): the configuration key is ``objective.KIND_options``.
        rules: name -> class whose defaults say what type an option has.

    Raises:
        ConfigError: unknown name or option, or a value of another type than the default.
    """
    if name not in rules:
        raise ConfigError(f"unknown {kind} {name!r}", where=kind, expected=", ".join(rules))
    rule = rules[name]
    defaults = {key: item.default for key, item in inspect.signature(rule).parameters.items()}
    for key, value in options.items():
        where = f"objective.{kind}_options.{key}"
        if key not in defaults:
            raise ConfigError(
                f"{kind} {name!r} has no option {key!r}",
                where=where,
                expected=f"one of: {', '.join(defaults)}" if defaults else "no options",
            )
        if not _fits(value, defaults[key]):
            raise ConfigError(
                f"option {key!r} of {kind} {name!r} is {value!r}",
                where=where,
                expected=f"a value like {defaults[key]!r}",
            )
    return rule(**options)


def _fits(value: object, default: object) -> bool:
    """Whether ``value`` has the type of the default; an integer is a number, a truth value is not."""
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return default is inspect.Parameter.empty or default is None or type(value) is type(default)
