"""Metrics to anything that speaks the wandb API (``init``, ``log``, ``finish``): trackio first, wandb if asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from halfbyte.errors import ConfigError, MissingExtraError

__all__ = ["Tracker", "make_tracker"]

KNOWN = ("trackio", "wandb")


class Tracker:
    """Forwards rows of metrics to a module with the wandb API.

    Arguments:
        module: the module, or None to track nothing.
    """

    def __init__(self, module: Any | None, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._module = module
        if module is not None:
            module.init(project=project, name=name, config=dict(config))

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Send one row."""
        if self._module is not None:
            self._module.log(dict(row), step=step)

    def finish(self) -> None:
        """Flush and close."""
        if self._module is not None:
            self._module.finish()


def make_tracker(kind: str | None, *, project: str, name: str, config: Mapping[str, Any]) -> Tracker:
    """A tracker by name, or one that tracks nothing.

    Raises:
        ConfigError: an unknown tracker.
        MissingExtraError: its package is not installed.
    """
    if kind is None:
        return Tracker(None, project=project, name=name, config=config)
    if kind not in KNOWN:
        raise ConfigError(f"unknown tracker {kind!r}", where="train.tracker", expected=" or ".join(KNOWN))
    try:
        module = importlib.import_module(kind)
    except ImportError as error:
        raise MissingExtraError(
            f"{kind} is not installed",
            where="train.tracker",
            fix=f"pip install {kind} (or pip install 'halfbyte[track]')",
        ) from error
    return Tracker(module, project=project, name=name, config=config)
