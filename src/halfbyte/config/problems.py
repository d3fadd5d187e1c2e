"""What is wrong with a configuration, in words: keys by name, where each came from, what may have been meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from halfbyte.errors import ConfigError

AnySection = TypeVar("AnySection", bound=BaseModel)
#: What other trainers call our keys, for suggestions.
_ALIASES = {
    "learning_rate": "lr", "max_grad_norm": "clip_norm", "num_generations": "samples_per_prompt",
    "max_new_tokens": "max_tokens", "max_steps": "steps", "num_train_epochs": "epochs", "output_dir": "out",
}  # fmt: skip


@dataclass
class Origins:
    """Which source set a key, for messages. ``default`` covers keys that no flag or ``--set`` touched."""

    default: str
    keys: dict[str, str] = field(default_factory=dict)

    def of(self, key: str, about: str = "") -> str:
        """The source of ``key``, or of a key inside it: of one that the text ``about`` what is wrong names, if there is one."""
        inside = [source for name, source in self.keys.items() if f"{name}.".startswith(f"{key}.")]
        around = [source for name, source in self.keys.items() if f"{key}.".startswith(f"{name}.")]
        words = set(re.findall(r"\w+", about))
        named = [s for name, s in self.keys.items() if name.startswith(f"{key}.") and name.rpartition(".")[2] in words]
        return (around or named or inside or [self.default])[-1]


def validated(model: type[AnySection], data: Mapping[str, Any], where: str) -> AnySection:
    """``model(**data)``, for small option tables of other modules.

    Raises:
        ConfigError: naming every key that is unknown or has a value that cannot be used.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise explain(error, model, Origins(where)) from error


def explain(error: ValidationError, model: type[BaseModel], origins: Origins) -> ConfigError:
    """One message with a line for each wrong key: its dotted name, what is wrong, what it may have meant."""
    problems: dict[str, list[str]] = {}
    for entry in error.errors(include_url=False):
        key = _key(model, entry["loc"])
        if entry["type"] == "extra_forbidden":
            text = f"unknown key{_suggestion(model, key)}"
        elif entry["type"] == "value_error":
            text = str(entry["ctx"]["error"])
        elif entry["type"] == "missing" and isinstance(entry["loc"][-1], int):  # of betas, our one pair
            text = f"takes two numbers, got {_short(entry['input'])}"
        elif entry["type"] == "missing":
            text = "is required"
        else:
            text = f"{entry['msg'][0].lower()}{entry['msg'][1:]}, got {_short(entry['input'])}"
        texts = problems.setdefault(key, [])
        if text not in texts:
            texts.append(text)
    lines = [f"{key}: {'; or '.join(texts)}" if key else "; ".join(texts) for key, texts in problems.items()]
    sources = list(dict.fromkeys(origins.of(key, "; ".join(texts)) for key, texts in problems.items()))
    return ConfigError("; ".join(lines), where=", ".join(sources))


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three of ``known`` that look like ``name``, best first."""
    lowered = {item.lower(): item for item in known}
    return [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]


def _suggestion(model: type[BaseModel], key: str) -> str:
    names = dict(field_names(model))
    parent, _, leaf = key.rpartition(".")
    siblings = [n.rpartition(".")[2] for n in names if n.rpartition(".")[0] == parent]
    elsewhere = [n for n in names if n.rpartition(".")[2] == leaf]
    prefix = f"{parent}." if parent else ""
    meant = [n for n in names if n.rpartition(".")[2] == _ALIASES.get(leaf.lower())]
    guesses = meant + [prefix + n for n in close_names(leaf, siblings)] + elsewhere
    if guesses:
        return f" (did you mean {' or '.join(dict.fromkeys(guesses))}?)"
    return f" (known{f' in {parent}' if parent else ''}: {', '.join(siblings)})"


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def field_names(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        if (section := section_of(info)) is not None:
            yield from field_names(section, f"{prefix}{name}.")


def _key(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Dotted key of an error: pydantic adds the member of a union, which means nothing to a user."""
    names, key = dict(field_names(model)), ""
    for part in location:
        if key in names and section_of(names[key]) is None:
            break
        key = f"{key}.{part}" if key else str(part)
    return key


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
