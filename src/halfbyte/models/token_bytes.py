"""The bytes that a vocabulary entry stands for, by the kind of its tokenizer's decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["decoder_kind", "entry_bytes"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def decoder_kind(decoder: Mapping[str, Any] | None) -> str:
    """``byte_level`` (GPT-2's alphabet), ``byte_fallback`` (SentencePiece's ``<0x0A>``), or ``other``, from tokenizer.json."""
    if decoder is None:
        return "other"
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts or ()}
    if "ByteLevel" in kinds:
        return "byte_level"
    return "byte_fallback" if "ByteFallback" in kinds else "other"


def entry_bytes(entry: str, kind: str) -> bytes | None:
    """Bytes of an entry that is no special token; None where only decoding tells."""
    if kind == "byte_level":
        try:
            return bytes(_ALPHABET[character] for character in entry)
        except KeyError:
            return None
    if kind == "byte_fallback":
        found = _BYTE.fullmatch(entry)
        return bytes([int(found[1], 16)]) if found else entry.replace("\u2581", " ").encode("utf-8")
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
