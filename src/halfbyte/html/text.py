"""Text from elsewhere on a page: what a reader would not see is spelled out, what is long is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

__all__ = ["flatten", "visible"]

LONGEST_TEXT = 4000
#: Characters a page must not obey: controls, and those that turn the direction of text.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Text with control and direction-changing characters spelled out (``\\x1b``), cut to a length that fits a page."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT} more characters)"
    return _UNSEEN.sub(lambda m: m.group().encode("unicode_escape").decode("ascii"), text)


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text, depth first; an empty table or list shows as such."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value)) if value else "[]"
    else:
        yield prefix, "" if value is None else str(value)
