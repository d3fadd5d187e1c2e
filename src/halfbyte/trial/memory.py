"""Memory by arithmetic: weights from the headers of safetensors files, KV bytes a token from config.json, and whether both fit.

For the preflight and the memory card. What a running server takes is measured elsewhere; the reserved pool that a GPU tool
shows is neither, so weights, KV and peak are always kept apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.trial.records import Strict

__all__ = ["Fit", "KvPrecision", "WeightBytes", "fit", "kv_bytes_per_token", "weight_bytes"]

KvPrecision: TypeAlias = Literal["fp32", "bf16", "fp8", "fp4"]
#: Bytes a value; FP4 with a scale byte for 16 values.
KV_BYTES: dict[KvPrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 16}


@dataclass(frozen=True)
class WeightBytes(Strict):
    """Bytes of the tensors in a folder's safetensors files.

    Arguments:
        by_dtype: the format's names (BF16, U8, F8_E4M3...).
    """

    total: int
    files: int
    tensors: int
    by_dtype: dict[str, int]


@dataclass(frozen=True)
class Fit(Strict):
    """Whether a server fits: weights + KV + the rest against what there is, in bytes."""

    weights: int
    kv: int
    rest: int
    memory: int
    fits: bool

    @property
    def total(self) -> int:
        """What is needed."""
        return self.weights + self.kv + self.rest


def weight_bytes(folder: Path) -> WeightBytes:
    """Sizes by the headers; no tensor is read.

    Raises:
        CheckpointError: no safetensors files there.
        RefitError: a damaged file.
    """
    from halfbyte.refit.shards import checkpoint_places

    places = checkpoint_places(folder)
    if not places:
        raise CheckpointError("no safetensors files", where=str(folder), expected="a model folder with weights")
    by_dtype: dict[str, int] = {}
    for place in places.values():
        by_dtype[place.info.dtype] = by_dtype.get(place.info.dtype, 0) + place.info.bytes
    files = len({place.path for place in places.values()})
    return WeightBytes(sum(by_dtype.values()), files, len(places), dict(sorted(by_dtype.items())))


def kv_bytes_per_token(config: Mapping[str, Any] | Path, precision: KvPrecision) -> int:
    """Bytes of KV cache a token over all layers, from config.json (or its folder).

    2 x KV heads x head dimension a layer; latent attention (``kv_lora_rank``) keeps that rank and the rotary part. Layers
    with a sliding window are counted in full: an upper bound.

    Raises:
        CheckpointError: no config.json, or keys missing.
    """
    loaded = _read(config) if isinstance(config, Path) else config
    inner = loaded.get("text_config")
    fields: Mapping[str, Any] = inner if isinstance(inner, Mapping) else loaded
    layers = _count(fields, "num_hidden_layers")
    if fields.get("kv_lora_rank"):
        values = layers * (_count(fields, "kv_lora_rank") + _count(fields, "qk_rope_head_dim"))
    else:
        heads = _count(fields, "num_attention_heads")
        kv_heads = heads if fields.get("num_key_value_heads") is None else _count(fields, "num_key_value_heads")
        if fields.get("head_dim") is None:
            head_dim = _count(fields, "hidden_size") // heads
        else:
            head_dim = _count(fields, "head_dim")
        values = layers * 2 * kv_heads * head_dim
    return round(values * KV_BYTES[precision])


def fit(weights: int, kv_per_token: int, tokens: int, memory: int, rest: int = 0) -> Fit:
    """Does a server with a KV pool of ``tokens`` fit in ``memory`` bytes? ``rest``: activations, runtime, all else."""
    if min(weights, kv_per_token, tokens, memory, rest) < 0:
        raise ConfigError("sizes of memory are not negative", where="fit")
    kv = kv_per_token * tokens
    return Fit(weights, kv, rest, memory, weights + kv + rest <= memory)


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("no readable config.json", where=str(file)) from error
    if not isinstance(loaded, dict):
        raise CheckpointError("config.json holds no object", where=str(file))
    return loaded


def _count(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}", where=key, expected="a positive whole number")
    return value
