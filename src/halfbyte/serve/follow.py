"""The served weights follow a refit store: fetched and packed beside the served ones, swapped while the engine rests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from halfbyte.errors import UserError
from halfbyte.refit.errors import LayoutError
from halfbyte.refit.fetch import Fetcher
from halfbyte.refit.head import Head, read_catalogue, read_head
from halfbyte.refit.manifest import Signer
from halfbyte.refit.store.protocol import ReadStore
from halfbyte.refit.subscriber import Refit, Subscriber
from halfbyte.refit.target import Target
from halfbyte.rollout.fp4_target import Fp4EngineTarget, fp4_coordinates
from halfbyte.rollout.refit_target import EngineTarget
from halfbyte.serve.loop import EngineLoop
from halfbyte.serve.opening import Opened
from halfbyte.serve.resting import RestingTarget

__all__ = ["Follower"]

_log = logging.getLogger("halfbyte.serve")


class Follower:
    """Refits again and again, in a thread of its own.

    Arguments:
        store: where versions come from.
        opened: what is served.
        loop: gives the engine away for the swap.
        on_refit: told of every refit, and of every error.
        seconds: between looks at the store.
        name: among the store's readers.
        signer: demand signed manifests.
    """

    def __init__(
        self,
        store: ReadStore,
        opened: Opened,
        loop: EngineLoop,
        on_refit: Callable[[Refit | Exception], None],
        *,
        seconds: float,
        name: str,
        signer: Signer | None = None,
    ) -> None:
        self._store, self._opened, self._loop, self._told = store, opened, loop, on_refit
        self._seconds, self._name, self._signer = seconds, name, signer
        self._subscriber: Subscriber | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="halfbyte-follow", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. Call it after the engine's loop has stopped: a refit that waits for the engine then gives up."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                done = self._refit()
            except Exception as error:
                if self._end.is_set():
                    return
                if isinstance(error, UserError):
                    _log.warning("the weights could not follow the store: %s", error)
                else:
                    _log.error("the weights could not follow the store", exc_info=error)
                self._told(error)
            else:
                if done is not None:
                    self._told(done)
                    continue
            self._end.wait(self._seconds)

    def _refit(self) -> Refit | None:
        if self._subscriber is None:
            target = self._target()
            if target is None:
                return None
            self._subscriber = Subscriber(self._store, target, name=self._name, signer=self._signer)
        return self._subscriber.refit()

    def _target(self) -> Target | None:
        """In the coordinates that the store is published in; None while it is empty."""
        found = read_head(self._store)
        if found is None or found[0].version is None:
            return None
        engine, checkpoint = self._opened.engine, self._opened.checkpoint
        if self._coded(found[0]):
            coordinates = fp4_coordinates(engine.arch, engine.precision, checkpoint.tensors, engine.kernels)
            with self._loop.paused():  # packs the same values again, from these arrays
                return RestingTarget(Fp4EngineTarget(engine, coordinates), self._loop)
        if checkpoint.quantisation is not None:
            raise LayoutError(
                "the store holds BF16 weights, the served checkpoint FP4 codes",
                where=str(checkpoint.folder),
                fix="serve the checkpoint that the store's run began with, or publish in FP4 coordinates",
            )
        return RestingTarget(EngineTarget(engine, checkpoint.tensors), self._loop)

    def _coded(self, head: Head) -> bool:
        """Whether the store is in FP4 coordinates: a full version names all tensors, others those that changed."""
        fetcher = Fetcher(self._store, signer=self._signer)
        edges = sorted(read_catalogue(self._store, head).edges, key=lambda edge: edge.kind != "full")
        for edge in edges:
            names = [tensor.info.name for tensor in fetcher.manifest(edge.manifest).tensors]
            if any(name.endswith((".codes", ".scales")) for name in names):
                return True
            if edge.kind == "full":
                return False
        return False
