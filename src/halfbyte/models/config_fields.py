"""Typed reading of config.json: every wrong or missing key is a message that names the file and the key."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import CheckpointError

__all__ = ["ConfigFields"]


@dataclass(frozen=True)
class ConfigFields:
    """A parsed config.json. Methods take alternative names of a key, first found wins; null counts as missing.

    Raises (all methods):
        CheckpointError: missing without a default, or of another type.
    """

    config: dict[str, Any]
    where: str

    def positive(self, *names: str, default: int | None = None, most: int | None = None) -> int:
        """An integer of at least 1, and at most ``most``."""
        return self._integer(names, default, least=1, most=most)

    def count(self, *names: str, default: int | None = None, most: int | None = None) -> int:
        """An integer of at least 0, and at most ``most``."""
        return self._integer(names, default, least=0, most=most)

    def number(self, name: str, *, default: float | None = None, least: float = 0.0) -> float:
        """A positive finite number, of at least ``least``."""
        value = self._found((name,), default)
        good = not isinstance(value, bool) and isinstance(value, (int, float))
        # The upper bound also keeps float() of a long integer from overflowing.
        if not good or not 0 < value <= sys.float_info.max or value < least:
            raise self._wrong(name, value, f"a finite number of at least {least:g}" if least else "a positive number")
        return float(value)

    def table(self, name: str) -> dict[str, Any]:
        """An object; missing is empty."""
        value = self._found((name,), {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object, or null")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings; None where it is missing."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return tuple(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; missing is ``default``."""
        value = self._found((name,), default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; missing is ()."""
        value = self._found((name,), ())
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self._wrong(name, value, "an integer or a list of integers")
        return tuple(items)

    def _integer(self, names: tuple[str, ...], default: int | None, least: int, most: int | None) -> int:
        value = self._found(names, default)
        good = not isinstance(value, bool) and isinstance(value, int)
        if not good or value < least or (most is not None and value > most):
            name = next((name for name in names if self.config.get(name) is not None), names[0])
            raise self._wrong(name, value, f"an integer of at least {least}" + (f", at most {most}" if most else ""))
        return int(value)

    def _found(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is None:
            raise CheckpointError(f"key {names[0]!r} is missing", where=self.where, fix="restore config.json")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return CheckpointError(f"key {name!r} is {shown}", where=self.where, expected=expected)
