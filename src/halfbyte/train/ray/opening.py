"""Rollouts on Ray out of a run's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from halfbyte import __version__
from halfbyte.config import Config
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.ray.cluster import Cluster
from halfbyte.train.ray.events import Events
from halfbyte.train.ray.messages import WorkerSpec
from halfbyte.train.ray.pool import Pool, actor_options
from halfbyte.train.ray.rollouts import RayRollouts, Shadow
from halfbyte.train.setting import Setting

__all__ = ["open_ray_rollouts", "tokenizer_files"]

_BESIDE = 128.0  # MiB of shared memory for what is not guidance
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def open_ray_rollouts(
    config: Config,
    setting: Setting,
    kernels: Kernels,
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    guidance: Plan,
    folder: Path,
    address: str | None = None,
) -> RayRollouts:
    """Connect to Ray, or start it here; workers start when the refit store is there.

    Arguments:
        tensors: the learner's published weights, ``version`` of them.
        folder: of the run. address: of a cluster; None takes ``RAY_ADDRESS``, or starts Ray on this machine.

    Raises:
        MissingExtraError: ray is not installed.
        ClusterError: the cluster does not answer.
    """
    assert setting.tokenizer_path is not None, "it was read from there"
    rollout, arch, precision = config.rollout, setting.arch, setting.precision
    files = tokenizer_files(setting.tokenizer_path)
    options = actor_options(rollout.resources, os.environ)
    cluster = Cluster(
        address or os.environ.get("RAY_ADDRESS") or None,
        memory_mb=config.alignment.memory_mb + _BESIDE,
        resources=tuple(options.get("resources", {})),
    )
    events = Events(folder)

    def make_pool(store: str, headers: dict[str, str], run: str) -> Pool:
        spec = WorkerSpec(
            config.to_json(),
            arch,
            files,
            setting.longest,
            setting.prompt_limit,
            store,
            headers,
            run,
            __version__,
        )
        return Pool(cluster, spec, rollout.workers, options=options, capacity=rollout.max_sequences, events=events)

    pack = partial(RolloutWeights.pack, arch, precision, tensors, kernels)
    return RayRollouts(
        cluster,
        make_pool,
        Shadow(arch, precision, kernels, pack(version=version, n_positions=setting.longest)),
        guidance,
        folder=folder,
        serve=rollout.store == "http" or (rollout.store == "auto" and not cluster.alone),
        events=events,
    )


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """What a tokenizer reads of a model's folder."""
    return {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
