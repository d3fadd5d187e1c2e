"""The backend of a run's rollouts, as its configuration names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from halfbyte.config import Config
from halfbyte.guidance.cache import Shelf
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels
from halfbyte.learner.ranks import Ranks
from halfbyte.models.open_model import model_folder
from halfbyte.rollout.engine import Engine
from halfbyte.train.background import BackgroundRollouts
from halfbyte.train.budgets import engine_options
from halfbyte.train.ranks import led_rollouts, local_rollouts
from halfbyte.train.rollouts import Rollouts
from halfbyte.train.setting import Setting
from halfbyte.train.vllm_rollouts import VllmRollouts, VllmSettings

__all__ = ["open_rollouts"]


def open_rollouts(
    config: Config,
    setting: Setting,
    ranks: Ranks,
    kernels: Kernels,
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    guidance: Plan,
    folder: Path,
    ray_address: str | None = None,
) -> Rollouts:
    """A backend that is not connected yet.

    Arguments:
        tensors: the learner's published weights, ``version`` of them.
        guidance: what is recorded at first.
        folder: of the run.
        ray_address: the cluster of ``rollout.backend = "ray"``; None takes ``RAY_ADDRESS``, or starts Ray on this machine.
    """
    rollout, limit = config.rollout, setting.prompt_limit

    def engine() -> Engine:
        return Engine(
            setting.arch,
            setting.precision,
            tensors,
            detokeniser=setting.tokenizer,
            options=engine_options(config, setting.longest),
            kernels=kernels,
            version=version,
            guidance=guidance,
            shelf=Shelf(config.alignment.memory_mb, folder),
        )

    def led() -> Rollouts:
        if rollout.backend == "vllm":
            return _vllm(config, setting, guidance, folder)
        if rollout.backend == "ray":
            from halfbyte.train.ray.opening import open_ray_rollouts

            return open_ray_rollouts(
                config,
                setting,
                kernels,
                tensors,
                version=version,
                guidance=guidance,
                folder=folder,
                address=ray_address,
            )
        width = rollout.prompts_per_step * rollout.samples_per_prompt
        return BackgroundRollouts(
            engine(), setting.environment, setting.tokenizer, guidance, width=width, prompt_limit=limit
        )

    if rollout.backend == "local" and not rollout.overlap:
        return local_rollouts(ranks, tensors, engine(), setting.environment, setting.tokenizer, limit)
    return led_rollouts(ranks, setting.precision, led)


def _vllm(config: Config, setting: Setting, guidance: Plan, folder: Path) -> VllmRollouts:
    rollout = config.rollout
    settings = VllmSettings(
        rollout.url,
        rollout.python,
        model_folder(config.model.path),
        folder / "vllm.log",
        max_length=setting.longest,
        arguments=rollout.server_arguments,
        store=None if rollout.store == "auto" else rollout.store,
        verify_every=rollout.verify_every,
    )
    served = VllmRollouts(
        settings, setting.arch, setting.precision, setting.environment, setting.tokenizer, setting.prompt_limit
    )
    served.guide(guidance)
    return served
