"""An engine, an environment and a tokenizer that play bundles by the weights of a run's store."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from halfbyte.config import Config
from halfbyte.envs import make_env
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import active
from halfbyte.models.precision import precision_from
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import Trajectory
from halfbyte.refit.store import open_store
from halfbyte.rollout.engine import Engine
from halfbyte.train.budgets import engine_options
from halfbyte.train.collect import play
from halfbyte.train.ray.follower import Follower
from halfbyte.train.ray.messages import Bundle, Played, WorkerSpec

__all__ = ["Player"]


class _Engine(Engine):
    """Lets somebody in between two steps."""

    before_step: Callable[[], None] = staticmethod(lambda: None)

    def step(self) -> list[tuple[int, Trajectory]]:
        self.before_step()
        return super().step()


class Player:
    """Plays bundles, one after the other.

    Arguments:
        spec: the run's. name: this reader's.
        before_step: called before each of the engine's steps; may change its weights.
    """

    def __init__(self, spec: WorkerSpec, name: str, before_step: Callable[[], None]) -> None:
        self.spec = spec
        config = Config.from_json(spec.config, where="the run's configuration")
        settings = dict(config.env.options)
        if config.env.reward is not None:
            settings["reward"] = config.env.reward
        self.environment = make_env(config.env.name, **settings)
        self.tokenizer = _tokenizer(spec.tokenizer)
        self._before_step = before_step
        self._config = config
        options: dict[str, Any] = {"headers": spec.headers} if spec.headers else {}
        self.follower = Follower(open_store(spec.store, **options), name, self._make_engine, run=spec.run)
        self._plan: list[list[Any]] = []

    def _make_engine(self, tensors: dict[str, Tensor], version: int) -> Engine:
        engine = _Engine(
            self.spec.architecture,
            precision_from(self._config.precision),
            tensors,
            detokeniser=self.tokenizer,
            options=engine_options(self._config, self.spec.longest),
            kernels=active(),
            version=version,
        )
        engine.before_step = self._before_step
        return engine

    @property
    def engine(self) -> Engine:
        """What generates."""
        return self.follower.engine

    @property
    def version(self) -> int:
        """What it generates with."""
        return self.follower.version

    def play(self, bundle: Bundle) -> Played:
        """Play all pieces in one batch; the weights are brought to the bundle's version first."""
        self.follower.reach(bundle.version)
        started, drawn = time.perf_counter(), self.engine.tokens_generated
        if bundle.guidance != self._plan:
            self.engine.guide(Plan.from_json(bundle.guidance))
            self._plan = bundle.guidance
        try:
            with nullcontext() if bundle.recorded else self.engine.unrecorded():
                trajectories = self._collect(bundle)
        except BaseException:
            self.engine.abort()  # the next bundle needs an idle engine
            raise
        cost = self.follower.cost
        return Played(
            trajectories,
            time.perf_counter() - started,
            self.engine.tokens_generated - drawn,
            cost.fetched_bytes,
            cost.seconds,
            cost.refits,
        )

    def _collect(self, bundle: Bundle) -> list[list[Trajectory]]:
        played = play(
            self.engine,
            self.environment,
            self.tokenizer,
            bundle.prompts,
            bundle.sampling,
            samples=[(piece.first, piece.count) for piece in bundle.pieces],
            keys=bundle.keys,
            max_prompt_tokens=self.spec.prompt_limit,
        )
        out: list[list[Trajectory]] = [[] for _ in bundle.pieces]
        for t in played:
            place, t.group = t.group, bundle.pieces[t.group].group
            out[place].append(t)
        return out


def _tokenizer(files: dict[str, bytes]) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="halfbyte-tokenizer-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        return Tokenizer.from_folder(folder)
