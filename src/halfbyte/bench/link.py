"""A refit over a slow link, measured: a throttled HTTP server in front of a store, and a subscriber that goes through it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rich.table

from halfbyte.bench.refit_traces import to_bf16
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.arrays import TensorInfo
from halfbyte.refit.codec import Profile
from halfbyte.refit.errors import TargetError
from halfbyte.refit.plan import Scenario, plan
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store import FilesystemStore, open_store
from halfbyte.refit.subscriber import Subscriber

__all__ = ["LinkRow", "adam_like_step", "link_table", "race", "throttled"]

Words = npt.NDArray[np.uint16]
#: A full transfer takes this many seconds over the link.
FULL_SECONDS = 500.0
TENSOR = 1 << 24
_PIECE = 1 << 14
_DIFFERENT = 8  # tensors


@dataclass(frozen=True)
class LinkRow:
    """One refit.

    Arguments:
        bytes: of the weights, and over the link for the refit.
        link_bytes_per_s: measured while a part of the full version went over the link.
        full_seconds: what all of it takes at that rate, or at the link's nominal one if that is higher; not waited for.
        refit_seconds: from the subscriber's look at HEAD until the new version is served.
        pause_seconds: of them, with the target stopped.
        encode_seconds: of the publisher, before.
        predicted_seconds: of the refit, by ``halfbyte.refit.plan``.
    """

    change_rate: float
    profile: str
    bytes: int
    link_bytes: int
    link_bytes_per_s: float
    full_seconds: float
    refit_seconds: float
    pause_seconds: float
    encode_seconds: float
    predicted_seconds: float
    exact: bool

    @property
    def speedup(self) -> float:
        """Full transfer over refit."""
        return self.full_seconds / self.refit_seconds

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return asdict(self) | {"speedup": self.speedup}


class _Bucket:
    """Lets ``rate`` bytes a second through, over all connections together.

    A sender that the machine did not run for a moment catches up, as a link does that goes on filling socket buffers; a link
    that nobody used has nothing saved up.
    """

    _BUFFERED = 0.25  # seconds

    def __init__(self, rate: float) -> None:
        self.rate, self.lock, self.free_at = rate, threading.Lock(), time.monotonic()
        self.sent = self.users = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around an answer."""
        with self.lock:
            if not self.users:
                self.free_at = max(self.free_at, time.monotonic())
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1

    def wait(self, count: int) -> None:
        with self.lock:
            now = time.monotonic()
            self.free_at = max(self.free_at, now - self._BUFFERED) + count / self.rate
            self.sent += count
            pause = self.free_at - now
        if pause > 0:
            time.sleep(pause)


@contextmanager
def throttled(folder: Path, rate: float) -> Iterator[tuple[str, _Bucket]]:
    """Serve a folder over HTTP on this machine at ``rate`` bytes a second in all: (address, counter)."""
    bucket = _Bucket(rate)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = (folder / self.path.lstrip("/")).resolve()
            if not path.is_file() or folder.resolve() not in path.parents:
                self.send_error(404)
                return
            data = path.read_bytes()
            begin, end, status = 0, len(data), 200
            span = self.headers.get("Range", "")
            if span.startswith("bytes="):
                first, _, last = span.removeprefix("bytes=").partition("-")
                begin, end, status = int(first), min(int(last) + 1 if last else len(data), len(data)), 206
            self.send_response(status)
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            with bucket.used():
                for at in range(begin, end, _PIECE):
                    piece = data[at : min(at + _PIECE, end)]
                    bucket.wait(len(piece))
                    self.wfile.write(piece)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bucket
    finally:
        server.shutdown()
        server.server_close()


def adam_like_step(bits: Words, size: float, rng: np.random.Generator) -> Words:
    """BF16 weights after an update of N(0, size), with FP32 masters anywhere within the rounding cell of each weight."""
    weights = (bits.astype(np.uint32) << 16).view(np.float32)
    cell = np.float32(2.0) ** (np.frexp(weights)[1] - 8).astype(np.float32)
    masters = weights + (rng.random(bits.size, np.float32) - np.float32(0.5)) * cell
    return to_bf16(masters + rng.standard_normal(bits.size, np.float32) * np.float32(size))


def step_of_rate(bits: Words, rate: float) -> float:
    """The size of update at which that share of the weights changes, found on a sample."""
    sample = bits[: 1 << 18]
    low, high = 1e-9, 1e-2
    for _ in range(24):
        middle = (low * high) ** 0.5
        changed = float((adam_like_step(sample, middle, np.random.default_rng(0)) != sample).mean())
        low, high = (middle, high) if changed < rate else (low, middle)
    return float((low * high) ** 0.5)


def race(
    size: int,
    *,
    rates: Sequence[float] = (0.01, 0.03, 0.05),
    profile: Profile = "max",
    full_seconds: float = FULL_SECONDS,
    folder: Path | None = None,
) -> Iterator[LinkRow]:
    """One refit for each change rate, over a link that would take ``full_seconds`` for all of the weights.

    Arguments:
        size: bytes of the weights, in BF16 tensors of 2**24 elements. There are eight different ones, which repeat under other
            names: streams are compressed by themselves and objects named with their entries, so nothing is gained by it.
        folder: where the store lies; a temporary one by default.
    Raises:
        TargetError: a refit did not happen.
    """
    with tempfile.TemporaryDirectory(dir=folder) as root:
        rng = np.random.default_rng(0)
        counts = [min(TENSOR, size // 2 - begin) for begin in range(0, size // 2, TENSOR)]
        drawn: dict[tuple[int, int], Words] = {}  # by place in the cycle and length

        def tensors(draw: Callable[[str, int], Words]) -> dict[str, Words]:
            keys = [(i % _DIFFERENT, n) for i, n in enumerate(counts)]
            for i, key in enumerate(keys):
                if keys.index(key) == i:
                    drawn[key] = draw(f"w{i}", counts[i])
            return {f"w{i}": drawn[key] for i, key in enumerate(keys)}

        held = tensors(lambda name, n: to_bf16(rng.standard_normal(n, np.float32) * np.float32(0.02)))
        infos = {name: TensorInfo(name, "BF16", (len(w),)) for name, w in held.items()}
        store = FilesystemStore(Path(root) / "store")
        options = PublishOptions(profile=profile, ties="separate", skip_levels=0, anchor_every=0)
        publisher = Publisher(store, "link", options=options, baseline=Path(root) / "baseline")
        first = publisher.publish(held, infos=infos)
        own = {name: w.copy() for name, w in held.items()}
        target = ArraysTarget(own, infos=infos, stamp=first.stamp)
        total = sum(w.nbytes for w in held.values())
        with throttled(Path(root) / "store", total / full_seconds) as (address, bucket):
            subscriber = Subscriber(open_store(address), target, audit_anchors=False)
            subscriber.refit()  # the hashes of what it holds, as any reader has them
            for rate in rates:
                update = step_of_rate(held["w0"], rate)
                before_step = held
                held = tensors(partial(_step, before_step, update, rng))
                changes = sum(int((held[name] != before_step[name]).sum()) for name in held)
                del before_step
                done = publisher.publish(held, infos=infos)
                measured = _link_rate(address, root, total / full_seconds)
                before, started = bucket.sent, time.perf_counter()
                refit = subscriber.refit()
                seconds = time.perf_counter() - started
                if refit is None:
                    raise TargetError("the subscriber found nothing to do", where=f"version {done.stamp.version}")
                scenario = Scenario(
                    total / 2, changes * 2 / total, measured, profile=profile, latency=0.0, pause=refit.pause_seconds
                )
                seconds_by_phase = plan(scenario).delta_seconds
                yield LinkRow(
                    change_rate=changes * 2 / total,
                    profile=profile,
                    bytes=total,
                    link_bytes=bucket.sent - before,
                    link_bytes_per_s=measured,
                    full_seconds=total / max(measured, bucket.rate),
                    refit_seconds=seconds,
                    pause_seconds=refit.pause_seconds,
                    encode_seconds=done.encode_seconds,
                    predicted_seconds=sum(v for k, v in seconds_by_phase.items() if k != "encode"),
                    exact=all(np.array_equal(own[name], held[name]) for name in held),
                )


def _step(held: Mapping[str, Words], update: float, rng: np.random.Generator, name: str, n: int) -> Words:
    return adam_like_step(held[name], update, rng)


def _link_rate(address: str, root: str, rate: float) -> float:
    """Bytes a second that the link lets through, from about a second of the largest object."""
    largest = max((Path(root) / "store").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    key = largest.relative_to(Path(root) / "store").as_posix()
    started = time.perf_counter()
    data = open_store(address).get_range(key, 0, max(_PIECE, int(rate)))
    return len(data) / (time.perf_counter() - started)


def link_table(rows: Sequence[LinkRow]) -> rich.table.Table:
    """One line a refit."""
    title = "refits over a throttled link"
    out = rich.table.Table("changed", "profile", title=title, title_justify="left")
    for name in ("weights MB", "sent MB", "full s", "refit s", "predicted s", "times sooner", "pause ms", "encode s"):
        out.add_column(name, justify="right")
    out.add_column("exact")
    for row in rows:
        out.add_row(
            f"{row.change_rate:.2%}",
            row.profile,
            f"{row.bytes / 1e6:.0f}",
            f"{row.link_bytes / 1e6:.2f}",
            f"{row.full_seconds:.0f}",
            f"{row.refit_seconds:.2f}",
            f"{row.predicted_seconds:.2f}",
            f"{row.speedup:.1f}",
            f"{1e3 * row.pause_seconds:.1f}",
            f"{row.encode_seconds:.2f}",
            "yes" if row.exact else "NO",
        )
    return out
