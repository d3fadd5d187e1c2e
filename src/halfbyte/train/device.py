"""Where the learner runs."""

from __future__ import annotations

import os

import torch

from halfbyte.config import Config
from halfbyte.errors import ConfigError

__all__ = ["device_of"]


def device_of(config: Config) -> torch.device:
    """The device of ``learner.device``; of several ranks on a host each has its own.

    Raises:
        ConfigError: ``cuda`` where there is none.
    """
    asked = config.learner.device
    there = asked != "cpu" and torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ConfigError(
            "there is no CUDA device",
            where="learner.device",
            expected="a GPU, and a torch that is built for it",
            fix="learner.device = cpu, or auto",
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if there else torch.device("cpu")
