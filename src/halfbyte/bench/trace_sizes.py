"""Bytes of guidance a token for large models, from the sizes in their configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MODELS", "SETTINGS", "ModelSizes", "Setting", "size_rows"]


@dataclass(frozen=True)
class ModelSizes:
    """What the formula needs of a model.

    Arguments:
        kv: numbers a token leaves in a layer's cache: 2 * kv heads * head dim, or the latent width of MLA.
    """

    name: str
    moe_layers: int
    layers: int
    hidden: int
    experts_per_token: int
    intermediate: int
    kv: int


@dataclass(frozen=True)
class Setting:
    """Guided sites beside the KV cache, payload bits, and the share of the layers, counted from the last."""

    name: str
    middle: bool
    bits: int
    share: float


#: Qwen3-30B-A3B: 48 layers, d 2048, 8 of 128 experts of 768, 4 kv heads of 128. Kimi K2 (1T): 61 layers of which the first is
#: dense, d 7168, 8 of 384 experts of 2048, MLA with a latent of 512 and 64 rotated numbers.
MODELS = (
    ModelSizes("Qwen3-30B-A3B", 48, 48, 2048, 8, 768, 2 * 4 * 128),
    ModelSizes("Kimi K2 (1T)", 60, 61, 7168, 8, 2048, 512 + 64),
)
SETTINGS = (
    Setting("paper: expert input + KV, deeper half", False, 1, 0.5),
    Setting("expert input + KV, all layers", False, 1, 1.0),
    Setting("expert input + intermediate + KV, all layers", True, 1, 1.0),
    Setting("the same, whole codes", True, 4, 1.0),
)


def size_rows() -> Iterator[dict[str, str | float]]:
    """``{model, setting, bits, bytes_per_token, gib_per_million_tokens}``, by sum of n * (bits + .5) / 8 over the guided layers.

    The global scale adds one byte a row: one a token and layer for the input, one a routed expert for the intermediate.
    """
    for model in MODELS:
        for s in SETTINGS:
            layers, routed = round(s.share * model.layers), min(round(s.share * model.layers), model.moe_layers)
            n = model.hidden + (model.experts_per_token * model.intermediate if s.middle else 0)
            rows = 1 + (model.experts_per_token if s.middle else 0)
            size = (routed * n + layers * model.kv) * (s.bits + 0.5) / 8
            yield {
                "model": model.name,
                "setting": s.name,
                "bits": s.bits,
                "bytes_per_token": size,
                "with_global_scales": size + routed * rows,
                "gib_per_million_tokens": (size + routed * rows) * 1e6 / 2**30,
            }
