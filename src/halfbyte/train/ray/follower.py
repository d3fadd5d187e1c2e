"""A run's weights out of its refit store, into an engine: the newest version whole, and from then on what changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import RefitError
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.errors import RewoundError
from halfbyte.refit.patch import Stamp
from halfbyte.refit.store.protocol import ReadStore
from halfbyte.refit.subscriber import Refit, Subscriber
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.refit_target import EngineTarget

__all__ = ["Followed", "Follower", "fetch"]

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}  # what a run publishes


@dataclass
class Followed:
    """What following has cost so far.

    Arguments:
        refits: versions taken after the first. fetched_bytes: of all, the first included.
        seconds: of all, waiting for the store included. pause_seconds: in which no token could be drawn.
    """

    refits: int = 0
    fetched_bytes: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0

    def add(self, done: Refit) -> None:
        """Count a refit."""
        self.refits += 1
        self.fetched_bytes += done.fetched_bytes
        self.seconds += done.prepare_seconds + done.pause_seconds
        self.pause_seconds += done.pause_seconds


def fetch(store: ReadStore, name: str, run: str | None = None) -> tuple[dict[str, Tensor], Stamp, Refit]:
    """All tensors of the store's newest version.

    Raises:
        RefitError: the store is empty, damaged, or of another run.
    """
    tensors: dict[str, Tensor] = {}
    target = ArraysTarget(tensors, make=_tensor)
    done = Subscriber(store, target, name=name, run=run).refit()
    if done is None:
        raise RefitError("the run's refit store is empty", where=repr(store), expected="the run's first version")
    return tensors, done.target, done


def _tensor(info: TensorInfo, data: Bytes) -> Tensor:
    if info.dtype not in _DTYPES:
        raise RefitError(f"a weight of dtype {info.dtype}", where=info.name, expected=" or ".join(_DTYPES))
    return torch.from_numpy(data.copy()).view(_DTYPES[info.dtype]).reshape(info.shape)


class Follower:
    """Keeps an engine at the version that is asked for.

    Arguments:
        store: the run's. name: this reader's, unique among the readers of the store.
        make_engine: an engine that serves tensors under a version.
    """

    def __init__(
        self,
        store: ReadStore,
        name: str,
        make_engine: Callable[[dict[str, Tensor], int], Engine],
        *,
        run: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store, self.clock, self.sleep = store, clock, sleep
        self.cost = Followed()
        started = clock()
        tensors, stamp, done = fetch(store, name, run)
        self.engine = make_engine(tensors, stamp.version)
        self.target = EngineTarget(self.engine, tensors, stamp=stamp)
        self.subscriber = Subscriber(store, self.target, name=name, run=stamp.run)
        self.cost.fetched_bytes, self.cost.seconds = done.fetched_bytes, clock() - started

    @property
    def version(self) -> int:
        """What the engine serves."""
        return self.engine.version

    def reach(self, version: int, patience: float = 300.0) -> None:
        """Go to the store's newest version, which is to be ``version`` or a later one; wait for the store to show it.

        Raises:
            RefitError: it does not within ``patience`` seconds, or cannot be read.
        """
        end, pause = self.clock() + patience, 0.01
        while self.version < version:
            done = self.subscriber.refit()
            if done is not None:
                self.cost.add(done)
                continue
            if self.clock() > end:
                raise RewoundError(
                    f"version {version} is not in the store", where=repr(self.store), expected="what the run published"
                )
            self.sleep(pause)  # a shared file system may show it a moment later
            pause = min(2 * pause, 1.0)
