"""A subscriber's memory on disk: what it has seen, and for weights that outlive it, what it was writing.

Phases of weights that survive their process:

    idle        the target holds ``stamp``
    committing  some of the log's new values may be written; the log is complete and durable

A process that starts in ``committing`` writes the log's new values over whatever is there (or its old ones, where the ranks
decided to go back). Both are whole versions; a mixture is never left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import block_count
from halfbyte.refit.disk import Disk
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.manifest import canonical
from halfbyte.refit.objects import read_object, write_object
from halfbyte.refit.patch import BlockPatch, Change, Stamp, Update
from halfbyte.refit.state import StateHash

__all__ = ["Journal", "Record", "update_from_bytes", "update_to_bytes"]

_FORMAT = "halfbyte-refit-journal/1"


@dataclass(frozen=True)
class Record:
    """What the journal says.

    Arguments:
        phase: ``idle`` or ``committing``.
        stamp: the version held, or held before the commit in progress.
        seen: the highest (epoch, version) ever seen in HEAD.
        ballot: name of the ranks' vote on the commit in progress; "" without ranks.
        log: digest of the log in progress; "" when idle.
    """

    phase: str = "idle"
    stamp: Stamp | None = None
    seen: tuple[int, int] = (0, -1)
    ballot: str = ""
    log: str = ""


class Journal:
    """One record, replaced atomically, and one log.

    Arguments:
        folder: where both lie; made when something is written.
        disk: the file operations.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk = folder, disk
        self.path, self.log_path = folder / "journal.json", folder / "commit.log"
        self.state_path = folder / "hashes.safetensors"
        self.record = self._read()

    def write(self, **changes: Any) -> None:
        """Replace fields of the record, durably."""
        record = replace(self.record, **changes)
        if record == self.record and self.path.exists():
            return
        self.disk.make_folders(self.folder)
        self.disk.publish(self.path, [canonical({"format": _FORMAT, **asdict(record)})])
        self.record = record

    def begin(self, update: Update, ballot: str) -> None:
        """Keep the log, then say that a commit is in progress."""
        data = update_to_bytes(update)
        self.disk.make_folders(self.folder)
        self.disk.publish(self.log_path, [data])
        self.write(phase="committing", stamp=update.source, ballot=ballot, log=hashlib.sha256(data).hexdigest())

    def end(self, stamp: Stamp | None, state: StateHash | None = None) -> None:
        """The target holds ``stamp``, whole; ``state`` has its block hashes, for finding damage later."""
        if state is not None:
            self.disk.make_folders(self.folder)
            self.disk.publish(self.state_path, [state_to_bytes(state)])
        self.write(phase="idle", stamp=stamp, ballot="", log="")
        self.disk.remove(self.log_path)

    def state(self) -> StateHash | None:
        """Block hashes of the version held; None where they were not kept (then only the bytes can tell)."""
        try:
            state = state_from_bytes(self.state_path.read_bytes())
        except (OSError, RefitError, ValueError, KeyError, TypeError):
            return None  # a hint only: it is held against the stamp's digest
        stamp = self.record.stamp
        return state if stamp is not None and state.digest() == stamp.state else None

    def pending(self) -> Update | None:
        """The update whose commit was interrupted; None when idle.

        Raises:
            CorruptError: the log is missing or damaged, which no crash can cause.
        """
        if self.record.phase == "idle":
            return None
        try:
            data = self.log_path.read_bytes()
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != self.record.log:
            raise CorruptError(
                "the log of an interrupted commit is damaged",
                where=str(self.log_path),
                fix="reload the target's weights",
            )
        return update_from_bytes(data)

    def _read(self) -> Record:
        try:
            value = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return Record()
        except ValueError as error:
            raise CorruptError(
                f"not JSON: {error}", where=str(self.path), fix="delete the subscriber's folder"
            ) from error
        try:
            if value.pop("format") != _FORMAT or value["phase"] not in ("idle", "committing"):
                raise ValueError("another format")
            stamp = value.pop("stamp")
            seen = tuple(value.pop("seen"))
            return Record(stamp=None if stamp is None else Stamp(**stamp), seen=(int(seen[0]), int(seen[1])), **value)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptError(
                f"not a subscriber's journal: {error}", where=str(self.path), fix="delete the subscriber's folder"
            ) from error


def update_to_bytes(update: Update) -> bytes:
    """A log: an object with an index and the values, one entry a tensor and side."""
    entries: dict[str, bytes | Bytes] = {}
    rows: list[Any] = []
    for number, change in enumerate(update.changes):
        blocks = [[b.begin, b.new.itemsize, b.count, b.positions is None] for b in change.blocks]
        rows.append([_info(change.before), _info(change.after), blocks, change.old is not None, change.new is not None])
        for key, arrays in (
            ("positions", [b.positions for b in change.blocks if b.positions is not None]),
            ("old", [b.old for b in change.blocks] if change.old is None else [change.old]),
            ("new", [b.new for b in change.blocks] if change.new is None else [change.new]),
        ):
            entries[f"{number}.{key}"] = _joined(arrays)
    index = {"source": update.source and asdict(update.source), "target": asdict(update.target), "changes": rows}
    entries["index"] = canonical(index)
    return write_object(entries)


def update_from_bytes(data: bytes) -> Update:
    """Read a log whose digest was checked."""
    entries = read_object(data)
    index = json.loads(entries["index"].tobytes())
    changes = []
    for number, (before, after, blocks, has_old, has_new) in enumerate(index["changes"]):
        positions = entries[f"{number}.positions"].copy().view(np.uint32)
        old, new = entries[f"{number}.old"].copy(), entries[f"{number}.new"].copy()
        done, place, at = [], 0, 0
        for begin, unit, count, whole in blocks:
            kind, n_bytes = np.dtype(f"<u{unit}"), unit * count
            where = None if whole else positions[place : place + count]
            done.append(BlockPatch(begin, where, *(s[at : at + n_bytes].copy().view(kind) for s in (old, new))))
            place, at = place + (0 if whole else count), at + n_bytes
        first, last = (None if i is None else TensorInfo(i[0], i[1], tuple(i[2])) for i in (before, after))
        changes.append(Change(first, last, tuple(done), old if has_old else None, new if has_new else None))
    source = index["source"]
    return Update(None if source is None else Stamp(**source), Stamp(**index["target"]), tuple(changes))


def state_to_bytes(state: StateHash) -> bytes:
    """Block hashes as an object: an index and 8 bytes a block."""
    rows = [_info(info) for info in state.infos.values()]
    hashes = _joined([state.hashes(name) for name in state.infos])
    return write_object({"index": canonical({"block": state.block, "tensors": rows}), "hashes": hashes})


def state_from_bytes(data: bytes) -> StateHash:
    """What :func:`state_to_bytes` wrote."""
    entries = read_object(data)
    index = json.loads(entries["index"].tobytes())
    hashes, state, at = entries["hashes"].copy().view(np.uint64), StateHash(index["block"]), 0
    for name, dtype, shape in index["tensors"]:
        info = TensorInfo(name, dtype, tuple(shape))
        count = block_count(info.elements, state.block)
        state.put(info, hashes[at : at + count])
        at += count
    return state


def _info(info: TensorInfo | None) -> list[Any] | None:
    return None if info is None else [info.name, info.dtype, list(info.shape)]


def _joined(arrays: Sequence[np.ndarray[Any, Any]]) -> Bytes:
    parts = [array.reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
