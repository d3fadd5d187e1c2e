"""Typed reading of config.json: every wrong or missing key is a message that names the file and the key."""

from __future__ import annotations

import math
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

    def positive(self, *names: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        return self._integer(names, default, least=1)

    def count(self, *names: str, default: int | None = None) -> int:
        """An integer of at least 0."""
        return self._integer(names, default, least=0)

    def number(self, name: str, *, default: float) -> float:
        """A positive finite number."""
        value = self._found((name,), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; missing is false."""
        value = self._found((name,), False)
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

    def _integer(self, names: tuple[str, ...], default: int | None, least: int) -> int:
        value = self._found(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(names[0], value, f"an integer of at least {least}")
        return value

    def _found(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is None:
            raise CheckpointError(f"key {names[0]!r} is missing", where=self.where, fix="restore config.json")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"key {name!r} is {value!r}", where=self.where, expected=expected)
