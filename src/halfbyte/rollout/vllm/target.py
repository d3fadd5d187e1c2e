"""A vLLM model as the target of a refit: checkpoint tensors on the host, and the model that is loaded from them.

An engine's own arrays cannot be patched: they are fused, sharded, padded and prepacked, each backend in its own way. So the
worker keeps the checkpoint's tensors on the host, the subscriber patches those under its usual checks, and the commit gives
them to the model's own ``load_weights``. The way back is the same with the old values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.errors import TargetError
from halfbyte.refit.head import Head
from halfbyte.refit.patch import Stamp, Update
from halfbyte.refit.ranks import Alone, Goal

__all__ = ["Exactly", "Loads", "ModelTarget", "whole_groups"]

_LAYER = re.compile(r"^((?:[^.\d][^.]*\.)*\d+)(?:\.|$)")


def whole_groups(changed: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names to load so that every fused parameter gets all of its parts: those of every layer that has a change.

    A group is all up to the first number in the name (``model.layers.3``); names without a number are one group.
    """
    groups = {_group(name) for name in changed}
    return [name for name in names if _group(name) in groups]


def _group(name: str) -> str:
    found = _LAYER.match(name)
    return found.group(1) if found else ""


class Loads(Protocol):
    """What :class:`ModelTarget` asks of a model."""

    def load(self, changed: Collection[str]) -> None:
        """Load these tensors, and all that share a parameter with them, from the host."""
        ...


class ModelTarget:
    """See the module's docstring, and :class:`~halfbyte.refit.target.Target` for the calls.

    Attributes:
        whole: False where a commit failed and the way back did, too: the model is between two versions.
    """

    survives = False

    def __init__(self, host: ArraysTarget, model: Loads) -> None:
        self.host, self.model, self.whole = host, model, True

    def infos(self) -> Mapping[str, TensorInfo]:
        """Checkpoint names, dtypes and shapes."""
        return self.host.infos()

    def stamp(self) -> Stamp | None:
        """What is served."""
        return self.host.stamp()

    def read(self, name: str) -> Bytes:
        """A checkpoint tensor's bytes, from the host."""
        return self.host.read(name)

    def stage(self, update: Update) -> None:
        """Check that everything can be written on the host."""
        self.host.stage(update)

    def pause(self) -> None:
        """The caller has paused the scheduler: the worker's calls run between its steps."""

    def commit(self, update: Update) -> None:
        """Patch the host's tensors and load the layers they belong to."""
        self.whole = False
        self.host.commit(update)
        self.model.load([change.name for change in update.changes])
        self.whole = True

    def rollback(self, update: Update) -> None:
        """The same with the old values."""
        self.whole = False
        self.host.rollback(update)
        self.model.load([change.name for change in update.changes])
        self.whole = True

    def resume(self) -> None:
        """The caller resumes the scheduler, and resets its prefix cache before."""

    def discard(self, update: Update) -> None:
        """Forget what was staged."""
        self.host.discard(update)


class Exactly(Alone):
    """One rank that goes to one version and nowhere else: what the trainer asked for, not what the store came to hold since.

    Arguments:
        version, state: of that version.
    """

    def __init__(self, version: int, state: str) -> None:
        self.version, self.state = version, state

    def goal(self, held: Stamp | None, head: Head) -> Goal | None:
        """See :class:`~halfbyte.refit.ranks.Votes`.

        Raises:
            TargetError: HEAD is another version, or has other content.
        """
        if (head.version, head.state) != (self.version, self.state):
            raise TargetError(
                f"the store's HEAD is version {head.version}",
                expected=f"version {self.version} with state {self.state[:12]}",
                fix="give the worker the store that the trainer publishes to, and update before the next publication",
            )
        return super().goal(held, head)
