"""Records and blocks on disk: append only, chained, and whole after a kill at any moment.

A record is one JSON line with a ``chain`` digest over itself and all lines before it, from the lock's digest on. A block's line
follows once its records are synced; it says where they end. What lies behind the last block's end is of a block that was cut
short: it is moved to abandoned.jsonl, kept but not counted, and the block is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from halfbyte.trial.blocks import BlockRecord
from halfbyte.trial.canonical import canonical, next_link
from halfbyte.trial.errors import IntegrityError
from halfbyte.trial.records import Record

__all__ = ["Journal", "read_blocks", "read_records"]


class Journal:
    """The writing side. Opening it recovers from whatever came before.

    Arguments:
        records, blocks, abandoned: files; missing ones are created.
        genesis: digest that the chains start from.

    Raises:
        IntegrityError: finished lines that are damaged or changed; nothing is written then.
    """

    def __init__(self, records: Path, blocks: Path, abandoned: Path, genesis: str) -> None:
        self.finished = read_blocks(blocks, genesis)
        self.records = read_records(records, self.finished, genesis)
        end = self.finished[-1].end if self.finished else 0
        self._chain = self.finished[-1].chain if self.finished else genesis
        self._link = _link_of(blocks, genesis)
        self.abandoned = _set_aside(records, end, abandoned)
        _cut_torn_line(blocks)
        self._records, self._blocks = records.open("ab"), blocks.open("ab")
        self._count = 0

    def write(self, record: Record) -> None:
        """Append a record of the block at hand."""
        data = record.to_json()
        self._chain = next_link(self._chain, data)
        _append(self._records, {**data, "chain": self._chain})
        self._records.flush()
        self.records.append(record)
        self._count += 1

    def commit(self, block: BlockRecord) -> None:
        """Finish a block; ``end``, ``chain``, ``records`` and ``abandoned`` are filled in here."""
        os.fsync(self._records.fileno())
        data = block.to_json() | {
            "records": self._count,
            "end": self._records.tell(),
            "chain": self._chain,
            "abandoned": self.abandoned,
        }
        self._link = next_link(self._link, data)
        _append(self._blocks, {**data, "link": self._link})
        self._blocks.flush()
        os.fsync(self._blocks.fileno())
        self.finished.append(BlockRecord.from_json(data))
        self._count = self.abandoned = 0

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._blocks.close()


def read_blocks(path: Path, genesis: str) -> list[BlockRecord]:
    """The finished blocks; a last line that a kill tore is left out.

    Raises:
        IntegrityError: a line is damaged, changed, missing or out of order.
    """
    link, found = genesis, []
    for number, data in enumerate(_objects(path)):
        stated = data.pop("link", None)
        link = next_link(link, data)
        if stated != link:
            raise _broken(path, number)
        block = BlockRecord.from_json(data, f"{path}, line {number + 1}")
        if block.block != number:
            raise IntegrityError(f"block {block.block} stands where block {number} belongs", where=str(path))
        found.append(block)
    return found


def read_records(path: Path, blocks: list[BlockRecord], genesis: str) -> list[Record]:
    """The records of finished blocks.

    Raises:
        IntegrityError: a record is damaged, changed, missing or added.
    """
    chain, found = genesis, list[Record]()
    data = path.read_bytes() if path.exists() else b""
    start = 0
    for block in blocks:
        lines = data[start : block.end].split(b"\n")
        if block.end > len(data) or lines.pop() or len(lines) != block.records:
            raise IntegrityError(f"block {block.block} has lost or gained records", where=str(path))
        for line in lines:
            value = _object(line, path, len(found))
            stated = value.pop("chain", None)
            chain = next_link(chain, value)
            if stated != chain:
                raise _broken(path, len(found))
            found.append(Record.from_json(value, f"{path}, line {len(found) + 1}"))
        if chain != block.chain:
            raise _broken(path, len(found) - 1)
        start = block.end
    return found


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")
    for number, line in enumerate(lines[:-1]):  # behind the last line end: nothing, or a torn line
        yield _object(line, path, number)


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _broken(path, number) from error
    if not isinstance(value, dict):
        raise _broken(path, number)
    return value


def _broken(path: Path, number: int) -> IntegrityError:
    return IntegrityError(
        "a line is not what was recorded: the chain of digests breaks",
        where=f"{path}, line {number + 1}",
        expected="records as the trial wrote them",
        fix="restore the folder from a copy, or run the trial again in a new folder",
    )


def _link_of(path: Path, genesis: str) -> str:
    link = genesis
    for data in _objects(path):
        link = data["link"]
    return link


def _set_aside(records: Path, end: int, abandoned: Path) -> int:
    """Move what lies behind ``end`` to the file of abandoned records; how many there were."""
    if not records.exists():
        return 0
    with records.open("r+b") as file:
        file.seek(end)
        rest = file.read()
        if not rest:
            return 0
        with abandoned.open("ab") as kept:
            kept.write(rest.rstrip(b"\n") + b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        file.truncate(end)
        os.fsync(file.fileno())
    return rest.rstrip(b"\n").count(b"\n") + 1


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _append(file: BinaryIO, value: dict[str, Any]) -> None:
    file.write(canonical(value).encode("utf-8") + b"\n")
