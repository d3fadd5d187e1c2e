"""What a run of several ranks uses in place of what one process does. All of it is imported only there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from halfbyte.config import Config
from halfbyte.envs import Environment
from halfbyte.errors import ConfigError
from halfbyte.learner.learner import Learner
from halfbyte.learner.ranks import Alone, Ranks
from halfbyte.models.precision import Precision
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.rollout.engine import Engine
from halfbyte.train.rollouts import LocalRollouts, RankedRollouts, Rollouts
from halfbyte.train.run_folder import Bystander, RunFolder
from halfbyte.train.weights import WayOfWeights, WeightPath

__all__ = ["folder_of", "led_rollouts", "local_rollouts", "open_weights", "ranks_of", "sharding"]


@contextmanager
def ranks_of(config: Config) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, or this process alone.

    Raises:
        ConfigError: the configuration asks for what several ranks cannot do.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        yield Alone()
        return
    from halfbyte.train.distributed import joined

    with joined(config) as group:
        _check(config)
        yield group


def sharding(ranks: Ranks) -> dict[str, Any]:
    """Arguments of :class:`Learner` that shard it over the ranks."""
    if ranks.size == 1:
        return {}
    from halfbyte.learner.sharded.group import Group
    from halfbyte.learner.sharded.parameters import ShardedParameters

    assert isinstance(ranks, Group)
    return {"ranks": ranks, "make_parameters": partial(ShardedParameters, group=ranks)}


def folder_of(path: Path, ranks: Ranks) -> RunFolder:
    """The run folder, which rank 0 writes."""
    return RunFolder(path) if ranks.rank == 0 else Bystander(path)


def local_rollouts(
    ranks: Ranks,
    tensors: Mapping[str, Tensor],
    engine: Engine,
    environment: Environment,
    tokenizer: Tokenizer,
    prompt_limit: int,
) -> LocalRollouts:
    """Rollouts in this process: of all prompts, or of this rank's share; ``engine`` was made from ``tensors``."""
    if ranks.size == 1:
        return LocalRollouts(engine, environment, tokenizer, prompt_limit)
    from halfbyte.train.rank_rollouts import RankRollouts

    return RankRollouts(engine, environment, tokenizer, prompt_limit, tensors, ranks)


def led_rollouts(ranks: Ranks, precision: Precision, make: Callable[[], Rollouts]) -> Rollouts:
    """A backend that one process talks to: this one alone, or rank 0 for all.

    Raises:
        UserError: ``make`` raised it, on rank 0.
    """
    if ranks.size == 1:
        return make()
    from halfbyte.train.agreement import together
    from halfbyte.train.led_rollouts import LedRollouts

    return LedRollouts(together(ranks, make if ranks.rank == 0 else lambda: None), ranks, precision)


def open_weights(
    folder: Path,
    rollouts: Rollouts,
    learner: Learner,
    tensors: Mapping[str, Tensor],
    version: int,
    delta_precision: Precision | None,
) -> WayOfWeights:
    """The way of the weights; ``tensors`` are the published ones."""
    if learner.ranks.size == 1:
        return WeightPath(folder, rollouts, learner, version, delta_precision)
    from halfbyte.train.sharded_weights import ShardedWeightPath

    return ShardedWeightPath(folder, cast(RankedRollouts, rollouts), learner, tensors, version, delta_precision)


def _check(config: Config) -> None:
    if config.learner.execution == "native":
        raise _common("learner.execution = native on several ranks", "learner.execution", 'the default, "emulated"')


def _common(what: str, where: str, expected: str) -> ConfigError:
    error = ConfigError(what, where=where, expected=expected)
    error.common = True  # all ranks have the same configuration
    return error
