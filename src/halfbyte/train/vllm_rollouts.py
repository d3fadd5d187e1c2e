"""Episodes by a vLLM server: ``rollout.backend = "vllm"``.

The server is somebody else's (by URL) or one of our own, started from the run's model. It reads the run's refit store itself, so
weights reach it as deltas; see ``halfbyte.rollout.vllm``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from halfbyte.envs import Environment
from halfbyte.errors import ConfigError
from halfbyte.guidance.plan import Plan
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.refit.patch import Update
from halfbyte.rollout.code_changes import CodeChanges
from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.engine import VllmEngine
from halfbyte.rollout.vllm.server import VllmServer
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.rollouts import Deployed, PlayedAtOnce, WeightSource

__all__ = ["VllmRollouts", "VllmSettings"]


@dataclass(frozen=True)
class VllmSettings:
    """Where the server is, or how to start one.

    Arguments:
        url: of a running server; None starts one.
        python: interpreter of the environment with vLLM, for a server of our own.
        model: folder that such a server is started from.
        log: where it writes.
        max_length: its longest sequence.
        arguments: more of its command line.
        store: address of the refit store as the server reaches it; None for its folder.
        verify_every: see :class:`~halfbyte.rollout.vllm.engine.VllmEngine`.
    """

    url: str | None
    python: str | None
    model: Path
    log: Path
    max_length: int | None = None
    arguments: tuple[str, ...] = ()
    store: str | None = None
    verify_every: int = 1


class VllmRollouts(PlayedAtOnce):
    """Episodes by a vLLM server; see :class:`~halfbyte.train.rollouts.Rollouts`.

    Arguments:
        precision: what trajectories record; the server has to run it.
        environment, tokenizer, prompt_limit: see :class:`~halfbyte.train.rollouts.PlayedAtOnce`.

    Attributes:
        engine: there after :meth:`connect`.
    """

    in_fp4 = False
    weights: RolloutWeights | None = None

    def __init__(
        self,
        settings: VllmSettings,
        arch: Architecture,
        precision: Precision,
        environment: Environment,
        tokenizer: Tokenizer,
        prompt_limit: int | None = None,
    ) -> None:
        super().__init__(environment, tokenizer, prompt_limit)
        self.settings, self.arch, self.precision = settings, arch, precision
        self.engine: VllmEngine
        self._server: VllmServer | None = None

    @property
    def _engine(self) -> VllmEngine:
        return self.engine

    def connect(self, source: WeightSource) -> None:
        """Start the server if it is to be ours, and bring it to the store's HEAD.

        Raises:
            VllmError: it cannot be started, reached or used.
            RefitError, WrongWeightsError: it does not take the weights.
        """
        settings, url = self.settings, self.settings.url
        if url is None:
            assert settings.python is not None, "the configuration asks for one or the other"
            self._server = VllmServer(
                settings.python,
                str(settings.model.resolve()),
                settings.log,
                max_length=settings.max_length,
                extra=settings.arguments,
            )
            url = self._server.url
        self.engine = VllmEngine(VllmClient(url), self.arch, self.precision, verify_every=settings.verify_every)
        self.engine.connect(settings.store or str(source.store.resolve()), source.stamp)
        self._since = time.perf_counter()

    def deploy(self, update: Update) -> Deployed:
        """See :class:`~halfbyte.train.rollouts.Rollouts`. The worker fetches in the pause; verifying counts as staging."""
        done = self.engine.update(update.target)
        return Deployed(
            CodeChanges(), 0.0 if done.verification is None else done.verification.seconds, done.pause_seconds
        )

    def guide(self, plan: Plan) -> None:
        """See :class:`~halfbyte.train.rollouts.Rollouts`.

        Raises:
            ConfigError: a plan that is not empty.
        """
        if len(plan):
            raise ConfigError(
                "vLLM records no guidance", where="alignment.method", expected='"none"', fix='rollout.backend = "local"'
            )

    def close(self) -> None:
        """End the server if it is ours."""
        super().close()
        if self._server is not None:
            self._server.close()
            self._server = None
