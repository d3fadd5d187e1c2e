"""The backend of a run's rollouts, as its configuration names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from halfbyte.config import Config
from halfbyte.envs import Environment
from halfbyte.guidance.cache import Shelf
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels
from halfbyte.learner.ranks import Ranks
from halfbyte.models.architecture import Architecture
from halfbyte.models.open_model import model_folder
from halfbyte.models.precision import Precision
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.rollout.engine import Engine
from halfbyte.train.background import BackgroundRollouts
from halfbyte.train.budgets import engine_options
from halfbyte.train.ranks import led_rollouts, local_rollouts
from halfbyte.train.rollouts import Rollouts
from halfbyte.train.vllm_rollouts import VllmRollouts, VllmSettings

__all__ = ["open_rollouts"]


def open_rollouts(
    config: Config,
    ranks: Ranks,
    architecture: Architecture,
    precision: Precision,
    kernels: Kernels,
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    environment: Environment,
    tokenizer: Tokenizer,
    tokenizer_path: Path | None,
    longest: int,
    prompt_limit: int,
    guidance: Plan,
    folder: Path,
    ray_address: str | None = None,
) -> Rollouts:
    """A backend that is not connected yet.

    Arguments:
        tensors: the learner's published weights, ``version`` of them.
        tokenizer_path: folder of its files, for workers elsewhere.
        longest, prompt_limit: tokens of a sequence, and of a prompt.
        guidance: what is recorded at first.
        folder: of the run.
        ray_address: the cluster of ``rollout.backend = "ray"``; None takes ``RAY_ADDRESS``, or starts Ray on this machine.
    """
    rollout = config.rollout

    def vllm() -> Rollouts:
        settings = VllmSettings(
            rollout.url,
            rollout.python,
            model_folder(config.model.path),
            folder / "vllm.log",
            max_length=longest,
            arguments=rollout.server_arguments,
            store=None if rollout.store == "auto" else rollout.store,
            verify_every=rollout.verify_every,
        )
        served = VllmRollouts(settings, architecture, precision, environment, tokenizer, prompt_limit)
        served.guide(guidance)
        return served

    def ray() -> Rollouts:
        from halfbyte.train.ray.opening import open_ray_rollouts

        assert tokenizer_path is not None
        return open_ray_rollouts(
            config,
            architecture,
            precision,
            kernels,
            tensors,
            version=version,
            tokenizer=tokenizer_path,
            longest=longest,
            prompt_limit=prompt_limit,
            guidance=guidance,
            folder=folder,
            address=ray_address,
        )

    def engine() -> Engine:
        return Engine(
            architecture,
            precision,
            tensors,
            detokeniser=tokenizer,
            options=engine_options(config, longest),
            kernels=kernels,
            version=version,
            guidance=guidance,
            shelf=Shelf(config.alignment.memory_mb, folder),
        )

    def background() -> Rollouts:
        width = rollout.prompts_per_step * rollout.samples_per_prompt
        return BackgroundRollouts(engine(), environment, tokenizer, guidance, width=width, prompt_limit=prompt_limit)

    if rollout.backend == "local" and not rollout.overlap:
        return local_rollouts(ranks, tensors, engine(), environment, tokenizer, prompt_limit)
    make = {"vllm": vllm, "ray": ray, "local": background}[rollout.backend]
    return led_rollouts(ranks, precision, make)
