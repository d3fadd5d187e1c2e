"""A rollout worker: an engine that follows the run's weights and plays what it is given. The process behind a Ray actor.

``play`` runs in one thread, bundle after bundle; ``follow`` in another, so
that new weights are fetched while the run still works on its side, and reach samples in flight where they may.
"""

from __future__ import annotations

import os
import threading
import time

from halfbyte import __version__
from halfbyte.errors import ClusterError
from halfbyte.train.ray.messages import Bundle, Hello, Played, WorkerSpec
from halfbyte.train.ray.player import Player

__all__ = ["RolloutWorker"]


class RolloutWorker:
    """One worker.

    Arguments:
        name: unique in the run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._player: Player | None = None
        self._engine = threading.Lock()  # held by whoever steps the engine or changes its weights
        self._state = threading.Condition()
        self._finished = 0  # bundles
        self._wanted = (0, 0)  # a version, and the bundle after which it may come

    def open(self, spec: WorkerSpec) -> Hello:
        """Fetch the weights and make ready.

        Raises:
            UserError: what keeps it from playing.
        """
        if spec.release != __version__:
            raise ClusterError(
                f"halfbyte {__version__} on the node of {self.name}",
                where=os.uname().nodename,
                expected=f"halfbyte {spec.release}, as the run has",
                fix="install the same version on all nodes",
            )
        player = self._player = Player(spec, self.name, before_step=self._between_steps)
        return Hello(os.uname().nodename, os.getpid(), player.version, player.engine.kernels.name)

    def play(self, bundle: Bundle) -> Played:
        """Scored trajectories of a bundle's pieces.

        Raises:
            UserError: a prompt, an activation or the store is not sound.
        """
        player = self._ready()
        try:
            with self._engine:
                return player.play(bundle)
        finally:
            with self._state:
                self._finished += 1
                self._state.notify_all()

    def follow(self, version: int, after: int) -> float:
        """Serve ``version`` as soon as the first ``after`` bundles are finished; the seconds it took to fetch and to stage.

        Raises:
            RefitError: the version cannot be had.
        """
        player = self._ready()
        with self._state:
            self._wanted = max(self._wanted, (version, after))
            self._state.wait_for(lambda: self._finished >= after)
        started = time.perf_counter()
        while player.version < version:
            if self._engine.acquire(timeout=0.05):  # else a bundle is played, which takes it along in flight
                try:
                    player.follower.reach(version)
                finally:
                    self._engine.release()
        return time.perf_counter() - started

    def _between_steps(self) -> None:
        version, after = self._wanted
        player = self._player
        if player is not None and player.version < version and self._finished >= after:
            player.follower.reach(version)

    def _ready(self) -> Player:
        assert self._player is not None, "play before open"
        return self._player
