"""The way of the weights: every update of a run goes through the refit store in its folder and from there to the rollouts.

So a run can be followed while it goes (``halfbyte refit follow --store RUN/refit``), and what is sampled from is what was
published, to the bit. The store is not synced file by file: a kill leaves it whole, and after a power failure it is made
again from the checkpoint that the run resumes from.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from halfbyte.errors import RefitError
from halfbyte.learner.learner import Learner
from halfbyte.models.precision import Precision
from halfbyte.refit.disk import Disk
from halfbyte.refit.head import read_head
from halfbyte.refit.patch import Update
from halfbyte.refit.publisher import Published, Publisher, PublishOptions
from halfbyte.refit.retention import Retention, collect
from halfbyte.refit.state import StateHash
from halfbyte.refit.store.filesystem import FilesystemStore
from halfbyte.rollout.code_changes import code_changes
from halfbyte.rollout.packer import Source
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.rollouts import Rollouts, WeightSource

__all__ = ["OPTIONS", "WayOfWeights", "WeightPath"]

#: Versions between two collections of what no reader needs any more.
COLLECT_EVERY = 64
#: The objects were decoded before HEAD names them, and a local file that was written can be read. Full versions bound what a late
#: reader fetches; skips would cost every step a quarter of its publication, and memory.
OPTIONS = PublishOptions(read_back=False, skip_levels=0)


class _Unsynced(Disk):
    """File operations without waiting for the platter."""

    def sync(self, path: Path) -> None:
        """Left to the system."""


class WayOfWeights(Protocol):
    """From the learner to the rollouts."""

    def publish(self, version: int) -> dict[str, float]:
        """Make the learner's weights the next version, in the store and in the rollouts; metrics of the step.

        Raises:
            RefitError, NumericsError: the rollouts serve the version they served.
        """
        ...


class WeightPath:
    """Opens the store of a run: a new one, or that of a run that goes on from ``version``.

    Arguments:
        folder: ``RUN/refit``.
        rollouts: generate with the learner's published weights.
        learner: whose weights are published.
        version: the weight version they have.
        delta_precision: in which code changes are counted where the rollouts hold no FP4 weights.
        options: how versions are written.
    """

    def __init__(
        self,
        folder: Path,
        rollouts: Rollouts,
        learner: Learner,
        version: int,
        delta_precision: Precision | None = None,
        options: PublishOptions = OPTIONS,
    ) -> None:
        self.folder, self.rollouts, self.learner, self.options = folder, rollouts, learner, options
        self.store = FilesystemStore(folder, disk=_Unsynced())
        tensors = self._tensors()
        self.publisher = self._resumed(tensors, version) or self._begun(tensors, version)
        stamp = self.publisher.head.stamp
        assert stamp is not None
        rollouts.connect(WeightSource(folder, stamp, self._latest))
        counted = rollouts.in_fp4 or delta_precision is None
        self.shadow = None if counted or delta_precision is None else self._packed(delta_precision, tensors)

    def publish(self, version: int) -> dict[str, float]:
        """Make the learner's weights the next version, in the store and in the rollouts.

        Returns:
            Metrics of the step, see docs/run-folder.md.
        Raises:
            RefitError, NumericsError: the rollouts serve the version they served.
        """
        shadow, done = self.shadow, self._next(version)
        assert done.update is not None
        deployed = self.rollouts.deploy(done.update)
        if version % COLLECT_EVERY == 0:
            collect(self.store, Retention(versions=COLLECT_EVERY))
        codes = deployed.codes
        if shadow is not None:
            self.shadow = self._packed(shadow.precision, self._tensors())
            codes = code_changes(shadow, self.shadow)
        fp4 = {}
        if codes.codes:
            fp4 = {
                "refit/changed_codes": codes.changed_codes / codes.codes,
                "refit/changed_scales": codes.changed_scales / codes.scales,
                "refit/avalanches": float(codes.avalanches),
            }
        return {
            "refit/changed": _differing(done.update) / max(done.elements, 1),
            "refit/bytes": float(done.payload_bytes),
            "refit/full_bytes": float(done.full_bytes),
            **fp4,
            "time/encode": done.encode_seconds,
            "time/store": done.store_seconds + done.upkeep_seconds,
            "time/stage": deployed.stage_seconds,
            "time/pause": deployed.pause_seconds,
        }

    def _next(self, version: int) -> Published:
        """Put the learner's weights into the store."""
        return self.publisher.publish(self._tensors(), version=version)

    def _packed(self, precision: Precision, tensors: dict[str, Tensor]) -> RolloutWeights:
        """The weights as a rollout in ``precision`` would hold them; nothing runs on them."""
        learner = self.learner
        return RolloutWeights.pack(learner.arch, precision, tensors, learner.kernels, version=0, n_positions=1)

    def _latest(self) -> Source:
        parameters = self.learner.parameters
        return Source(parameters.published_parameters(), dict(parameters.scales.current) if parameters.scales else {})

    def _tensors(self) -> dict[str, Tensor]:
        parameters = self.learner.parameters
        return dict(parameters.published()) | parameters.published_scales()

    def _resumed(self, tensors: dict[str, Tensor], version: int) -> Publisher | None:
        """The store as it was at ``version``; None where it does not hold these very weights under that number."""
        try:
            found = read_head(self.store)
            if found is None:
                return None
            publisher = Publisher(self.store, found[0].run, options=self.options)
            if publisher.head.version != version:
                publisher.rewind(version)
            same = StateHash.of(tensors, publisher.options.block).digest() == publisher.head.state
            return publisher if same else None
        except RefitError:
            return None

    def _begun(self, tensors: dict[str, Tensor], version: int) -> Publisher:
        shutil.rmtree(self.folder, ignore_errors=True)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.folder.resolve().parent.name).strip("-._")[:60] or "run"
        publisher = Publisher(self.store, f"{name}-{secrets.token_hex(4)}", options=self.options)
        publisher.publish(tensors, version=version)
        return publisher


def _differing(update: Update) -> int:
    """Elements whose bits differ; a patch of a dense block writes equal ones, too."""
    blocks = [block for change in update.changes for block in change.blocks]
    return sum(int(np.count_nonzero(block.old != block.new)) for block in blocks)
