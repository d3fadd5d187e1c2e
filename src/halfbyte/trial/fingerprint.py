"""What a model folder holds, as one digest, without reading all of a large checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from halfbyte.trial.canonical import digest

__all__ = ["fingerprint"]

_WHOLE = 16 << 20  # files up to this size are read whole
_PIECE, _PIECES = 1 << 16, 64


def fingerprint(folder: Path) -> str:
    """SHA-256 over names, sizes and content of the files of a folder.

    Of files above 16 MiB only 64 evenly spaced pieces of 64 KiB count, first and last included: another checkpoint, precision
    or shard differs there; a change of a few weights by hand may not.
    """
    return digest(
        {path.name: _file(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}
    )


def _file(path: Path) -> str:
    size = path.stat().st_size
    sha = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            sha.update(file.read())
        else:
            for piece in range(_PIECES):
                file.seek((size - _PIECE) * piece // (_PIECES - 1))
                sha.update(file.read(_PIECE))
    return sha.hexdigest()
