"""A small trainer, and ways to look at what a refit did. The oracle is the trainer's own arrays, compared byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.refit.adapters.arrays import ArraysTarget, Hooks
from halfbyte.refit.patch import Stamp
from halfbyte.refit.publisher import Publisher, PublishOptions

#: Blocks so small that every tensor has several.
OPTIONS = PublishOptions(block=256, anchor_every=8, skip_levels=3, object_bytes=4000)


class Trainer:
    """Weights of several dtypes that change a little at every step, NaN, infinities and minus zero among them."""

    def __init__(self, seed: int = 0, size: int = 40) -> None:
        self.random = np.random.default_rng(seed)
        normal = self.random.standard_normal
        self.weights: dict[str, np.ndarray[Any, Any]] = {
            "embed.weight": normal((size, 33)).astype(np.float32),
            "layers.0.weight": normal((size, 32)).astype(np.float16),
            "layers.1.weight": normal((3, size, 11)).astype(np.float32),
            "layers.1.codes": self.random.integers(0, 256, (size, 16), dtype=np.uint8),
            "norm.weight": np.ones(7, np.float32),
            "step": np.array(0, np.int64),
            "empty": np.empty((0, 4), np.float32),
        }

    def step(self, rate: float = 0.03) -> None:
        """Change about ``rate`` of every tensor's elements."""
        for name, array in self.weights.items():
            flat = array.reshape(-1).view(np.dtype(f"u{array.itemsize}"))
            if name == "step":
                array[...] += 1
            elif flat.size:
                where = self.random.random(flat.size) < rate
                flat[where] += self.random.integers(1, 3, int(where.sum())).astype(flat.dtype)
                if array.dtype.kind == "f" and self.random.random() < 0.3:
                    place = int(self.random.integers(array.size))
                    array.reshape(-1)[place] = self.random.choice(np.array([np.nan, -0.0, 0.0, np.inf], array.dtype))

    def copy(self) -> dict[str, np.ndarray[Any, Any]]:
        """A copy of the weights as they are now."""
        return {name: array.copy() for name, array in self.weights.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self.weights.values())


def zeros_like(weights: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of the same layout, all zero."""
    return {name: np.zeros_like(array) for name, array in weights.items()}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Same names and the same bytes under each."""
    return a.keys() == b.keys() and all(np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes() for name in a)


def publish_versions(store: Any, trainer: Trainer, count: int, options: PublishOptions = OPTIONS) -> Publisher:
    """A publisher that has published ``count`` versions, with a step of the trainer between them."""
    publisher = Publisher(store, "run", options=options)
    for n in range(count):
        if n:
            trainer.step()
        publisher.publish(trainer.weights)
    return publisher


class EngineHooks(Hooks):
    """Counts what an engine would do around a commit."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.stamp: Stamp | None = None

    @property
    def serving(self) -> bool:
        """Whether tokens are being drawn."""
        return [event for event in ("resume", *self.events) if event != "invalidate"][-1] == "resume"

    def pause(self) -> None:
        self.events.append("pause")

    def resume(self) -> None:
        self.events.append("resume")

    def invalidate_prefixes(self, stamp: Stamp | None) -> None:
        self.events.append("invalidate")
        self.stamp = stamp


def arrays_target(weights: Mapping[str, np.ndarray[Any, Any]], **more: Any) -> ArraysTarget:
    """A target with a copy of these weights."""
    return ArraysTarget({name: array.copy() for name, array in weights.items()}, **more)


def checkpoint(folder: Path, weights: Mapping[str, np.ndarray[Any, Any]], shards: int = 2) -> Path:
    """An ordinary checkpoint folder of several files, written by the safetensors library."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    names = sorted(weights)
    for n in range(shards):
        save_file(
            {name: weights[name] for name in names[n::shards]},
            folder / f"model-{n + 1:05d}-of-{shards:05d}.safetensors",
        )
    (folder / "config.json").write_text("{}")
    return folder


def read_checkpoint(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a folder, read by the safetensors library."""
    from safetensors.numpy import load_file

    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}
