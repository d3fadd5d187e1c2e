"""Small text and JSON files, whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_object", "write_object", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name of this process, sync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_object(path: Path, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON object; NaN and infinity are bugs here."""
    separators = (",", ":") if indent is None else None
    write_text(path, json.dumps(value, indent=indent, separators=separators, sort_keys=True, allow_nan=False) + "\n")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or none that can be read as such."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
