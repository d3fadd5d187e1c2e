"""``halfbyte refit bench``: what a changed weight costs and how fast codecs are, ours beside others, every result checked.

Speeds are bytes of the BF16 weights that a codec looked at, by processor seconds of this process, whatever else the machine does.
Encoding is timed with the hashes of the base at hand, as a publisher has them. Codecs take turns within a round. Both sides
should not lie a power of two apart: memory answers a quarter slower then (64 MB, measured), so the default is no such size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rich.table

from halfbyte.bench.refit_traces import TRACES, AdamTrace
from halfbyte.bench.rivals import RIVALS, Rival, installed_rivals
from halfbyte.errors import DataError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec import Profile, TensorDelta, apply, block_hashes, encode
from halfbyte.refit.fetch import Fetcher
from halfbyte.refit.head import read_catalogue, read_head
from halfbyte.refit.objects import read_object
from halfbyte.refit.store import open_store

__all__ = ["CodecRow", "Trace", "measure", "run_versions", "schemes", "table", "traces"]

Words = npt.NDArray[np.uint16]
#: A run's trace is its last so many updates.
STEPS = 20


@dataclass(frozen=True, eq=False)
class Trace:
    """Updates to measure.

    Arguments:
        name: for the table.
        steps: makes (base, target) of each update, BF16 bits [n].
    """

    name: str
    steps: Callable[[], Iterator[tuple[Words, Words]]]


@dataclass(frozen=True)
class CodecRow:
    """One codec on one trace, over all its updates.

    Arguments:
        change_rate: share of the weights whose bits change.
        bytes_per_change: payload bytes by changed weights.
        encode_gb_per_s, apply_gb_per_s: medians over updates and rounds.
        exact: every update gave the target to the bit.
    """

    scheme: str
    trace: str
    change_rate: float
    bytes_per_change: float
    encode_gb_per_s: float
    apply_gb_per_s: float
    exact: bool
    updates: int
    elements: int

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return asdict(self)


def schemes(profiles: Sequence[Profile]) -> tuple[list[Rival], list[str]]:
    """Ours first, then the rivals, then what is installed; and a line for what is not."""
    found, absent = installed_rivals()
    return [*(_ours(profile) for profile in profiles), *RIVALS, *found], absent


def _ours(profile: Profile) -> Rival:
    hashes: dict[int, npt.NDArray[np.uint64]] = {}

    def encoded(base: Words, target: Words) -> TensorDelta:
        known = hashes.get(id(base))
        if known is None:
            hashes.clear()
            known = hashes[id(base)] = block_hashes("BF16", base.view(np.uint8))
        return encode("BF16", base.view(np.uint8), target.view(np.uint8), profile, base_hashes=known)

    def applied(data: Words, delta: TensorDelta) -> Words:
        done = apply("BF16", data.view(np.uint8), delta)
        assert not done.damaged
        return data

    return Rival(f"halfbyte {profile}", encoded, applied, lambda delta: delta.n_bytes)


def traces(elements: int, run: Path | None) -> Iterator[Trace]:
    """The synthetic traces, and the last updates of a run folder or store.

    Raises:
        DataError: the run holds no updates of BF16 weights.
    """

    def synthetic(lr: float, signal: float) -> Callable[[], Iterator[tuple[Words, Words]]]:
        return lambda: iter([AdamTrace(elements, lr, signal).step()])

    for name, (lr, signal) in TRACES.items():
        yield Trace(f"Adam {name}", synthetic(lr, signal))
    if run is not None:
        store = run / "refit" if (run / "refit").is_dir() else run
        count = sum(1 for _ in run_versions(store))
        if not count:
            raise DataError(
                "no updates of BF16 weights",
                where=str(store),
                expected="a run folder, or a store with several versions",
            )
        name = f"{run.resolve().name}, {min(count, STEPS)} steps"
        yield Trace(name, lambda: islice(run_versions(store), max(0, count - STEPS), None))


def run_versions(store: Path) -> Iterator[tuple[Words, Words]]:
    """All BF16 weights before and after each version of a store, one after the other in order of name."""
    opened = open_store(str(store))
    found = read_head(opened)
    if found is None:
        return
    fetcher = Fetcher(opened)
    held: dict[str, Bytes] = {}
    last: Words | None = None
    for edge in sorted(read_catalogue(opened, found[0]).edges, key=lambda e: e.version):
        if edge.kind == "skip" or (edge.kind == "full" and held):
            continue
        manifest = fetcher.manifest(edge.manifest)
        objects = fetcher.objects(manifest.objects)
        entries = {n: data for ref in manifest.objects for n, data in read_object(objects[ref.digest]).items()}
        for change in (c for c in manifest.tensors if c.info.dtype == "BF16" and c.object is not None):
            name = change.info.name
            if change.operation == "patch":
                apply("BF16", held[name], TensorDelta.from_bytes(entries[name]))
            else:
                held[name] = np.array(entries[name])
        now = np.concatenate([held[name] for name in sorted(held)]).view(np.uint16) if held else np.empty(0, np.uint16)
        if last is not None and last.size == now.size and edge.kind != "noop":
            yield last, now
        last = now


@dataclass(eq=False)
class _Tally:
    """What one codec has shown so far."""

    encode: list[float]
    apply: list[float]
    size: int = 0
    exact: bool = True

    def add(self, rival: Rival, base: Words, target: Words, work: Words, *, first: bool) -> None:
        """One round."""
        work[:] = base
        started = time.process_time()
        payload = rival.encode(base, target)
        encoded = time.process_time()
        after = rival.apply(work, payload)
        applied = time.process_time()
        self.encode.append(base.nbytes / max(encoded - started, 1e-9))
        self.apply.append(base.nbytes / max(applied - encoded, 1e-9))
        if first:
            self.size += rival.size(payload)
            self.exact = self.exact and bool(np.array_equal(after, target))


def measure(trace: Trace, contestants: Sequence[Rival], *, repeats: int) -> Iterator[CodecRow]:
    """Rows of all contestants on one trace."""
    found = {rival.name: _Tally([], []) for rival in contestants}
    changes = elements = updates = 0
    for base, target in trace.steps():
        changed = int((base != target).sum())
        changes, elements, updates = changes + changed, elements + base.size, updates + 1
        work = np.empty_like(base)
        for turn in range(max(1, repeats)):
            for rival in contestants if turn % 2 == 0 else reversed(contestants):
                found[rival.name].add(rival, base, target, work, first=turn == 0)
    for name, tally in found.items():
        yield CodecRow(
            name,
            trace.name,
            changes / max(elements, 1),
            tally.size / max(changes, 1),
            statistics.median(tally.encode) / 1e9,
            statistics.median(tally.apply) / 1e9,
            tally.exact,
            updates,
            elements // max(updates, 1),
        )


def table(rows: Sequence[CodecRow]) -> rich.table.Table:
    """One line a trace and codec."""
    out = rich.table.Table("trace", "codec", title="deltas of BF16 weights", title_justify="left")
    for name in ("changed", "bytes a change", "encode GB/s", "decode + apply GB/s", "of dense XOR"):
        out.add_column(name, justify="right")
    out.add_column("exact")
    dense = {row.trace: row.apply_gb_per_s for row in rows if row.scheme.startswith("dense XOR")}
    for row in rows:
        times = f"{row.apply_gb_per_s / dense[row.trace]:.1f} x" if row.trace in dense else ""
        out.add_row(
            row.trace,
            row.scheme,
            f"{row.change_rate:.2%}",
            f"{row.bytes_per_change:.3f}",
            f"{row.encode_gb_per_s:.2f}",
            f"{row.apply_gb_per_s:.2f}",
            times,
            "yes" if row.exact else "NO",
        )
    return out
