"""Files, flags and ``--set`` into one table of values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from halfbyte.config.problems import Origins, field_names, section_of
from halfbyte.errors import ConfigError


def read_file(path: Path) -> dict[str, Any]:
    """The table in a TOML file, or the object in a ``.json`` file.

    Raises:
        ConfigError: no such file, or not TOML / JSON; with line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = f"the configuration file cannot be read: {error}"
        raise ConfigError(what, where=str(path), expected="a TOML file in UTF-8") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"not {kind}: {error}", where=str(path), fix="mend it; text needs quotes") from error
    if not isinstance(data, dict):
        raise ConfigError("not a table", where=str(path), expected="sections with keys")
    return data


def apply_flags(
    data: dict[str, Any], flags: Mapping[str, object], defaults: Mapping[str, Any], origins: Origins
) -> None:
    """Write the flags that were given (value not None) into ``data``."""
    for key, value in flags.items():
        if value is not None:
            _write(data, key, str(value) if isinstance(value, Path) else value, defaults, "command-line flag")
            origins.keys[key] = "command-line flag"


def apply_settings(
    data: dict[str, Any], sets: Iterable[str], model: type[BaseModel], defaults: Mapping[str, Any], origins: Origins
) -> None:
    """Write ``key=value`` texts into ``data``, each value read by the type of its key.

    Raises:
        ConfigError: no ``=``, an empty key, or a key inside a plain value.
    """
    for setting in sets:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(
                f"{setting!r} sets nothing", where="--set", expected="section.key=value, such as learner.lr=1e-5"
            )
        origin = f"--set {setting}"
        _write(data, key, _read_value(text.strip(), dict(field_names(model)).get(key)), defaults, origin)
        origins.keys[key] = origin


def _write(data: dict[str, Any], key: str, value: object, defaults: Mapping[str, Any], origin: str) -> None:
    *parents, leaf = key.split(".")
    table: dict[str, Any] = data
    default: Any = defaults
    for i, name in enumerate(parents):
        default = default.get(name) if isinstance(default, Mapping) else None
        inner = table.get(name, {} if isinstance(default, Mapping) or default is None else default)
        if isinstance(inner, str) and name == "precision":
            inner = {"preset": inner}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(parents[: i + 1])} is a value, not a table", where=origin, expected="a key of a section"
            )
        table[name] = inner = dict(inner)
        table = inner
    table[leaf] = value


def _read_value(text: str, info: FieldInfo | None) -> Any:
    """The reading of ``text`` that the key's type accepts: none, TOML, bare text, or a list without its brackets."""
    toml = _toml(text)
    readings = [reading for reading in (toml, text) if reading is not None]
    if info is None or section_of(info) is not None:
        return readings[0]
    if get_origin(info.annotation) is tuple and not isinstance(toml, list):
        readings = [reading for reading in (_toml(f"[{text}]"), [text]) if reading is not None]
    adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
    for reading in [None, *readings] if text.lower() in ("none", "null") else readings:
        try:
            return adapter.validate_python(reading)
        except ValidationError:
            continue
    return readings[0]


def _toml(text: str) -> Any:
    try:
        data = tomllib.loads(f"value = {text}")
    except ValueError:
        return None
    return data["value"] if data.keys() == {"value"} else None
